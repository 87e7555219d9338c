"""The columns of the planners: every layout that may train and every replica that may generate.

A column takes the best link that any placement could give, so its time bounds that of every placement from below.
Only proven dominance removes one: whatever plan used it could use others instead, at no more devices, concurrency,
latency or time.

Which replicas fit beside each other is exact: tensor-parallel degrees are powers of two, so replicas fit on machines
of d₁, d₂, … devices exactly if for every power k, Σ over degrees ≥ k of degree/k ≤ Σ ⌊dᵢ/k⌋. On CPUs the cores of a
machine that generate form one process, so processes fit exactly if for every k no more have k cores or more than there
are machines with k cores free.

What runs today, and so all there is unless what-if opens the rest: one trainer on devices of one machine and type, a
rank per GPU or one process on cores; replicas on one GPU, or one process on cores; and each replica leases whole
groups, as many as fit. Never are there more ranks than a minibatch has answers.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from planners.costs.generation import TENSOR_RANKS, ServingCost
from planners.costs.memory import GIB, serving_memory
from planners.costs.sync import SYNC_RUNS_TODAY, SyncMode
from planners.costs.training import Stage, TrainingCost, TrainingLayout
from planners.errors import CannotGenerate, CannotTrain, DoesNotRun
from planners.hardware.catalogue import CATALOGUE
from planners.hardware.profile import DeviceProfile
from planners.hardware.topology import Topology
from planners.workload.demand import Demand
from planners.workload.model import Model

MOST_PIPELINE_MACHINES = 4
DEVICES_OF_A_MACHINE = 8  # of GPUs that can be rented
LEAST_MICRO_BATCH = 512  # tokens; smaller ones are no remedy for want of memory


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

    def leaves_less(self, device_type: str, cores: int) -> int:
        """Machines of a type that have so many cores, and no longer beside the trainer."""
        return sum(
            s.machines
            for s, d in zip(self.layout.stages, self.sizes, strict=True)
            if s.device_type == device_type and d - s.devices // s.machines < cores <= d
        )

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
    """ψ: a replica of `tensor` devices, or one process on `cores`, with `concurrency` answers in progress.

    `leased` of the answers that the gate admits are its own: whole groups, some of whose answers may have to wait.
    """

    device_type: str
    tensor: int
    concurrency: int
    tokens_per_s: float
    latency_s: float
    leased: int
    cores: int = 1

    @property
    def devices(self) -> int:
        """Devices of the replica."""
        return self.tensor * self.cores

    def places(self, k: int) -> int:
        """Places for k devices side by side that it takes; the cores of a process count one by one."""
        return self.devices if k == 1 else self.tensor // k

    def runs_today(self, group_size: int) -> bool:
        """Whether the engine can run it: one device or one process, and whole groups of answers."""
        return self.tensor == 1 and (self.concurrency % group_size == 0 or self.concurrency < group_size)

    @property
    def name(self) -> str:
        """Such as `h20 tp2 c64`, or `cpu tp1·3 cores c64`."""
        cores = f"·{self.cores} cores" if self.cores > 1 else ""
        return f"{self.device_type} tp{self.tensor}{cores} c{self.concurrency}"


@dataclass(frozen=True)
class TrainingWish:
    """What leaves no choice: a person's word on who trains, on how many devices, in which ZeRO stage."""

    device_type: str | None = None
    devices: int | None = None
    zero: int | None = None

    @property
    def words(self) -> str:
        """Who is asked to train, such as `$train_type h20 and $train_devices 4`, for `in_words`."""
        asked = [f"$train_type {self.device_type}"] if self.device_type is not None else []
        asked += [f"$train_devices {self.devices}"] if self.devices is not None else []
        return " and ".join(asked)


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
        training_wish: TrainingWish | None = None,
    ) -> None:
        if sync_mode not in SYNC_RUNS_TODAY and not what_if:
            raise DoesNotRun(
                f"Sync mode {sync_mode} does not run yet; `storage` does. Add $what_if to plan with it all the same."
            )
        self.topology = topology
        self.model = model
        self.demand = demand
        self.what_if = what_if
        self.sync_mode: SyncMode = sync_mode
        self.profiles = profiles or {}
        self.training_wish = training_wish or TrainingWish()
        self.serving = ServingCost(model, demand, profiles, full_context=not what_if)
        self.training = TrainingCost(model, demand, topology.types, profiles)
        self.capacity: Counter[tuple[str, int]] = Counter()
        self.machine_counts: Counter[tuple[str, int]] = Counter()
        for node in topology.nodes:
            self.machine_counts[node.type_name, node.devices] += 1
            for k in TENSOR_RANKS:
                self.capacity[node.type_name, k] += node.devices // k

    def on(self, topology: Topology) -> "Problem":
        """The same on other devices."""
        return self._changed(topology, self.demand)

    def asking(self, demand: Demand) -> "Problem":
        """The same with another demand."""
        return self._changed(self.topology, demand)

    def _changed(self, topology: Topology, demand: Demand) -> "Problem":
        return Problem(
            topology,
            self.model,
            demand,
            what_if=self.what_if,
            sync_mode=self.sync_mode,
            profiles=self.profiles,
            training_wish=self.training_wish,
        )

    def machine_counts_of(self, device_type: str) -> int:
        """Machines of a type."""
        return sum(count for (kind, _), count in self.machine_counts.items() if kind == device_type)

    def core_machines(self) -> list[tuple[str, int, int]]:
        """(type, k, machines of that CPU type with k cores or more), for every k that some machine has."""
        return [
            (name, k, sum(n for (kind, size), n in self.machine_counts.items() if kind == name and size >= k))
            for name, device in self.topology.types.items()
            if device.kind == "cpu"
            for k in range(1, max(size for kind, size in self.machine_counts if kind == name) + 1)
        ]


