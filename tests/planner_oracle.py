"""The best plan by exhaustive search over concrete devices: slow, and shares no column or solver code.

It shares the cost formulas (seconds of a layout on given links, tokens/s of a replica, seconds of a sync), because it
checks the search and not the costs.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from planners.demand import Demand
from planners.model import Model
from planners.serving import ServingCost
from planners.sync import SyncMode, sync_of
from planners.topology import Node, Topology
from planners.training import Stage, TrainingCost, TrainingLayout

LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
Engine = tuple[int, int, float, float]  # devices, answers, tokens/s, latency


@dataclass(frozen=True)
class Trainer:
    """Machines and the devices taken on each, stage by stage, with the seconds of a step."""

    stages: tuple[tuple[Node, ...], ...]
    taken: dict[str, int]
    seconds: float


def best_step_s(topology: Topology, model: Model, demand: Demand, sync: SyncMode, what_if: bool) -> float | None:
    """Seconds of the fastest step, or None if there is no plan."""
    serving, training = ServingCost(model, demand), TrainingCost(model, demand, topology.types)
    engines = {n.name: engines_of(serving, demand, n) for n in topology.nodes}
    best: float | None = None
    for trainer in trainers(training, topology, model, demand, what_if):
        for choice in generations(topology, engines, trainer, demand):
            generating = [n for n, chosen in zip(topology.nodes, choice, strict=True) if chosen]
            used = [engine for chosen in choice for engine in chosen]
            if not used:
                continue
            nodes = [n for stage in trainer.stages for n in stage]
            cost = sync_of(sync, topology, nodes, generating, model.weight_bytes)
            longest_s = max(e[3] for e in used) / max(1, demand.max_staleness - 0.5)
            generate_s = max(demand.tokens_per_step / sum(e[2] for e in used), longest_s) + demand.reward_s
            together = trainer.seconds + generate_s if demand.max_staleness == 0 else max(trainer.seconds, generate_s)
            step = max(together + cost.pause_s, cost.transfer_s)
            best = step if best is None else min(best, step)
    return best


def engines_of(serving: ServingCost, demand: Demand, node: Node) -> list[Engine]:
    """Every replica that fits on this machine's kind of device."""
    found: list[Engine] = []
    for devices in (1, 2, 4, 8):
        if devices > node.devices or serving.model.heads % devices:
            continue
        most = min(serving.most_answers(node.device, devices), max(1, demand.max_staleness) * demand.answers_per_step)
        for answers in {c for c in LADDER if c < most} | ({most} if most else set()):
            rate = serving.tokens_per_s(node.device, devices, answers)
            found.append((devices, answers, rate, serving.latency_s(node.device, devices, answers)))
    return found


def generations(
    topology: Topology, engines: dict[str, list[Engine]], trainer: Trainer, demand: Demand
) -> Iterator[tuple[tuple[Engine, ...], ...]]:
    """Every set of replicas on the devices that the trainer leaves, within the gate."""
    gate = max(1, demand.max_staleness) * demand.answers_per_step
    per_machine = [
        list(packings(engines[n.name], n.devices - trainer.taken.get(n.name, 0), gate, 0)) for n in topology.nodes
    ]
    for choice in itertools.product(*per_machine):
        if sum(engine[1] for chosen in choice for engine in chosen) <= gate:
            yield choice


def packings(engines: list[Engine], free: int, gate: int, start: int) -> Iterator[tuple[Engine, ...]]:
    """Multisets of replicas on `free` devices."""
    yield ()
    for i in range(start, len(engines)):
        if engines[i][0] <= free and engines[i][1] <= gate:
            for rest in packings(engines, free - engines[i][0], gate - engines[i][1], i):
                yield (engines[i], *rest)


def trainers(
    training: TrainingCost, topology: Topology, model: Model, demand: Demand, what_if: bool
) -> Iterator[Trainer]:
    """Every layout on every set of concrete machines."""
    most = max(1, demand.answers_per_step // demand.minibatches)
    degrees = [k for k in (1, 2, 4, 8) if model.heads % k == 0] if what_if else [1]
    for node in topology.nodes:
        for tensor, data in itertools.product(degrees, range(1, node.devices + 1)):
            if tensor * data <= node.devices and data <= most:
                yield from _costed(training, topology, ((node,),), (Stage(node.type_name, data, tensor, 1),))
    if not what_if:
        return
    for count in range(1, len(topology.nodes) + 1):
        for nodes in itertools.permutations(topology.nodes, count):
            yield from _whole(training, topology, nodes, degrees, most)


def _whole(
    training: TrainingCost, topology: Topology, nodes: tuple[Node, ...], degrees: list[int], most: int
) -> Iterator[Trainer]:
    """Layouts that take these machines entirely: data parallel, a pipeline of equals, or two types in turn."""
    kinds = [(n.type_name, n.devices) for n in nodes]
    if len(set(kinds)) == 1:
        kind, size = kinds[0]
        for tensor in (k for k in degrees if size % k == 0):
            data = len(nodes) * size // tensor
            if len(nodes) > 1 and data <= most:
                yield from _costed(training, topology, (nodes,), (Stage(kind, data, tensor, len(nodes)),))
            if 2 <= len(nodes) <= 4 and size // tensor <= most:
                stages = tuple(Stage(kind, size // tensor, tensor, 1) for _ in nodes)
                yield from _costed(training, topology, tuple((n,) for n in nodes), stages)
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
            yield from _costed(training, topology, (first, second), stages)


def _costed(
    training: TrainingCost, topology: Topology, nodes: tuple[tuple[Node, ...], ...], stages: tuple[Stage, ...]
) -> Iterator[Trainer]:
    links = [min((topology.link(a, b) for a, b in itertools.combinations(group, 2)), default=1e18) for group in nodes]
    links += [min(topology.link(a, b) for a in x for b in y) for x, y in itertools.pairwise(nodes)]
    fitting = [
        training.step_s(TrainingLayout(stages, zero), links)
        for zero in range(4)
        if all(m.fits for m in training.memory(TrainingLayout(stages, zero)))
    ]
    if fitting:
        taken = {n.name: s.devices // s.machines for s, group in zip(stages, nodes, strict=True) for n in group}
        yield Trainer(nodes, taken, min(fitting))
