"""The columns of the planners: every layout that may train and every replica that may generate.

A column takes the best link that any placement could give, so its time bounds that of every placement from below.
Only proven dominance removes one: whatever plan used it could use others instead, at no more devices, concurrency,
latency or time.

Which replicas fit beside each other is exact: tensor-parallel degrees are powers of two, so replicas fit on machines
of d₁, d₂, … devices exactly if for every power k, Σ over degrees ≥ k of degree/k ≤ Σ ⌊dᵢ/k⌋.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from planners.demand import Demand
from planners.errors import UserError
from planners.memory import GIB, serving_memory
from planners.model import Model
from planners.profile import DeviceProfile
from planners.serving import TENSOR_RANKS, ServingCost
from planners.sync import SYNC_RUNS_TODAY, SyncMode
from planners.topology import Storage, Topology
from planners.training import Stage, TrainingCost, TrainingLayout

MOST_PIPELINE_MACHINES = 4


@dataclass(frozen=True)
class TrainingColumn:
    """σ on machines of given sizes: `sizes` has the devices per machine of each stage."""

    layout: TrainingLayout
    sizes: tuple[int, ...]
    step_s: float
    uses: Mapping[tuple[str, int], int] = field(hash=False)

    @property
    def types(self) -> tuple[str, ...]:
        """Device types that train, sorted."""
        return tuple(sorted({stage.device_type for stage in self.layout.stages}))

    def machines(self, device_type: str, size: int) -> int:
        """Machines of a type and size that train."""
        return sum(
            s.machines
            for s, d in zip(self.layout.stages, self.sizes, strict=True)
            if s.device_type == device_type and d == size
        )

    def spare(self, device_type: str) -> int:
        """Devices of a type left on the machines that train."""
        return sum(
            s.machines * d - s.devices
            for s, d in zip(self.layout.stages, self.sizes, strict=True)
            if s.device_type == device_type
        )


@dataclass(frozen=True)
class RolloutColumn:
    """ψ: a replica of `tensor` devices with `concurrency` answers in progress."""

    device_type: str
    tensor: int
    concurrency: int
    tokens_per_s: float
    latency_s: float

    @property
    def runs_today(self) -> bool:
        """Whether the engine can run it: one device a replica."""
        return self.tensor == 1

    @property
    def name(self) -> str:
        """Such as `h20 tp2 c64`."""
        return f"{self.device_type} tp{self.tensor} c{self.concurrency}"


class Problem:
    """Everything a plan is made from, with its cost models."""

    def __init__(
        self,
        topology: Topology,
        model: Model,
        demand: Demand,
        *,
        what_if: bool = False,
        sync_mode: SyncMode = "storage",
        profiles: Mapping[str, DeviceProfile] | None = None,
    ) -> None:
        if sync_mode not in SYNC_RUNS_TODAY and not what_if:
            raise UserError(
                f"Sync mode {sync_mode} does not run yet; `storage` does. Add --what-if to plan with it all the same."
            )
        topology = replace(topology, storage=_measured_storage(topology, model, profiles or {}))
        self.topology = topology
        self.model = model
        self.demand = demand
        self.what_if = what_if
        self.sync_mode: SyncMode = sync_mode
        self.serving = ServingCost(model, demand, profiles)
        self.training = TrainingCost(model, demand, topology.types, profiles)
        self.capacity: Counter[tuple[str, int]] = Counter()
        self.machine_counts: Counter[tuple[str, int]] = Counter()
        for node in topology.nodes:
            self.machine_counts[node.type_name, node.devices] += 1
            for k in TENSOR_RANKS:
                self.capacity[node.type_name, k] += node.devices // k

    def machine_counts_of(self, device_type: str) -> int:
        """Machines of a type."""
        return sum(count for (kind, _), count in self.machine_counts.items() if kind == device_type)


def _measured_storage(topology: Topology, model: Model, profiles: Mapping[str, DeviceProfile]) -> Storage:
    """The shared directory at the speed that was measured, where every type has a profile: the slowest type's."""
    if not set(topology.types) <= set(profiles):
        return topology.storage
    publish_s = max(profiles[t].publish_s for t in topology.types)
    load_s = max(profiles[t].load_s for t in topology.types)
    gigabytes = model.weight_bytes / 1e9
    return Storage(
        write_gb_per_s=gigabytes / max(publish_s, 1e-6), read_gb_per_s=1e6, load_gb_per_s=gigabytes / max(load_s, 1e-6)
    )


