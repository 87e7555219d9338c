"""The planner's front door: a problem and a goal in, a plan out."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from planners.errors import UserError
from planners.hardware.topology import Topology
from planners.plan.plan import ClusterPlan, build_plan
from planners.search.columns import (
    Problem,
    RolloutColumn,
    TrainingColumn,
    rollout_columns,
    training_columns,
)
from planners.search.joint import price_of, solve_joint
from planners.search.placement import Placed, place, with_real_step
from planners.search.program import TIDY_USD_PER_H, Wish
from planners.search.solver import Infeasible

Mode = Literal["joint", "two-phase", "homogeneous", "uniform", "exhaustive"]
RANKING_ROUNDS = 4
MET = 1e-6  # by which a target may be missed, or a price exceeded: the solver's tolerance
SOLVER_GAP, FINE_SOLVER_GAP = 1e-3, 1e-7
FEW_DEVICES = 16
"""What runs today on up to so many devices is solved to the finer gap, which costs nothing there."""


@dataclass(frozen=True)
class Goal:
    """How to plan, and what for.

    Attributes:
        mode: `joint`, `two-phase` (Algorithm 1 of AReaL-Hex), or a baseline: `homogeneous` uses the best single device
            type, `uniform` trains on half of the devices, `exhaustive` tries everything on up to 8 devices.
        budget_usd_per_h: rent at most this much.
        target_tokens_per_s: rent as cheaply as possible for this throughput.
        partition: Eq 3 as printed, or corrected (mode `two-phase`).
        exclude_training_bound: refuse plans with C_T > C_I, as the paper does (mode `two-phase`).
        time_limit_s: of each solve.
    """

    mode: Mode = "joint"
    budget_usd_per_h: float | None = None
    target_tokens_per_s: float | None = None
    partition: Literal["printed", "corrected"] = "corrected"
    exclude_training_bound: bool = False
    time_limit_s: float = 60.0


def make_plan(problem: Problem, goal: Goal = Goal()) -> ClusterPlan:
    """Choose who generates and who trains.

    Raises:
        UserError: bad input, nothing fits, or the goal cannot be met; the message names the best that can.
    """
    check_goal(problem.topology, goal)
    began = time.perf_counter()
    if goal.mode == "two-phase":
        from planners.search.two_phase import plan_two_phase

        placed = plan_two_phase(problem, goal.partition, goal.exclude_training_bound, goal.time_limit_s)
        outcome = _unproven(placed)
    else:
        target = goal.target_tokens_per_s
        target_s = problem.demand.tokens_per_step / target if target else None
        outcome = _solve(problem, goal.mode, Wish(goal.budget_usd_per_h, target_s), goal.time_limit_s)
    return build_plan(
        problem,
        outcome.placed,
        mode=goal.mode,
        bound_step_s=outcome.bound_s,
        solver_step_s=outcome.solver_s,
        price_bound_usd_per_h=outcome.price_bound_usd_per_h,
        solve_s=time.perf_counter() - began,
    )


@dataclass(frozen=True)
class _Outcome:
    """A placement, the step time that none can beat, the solver's own, and with a target the price that none can."""

    placed: Placed
    bound_s: float
    solver_s: float
    price_bound_usd_per_h: float | None = None


def _solve(problem: Problem, mode: Mode, wish: Wish, time_limit_s: float) -> _Outcome:
    if mode == "exhaustive":
        from planners.search.exhaustive import plan_exhaustively

        return _unproven(plan_exhaustively(problem))
    if mode == "homogeneous":
        return _homogeneous(problem, wish, time_limit_s)
    training, rollout = training_columns(problem), rollout_columns(problem)
    if mode == "uniform":
        training = _half(problem, training)
    try:
        return _solve_and_place(problem, training, rollout, wish, time_limit_s)
    except Infeasible:
        raise UserError(_cannot(problem, training, rollout, wish, time_limit_s)) from None


def _unproven(placed: Placed) -> _Outcome:
    return _Outcome(placed, placed.step_s, placed.step_s)


