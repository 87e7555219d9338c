"""A plan in words and in characters: why this split, who stands where, who did what when, what money would buy."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from planners.cluster_plan import ClusterPlan
from planners.columns import Problem, TrainingWish, rollout_columns, training_columns
from planners.demand import Demand
from planners.errors import UserError
from planners.joint import solve_joint
from planners.make import make_plan
from planners.memory import GIB
from planners.model import Model
from planners.simulator import Simulation
from planners.solver import Infeasible
from planners.topology import Topology

SYMBOLS = {"train": "T", "generate": "G", "sync": "s", "wait": ".", "down": "x"}
NEGLIGIBLE = 0.001
"""Share of a step's time that counts as none: the solver's own gap, within which two plans are equal."""
NEXT_LIMIT_S = 10.0
"""Of each solve for one more device, which only adds a sentence to a plan that is there."""


def explain(plan: ClusterPlan, next_devices: Mapping[str, float] | None = None) -> str:
    """Why this split, how sure that is, and which device would help.

    Args:
        plan: the plan.
        next_devices: gain of one more device of each type, from `next_device_gains`.
    """
    generating = Counter(t for replica in plan.replicas for t in [replica.device_type] * len(replica.devices))
    side, other = ("Training", "generation") if plan.limited_by == "training" else ("Generation", "training")
    sides = (plan.train_s + plan.sync_train_s, plan.rollout_s + plan.reward_s + plan.sync_rollout_s)
    longer, shorter = sorted(sides, reverse=True)
    idle = sum(m.devices - m.training - m.rollout for m in plan.machines)
    lines = [
        f"Trains on {plan.training.layout}; generates on "
        + ", ".join(f"{count} × {kind}" for kind, count in sorted(generating.items()))
        + f" in {len(plan.replicas)} {'replica' if len(plan.replicas) == 1 else 'replicas'}.",
        f"{side} limits: {longer:.2f} s a step against {shorter:.2f} s of {other}, {_sync_words(plan)} included; a "
        f"step takes {plan.step_s:.2f} s{_in_turn(plan)}.",
        f"{plan.throughput_tokens_per_s:,.0f} response tokens/s{_price_words(plan)}.",
    ]
    if plan.simulated_step_s is not None:
        differs = round(plan.simulated_step_s / plan.step_s - 1, 3) or 0.0  # never -0.0
        lines.append(
            f"A simulation, with lengths drawn at random, takes {plan.simulated_step_s:.2f} s a step ({differs:+.1%})."
        )
    lines.append(_certainty(plan))
    if idle:
        lines.append(f"{idle} {'device is' if idle == 1 else 'devices are'} not needed: no use would shorten the step.")
    fullest = max((n for n, m in plan.memory.items() if m.role == "train"), key=lambda name: _share(plan, name))
    lines.append(f"Memory is fullest on {fullest}: {_share(plan, fullest):.0%} of what may be used.")
    for kind, gain in sorted((next_devices or {}).items(), key=lambda item: -item[1]):
        what = f"brings {gain:+.1%}" if gain > NEGLIGIBLE else "brings nothing"
        lines.append(f"One more {kind} {what}.")
    if plan.what_if:
        lines.append("What-if: it uses layouts or a sync mode that do not run yet.")
    return "\n".join(lines)


def _price_words(plan: ClusterPlan) -> str:
    if not plan.usd_per_h:
        return ""
    return f" for {plan.usd_per_h:.2f} USD/h, {plan.usd_per_million_tokens:.2f} USD per million tokens"


def _sync_words(plan: ClusterPlan) -> str:
    if plan.sync_mode == "storage":
        return f"{plan.sync_train_s:.2f} s of writing weights and {plan.sync_rollout_s:.2f} s of loading them"
    hidden = f" after {plan.transfer_s:.2f} s of hidden transfer" if plan.transfer_s else ""
    return f"{plan.sync_rollout_s:.2f} s of {plan.sync_mode} sync{hidden}"


def _in_turn(plan: ClusterPlan) -> str:
    return ", since with staleness 0 the sides take turns" if plan.demand.max_staleness == 0 else ""


def _certainty(plan: ClusterPlan) -> str:
    if plan.mode == "exhaustive":
        return f"The best there is, {plan.bound_holds}: every assignment was tried."
    if plan.mode != "joint":
        return f"Mode {plan.mode} proves no bound."
    if plan.price_bound_usd_per_h is not None:
        return f"Nothing below {plan.price_bound_usd_per_h:.2f} USD/h reaches the target, {plan.bound_holds}."
    return f"At most {plan.gap:.2%} below the best there is, {plan.bound_holds}."


def _share(plan: ClusterPlan, name: str) -> float:
    m = plan.memory[name]
    held = m.weights + m.gradients + m.optimiser + m.activations + m.kv + m.workspace
    return held / m.available


def next_device_gains(
    topology: Topology,
    model: Model,
    demand: Demand,
    plan: ClusterPlan,
    *,
    what_if: bool = False,
    training_wish: TrainingWish | None = None,
) -> dict[str, float]:
    """Relative gain in throughput from one more device of each type, on a machine of its own.

    It is linked as machines of its type are; where there is only one, as its type is linked to others. Compared are
    step times before placement. A layout that trains no faster than the plan's step cannot shorten it, so only the
    others are tried. Among 1,000 devices and more one is within the solver's own gap of 0.1 %: nothing is said of it,
    nor of a type where the solver finds no answer in time. `what_if` and `training_wish` are those of `make_plan`.
    """
    if topology.devices * NEGLIGIBLE >= 1:
        return {}
    before_s = demand.tokens_per_step / plan.upper_bound_tokens_per_s / (1 - plan.gap_solver)
    gains = {}
    for kind, device in topology.types.items():
        links = {frozenset((kind,)): min(topology.type_links.values(), default=1e9), **topology.type_links}
        like = next(n for n in topology.nodes if n.type_name == kind)
        extra = replace(like, name="one-more", group="one-more", device=device, devices=1, host="", numbers=())
        grown = replace(topology, nodes=(*topology.nodes, extra), type_links=links)
        problem = Problem(grown, model, demand, what_if=what_if, sync_mode=plan.sync_mode, training_wish=training_wish)
        try:
            gains[kind] = max(0.0, before_s / _step_below_s(problem, before_s) - 1)
        except UserError:
            continue
    return gains


def _step_below_s(problem: Problem, limit_s: float) -> float:
    """The shortest step before placement, or the limit where none is shorter.

    Raises:
        UserError: the solver found no plan in time.
    """
    training = [column for column in training_columns(problem) if column.step_s < limit_s]
    if not training:
        return limit_s
    try:
        return solve_joint(problem, training, rollout_columns(problem), time_limit_s=NEXT_LIMIT_S).objective
    except Infeasible:
        return limit_s


def budget_curve(
    topology: Topology, model: Model, demand: Demand, budgets: list[float], **how: Any
) -> Iterator[tuple[float, ClusterPlan]]:
    """The best plan for each budget in USD/h; budgets that buy none are left out.

    Args:
        how: further arguments of `make_plan`, such as `what_if` and `sync_mode`.
    """
    for budget in budgets:
        try:
            yield budget, make_plan(topology, model, demand, budget_usd_per_h=budget, **how)
        except UserError:
            continue


def cluster_map(plan: ClusterPlan) -> str:
    """A line per machine, a letter per device: T trains, G generates, · is not needed."""
    width = max(len(m.name) for m in plan.machines)
    kinds = max(len(m.device_type) for m in plan.machines)
    return "\n".join(
        f"{m.name:{width}}  {m.device_type:{kinds}}  "
        + "T" * m.training
        + "G" * m.rollout
        + "·" * (m.devices - m.training - m.rollout)
        for m in plan.machines
    )


def memory_table(plan: ClusterPlan) -> str:
    """GiB by part for every kind of device in the plan."""
    parts = ("weights", "gradients", "optimiser", "activations", "kv", "workspace", "available")
    width = max(len(name) for name in plan.memory)
    lines = [f"{'GiB per device':{width}}" + "".join(f"{part:>12}" for part in parts)]
    for name, memory in plan.memory.items():
        values = memory.model_dump()
        lines.append(f"{name:{width}}" + "".join(f"{values[part] / GIB:12.1f}" for part in parts))
    return "\n".join(lines)


def gantt(simulation: Simulation, width: int = 100) -> str:
    """A line per actor over the whole run: T trains, G generates, s syncs, x is down, . waits.

    Each character shows what the actor did most in its slice of time. Needs a simulation with `keep_spans`.
    """
    actors = sorted({span.actor for span in simulation.spans}, key=lambda a: (a != "trainer", len(a), a))
    slice_s = simulation.seconds / width
    lines = [f"{'':9}0 s{'':{max(0, width - 16)}}{simulation.seconds:10.0f} s"]
    for actor in actors:
        spent = [Counter[str]() for _ in range(width)]
        for span in (s for s in simulation.spans if s.actor == actor):
            first = max(0, int(span.start_s / slice_s))
            for i in range(first, min(width, int(span.end_s / slice_s) + 1)):
                overlap_s = min(span.end_s, (i + 1) * slice_s) - max(span.start_s, i * slice_s)
                spent[i][span.kind] += overlap_s  # type: ignore[assignment]
        line = "".join(SYMBOLS[max(s, key=lambda kind: s[kind])] if s else " " for s in spent)
        lines.append(f"{actor if actor == 'trainer' else 'r' + actor:9}{line}")
    return "\n".join(lines)