def rollout_columns(problem: Problem) -> list[RolloutColumn]:
    """Replicas that fit, undominated ones only.

    Raises:
        UserError: the model fits on no device as a replica.
    """
    columns: list[RolloutColumn] = []
    serving = problem.serving
    for name, device in sorted(problem.topology.types.items()):
        largest = max(n.devices for n in problem.topology.nodes if n.type_name == name)
        for ranks in serving.tensor_ranks(device, largest) if problem.what_if else [1]:
            for c in serving.concurrencies(device, ranks):
                rate, latency = serving.tokens_per_s(device, ranks, c), serving.latency_s(device, ranks, c)
                columns.append(RolloutColumn(name, ranks, c, rate, latency))
    if not columns:
        raise UserError(_fits_nowhere(problem))
    return [c for c in columns if not any(_replaces(other, c) for other in columns)]


def _replaces(a: RolloutColumn, b: RolloutColumn) -> bool:
    """Whether several replicas a do all that one replica b does on the same devices."""
    if a.device_type != b.device_type or a.tensor >= b.tensor:
        return False
    copies = b.tensor // a.tensor
    return (
        copies * a.concurrency <= b.concurrency
        and copies * a.tokens_per_s >= b.tokens_per_s
        and a.latency_s <= b.latency_s
    )


def training_columns(problem: Problem) -> list[TrainingColumn]:
    """Layouts that fit, each with its fastest ZeRO stage, undominated ones only.

    Raises:
        UserError: nothing can train the model.
    """
    found: list[TrainingColumn] = []
    for stages, sizes in _stage_lists(problem):
        column = _fastest(problem, stages, sizes)
        if column is not None:
            found.append(column)
    if not found:
        raise UserError(_fits_nowhere(problem))
    found.sort(key=lambda c: (c.step_s, c.layout.devices, c.layout.name))
    kept: list[TrainingColumn] = []
    for column in found:
        if not any(_dominates(other, column) for other in kept):
            kept.append(column)
    return kept


def _dominates(a: TrainingColumn, b: TrainingColumn) -> bool:
    return (
        a.step_s <= b.step_s
        and a.types == b.types
        and all(used <= b.uses.get(key, 0) for key, used in a.uses.items())
        and all(a.spare(t) >= b.spare(t) for t in b.types)
    )