def rollout_columns(problem: Problem) -> list[RolloutColumn]:
    """Replicas that fit, undominated ones only.

    Raises:
        CannotGenerate: the model fits on no device as a replica.
    """
    columns: list[RolloutColumn] = []
    serving = problem.serving
    for name, device in sorted(problem.topology.types.items()):
        largest = max(n.devices for n in problem.topology.nodes if n.type_name == name)
        if problem.what_if and device.kind == "cuda":
            for ranks in serving.tensor_ranks(device, largest):
                for c in serving.concurrencies(device, ranks):
                    rate, latency = serving.tokens_per_s(device, ranks, c), serving.latency_s(device, ranks, c)
                    columns.append(RolloutColumn(name, ranks, c, rate, latency, c))
            continue
        for c in serving.group_concurrencies(device):
            rate, latency = serving.tokens_per_s(device, 1, c), serving.latency_s(device, 1, c)
            leased = max(c, problem.demand.group_size)
            for cores in range(1, largest + 1) if device.kind == "cpu" else [1]:
                columns.append(RolloutColumn(name, 1, c, cores * rate, latency / cores, leased, cores))
    if not columns:
        raise CannotGenerate(_cannot_generate(problem))
    return _undominated(columns)


def _undominated(columns: list[RolloutColumn]) -> list[RolloutColumn]:
    """Without those that a narrower replica of the same devices, or several on fewer devices each, can stand for."""
    kept: list[RolloutColumn] = []
    for c in sorted(columns, key=lambda c: (c.device_type, c.tensor, c.cores, c.concurrency)):
        same = [other for other in kept if (other.device_type, other.cores) == (c.device_type, c.cores)]
        if not any(_replaces(other, c) for other in same):
            kept.append(c)
    return kept


def _replaces(a: RolloutColumn, b: RolloutColumn) -> bool:
    """Whether one or several replicas a do all that one replica b does on the same devices."""
    copies = b.tensor // a.tensor
    return (
        copies * a.leased <= b.leased
        and copies * a.tokens_per_s >= b.tokens_per_s * (1 - 1e-12)
        and a.latency_s <= b.latency_s
    )


