"""Baseline `exhaustive`: the best plan by trying every assignment of concrete devices. For up to 8 of them.

It shares the cost formulas with the other modes (seconds of a layout on given links, tokens/s of a replica, seconds of
a sync) and none of their columns, bounds or programs, so the tests check the joint planner against it.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planners.costs.generation import ServingCost
from planners.costs.sync import sync_of
from planners.costs.training import Stage, TrainingCost, TrainingLayout
from planners.errors import UserError
from planners.hardware.topology import Node, Topology
from planners.search.columns import Problem, RolloutColumn, TrainingColumn, is_wished
from planners.search.placement import Placed
from planners.workload.demand import Demand

MOST_DEVICES = 8
GROUPS = (*range(1, 17), 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Both its own, though the other modes have them too: what is checked against this must not decide what it tries."""
Engine = tuple[int, int, float, float, int]
"""Devices, answers in progress, tokens/s, latency of one replica, answers that it leases."""


@dataclass(frozen=True)
class Trainer:
    """Machines stage by stage, the devices taken on each, the layout and the seconds of a step."""

    stages: tuple[tuple[Node, ...], ...]
    taken: dict[str, int]
    layout: TrainingLayout
    seconds: float


def plan_exhaustively(problem: Problem) -> Placed:
    """The fastest plan.

    Raises:
        UserError: more than `MOST_DEVICES` devices, or no plan at all.
    """
    topology = problem.topology
    if topology.devices > MOST_DEVICES:
        raise UserError(
            f"Mode exhaustive tries every assignment and stops at {MOST_DEVICES} devices, but cluster {topology.name} "
            f"has {topology.devices}: use mode joint."
        )
    engines = {n.name: engines_of(problem.serving, problem.demand, n, problem.what_if) for n in topology.nodes}
    best: Placed | None = None
    for trainer in trainers(problem):
        for choice in generations(topology, engines, trainer, problem.demand):
            placed = _placed(problem, trainer, choice, best.step_s if best else float("inf"))
            best = placed or best
    if best is None:
        raise UserError(f"No assignment of the devices of cluster {topology.name} both trains and generates.")
    return best


def _placed(
    problem: Problem, trainer: Trainer, choice: tuple[tuple[Engine, ...], ...], faster_than_s: float
) -> Placed | None:
    """The plan if it is faster than that."""
    topology, demand = problem.topology, problem.demand
    used = [engine for chosen in choice for engine in chosen]
    if not used:
        return None
    rate, latency_s = sum(e[2] for e in used), max(e[3] for e in used)
    generate_s = demand.tokens_per_step / rate
    together_s = max(trainer.seconds, generate_s, demand.scoring_s)
    if together_s >= faster_than_s:
        return None
    generating = [n for n, chosen in zip(topology.nodes, choice, strict=True) if chosen]
    training = [n for stage in trainer.stages for n in stage]
    sync = sync_of(problem.sync_mode, topology, training, generating, problem.model.weight_bytes, problem.profiles)
    eta = demand.max_staleness
    batch_s = demand.reward_s + max(latency_s, generate_s + demand.drain_share * latency_s, demand.scoring_s)
    in_time_s = (trainer.seconds + sync.transfer_s + batch_s) / (eta + 1) + sync.rollout_s
    sides_s = max(trainer.seconds + sync.train_s, generate_s + sync.rollout_s)
    step_s = max(sides_s, in_time_s, sync.transfer_s, demand.scoring_s)
    if step_s >= faster_than_s:
        return None
    replicas = []
    for node, chosen in zip(topology.nodes, choice, strict=True):
        first = trainer.taken.get(node.name, 0)
        for devices, answers, engine_rate, engine_latency_s, leased in chosen:
            tensor, cores = (1, devices) if node.device.kind == "cpu" else (devices, 1)
            column = RolloutColumn(node.type_name, tensor, answers, engine_rate, engine_latency_s, leased, cores)
            replicas.append((column, node, tuple(range(first, first + devices))))
            first += devices
    stages = tuple(tuple((n, tuple(range(trainer.taken[n.name]))) for n in stage) for stage in trainer.stages)
    sizes = tuple(stage[0].devices for stage in trainer.stages)
    trained = TrainingColumn(trainer.layout, sizes, trainer.seconds, {})
    return Placed(trained, stages, tuple(replicas), trainer.seconds, rate, latency_s, sync, step_s)