def _stage_lists(problem: Problem) -> list[tuple[tuple[Stage, ...], tuple[int, ...]]]:
    """All stage lists: one machine in part, whole machines, and, as what-if, pipelines over whole machines."""
    sequences = max(1, problem.demand.answers_per_step // problem.demand.minibatches)
    tensors = [k for k in TENSOR_RANKS if problem.model.heads % k == 0] if problem.what_if else [1]
    lists: list[tuple[tuple[Stage, ...], tuple[int, ...]]] = []
    whole: list[tuple[Stage, int]] = []
    for (kind, size), count in sorted(problem.machine_counts.items()):
        for tensor in (k for k in tensors if k <= size):
            for devices in range(tensor, size + 1, tensor):
                if devices // tensor <= sequences:
                    lists.append(((Stage(kind, devices // tensor, tensor, 1),), (size,)))
            if not problem.what_if or size % tensor:
                continue
            for machines in range(1, count + 1):
                stage = Stage(kind, machines * size // tensor, tensor, machines)
                if stage.data <= sequences:
                    whole.append((stage, size))
                    if machines > 1:
                        lists.append(((stage,), (size,)))
    if problem.what_if:
        lists += _pipelines(problem, whole)
    return lists


def _pipelines(problem: Problem, whole: list[tuple[Stage, int]]) -> list[tuple[tuple[Stage, ...], tuple[int, ...]]]:
    """Pipelines of equal stages, one per machine, and of two stages of different types with equal data parallelism."""
    lists = []
    for stage, size in whole:
        available = problem.machine_counts[stage.device_type, size]
        if stage.machines == 1:
            for depth in range(2, min(available, MOST_PIPELINE_MACHINES) + 1):
                lists.append(((stage,) * depth, (size,) * depth))
    for a, size_a in whole:
        for b, size_b in whole:
            few = a.machines + b.machines <= 2 * MOST_PIPELINE_MACHINES
            if a.device_type < b.device_type and a.data == b.data and few:
                lists.append(((a, b), (size_a, size_b)))
    return lists


def _fastest(problem: Problem, stages: tuple[Stage, ...], sizes: tuple[int, ...]) -> TrainingColumn | None:
    """The layout with the fastest ZeRO stage that fits."""
    links = best_links(problem.topology, stages)
    best: tuple[float, TrainingLayout] | None = None
    for zero in (0, 1, 2, 3):
        layout = TrainingLayout(stages, zero)
        if all(memory.fits for memory in problem.training.memory(layout)):
            seconds = problem.training.step_s(layout, links)
            if best is None or seconds < best[0]:
                best = (seconds, layout)
    if best is None:
        return None
    uses: Counter[tuple[str, int]] = Counter()
    for stage, size in zip(stages, sizes, strict=True):
        for k in TENSOR_RANKS:
            uses[stage.device_type, k] += _taken(stage, size, k)
    return TrainingColumn(best[1], sizes, best[0], dict(uses))


def _taken(stage: Stage, size: int, k: int) -> int:
    """Places for k devices side by side that the stage takes away from its machines."""
    return stage.machines * (size // k) - stage.machines * ((size - stage.devices // stage.machines) // k)


def best_links(topology: Topology, stages: tuple[Stage, ...]) -> list[float]:
    """Largest bandwidth any placement could give inside each stage and from each to the next."""
    inside = [topology.best_link(s.device_type, s.device_type) for s in stages]
    between = [topology.best_link(a.device_type, b.device_type) for a, b in pairwise(stages)]
    return inside + between


def _fits_nowhere(problem: Problem) -> str:
    """How many GiB are missing where it comes closest, and the smallest thing that would do."""
    model = problem.model
    best: tuple[float, str] | None = None
    for stages, _ in _stage_lists(problem):
        layout = TrainingLayout(stages, 3)
        for stage, memory in zip(stages, problem.training.memory(layout), strict=True):
            short = (memory.total - memory.available) / GIB
            where = f"training on {stage.devices} × {stage.device_type} (ZeRO 3)"
            if best is None or short < best[0]:
                best = (short, where)
    longest = problem.demand.prompt.longest + problem.demand.response.longest
    for name, device in problem.topology.types.items():
        memory = serving_memory(model, device, 1, longest)
        if problem.serving.most_answers(device, 1) == 0 and (best is None or best[0] <= 0):
            best = ((memory.total - memory.available) / GIB, f"a replica on one {name}")
    short, where = best or (0.0, "anything")
    needed = (16 + 4) * model.parameters / GIB
    return (
        f"Model {model.name} ({model.parameters / 1e9:.1f} B parameters) fits nowhere on cluster "
        f"{problem.topology.name}: {where} comes closest and lacks {max(short, 0):.1f} GiB per device. Its training "
        f"states alone take {needed:.0f} GiB over all devices that train; the smallest that would do is "
        f"{_smallest(problem)}."
    )


def _smallest(problem: Problem) -> str:
    """The fewest devices of the cheapest catalogue type on one machine of eight that train it with ZeRO 3."""
    from planners.catalogue import CATALOGUE

    options = []
    for name, device in CATALOGUE.items():
        cost = TrainingCost(problem.model, problem.demand, {name: device})
        for devices in range(1, 9):
            if cost.memory(TrainingLayout((Stage(name, devices, 1, 1),), 3))[0].fits:
                options.append((devices * device.usd_per_h, devices, name))
                break
    if not options:
        return "a machine of eight b200 or several machines"
    _, devices, name = min(options)
    return f"one machine with {devices} × {name}"
