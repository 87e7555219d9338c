"""A plan in words and in characters: why this split, who stands where, who did what when, what money would buy."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from planners.cluster_plan import ClusterPlan
from planners.demand import Demand
from planners.errors import UserError
from planners.make import make_plan
from planners.memory import GIB
from planners.model import Model
from planners.simulator import Simulation
from planners.topology import Topology

SYMBOLS = {"train": "T", "generate": "G", "sync": "s", "wait": ".", "down": "x"}
NEGLIGIBLE = 0.001


def explain(plan: ClusterPlan, next_devices: Mapping[str, float] | None = None) -> str:
    """Why this split, how sure that is, and which device would help.

    Args:
        plan: the plan.
        next_devices: gain of one more device of each type, from `next_device_gains`.
    """
    generating = Counter(t for replica in plan.replicas for t in [replica.device_type] * len(replica.devices))
    side, other = ("Training", "generation") if plan.limited_by == "training" else ("Generation", "training")
    longer, shorter = sorted((plan.train_s, plan.rollout_s + plan.reward_s), reverse=True)
    idle = sum(m.devices - m.training - m.rollout for m in plan.machines)
    lines = [
        f"Trains on {plan.training.layout}; generates on "
        + ", ".join(f"{count} × {kind}" for kind, count in sorted(generating.items()))
        + f" in {len(plan.replicas)} replicas.",
        f"{side} limits: {longer:.1f} s a step against {shorter:.1f} s of {other}; sync ({plan.sync_mode}) adds "
        f"{plan.sync_s:.1f} s, so a step takes {plan.step_s:.1f} s.",
        f"{plan.throughput_tokens_per_s:,.0f} response tokens/s for {plan.usd_per_h:.2f} USD/h, "
        f"{plan.usd_per_million_tokens:.2f} USD per million tokens.",
        _certainty(plan),
    ]
    if idle:
        lines.append(f"{idle} devices are not needed: they would not shorten the step.")
    fullest = max((n for n, m in plan.memory.items() if m.role == "train"), key=lambda name: _share(plan, name))
    lines.append(f"Memory is fullest on {fullest}: {_share(plan, fullest):.0%} of what may be used.")
    for kind, gain in sorted((next_devices or {}).items(), key=lambda item: -item[1]):
        what = f"brings {gain:+.1%}" if gain > NEGLIGIBLE else "brings nothing"
        lines.append(f"One more {kind} {what}.")
    if plan.what_if:
        lines.append("What-if: it uses layouts or a sync mode that do not run yet.")
    return "\n".join(lines)


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


def next_device_gains(topology: Topology, model: Model, demand: Demand, plan: ClusterPlan) -> dict[str, float]:
    """Relative gain in throughput from one more device of each type, on a machine of its own.

    It is linked as machines of its type are; where there is only one, as its type is linked to others.
    """
    gains = {}
    for kind, device in topology.types.items():
        links = {frozenset((kind,)): min(topology.type_links.values(), default=1e9), **topology.type_links}
        like = next(n for n in topology.nodes if n.type_name == kind)
        extra = replace(like, name="one-more", group="one-more", device=device, devices=1)
        grown = replace(topology, nodes=(*topology.nodes, extra), type_links=links)
        better = make_plan(grown, model, demand, what_if=plan.what_if, sync_mode=plan.sync_mode)
        gains[kind] = better.throughput_tokens_per_s / plan.throughput_tokens_per_s - 1
    return gains


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