def engines_of(serving: ServingCost, demand: Demand, node: Node, what_if: bool) -> list[Engine]:
    """Every replica that fits on this machine's kind of device."""
    found: list[Engine] = []
    gate, group = max(1, demand.max_staleness) * demand.answers_per_step, demand.group_size
    on_cores = node.device.kind == "cpu"
    if what_if and not on_cores:
        for devices in (1, 2, 4, 8):
            if devices > node.devices or serving.model.heads % devices:
                continue
            most = min(serving.most_answers(node.device, devices), gate)
            for answers in {c for c in LADDER if c < most} | ({most} if most else set()):
                rate = serving.tokens_per_s(node.device, devices, answers)
                found.append((devices, answers, rate, serving.latency_s(node.device, devices, answers), answers))
        return found
    most = min(serving.most_answers(node.device, 1), gate, demand.concurrency or gate)
    ladder = {most // group} if demand.concurrency else {*GROUPS, most // group}
    whole = {groups * group for groups in ladder if 0 < groups <= most // group}
    for answers in whole or ({most} if most else set()):
        rate, latency_s = serving.tokens_per_s(node.device, 1, answers), serving.latency_s(node.device, 1, answers)
        for cores in range(1, node.devices + 1) if on_cores else [1]:
            found.append((cores, answers, cores * rate, latency_s / cores, max(answers, group)))
    return found


def generations(
    topology: Topology, engines: dict[str, list[Engine]], trainer: Trainer, demand: Demand
) -> Iterator[tuple[tuple[Engine, ...], ...]]:
    """Every set of replicas on the devices that the trainer leaves, within the gate."""
    gate = max(1, demand.max_staleness) * demand.answers_per_step
    per_machine = []
    for n in topology.nodes:
        free = n.devices - trainer.taken.get(n.name, 0)
        if n.device.kind == "cpu":  # one process on the cores that are left
            per_machine.append([(), *((e,) for e in engines[n.name] if e[0] <= free and e[4] <= gate)])
        else:
            per_machine.append(list(packings(engines[n.name], free, gate, 0)))
    for choice in itertools.product(*per_machine):
        if sum(engine[4] for chosen in choice for engine in chosen) <= gate:
            yield choice


def packings(engines: list[Engine], free: int, gate: int, start: int) -> Iterator[tuple[Engine, ...]]:
    """Multisets of replicas on `free` devices."""
    yield ()
    for i in range(start, len(engines)):
        if engines[i][0] <= free and engines[i][4] <= gate:
            for rest in packings(engines, free - engines[i][0], gate - engines[i][4], i):
                yield (engines[i], *rest)


def trainers(problem: Problem) -> Iterator[Trainer]:
    """Every layout on every set of concrete machines, as far as it is wished."""
    wish = problem.training_wish
    for trainer in _all_trainers(problem, range(4) if wish.zero is None else (wish.zero,)):
        if is_wished(wish, trainer.layout.stages):
            yield trainer


def _all_trainers(problem: Problem, zeros: Sequence[int]) -> Iterator[Trainer]:
    training, topology, what_if, most = problem.training, problem.topology, problem.what_if, problem.training.most_ranks
    degrees = [k for k in (1, 2, 4, 8) if problem.model.heads % k == 0] if what_if else [1]
    for node in topology.nodes:
        if node.device.kind == "cpu":
            for cores in range(1, node.devices + 1):
                yield from _costed(training, topology, ((node,),), (Stage(node.type_name, 1, 1, 1, cores),), zeros)
            continue
        for tensor, data in itertools.product(degrees, range(1, node.devices + 1)):
            if tensor * data <= node.devices and data <= most:
                yield from _costed(training, topology, ((node,),), (Stage(node.type_name, data, tensor, 1),), zeros)
    if not what_if:
        return
    for count in range(1, len(topology.nodes) + 1):
        for nodes in itertools.permutations(topology.nodes, count):
            yield from _whole(problem, nodes, degrees, zeros)


def _whole(problem: Problem, nodes: tuple[Node, ...], degrees: list[int], zeros: Sequence[int]) -> Iterator[Trainer]:
    """Layouts that take these machines entirely: data parallel, a pipeline of equals, or two types in turn."""
    training, topology, most = problem.training, problem.topology, problem.training.most_ranks
    kinds = [(n.type_name, n.devices) for n in nodes]
    if len(set(kinds)) == 1:
        kind, size = kinds[0]
        for tensor in (k for k in degrees if size % k == 0):
            data = len(nodes) * size // tensor
            if len(nodes) > 1 and data <= most:
                yield from _costed(training, topology, (nodes,), (Stage(kind, data, tensor, len(nodes)),), zeros)
            if 2 <= len(nodes) <= 4 and size // tensor <= most:
                stages = tuple(Stage(kind, size // tensor, tensor, 1) for _ in nodes)
                yield from _costed(training, topology, tuple((n,) for n in nodes), stages, zeros)
    for cut in range(1, len(nodes)):
        first, second = nodes[:cut], nodes[cut:]
        if len({*kinds[:cut]}) > 1 or len({*kinds[cut:]}) > 1 or not kinds[0][0] < kinds[cut][0]:
            continue
        for a, b in itertools.product(degrees, degrees):
            (kind_a, size_a), (kind_b, size_b) = kinds[0], kinds[cut]
            data = len(first) * size_a // a
            if size_a % a or size_b % b or data != len(second) * size_b // b or data > most:
                continue
            stages = (Stage(kind_a, data, a, len(first)), Stage(kind_b, data, b, len(second)))
            yield from _costed(training, topology, (first, second), stages, zeros)


def _costed(
    training: TrainingCost,
    topology: Topology,
    nodes: tuple[tuple[Node, ...], ...],
    stages: tuple[Stage, ...],
    zeros: Sequence[int],
) -> Iterator[Trainer]:
    links = [min((topology.link(a, b) for a, b in itertools.combinations(group, 2)), default=1e18) for group in nodes]
    links += [min(topology.link(a, b) for a in x for b in y) for x, y in itertools.pairwise(nodes)]
    layouts = [TrainingLayout(stages, zero) for zero in zeros]
    fitting = [layout for layout in layouts if all(m.fits for m in training.memory(layout))]
    if fitting:
        fastest = min(fitting, key=lambda layout: training.step_s(layout, links))
        taken = {n.name: s.devices // s.machines for s, group in zip(stages, nodes, strict=True) for n in group}
        yield Trainer(nodes, taken, fastest, training.step_s(fastest, links))
