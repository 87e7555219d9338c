"""A plan in words and in characters: why this split, who stands where, who did what when, what money would buy."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby

from planners.costs.memory import GIB
from planners.errors import CHOICES, UserError, in_words
from planners.plan.plan import ClusterPlan
from planners.plan.simulator import Simulation, Span, shown_steps
from planners.search.columns import Problem
from planners.search.make import Goal, make_plan, rounded_down
from planners.search.next_device import NEGLIGIBLE, Gain

SYMBOLS = {"train": "T", "generate": "G", "sync": "s", "wait": ".", "down": "x"}
DISAGREEMENT = 0.05
"""Share by which plan and simulation may differ without a word on which to trust."""
MOST_HINTS = 5
"""Device types of which one more is spoken of by name."""
ALIKE = 4
"""So many equal machines in a row have a line each in the map; more share one."""


def explain(
    plan: ClusterPlan,
    gains: Mapping[str, Gain] | None = None,
    *,
    budget_usd_per_h: float | None = None,
    opened: Gain | None = None,
    names: Mapping[str, str] = CHOICES,
) -> str:
    """Why this split, how sure that is, and which device would help.

    Args:
        plan: the plan.
        gains: of one more device of each type, from `next_device_gains`.
        budget_usd_per_h: what it was planned for.
        opened: what layouts that do not run yet would bring, where that was asked.
        names: those of choices, for `in_words`.
    """
    generating = Counter(t for replica in plan.replicas for t in [replica.device_type] * len(replica.devices))
    lines = [
        f"Trains on {plan.trainer.layout}; generates on "
        + ", ".join(f"{count} × {kind}" for kind, count in sorted(generating.items()))
        + f" in {len(plan.replicas)} {'replica' if len(plan.replicas) == 1 else 'replicas'}.",
        *_limit(plan),
        *_longest_answers(plan),
        f"{rounded_down(plan.throughput_tokens_per_s)} response tokens/s{_price_words(plan)}.",
        *_simulated(plan),
        _certainty(plan),
        *(in_words(line, names) for line in _left_out(plan, budget_usd_per_h, opened)),
    ]
    fullest = max((n for n, m in plan.memory.items() if m.role == "train"), key=lambda name: _share(plan, name))
    lines.append(f"Memory is fullest on {fullest}: {_share(plan, fullest):.0%} of what may be used.")
    lines += _next_devices(plan, gains or {})
    if plan.what_if:
        lines.append("What-if: it uses layouts or a sync mode that do not run yet.")
    return "\n".join(lines)


def _limit(plan: ClusterPlan) -> list[str]:
    """What decides the step's time, and what scoring does to it."""
    sides = {
        "training": plan.train_s + plan.sync_train_s,
        "generation": plan.rollout_s + plan.sync_rollout_s,
    }
    step = f"a step takes {_seconds(plan.step_s)}{_in_turn(plan)}"
    if plan.limited_by == "scoring":
        at_once = f"{plan.demand.scorers} {'group' if plan.demand.scorers == 1 else 'groups'} at once"
        against = ", ".join(f"{_seconds(value)} of {name}" for name, value in sides.items())
        return [f"Scoring limits: {_seconds(plan.scoring_s)} a step with {at_once} against {against}; {step}."]
    side, other = ("Training", "generation") if plan.limited_by == "training" else ("Generation", "training")
    lines = [
        f"{side} limits: {_seconds(sides[side.lower()])} a step against {_seconds(sides[other])} of {other}, "
        f"{_sync_words(plan)} included; {step}."
    ]
    if plan.reward_s and plan.mode == "two-phase":
        lines.append(
            f"Algorithm 1 adds the {_seconds(plan.reward_s)} of scoring to generation; here it goes on beside, and "
            "only delays a group."
        )
    return lines


def seconds(value: float) -> str:
    """To the hundredth, or to two digits where that would be nothing."""
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def _seconds(value: float) -> str:
    return f"{seconds(value)} s"


def _work_s(plan: ClusterPlan) -> float:
    """What generating a step's tokens takes all replicas together."""
    return plan.throughput_tokens_per_s * plan.step_s / sum(r.tokens_per_s for r in plan.replicas)


def _longest_decide(plan: ClusterPlan) -> bool:
    """Whether generation takes longer than its work, and would not if no answer were longer than others.

    Where training limits, a little is not worth a word.
    """
    return _takes_longer(plan) and _step_without_tail_s(plan) < plan.step_s * (1 - NEGLIGIBLE)


def _takes_longer(plan: ClusterPlan) -> bool:
    return plan.rollout_s > _work_s(plan) * (1 + (NEGLIGIBLE if plan.limited_by == "generation" else DISAGREEMENT))


def _step_without_tail_s(plan: ClusterPlan) -> float:
    """The step time if all answers of a batch ended with its work."""
    batch_s = plan.reward_s + max(_work_s(plan), plan.scoring_s)
    in_time_s = (plan.train_s + plan.transfer_s + batch_s) / (plan.demand.max_staleness + 1) + plan.sync_rollout_s
    return max(plan.train_s + plan.sync_train_s, _work_s(plan) + plan.sync_rollout_s, plan.scoring_s, in_time_s)


