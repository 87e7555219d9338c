"""The simulator: exact where arithmetic can say what must come out, within the staleness bound always."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planners.errors import UserError
from planners.plan.plan import ClusterPlan, IterationPlan
from planners.plan.simulator import Simulation, Simulator, simulate, with_simulated_step
from planners.workload.demand import Demand
from planners.workload.lengths import Lengths, LogNormal, constant
from planners.workload.model import read_model
from tasks.config.trees import read_cluster
from tests.support.places import DEPLOYMENTS
from tests.support.plan import plan_for

SEVEN = read_model(DEPLOYMENTS / "models" / "r1-distill-qwen-7b")
HEX = read_cluster(DEPLOYMENTS / "clusters" / "paper-h800-8-h20-48.yaml")
PAPER_LENGTHS = LogNormal(mean=5000, q99=16000, cap=27648).lengths()


def planned(prompts: int, group: int, staleness: int, lengths: Lengths) -> ClusterPlan:
    demand = Demand(prompts, group, staleness, constant(250), lengths, 28672)
    return plan_for(HEX, SEVEN, demand, what_if=True, sync_mode="tree")


BASE = planned(8, 4, 2, LogNormal(mean=100, q99=300, cap=2000).lengths())


def plan_of(
    *,
    prompts: int = 2,
    group: int = 2,
    staleness: int = 1,
    points: tuple[float, ...] = (10.0,),
    concurrency: int = 4,
    replicas: int = 1,
    iteration_s: float = 1.0,
    train_s: float = 5.0,
    sync_s: float = 0.0,
    transfer_s: float = 0.0,
) -> ClusterPlan:
    """A plan with costs that a person can add up: every iteration takes equally long."""
    one = BASE.replicas[0].model_copy(update={"concurrency": concurrency, "layout": "unit"})
    demand = BASE.demand.model_copy(
        update={
            "prompts_per_step": prompts,
            "group_size": group,
            "max_staleness": staleness,
            "response_points": points,
            "prompt_tokens": 0.0,
        }
    )
    costs = IterationPlan(base_s=(iteration_s,) * concurrency, per_cached_token_s=0, per_context_s=0, prefill_s=0)
    return BASE.model_copy(
        update={
            "demand": demand,
            "replicas": (one,) * replicas,
            "iterations": {"unit": costs},
            "train_s": train_s,
            "sync_s": transfer_s + sync_s,
            "sync_train_s": sync_s,
            "sync_rollout_s": sync_s,
            "transfer_s": transfer_s,
            "reward_s": 0.0,
        }
    )


def test_a_run_that_can_be_added_up() -> None:
    """Without staleness: 10 iterations of 1 s, 5 s of training and 2 s of sync, over and over."""
    outcome = simulate(plan_of(staleness=0, sync_s=2), steps=4, warm_up=1)
    assert outcome.step_s == pytest.approx(17)
    assert outcome.throughput_tokens_per_s == pytest.approx(40 / 17)
    assert outcome.staleness == {0: 8}


def test_a_batch_in_progress_stands_still_at_the_version_in_between() -> None:
    """η = 1: every second version starts a batch, 10 s + 1 s of training and two syncs of 6 s later it is trained."""
    outcome = simulate(plan_of(staleness=1, replicas=2, train_s=1, sync_s=6), steps=40, warm_up=20)
    assert outcome.step_s == pytest.approx((10 + 1) / 2 + 6)


def test_a_written_version_delays_replicas_and_not_the_other_side() -> None:
    """Mode `storage`: the trainer goes on once it has written, for 3 s, a version that replicas then load for 2 s."""
    plan = plan_of(staleness=4, train_s=12).model_copy(
        update={"sync_train_s": 3.0, "sync_rollout_s": 2.0, "transfer_s": 3.0}
    )
    assert simulate(plan, steps=20).step_s == pytest.approx(15)
    outcome = simulate(plan.model_copy(update={"train_s": 1.0}), steps=30, warm_up=10)
    assert outcome.step_s == pytest.approx(12)


def test_lengths_between_whole_tokens_keep_their_mean() -> None:
    """A mean of 1.6 tokens is planned as such, and was simulated as 1."""
    plan = plan_of(points=(1.6,), prompts=8, group=8, concurrency=64, train_s=5)
    outcome = simulate(plan, steps=60, warm_up=20)
    assert outcome.throughput_tokens_per_s * outcome.step_s == pytest.approx(1.6 * 64, rel=0.05)
    assert outcome == simulate(plan, steps=60, warm_up=20)


def test_staleness_hides_training_behind_generation() -> None:
    outcome = simulate(plan_of(staleness=2, train_s=9), steps=20)
    assert outcome.step_s == pytest.approx(10)
    assert max(outcome.staleness) <= 2


def test_slow_training_shuts_the_gate() -> None:
    outcome = simulate(plan_of(staleness=1, train_s=40), steps=10)
    assert outcome.step_s == pytest.approx(40)
    assert outcome.gate_wait_share > 0.5
    assert outcome.staleness == {0: 2, 1: 18}


def test_a_transfer_delays_the_version_and_not_the_trainer() -> None:
    hidden = simulate(plan_of(staleness=4, train_s=12, transfer_s=6), steps=20)
    assert hidden.step_s == pytest.approx(12)
    paused = simulate(plan_of(staleness=4, train_s=12, sync_s=6), steps=20)
    assert paused.step_s == pytest.approx(18)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=6),
    st.integers(0, 200),
    st.tuples(st.floats(1e-4, 0.1), st.floats(0, 1e-3), st.floats(0, 1e-3)),
)
def test_many_iterations_cost_what_each_costs(tokens: list[int], extra: int, costs: tuple[float, float, float]) -> None:
    base, per_token, per_context = costs
    iteration = IterationPlan(
        base_s=(base,) * len(tokens), per_cached_token_s=per_token, per_context_s=per_context, prefill_s=0
    )
    simulator = Simulator(BASE)
    replica = simulator.replicas[0]
    replica.costs, replica.cached = iteration, float(sum(tokens))
    replica.running = [(10**6, 0, 1) for _ in tokens]
    cached, expected = float(sum(tokens)), 0.0
    for _ in range(extra):
        expected += base + per_token * cached + per_context * cached / len(tokens)
        cached += len(tokens)
    assert replica.span_s(extra) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    replica.advance(expected + 1e-12)
    assert extra - 1 <= replica.iteration <= extra
    assert replica.clock_s <= expected + 1e-6


def check_rules(outcome: Simulation, plan: ClusterPlan, steps: int) -> None:
    assert all(0 <= age <= plan.demand.max_staleness for age in outcome.staleness)
    assert sum(outcome.staleness.values()) == steps * plan.demand.prompts_per_step


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 4),
    st.lists(st.integers(1, 1000), min_size=1, max_size=8),
    st.integers(1, 6),
    st.integers(1, 3),
    st.floats(0.1, 500),
    st.floats(0, 50),
    st.integers(0, 3),
)
def test_staleness_holds_and_nothing_is_dropped_without_failures(
    prompts: int,
    group: int,
    staleness: int,
    lengths: list[int],
    concurrency: int,
    replicas: int,
    train_s: float,
    transfer_s: float,
    seed: int,
) -> None:
    plan = plan_of(
        prompts=prompts,
        group=group,
        staleness=staleness,
        points=tuple(float(n) for n in sorted(lengths)),
        concurrency=concurrency,
        replicas=replicas,
        train_s=train_s,
        transfer_s=transfer_s,
    )
    outcome = simulate(plan, steps=12, seed=seed)
    check_rules(outcome, plan, 12)
    assert outcome.dropped == {}


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 3), st.integers(0, 5), st.floats(1, 60))
def test_failures_cost_time_and_never_freshness(staleness: int, seed: int, failures_per_h: float) -> None:
    plan = plan_of(staleness=staleness, points=(5.0, 20.0, 60.0), replicas=3)
    outcome = simulate(plan, steps=15, seed=seed, failures_per_h=failures_per_h, repair_s=30)
    check_rules(outcome, plan, 15)
    assert set(outcome.dropped) <= {"lease_lost", "stale"}


def test_a_seed_decides_everything() -> None:
    first, second = (simulate(BASE, steps=10, seed=7, failures_per_h=5, keep_spans=True) for _ in range(2))
    assert first == second
    assert simulate(BASE, steps=10, seed=8) != simulate(BASE, steps=10, seed=9)


def test_spans_of_an_actor_do_not_overlap() -> None:
    outcome = simulate(plan_of(staleness=1, sync_s=1), steps=6, keep_spans=True)
    assert {span.kind for span in outcome.spans} >= {"train", "generate", "sync"}
    for actor in {span.actor for span in outcome.spans}:
        mine = sorted((s for s in outcome.spans if s.actor == actor), key=lambda s: s.start_s)
        for a, b in pairwise(mine):
            assert a.end_s <= b.start_s + 1e-6


@pytest.mark.parametrize("staleness", [0, 1, 2, 4, 8])
def test_agrees_with_the_planner_in_steady_state(staleness: int) -> None:
    """With 32 prompts a step; benchmarks/README.md has the table, where fewer agree less."""
    plan = planned(32, 16, staleness, PAPER_LENGTHS)
    outcome = simulate(plan, steps=60, warm_up=20)
    assert outcome.throughput_tokens_per_s == pytest.approx(plan.throughput_tokens_per_s, rel=0.05)
    assert outcome.dropped == {}


def test_a_plan_can_carry_the_step_time_of_its_simulation() -> None:
    plan = with_simulated_step(plan_of(staleness=0, sync_s=2))
    assert plan.simulated_step_s == pytest.approx(17)


def test_a_warm_up_must_leave_steps() -> None:
    with pytest.raises(UserError, match="leave none"):
        simulate(BASE, steps=3, warm_up=3)
    assert replace(simulate(BASE, steps=1), spans=()).steps == 1


def test_more_answers_than_can_be_simulated_in_time_are_refused() -> None:
    with pytest.raises(UserError, match=r"Simulate at most 625,000 steps"):
        simulate(BASE, steps=10**6)
    large = BASE.demand.model_copy(update={"prompts_per_step": 10**8})
    with pytest.raises(UserError, match=r"A step of this plan cannot be simulated"):
        simulate(BASE.model_copy(update={"demand": large}), steps=1)


def test_progress_is_told_step_by_step() -> None:
    told: list[int] = []
    simulate(BASE, steps=5, tell=told.append)
    assert told == [1, 2, 3, 4, 5]


def test_a_negative_staleness_never_reaches_the_simulator() -> None:
    with pytest.raises(UserError):
        planned(1, 1, -1, constant(10))