def training_columns(problem: Problem) -> list[TrainingColumn]:
    """Layouts that fit, each with its fastest ZeRO stage, undominated ones only.

    Raises:
        CannotTrain: nothing can train the model.
    """
    wished = _wished_stage_lists(problem)
    if not wished:
        raise CannotTrain(_no_such_trainer(problem))
    found = [column for stages, sizes in wished if (column := _fastest(problem, stages, sizes)) is not None]
    if not found:
        raise CannotTrain(_cannot_train(problem))
    found.sort(key=lambda c: (c.step_s, c.layout.devices, c.layout.name))
    kept: list[TrainingColumn] = []
    for column in found:
        if not any(_dominates(other, column) for other in kept):
            kept.append(column)
    return kept


def is_wished(wish: TrainingWish, stages: tuple[Stage, ...]) -> bool:
    """Whether these stages are of the type and the devices that are asked for."""
    of_type = wish.device_type is None or all(stage.device_type == wish.device_type for stage in stages)
    return of_type and wish.devices in (None, sum(stage.devices for stage in stages))


def _wished_stage_lists(problem: Problem) -> list[tuple[tuple[Stage, ...], tuple[int, ...]]]:
    return [(stages, sizes) for stages, sizes in _stage_lists(problem) if is_wished(problem.training_wish, stages)]


def _no_such_trainer(problem: Problem) -> str:
    """Why no stages are as wished: no machine is that large, or a minibatch has no work for so many ranks."""
    wish, most = problem.training_wish, problem.training.most_ranks
    kinds = [kind for kind in problem.topology.types if wish.device_type in (None, kind)]
    largest = max((node.devices for node in problem.topology.nodes if node.type_name in kinds), default=0)
    if (wish.devices or 0) > largest:
        return (
            f"Nothing can train as {wish.words} asks: training takes devices of one type of one machine, and on "
            f"{problem.topology.name} that are at most {largest} ({', '.join(kinds)})."
        )
    return (
        f"Nothing can train as {wish.words} asks: a minibatch has work for {most} GPUs, one for each answer. Train on "
        "fewer, or lower $minibatches."
    )


def _dominates(a: TrainingColumn, b: TrainingColumn) -> bool:
    return (
        a.step_s <= b.step_s
        and a.types == b.types
        and a.sizes == b.sizes
        and all(used <= b.uses.get(key, 0) for key, used in a.uses.items())
        and all(a.spare(t) >= b.spare(t) for t in b.types)
    )