def _longest_answers(plan: ClusterPlan) -> list[str]:
    """What generation's seconds are where they are not its work."""
    if not _takes_longer(plan):
        return []
    if not _longest_decide(plan):
        return [
            f"Of generation's {_seconds(plan.rollout_s)} its work takes {_seconds(_work_s(plan))}: the way of new "
            "weights decides, since answers may be only so many versions old."
        ]
    eta, longest_s = plan.demand.max_staleness, max(r.latency_s for r in plan.replicas)
    steps = f"with staleness {eta} they have {eta + 1} steps, training included" if eta else "each step waits for them"
    return [
        f"Of generation's {_seconds(plan.rollout_s)} its work takes {_seconds(_work_s(plan))}: the longest answers "
        f"decide, which take {_seconds(longest_s)}; {steps}."
    ]


def _simulated(plan: ClusterPlan) -> list[str]:
    """The simulation's step time, and which of the two figures to trust where they differ."""
    shown = shown_steps(plan.demand)
    if shown is None:
        return ["Not simulated: a step has too many answers, among which chance evens out."]
    if plan.simulated_step_s is None:
        return []
    differs = round(plan.simulated_step_s / plan.step_s - 1, 3) or 0.0  # never -0.0
    lines = [
        f"A simulation, with lengths drawn at random, takes {_seconds(plan.simulated_step_s)} a step ({differs:+.1%})."
    ]
    if abs(differs) > DISAGREEMENT:
        lines.append(f"They differ by more than {DISAGREEMENT:.0%}: {_whom_to_trust(plan, differs, *shown)}.")
    return lines


def _whom_to_trust(plan: ClusterPlan, differs: float, steps: int, warm_up: int) -> str:
    if plan.demand.max_staleness > warm_up:
        return (
            f"trust the plan, since the simulation's {steps} steps are too few to leave the start behind at staleness "
            f"{plan.demand.max_staleness}"
        )
    if differs > 0:
        why = "work and longest answer vary from step to step, and each side waits for the other"
    else:
        why = "replicas that are not full, as the gate leaves them, are faster than the plan's full ones"
    return f"trust the simulation, since {why}"


def _left_out(plan: ClusterPlan, budget_usd_per_h: float | None, opened: Gain | None) -> list[str]:
    """Why devices do nothing, as far as that is known."""
    idle = sum(m.devices - m.training - m.rollout for m in plan.machines)
    if not idle:
        return []
    devices = f"{idle} {'device is' if idle == 1 else 'devices are'}"
    if plan.price_bound_usd_per_h is not None:
        return [f"{devices} not rented: the target is met without."]
    sure = plan.gap is not None and plan.gap <= NEGLIGIBLE
    found = "no use of them would shorten the step" if sure else "no use of them was found to shorten the step"
    if budget_usd_per_h is not None:
        return [f"{devices} not rented: within {budget_usd_per_h:g} USD/h {found}."]
    if plan.mode == "homogeneous":
        return [f"{devices} left out: mode homogeneous uses one device type, and no more of it than shorten the step."]
    if plan.mode == "two-phase":
        return [f"{devices} left out by Algorithm 1; mode joint would say whether any use shortens the step."]
    within = " where half of the devices train" if plan.mode == "uniform" else ""
    today = "" if plan.what_if or opened is None else " in layouts that run today"
    lines = [f"{devices} not needed: {found}{within}{today}."]
    if opened is not None and opened.share > NEGLIGIBLE:
        lines.append(f"Layouts that $what_if opens would bring {_gain_words(opened)}.")
    return lines


def _next_devices(plan: ClusterPlan, gains: Mapping[str, Gain]) -> list[str]:
    """A sentence per type, the most useful first."""
    waits = plan.limited_by == "generation" and _longest_decide(plan)
    why = ", since the longest answers decide" if waits else ""  # else one would expect more devices to help
    by_gain = sorted(gains.items(), key=lambda item: -item[1].share)
    lines = [
        f"One more {kind} brings {_gain_words(gain)}{why if gain.share <= NEGLIGIBLE else ''}."
        for kind, gain in by_gain[:MOST_HINTS]
    ]
    if len(by_gain) > MOST_HINTS:
        rest = by_gain[MOST_HINTS:]
        most = _gain_words(rest[0][1])
        lines.append(
            f"One more of any of {len(rest)} other types brings {most}{'' if most == 'nothing' else ' or less'}."
        )
    if any(gain.share > NEGLIGIBLE for gain in gains.values()):
        lines.append("These are planned gains in tokens/s, on a machine of its own, before placement.")
    return lines


def _gain_words(gain: Gain) -> str:
    if gain.share <= NEGLIGIBLE:
        return "nothing"
    return f"{'at most ' if gain.at_most else ''}{gain.share:+.1%}"