def rounded_down(value: float) -> str:
    """A rate to four digits, or in whole tokens, never above its true value: as a target it can be reached."""
    digits = max(0, 3 - math.floor(math.log10(value)))
    return f"{math.floor(value * 10**digits) / 10**digits:.{digits}f}"


def check_goal(topology: Topology, goal: Goal) -> None:
    """Refuse a budget in USD/h or a target in tokens/s that no plan can be asked for; takes no time.

    Raises:
        UserError: it is not positive and finite, both are given, or mode or cluster has no use for it.
    """
    mode, budget, target = goal.mode, goal.budget_usd_per_h, goal.target_tokens_per_s
    if budget is not None and not 0 < budget < math.inf:  # not a number is neither
        raise UserError(f"The budget is {budget:g} USD/h: give a positive, finite one.")
    if target is not None and not 0 < target < math.inf:
        raise UserError(f"The target is {target:g} tokens/s: give a positive, finite one.")
    if budget is not None and target is not None:
        raise UserError("Give a budget or a target, not both.")
    if budget is not None and topology.usd_per_h == 0:
        raise UserError(f"Nothing on cluster {topology.name} has a price, so a budget says nothing: set usd_per_h.")
    if mode in ("two-phase", "exhaustive") and (budget is not None or target is not None):
        raise UserError(f"Mode {mode} plans a given cluster; use mode joint with a budget or a target.")


def _homogeneous(problem: Problem, wish: Wish, time_limit_s: float) -> _Outcome:
    """The best single device type: the fastest, or with a target the cheapest that reaches it."""
    training, rollout = training_columns(problem), rollout_columns(problem)
    outcomes = []
    for kind in problem.topology.types:
        train = [c for c in training if c.types == (kind,)]
        generate = [c for c in rollout if c.device_type == kind]
        if train and generate:
            try:
                outcomes.append(_solve_and_place(problem, train, generate, wish, time_limit_s))
            except Infeasible:
                continue
    if not outcomes:
        raise UserError(
            f"No single device type of cluster {problem.topology.name} can train and generate alone"
            f"{_within(problem, wish)}: ask for less, add devices, or use mode joint."
        )
    quality = _quality(wish)
    return min(outcomes, key=lambda outcome: quality(outcome.placed))


def _within(problem: Problem, wish: Wish) -> str:
    """The limit that a plan has to keep to, in words."""
    if wish.budget_usd_per_h is not None:
        return f" for {wish.budget_usd_per_h:g} USD/h"
    if wish.target_step_s is not None:
        return f" at {problem.demand.tokens_per_step / wish.target_step_s:.0f} tokens/s"
    return ""


def _half(problem: Problem, training: list[TrainingColumn]) -> list[TrainingColumn]:
    """Those that take half of the devices, or as near to half as a layout comes."""
    half = problem.topology.devices / 2
    nearest = min(abs(c.layout.devices - half) for c in training)
    return [c for c in training if abs(c.layout.devices - half) == nearest]


def _solve_and_place(
    problem: Problem,
    training: list[TrainingColumn],
    rollout: list[RolloutColumn],
    wish: Wish,
    time_limit_s: float,
) -> _Outcome:
    """Solve, place, and solve again at the speed that the placement reached while that changes the choice.

    Raises:
        Infeasible: no plan satisfies the wish.
    """
    few = problem.topology.devices <= FEW_DEVICES and not problem.what_if
    gap = FINE_SOLVER_GAP if few else SOLVER_GAP
    first = solve_joint(problem, training, rollout, wish, time_limit_s=time_limit_s, gap=gap)
    choice, best = first, place(problem, first.training, first.replicas)
    placed = best
    for _ in range(RANKING_ROUNDS):
        if placed.train_s <= choice.training.step_s * (1 + 1e-9):
            break
        slower = with_real_step(choice.training, placed)
        training = [slower if c.layout == slower.layout and c.sizes == slower.sizes else c for c in training]
        try:
            choice = solve_joint(problem, training, rollout, wish, time_limit_s=time_limit_s, gap=gap)
        except Infeasible:
            break
        placed = place(problem, choice.training, choice.replicas)
        best = min(best, placed, key=_quality(wish))
    if wish.target_step_s is None:
        return _Outcome(best, min(first.bound, best.step_s), min(first.objective, best.step_s))
    best = _fastest_as_cheap(problem, training, rollout, wish, best, time_limit_s, gap)
    return _Outcome(best, best.step_s, best.step_s, max(0.0, first.bound - TIDY_USD_PER_H * problem.topology.devices))