def _stage_lists(problem: Problem) -> list[tuple[tuple[Stage, ...], tuple[int, ...]]]:
    """All stage lists: one machine in part, whole machines, and, as what-if, pipelines over whole machines."""
    tensors = [k for k in TENSOR_RANKS if problem.model.heads % k == 0] if problem.what_if else [1]
    lists: list[tuple[tuple[Stage, ...], tuple[int, ...]]] = []
    whole: list[tuple[Stage, int]] = []
    for (kind, size), count in sorted(problem.machine_counts.items()):
        if problem.topology.types[kind].kind == "cpu":
            lists += [((Stage(kind, 1, 1, 1, cores),), (size,)) for cores in range(1, size + 1)]
            continue
        for tensor in (k for k in tensors if k <= size):
            for devices in range(tensor, size + 1, tensor):
                if devices // tensor <= problem.training.most_ranks:
                    lists.append(((Stage(kind, devices // tensor, tensor, 1),), (size,)))
            if not problem.what_if or size % tensor:
                continue
            for machines in range(1, count + 1):
                stage = Stage(kind, machines * size // tensor, tensor, machines)
                if stage.data <= problem.training.most_ranks:
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
    wished = problem.training_wish.zero
    for zero in (0, 1, 2, 3) if wished is None else (wished,):
        layout = TrainingLayout(stages, zero)
        if _fits(problem, layout):
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


def _fits(problem: Problem, layout: TrainingLayout) -> bool:
    return all(memory.fits for memory in problem.training.memory(layout))


def _cannot_train(problem: Problem) -> str:
    """How many GiB are missing where it comes closest, and the smallest thing that would do."""
    wish = problem.training_wish
    zero = 3 if wish.zero is None else wish.zero
    layouts = [TrainingLayout(stages, zero) for stages, _ in _wished_stage_lists(problem)]
    lacks = [max(m.total - m.available for m in problem.training.memory(layout)) for layout in layouts]
    closest = layouts[lacks.index(min(lacks))]
    devices = " + ".join(f"{stage.devices} × {stage.device_type}" for stage in closest.stages)
    higher = "with $zero_stage 3 " if zero < 3 else ""
    sharded = [replace(layout, zero=3) for layout in layouts]
    if tokens := _fitting_micro_batch(problem, layouts):
        remedy = f"with $micro_batch_tokens={tokens} it fits"
    elif higher and any(_fits(problem, layout) for layout in sharded):
        remedy = f"{higher}it fits"
    elif higher and (tokens := _fitting_micro_batch(problem, sharded)):
        remedy = f"{higher}and $micro_batch_tokens={tokens} it fits"
    else:
        remedy = f"{higher}the smallest that would do is {_smallest(problem)}"
    asked = f" as {wish.words} asks" if wish.words else ""
    states = problem.training.states_bytes(closest)
    return (
        f"{_fits_nowhere(problem)}: training on {devices} (ZeRO {zero}){asked} comes closest and lacks "
        f"{min(lacks) / GIB:.1f} GiB per device. Its training states alone take "
        f"{states / GIB:.0f} GiB over all devices that train; {remedy}."
    )


def _fitting_micro_batch(problem: Problem, layouts: list[TrainingLayout]) -> int | None:
    """The largest budget, halved and halved again, with which one of the layouts fits."""
    tokens = problem.demand.micro_batch_tokens // 2
    while tokens >= LEAST_MICRO_BATCH:
        demand = replace(problem.demand, micro_batch_tokens=tokens)
        cost = TrainingCost(problem.model, demand, problem.topology.types, problem.profiles)
        if any(all(memory.fits for memory in cost.memory(layout)) for layout in layouts):
            return tokens
        tokens //= 2
    return None


def _cannot_generate(problem: Problem) -> str:
    """How many GiB a replica lacks where it comes closest."""
    longest = problem.serving.longest_tokens
    lacks = {}
    for name, device in problem.topology.types.items():
        needed, there = serving_memory(problem.model, device, 1, longest), serving_memory(problem.model, device, 1)
        lacks[name] = max(needed.total - needed.available, needed.kv - there.kv)
    closest = min(lacks, key=lambda name: lacks[name])
    return (
        f"{_fits_nowhere(problem)}: a replica on one {closest} comes closest and lacks "
        f"{lacks[closest] / GIB:.1f} GiB for the weights and a cache of {longest:.0f} tokens. Lower $max_context, "
        "or add devices with more memory."
    )


def _fits_nowhere(problem: Problem) -> str:
    size = f"{problem.model.parameters / 1e9:.1f} B parameters"
    return f"Model {problem.model.name} ({size}) fits nowhere on cluster {problem.topology.name}"


def _smallest(problem: Problem) -> str:
    """The fewest devices of the cheapest catalogue type on one machine that train it with ZeRO 3."""
    options = []
    gpus = {name: device for name, device in CATALOGUE.items() if device.kind == "cuda"}
    for name, device in gpus.items():
        cost = TrainingCost(problem.model, problem.demand, {name: device})
        for devices in range(1, DEVICES_OF_A_MACHINE + 1):
            if cost.memory(TrainingLayout((Stage(name, devices, 1, 1),), 3))[0].fits:
                options.append((devices * device.usd_per_h, devices, name))
                break
    if not options:
        largest = max(gpus, key=lambda name: gpus[name].memory_bytes)
        return f"more than one machine, even with {DEVICES_OF_A_MACHINE} × {largest}"
    _, devices, name = min(options)
    return f"one machine with {devices} × {name}"