def _price_words(plan: ClusterPlan) -> str:
    if not plan.usd_per_h:
        return ""
    return f" for {plan.usd_per_h:.2f} USD/h, {money(plan.usd_per_million_tokens)} USD per million tokens"


def money(usd: float) -> str:
    """USD to the cent, or to two digits where that would be nothing."""
    return f"{usd:.2f}" if usd >= 0.1 or usd == 0 else f"{usd:.2g}"


def _sync_words(plan: ClusterPlan) -> str:
    if plan.sync_mode == "storage":
        return f"{_seconds(plan.sync_train_s)} of writing weights and {_seconds(plan.sync_rollout_s)} of loading them"
    hidden = f" after {_seconds(plan.transfer_s)} of hidden transfer" if plan.transfer_s else ""
    return f"{_seconds(plan.sync_rollout_s)} of {plan.sync_mode} sync{hidden}"


def _in_turn(plan: ClusterPlan) -> str:
    return ", since with staleness 0 the sides take turns" if plan.demand.max_staleness == 0 else ""


def _certainty(plan: ClusterPlan) -> str:
    if plan.mode == "exhaustive":
        return f"The best there is, {plan.bound_holds}: every assignment was tried."
    if plan.gap is None:
        return f"Mode {plan.mode} proves no bound."
    if plan.price_bound_usd_per_h is not None:
        return f"Nothing below {plan.price_bound_usd_per_h:.2f} USD/h reaches the target, {plan.bound_holds}."
    return f"At most {plan.gap:.2%} below the best there is, {plan.bound_holds}."


def _share(plan: ClusterPlan, name: str) -> float:
    m = plan.memory[name]
    held = m.weights + m.gradients + m.optimiser + m.activations + m.kv + m.workspace
    return held / m.available


def budget_curve(problem: Problem, budgets: list[float]) -> Iterator[tuple[float, ClusterPlan]]:
    """The best plan for each budget in USD/h; budgets that buy none are left out."""
    for budget in budgets:
        try:
            yield budget, make_plan(problem, Goal(budget_usd_per_h=budget))
        except UserError:
            continue


def cluster_map(plan: ClusterPlan) -> str:
    """A letter per device, a line per machine or for several equal ones in a row, and what the letters mean."""
    rows = []
    for (kind, *roles), machines in groupby(
        plan.machines, key=lambda m: (m.device_type, m.training, m.rollout, m.devices)
    ):
        alike, letters = list(machines), "T" * roles[0] + "G" * roles[1] + "·" * (roles[2] - roles[0] - roles[1])
        if len(alike) <= ALIKE:
            rows += [(m.name, kind, letters) for m in alike]
        else:
            rows.append((f"{alike[0].name} … {alike[-1].name}", kind, f"{letters}  × {len(alike)}"))
    width, kinds = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = [f"{name:{width}}  {kind:{kinds}}  {letters}" for name, kind, letters in rows]
    return "\n".join([*lines, "T trains, G generates, · is not used"])


def memory_table(plan: ClusterPlan) -> str:
    """GiB by part for every kind of device in the plan."""
    parts = ("weights", "gradients", "optimiser", "activations", "kv", "workspace", "available")
    width = max(len(name) for name in (*plan.memory, "GiB per device"))
    lines = [f"{'GiB per device':{width}}" + "".join(f"{part:>12}" for part in parts)]
    for name, memory in plan.memory.items():
        values = memory.model_dump()
        lines.append(f"{name:{width}}" + "".join(f"{_gib(values[part]):>12}" for part in parts))
    return "\n".join(lines)


def _gib(amount: float) -> str:
    gib = amount / GIB
    return "-" if gib == 0 else f"{gib:.1f}" if gib >= 0.05 else f"{gib:.1g}"


def gantt(simulation: Simulation, width: int = 100) -> str:
    """A line per actor over the whole run: T trains, G generates, s syncs, x is down, . waits.

    Each character shows what the actor did most in its slice of time. Needs a simulation with `keep_spans`.
    """
    slice_s = simulation.seconds / width
    spans_of: dict[str, list[Span]] = {}
    for span in simulation.spans:
        spans_of.setdefault(span.actor, []).append(span)
    actors = sorted(spans_of, key=lambda a: (a != "trainer", len(a), a))
    lines = [f"{'':9}0 s{'':{max(0, width - 16)}}{simulation.seconds:10.0f} s"]
    for actor in actors:
        spent = [Counter[str]() for _ in range(width)]
        for span in spans_of[actor]:
            first = max(0, int(span.start_s / slice_s))
            for i in range(first, min(width, int(span.end_s / slice_s) + 1)):
                overlap_s = min(span.end_s, (i + 1) * slice_s) - max(span.start_s, i * slice_s)
                spent[i][span.kind] += overlap_s  # type: ignore[assignment]
        line = "".join(SYMBOLS[max(s, key=lambda kind: s[kind])] if s else " " for s in spent)
        lines.append(f"{actor if actor == 'trainer' else 'r' + actor:9}{line}")
    return "\n".join([*lines, "T trains, G generates, s takes or gives weights, x is down, . waits"])
