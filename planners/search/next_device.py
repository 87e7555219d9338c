"""What would bring a plan further: one more device of a type, layouts that do not run yet, smaller micro-batches."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planners.errors import CHOICES, UserError, in_words
from planners.plan.plan import ClusterPlan
from planners.search.columns import LEAST_MICRO_BATCH, Problem, rollout_columns, training_columns
from planners.search.joint import solve_fastest
from planners.search.program import Wish
from planners.search.solver import Infeasible

NEGLIGIBLE = 0.001
"""Share of a step's time that counts as none: the solver's own gap, within which two plans are equal."""
ROUGH = 0.005
"""Solver gap of what only adds a sentence to a plan that is there."""
ASK_LIMIT_S = 3.0
"""Seconds of solving, all types together; beyond that a bound has to do."""
REMEDY = 0.02
"""Share by which smaller micro-batches have to shorten training to be named."""
MOST_DEVICES = 1000
"""From here on one more device is within the solver's own gap."""


@dataclass(frozen=True)
class Gain:
    """Relative gain in throughput; `at_most` where the solver ran out of time and it is a bound."""

    share: float
    at_most: bool = False


def next_device_gains(problem: Problem, plan: ClusterPlan) -> dict[str, Gain]:
    """What one more device of each type would bring to a plan of mode `joint`, on a machine of its own.

    It is linked as machines of its type are; where there is only one, as its type is linked to others. Compared are
    step times before placement. Nothing is said of a type for which the solver, with `ASK_LIMIT_S` over all types, has
    no answer.
    """
    topology = problem.topology
    if topology.devices >= MOST_DEVICES:
        return {}
    before_s = _before_placement_s(problem, plan)
    gains = {}
    for kind, device in topology.types.items():
        to_others = [speed for types, speed in topology.type_links.items() if kind in types]
        links = {frozenset((kind,)): min(to_others, default=1e9), **topology.type_links}
        like = next(n for n in topology.nodes if n.type_name == kind)
        extra = replace(like, name="one-more", group="one-more", device=device, devices=1, host="", numbers=())
        grown = replace(topology, nodes=(*topology.nodes, extra), type_links=links)
        try:
            gains[kind] = _gain(problem.on(grown), before_s, ASK_LIMIT_S / len(topology.types))
        except UserError:
            continue
    return gains


def what_if_gain(problem: Problem, plan: ClusterPlan) -> Gain | None:
    """What layouts that do not run yet would bring to a plan of those that do; None where the solver has no answer."""
    demand = replace(problem.demand, concurrency=None)
    opened = Problem(problem.topology, problem.model, demand, what_if=True, sync_mode=plan.sync_mode)
    try:
        return _gain(opened, _before_placement_s(problem, plan), ASK_LIMIT_S)
    except UserError:
        return None


def memory_remedy(problem: Problem, plan: ClusterPlan, names: Mapping[str, str] = CHOICES) -> list[str]:
    """A sentence where training limits and smaller micro-batches would let a faster layout fit into memory.

    `names` are those of choices, for `in_words`.
    """
    demand = problem.demand
    if plan.limited_by != "training" or problem.topology.devices >= MOST_DEVICES:
        return []
    tokens, fastest = demand.micro_batch_tokens, ""
    now_s = plan.train_s * (1 - REMEDY)
    while tokens >= 2 * LEAST_MICRO_BATCH:
        tokens //= 2
        best = training_columns(problem.asking(replace(demand, micro_batch_tokens=tokens)))[0]
        if best.step_s < now_s:
            now_s = best.step_s
            fastest = (
                f"Memory keeps a faster training layout out: with $micro_batch_tokens={tokens} "
                f"{best.layout.name} fits and takes {best.step_s:.2f} s."
            )
    return [in_words(fastest, names)] if fastest else []


def _before_placement_s(problem: Problem, plan: ClusterPlan) -> float:
    if plan.upper_bound_tokens_per_s is None or plan.gap_solver is None:
        return plan.step_s
    return problem.demand.tokens_per_step / plan.upper_bound_tokens_per_s / (1 - plan.gap_solver)


def _gain(problem: Problem, before_s: float, time_limit_s: float) -> Gain:
    """Only steps that are shorter are asked for, which is quick to refute; a layout that trains no faster has none."""
    below_s = before_s * (1 - NEGLIGIBLE)
    training = [column for column in training_columns(problem) if column.step_s < below_s]
    if not training:
        return Gain(0.0)
    try:
        found = solve_fastest(
            problem, training, rollout_columns(problem), Wish(below_s=below_s), time_limit_s=time_limit_s, gap=ROUGH
        )
    except Infeasible:
        return Gain(0.0)
    if found.objective <= found.bound * (1 + 2 * ROUGH):
        return Gain(before_s / found.objective - 1)
    return Gain(before_s / found.bound - 1, at_most=True)
