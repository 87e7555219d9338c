"""Mode `joint`: one mixed-integer program decides who trains, who generates, and in which layout.

    σ  training columns     T_σ seconds a step; uses a_σ,t,k places; trained by the type set g(σ)
    ψ  rollout columns      tp_ψ devices of type t, concurrency c_ψ, h_ψ tokens/s, latency ℓ_ψ of the longest answer
    z_σ ∈ {0,1}  y_ψ ∈ ℕ    chosen layout, number of replicas
    m_t,d ∈ ℕ               machines of type t with d devices that generate and do not train; m_t = Σ_d m_t,d
    l_t, v_t, s_t ∈ {0,1}   whether the trainer's machine generates too, m_t ≥ 1, m_t ≥ 2
    T, τ, H                 step time, generation time, generation rate
    S, P, X                 seconds that replicas and trainer stand still for a weight update, transfer time

    minimise T                                                   (or price, see below)
    (1)  Σ_σ z_σ = 1
    (2)  Σ_σ a_σ,t,k z_σ + Σ_{ψ of t, tp ≥ k} (tp_ψ/k) y_ψ ≤ Σ_machines ⌊d/k⌋          ∀ t, k: they fit side by side
         Σ_{ψ of t, cores ≥ k} y_ψ ≤ machines of t with k cores left by training     ∀ CPU types t, k: one process each
    (3)  H = Σ h_ψ y_ψ,   τ ≥ W/H                                convex: tangents τ ≥ (W/H₀)(2 − H/H₀) until tight
    (4)  T ≥ Σ T_σ z_σ + P
    (5)  T ≥ τ + S,   T ≥ B·R/scorers                            R seconds until a group is scored, beside generation
    (6)  Σ leased_ψ y_ψ ≤ max(1, η)·B·G                          more in flight would starve at the gate
    (7)  Λ ≥ ℓ_ψ for used ψ, and a batch must be there in time, η + 1 steps after its version was trained:
         (η + 1)(T − S) ≥ Σ T_σ z_σ + X + R + max(Λ, τ + ρ·Λ, B·R/scorers)
                                                                 its longest answer, its work and what drains, ρ of Λ,
                                                                 or the scoring of all its groups; the last one's then
    (8)  Σ_d d·m_t,d ≥ Σ_{ψ of t} tp_ψ y_ψ − min(Σ spare_σ,t z_σ, l_t·max d),   m_t,d ≤ machines left by training
    (9)  S, P, X as in `planners.costs.sync`: P = S but in mode `storage`, where P = X = Σ publish_σ z_σ and S ≥ load_t
         for used t; in the other modes per type set g, switched on by Σ_{σ: g(σ)=g} z_σ
   (10)  T ≥ X

A CPU type with one machine has at most one process, so there Λ ≥ Σ ℓ_ψ y_ψ and, where it is the only type,
τ = Σ (W/h_ψ) y_ψ; free cores of it that do not train all generate.

Variants: Σ_t price_t·n_t ≤ budget with n_t devices used; or T ≤ target, minimise Σ_t price_t·n_t. Columns carry the
best link that any placement gives, so the solver's bound holds for every placement of the listed layouts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from planners.costs.sync import Sync, ceiling_of
from planners.errors import UserError
from planners.search.columns import Problem, RolloutColumn, TrainingColumn
from planners.search.program import Program, Wish, highest_rate, spread
from planners.search.solver import Infeasible, minimise

TIGHT = 1e-5
SLACK = 1e-5
ROUNDS = 12
PRICE_GAPS = 5  # the solver's gap in price beside that in time
WORTH = 10.0  # what a per cent of headroom may cost, in per cent of the price


@dataclass(frozen=True)
class Choice:
    """A solved program: chosen columns, and bounds proven for all others.

    `objective` and `bound` are seconds per step, or USD per hour where a target step time is given.
    """

    training: TrainingColumn
    replicas: Mapping[RolloutColumn, int]
    objective: float
    bound: float
    sync: Sync


def solve_joint(
    problem: Problem,
    training: list[TrainingColumn],
    rollout: list[RolloutColumn],
    wish: Wish | None = None,
    *,
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
) -> Choice:
    """Choose columns: the fastest plan, and among equally fast ones the cheapest that has headroom worth its price.

    Where devices cost nothing that is the one that generates fastest: what stands there anyway may as well help.

    Raises:
        Infeasible: no plan satisfies the wish.
        UserError: the solver found none in time.
    """
    wish = wish or Wish()
    if wish.target_step_s is not None:
        return _solve(problem, training, rollout, wish, 0.0, time_limit_s, gap)
    fastest = solve_fastest(problem, training, rollout, wish, time_limit_s=time_limit_s, gap=gap)
    is_free = problem.topology.usd_per_h == 0
    kept = training if is_free else [fastest.training]
    return _cheapest_as_fast(problem, kept, rollout, wish, fastest, time_limit_s, gap)


def solve_fastest(
    problem: Problem,
    training: list[TrainingColumn],
    rollout: list[RolloutColumn],
    wish: Wish,
    *,
    time_limit_s: float,
    gap: float,
) -> Choice:
    """The fastest plan, at whatever price and with as many devices as the solver came upon.

    The latency condition (7) costs a binary per column, so a first solve without it gives a floor under T; only the
    columns that the floor does not allow get one.

    Raises:
        Infeasible: no plan satisfies the wish.
        UserError: the solver found none in time.
    """
    fastest = _solve(problem, training, rollout, wish, None, time_limit_s, gap)
    if _true_step_s(problem, fastest) <= fastest.objective * (1 + SLACK):
        return fastest
    allowed_s = _allowed_latency_s(problem, _shortest_body_s(problem, training, rollout, fastest.bound))
    exact = _solve(problem, training, rollout, wish, allowed_s, time_limit_s, gap)
    return replace(exact, bound=max(exact.bound, fastest.bound))


def _cheapest_as_fast(
    problem: Problem,
    training: list[TrainingColumn],
    rollout: list[RolloutColumn],
    wish: Wish,
    fastest: Choice,
    time_limit_s: float,
    gap: float,
) -> Choice:
    """The same step time at the lowest price, headroom considered, with one of these training columns.

    Lengths vary from step to step, so of two sides that are equally fast on average each waits for the other: a second
    that a step may have to wait counts as the share of the fastest plan's price that is paid in it.
    """
    slack, is_free = min(SLACK, gap), problem.topology.usd_per_h == 0
    true_s = max(fastest.objective, _true_step_s(problem, fastest))  # the solver's tolerances lie in between
    second = 0.0 if is_free else WORTH * price_of(problem, fastest) / true_s
    as_fast = Wish(wish.budget_usd_per_h, true_s * (1 + slack), is_free, second)
    allowed_s = _allowed_latency_s(problem, _shortest_body_s(problem, training, rollout, fastest.bound))
    allowed_s /= 1 if is_free else 1 + spread(problem.demand)[1]
    try:
        cheap = _solve(problem, training, rollout, as_fast, allowed_s, time_limit_s, PRICE_GAPS * gap)
    except Infeasible:  # by less than the solver's own tolerance
        return fastest
    if _true_step_s(problem, cheap) > true_s * (1 + 2 * slack):  # tangents ran out
        return fastest
    return replace(fastest, training=cheap.training, replicas=cheap.replicas, sync=cheap.sync)


def price_of(problem: Problem, choice: Choice) -> float:
    """USD per hour of the devices used."""
    types = problem.topology.types
    trains = sum(count * types[t].usd_per_h for (t, k), count in choice.training.uses.items() if k == 1)
    return trains + sum(n * c.devices * types[c.device_type].usd_per_h for c, n in choice.replicas.items())


def _shortest_body_s(
    problem: Problem, training: list[TrainingColumn], rollout: list[RolloutColumn], bound_s: float
) -> float:
    """T − S of no plan is below this, given that no T is below the bound."""
    demand = problem.demand
    generates_s = demand.tokens_per_step / highest_rate(problem, rollout)
    trains_s = min(c.step_s for c in training) if problem.sync_mode != "storage" else 0.0  # there it does not wait S
    pause_s = ceiling_of(problem.sync_mode, problem.topology, problem.model.weight_bytes, problem.profiles).rollout_s
    return max(generates_s, trains_s, bound_s - pause_s)


def _allowed_latency_s(problem: Problem, body_s: float) -> float:
    """Latencies that satisfy (7) in every plan with T − S of at least `body_s`, by (4) and (5)."""
    worst = ceiling_of(problem.sync_mode, problem.topology, problem.model.weight_bytes, problem.profiles)
    demand, late_s = problem.demand, worst.transfer_s - (worst.train_s - worst.rollout_s)
    whole_s = demand.max_staleness * body_s - late_s - demand.reward_s
    drained_s = (demand.max_staleness - 1) * body_s - late_s - demand.reward_s
    return min(whole_s, drained_s / demand.drain_share) if demand.drain_share else whole_s


def _true_step_s(problem: Problem, choice: Choice) -> float:
    """T of a choice from its columns, free of the program's tangents and levels."""
    latency_s = max(c.latency_s for c in choice.replicas)
    return step_seconds(problem, choice.training.step_s, total_rate(choice.replicas), latency_s, choice.sync)


