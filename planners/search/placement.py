"""From counts to concrete devices: a partition of the machines over their bandwidths, refined by swaps.

The training machines are grown from every possible seed by the machine that keeps the slowest link among them fastest;
replicas then fill the machines that the trainer reaches fastest, largest degrees first, which always fits (see
`planners.search.columns`). Swapping a training machine for another of the same kind is kept while it shortens the step
on the real links. Where no two machines of a type differ in their links one seed is as good as any.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from planners.costs.sync import Sync, sync_of
from planners.hardware.topology import Node, Topology
from planners.search.columns import Problem, RolloutColumn, TrainingColumn
from planners.search.joint import step_seconds

SWAP_PASSES = 3


@dataclass(frozen=True)
class Placed:
    """Concrete devices of one plan, costed on the real links.

    `stages` has, for each pipeline stage, the devices on each machine; `replicas` the column and its devices on one.
    """

    training: TrainingColumn
    stages: tuple[tuple[tuple[Node, tuple[int, ...]], ...], ...]
    replicas: tuple[tuple[RolloutColumn, Node, tuple[int, ...]], ...]
    train_s: float
    rate: float
    latency_s: float
    sync: Sync
    step_s: float


def place(problem: Problem, training: TrainingColumn, replicas: Mapping[RolloutColumn, int]) -> Placed:
    """The best placement found; costs are those of the real links."""
    best: Placed | None = None
    for seed in _seeds(problem, training):
        stages = _grow(problem, training, seed)
        placed = _refine(problem, training, replicas, _fill(problem, training, replicas, stages))
        if best is None or placed.step_s < best.step_s:
            best = placed
    if best is None:
        raise ValueError(f"No machines of the sizes {training.sizes} for {training.layout.name}.")
    return best


def _kinds(problem: Problem, training: TrainingColumn, stage: int) -> list[Node]:
    """Machines on which a stage may stand, by name."""
    kind, size = training.layout.stages[stage].device_type, training.sizes[stage]
    return sorted(
        (n for n in problem.topology.nodes if n.type_name == kind and n.devices == size), key=lambda n: n.name
    )


def _seeds(problem: Problem, training: TrainingColumn) -> list[Node]:
    candidates = _kinds(problem, training, 0)
    return candidates if problem.topology.node_links else candidates[:1]


def _grow(problem: Problem, training: TrainingColumn, seed: Node) -> list[list[Node]]:
    """Machines of every stage, grown from the seed."""
    topology, chosen = problem.topology, [seed]
    stages: list[list[Node]] = []
    for i, stage in enumerate(training.layout.stages):
        mine = [seed] if i == 0 else []
        while len(mine) < stage.machines:
            free = [n for n in _kinds(problem, training, i) if n not in chosen]
            around = mine or chosen
            grown = max(free, key=lambda n: min(topology.link(n, other) for other in around))
            mine.append(grown)
            chosen.append(grown)
        stages.append(mine)
    return stages


def _refine(
    problem: Problem, training: TrainingColumn, replicas: Mapping[RolloutColumn, int], placed: Placed
) -> Placed:
    """Swap training machines for others of their kind while that helps."""
    if not problem.topology.node_links:
        return placed
    for _ in range(SWAP_PASSES):
        before = placed.step_s
        for i in range(len(training.layout.stages)):
            for j in range(training.layout.stages[i].machines):
                for other in _kinds(problem, training, i):
                    stages = [[node for node, _ in stage] for stage in placed.stages]
                    if any(other in stage for stage in stages):
                        continue
                    stages[i][j] = other
                    swapped = _fill(problem, training, replicas, stages)
                    if swapped.step_s < placed.step_s:
                        placed = swapped
        if placed.step_s >= before:
            break
    return placed


def _fill(
    problem: Problem, training: TrainingColumn, replicas: Mapping[RolloutColumn, int], stages: list[list[Node]]
) -> Placed:
    """Place the replicas around the training machines, on these first or last, and cost the whole."""
    topology = problem.topology
    trainers = {node.name: node for nodes in stages for node in nodes}
    reach = {n.name: max(topology.link(t, n) for t in trainers.values()) for n in topology.nodes}

    def after(node: Node) -> tuple[float, int, str]:
        return -reach[node.name], -node.devices, node.name

    first = sorted(topology.nodes, key=lambda n: (n.name not in trainers, *after(n)))
    last = sorted(topology.nodes, key=lambda n: (n.name in trainers, *after(n)))
    orders = [first, last] if any(training.spare(t) for t in training.types) else [first]
    return min((_pack(problem, training, replicas, stages, order) for order in orders), key=lambda p: p.step_s)


def _pack(
    problem: Problem,
    training: TrainingColumn,
    replicas: Mapping[RolloutColumn, int],
    stages: list[list[Node]],
    order: list[Node],
) -> Placed:
    """Replicas onto the first machine of the order that has room, largest first; one process on a machine's cores."""
    used: dict[str, int] = {}
    full: set[str] = set()
    taken = []
    for stage, nodes in zip(training.layout.stages, stages, strict=True):
        each = stage.devices // stage.machines
        taken.append(tuple((node, tuple(range(each))) for node in nodes))
        used.update({node.name: each for node in nodes})
    placed: list[tuple[RolloutColumn, Node, tuple[int, ...]]] = []
    for column in sorted(replicas, key=lambda c: (-c.devices, c.name)):
        room = iter([n for n in order if n.type_name == column.device_type])
        node = next(room)
        for _ in range(replicas[column]):
            while node.name in full or node.devices - used.get(node.name, 0) < column.devices:
                node = next(room)
            start = used.get(node.name, 0)
            placed.append((column, node, tuple(range(start, start + column.devices))))
            used[node.name] = start + column.devices
            if node.device.kind == "cpu":
                full.add(node.name)
    return cost_placement(problem, training, tuple(taken), tuple(placed))


def cost_placement(
    problem: Problem,
    training: TrainingColumn,
    stages: tuple[tuple[tuple[Node, tuple[int, ...]], ...], ...],
    replicas: tuple[tuple[RolloutColumn, Node, tuple[int, ...]], ...],
) -> Placed:
    """Step time of concrete devices on the real links."""
    nodes = [[node for node, _ in stage] for stage in stages]
    train_s = problem.training.step_s(training.layout, real_links(problem.topology, nodes))
    trainers = [node for stage in nodes for node in stage]
    if not replicas:
        return Placed(training, stages, replicas, train_s, 0.0, 0.0, Sync(0.0, 0.0), train_s)
    generating = list({node.name: node for _, node, _ in replicas}.values())
    weight_bytes = problem.model.weight_bytes
    sync = sync_of(problem.sync_mode, problem.topology, trainers, generating, weight_bytes, problem.profiles)
    rate = sum(column.tokens_per_s for column, _, _ in replicas)
    latency_s = max(column.latency_s for column, _, _ in replicas)
    step_s = step_seconds(problem, train_s, rate, latency_s, sync)
    return Placed(training, stages, replicas, train_s, rate, latency_s, sync, step_s)


def real_links(topology: Topology, stages: list[list[Node]]) -> list[float]:
    """Slowest bandwidth inside each stage and from each to the next."""
    inside = [
        min((topology.link(a, b) for i, a in enumerate(nodes) for b in nodes[i + 1 :]), default=float("inf"))
        for nodes in stages
    ]
    between = [min(topology.link(a, b) for a in first for b in second) for first, second in pairwise(stages)]
    return inside + between


def with_real_step(column: TrainingColumn, placed: Placed) -> TrainingColumn:
    """The column at the speed that its placement reaches."""
    return replace(column, step_s=placed.train_s)