def _fastest_as_cheap(
    problem: Problem,
    training: list[TrainingColumn],
    rollout: list[RolloutColumn],
    wish: Wish,
    cheapest: Placed,
    time_limit_s: float,
    gap: float,
) -> Placed:
    """The fastest placement at the price of the cheapest one that meets the target; at any, where that missed it.

    Raises:
        Infeasible: the target is missed on the real links.
    """
    meets = cheapest.step_s <= (wish.target_step_s or 0.0) * (1 + MET)
    price = _price(cheapest)
    budget = Wish(budget_usd_per_h=price * (1 + MET) if meets else None)
    choice = solve_joint(problem, training, rollout, budget, time_limit_s=time_limit_s, gap=gap)
    best = min(cheapest, place(problem, choice.training, choice.replicas), key=_quality(wish))
    if best.step_s > (wish.target_step_s or 0.0) * (1 + MET):
        raise Infeasible
    return best


def _price(placed: Placed) -> float:
    """USD per hour of the devices used."""
    trains = sum(n.device.usd_per_h * len(devices) for stage in placed.stages for n, devices in stage)
    return trains + sum(n.device.usd_per_h * len(devices) for _, n, devices in placed.replicas)


def _quality(wish: Wish) -> Callable[[Placed], tuple[float, ...]]:
    """Smaller is better: step time, or price and then step time among placements that meet the target."""

    def quality(placed: Placed) -> tuple[float, ...]:
        if wish.target_step_s is None:
            return (placed.step_s,)
        if placed.step_s > wish.target_step_s * (1 + MET):
            return (math.inf, placed.step_s)
        return (round(_price(placed), 6), placed.step_s)

    return quality


def _cannot(
    problem: Problem,
    training: list[TrainingColumn],
    rollout: list[RolloutColumn],
    wish: Wish,
    time_limit_s: float,
) -> str:
    """What is the nearest to the wish that can be had."""
    tokens = problem.demand.tokens_per_step
    try:
        if wish.budget_usd_per_h is not None:
            slowest = Wish(target_step_s=_longest_step_s(problem, training, rollout))
            cheapest = solve_joint(problem, training, rollout, slowest, time_limit_s=time_limit_s)
            return (
                f"A budget of {wish.budget_usd_per_h:g} USD/h buys no plan: the cheapest is "
                f"{_words(cheapest.training, cheapest.replicas)} for "
                f"{math.ceil(100 * round(price_of(problem, cheapest), 6)) / 100:.2f} USD/h."
            )
        fastest = _solve_and_place(problem, training, rollout, Wish(), time_limit_s).placed
    except Infeasible:
        return (
            f"Cluster {problem.topology.name} has too few devices: model {problem.model.name} can be trained on it, "
            "or generate on it, but not both at once. Add devices."
        )
    return (
        f"{tokens / (wish.target_step_s or 1):g} tokens/s cannot be reached on cluster {problem.topology.name}: the "
        f"best is {rounded_down(tokens / fastest.step_s)} tokens/s with "
        f"{_words(fastest.training, Counter(column for column, _, _ in fastest.replicas))}."
    )


def _longest_step_s(problem: Problem, training: list[TrainingColumn], rollout: list[RolloutColumn]) -> float:
    """A step that any plan keeps to."""
    slowest = min(c.tokens_per_s for c in rollout)
    longest_s = max(c.step_s for c in training) + problem.demand.tokens_per_step / slowest
    longest_s += problem.demand.reward_s + problem.demand.scoring_s
    return 10 * (longest_s + max(c.latency_s for c in rollout) + problem.model.weight_bytes / 1e8)


def _words(training: TrainingColumn, replicas: Mapping[RolloutColumn, int]) -> str:
    counts = ", ".join(f"{count} × {column.name}" for column, count in replicas.items())
    return f"training on {training.layout.name} with replicas {counts}"