def step_seconds(problem: Problem, train_s: float, rate: float, latency_s: float, sync: Sync) -> float:
    """T from its parts, (3) to (5), (7) and (10)."""
    demand = problem.demand
    generate_s = demand.tokens_per_step / rate
    body_s = max(train_s + sync.train_s, generate_s + sync.rollout_s, demand.scoring_s)
    batch_s = max(latency_s, generate_s + demand.drain_share * latency_s, demand.scoring_s)
    in_time_s = (train_s + sync.transfer_s + demand.reward_s + batch_s) / (demand.max_staleness + 1)
    return max(body_s, in_time_s + sync.rollout_s, sync.transfer_s)


def total_rate(replicas: Mapping[RolloutColumn, int]) -> float:
    """H."""
    return sum(c.tokens_per_s * n for c, n in replicas.items())


def _solve(
    problem: Problem,
    training: list[TrainingColumn],
    rollout: list[RolloutColumn],
    wish: Wish,
    allowed_s: float | None,
    time_limit_s: float,
    gap: float,
) -> Choice:
    built = Program(problem, training, rollout, wish, allowed_s)
    bound = -math.inf
    for _ in range(ROUNDS):
        solution = minimise(built.program, time_limit_s, gap)
        bound = max(bound, solution.bound)
        rate = built.rate.varValue
        if built.generation.varValue >= problem.demand.tokens_per_step / rate * (1 - min(TIGHT, gap)):
            break
        built.add_tangent(rate)
    z = max(range(len(training)), key=lambda i: built.z[i].varValue)
    replicas = {c: round(y.varValue) for c, y in zip(rollout, built.y, strict=True) if round(y.varValue) > 0}
    if not replicas:
        raise UserError("The solver returned a plan without replicas.")
    sync = Sync(built.train_pause.varValue, built.pause.varValue, built.transfer.varValue)
    return Choice(training[z], replicas, solution.objective, bound, sync)
