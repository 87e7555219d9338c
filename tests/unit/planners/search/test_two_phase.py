"""Algorithm 1 of AReaL-Hex: its parts against brute force, its outcome against the joint planner's bound."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planners.errors import UserError
from planners.hardware.topology import ClusterFile, parse_cluster
from planners.search.columns import Problem, RolloutColumn, rollout_columns
from planners.search.partition import Repartition, Variant, device_graph
from planners.search.two_phase import LENGTH_CLASSES, class_rate, makespan_s, solve_rollout, windowed_rollout_s
from planners.workload.demand import Demand
from planners.workload.lengths import LogNormal, constant
from planners.workload.model import read_model
from tasks.config.trees import read_cluster
from tests.support.places import DEPLOYMENTS
from tests.support.plan import bound_of, plan_for

SEVEN = read_model(DEPLOYMENTS / "models" / "r1-distill-qwen-7b")
PAPER = Demand(32, 16, 8, constant(250), LogNormal(mean=5000, q99=16000, cap=27648).lengths(), 28672, minibatches=4)
HEX = read_cluster(DEPLOYMENTS / "clusters" / "paper-h800-8-h20-48.yaml")
variants = st.sampled_from(["printed", "corrected"])


def two_machines(h800: int, h20: int) -> ClusterFile:
    machines = [
        {"name": "a", "device_type": "h800", "devices": h800},
        {"name": "b", "device_type": "h20", "devices": h20},
    ]
    links = [{"between": ["h800", "h20"], "gb_per_s": 1.5}]
    return ClusterFile.model_validate({"name": "two", "machines": machines, "links": links})


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), variants, st.floats(0, 0.9), st.floats(0.05, 0.6))
def test_the_partition_maximises_eq_3(h800: int, h20: int, variant: Variant, low: float, width: float) -> None:
    repartition = Repartition(device_graph(parse_cluster(two_machines(h800, h20))), variant)
    inside = [
        taken
        for taken in itertools.product(range(h800 + 1), range(h20 + 1))
        if 0 < sum(taken) < h800 + h20 and low <= repartition.share(taken) <= low + width
    ]
    chosen = repartition.maximise(low, low + width)
    if inside:
        assert chosen in inside
        assert repartition.objective(chosen) == pytest.approx(max(repartition.objective(t) for t in inside))


def test_eq_3_as_printed_trains_on_h20_and_corrected_on_h800() -> None:
    """The finding of the reference page: with SXM figures the best printed partition is H20 only for γ = 0.2-0.5."""
    types = [n.type_name for n in HEX.nodes]

    def trains(variant: Variant, low: float, high: float) -> dict[str, int]:
        chosen = Repartition(device_graph(HEX), variant).maximise(low, high)
        return {t: sum(n for n, u in zip(chosen, types, strict=True) if u == t) for t in set(types)}

    assert trains("printed", 0.2, 0.5)["h800"] == 0
    assert trains("corrected", 0.49, 0.55) == {"h800": 8, "h20": 0}


def problem(h800: int, h20: int, answers: int = 512) -> Problem:
    demand = Demand(answers // 16, 16, 8, constant(250), PAPER.response, 28672, minibatches=1)
    return Problem(parse_cluster(two_machines(h800, h20)), SEVEN, demand, what_if=True)


def two_column_theta_s(side: Problem, columns: list[RolloutColumn], counts: tuple[int, int]) -> float:
    """Θ of two kinds of replicas: the first takes the classes it is comparatively better at, in part the last one."""
    classes = [(p * side.demand.answers_per_step, n) for p, n in side.demand.response.classes(LENGTH_CLASSES)]
    seconds = [[n / class_rate(side, c, n) for _, n in classes] for c in columns]
    order = sorted(range(len(classes)), key=lambda j: seconds[0][j] / seconds[1][j])
    best = math.inf
    for cut in range(4001):
        left = cut / 4000 * sum(b for b, _ in classes)
        busy = [0.0, 0.0]
        for j in order:
            mine = min(left, classes[j][0])
            left -= mine
            busy[0] += mine * seconds[0][j]
            busy[1] += (classes[j][0] - mine) * seconds[1][j]
        if all(work == 0 or count > 0 for work, count in zip(busy, counts, strict=True)):
            best = min(best, max(work / count for work, count in zip(busy, counts, strict=True) if count))
    return best


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 4), st.integers(1, 4))
def test_the_rollout_program_matches_a_hand_made_assignment(h800: int, h20: int) -> None:
    side = problem(h800, h20)
    columns = [c for c in rollout_columns(side) if c.concurrency == 64 and c.tensor == 1]
    columns.sort(key=lambda c: c.device_type, reverse=True)
    replicas, theta_s = solve_rollout(side, columns, 10)
    assert {c.device_type: n for c, n in replicas.items()} == {"h800": h800, "h20": h20}
    assert theta_s == pytest.approx(two_column_theta_s(side, columns, (h800, h20)), rel=2e-3)


def test_a_longer_window_hides_the_start_and_the_tail() -> None:
    side = problem(8, 8)
    column = next(c for c in rollout_columns(side) if c.device_type == "h800" and c.concurrency == 64)
    steady_s = side.demand.tokens_per_step / (8 * column.tokens_per_s)
    short = makespan_s(side, {column: 8}, 1)
    seconds, window = windowed_rollout_s(side, {column: 8})
    assert short > seconds > steady_s * 0.98
    assert window >= side.demand.max_staleness + 1
    assert seconds == pytest.approx(steady_s, rel=0.1)


@pytest.mark.parametrize("variant", ["printed", "corrected"])
def test_algorithm_1_never_beats_the_joint_bound(variant: Variant) -> None:
    joint = plan_for(HEX, SEVEN, PAPER, what_if=True, sync_mode="blocking")
    published = plan_for(HEX, SEVEN, PAPER, mode="two-phase", partition=variant, what_if=True, sync_mode="blocking")
    assert published.throughput_tokens_per_s <= bound_of(joint) * (1 + 1e-6)
    assert sum(m.training + m.rollout for m in published.machines) <= HEX.devices


def test_plans_bound_by_training_can_be_excluded() -> None:
    """C_I has the makespan's tail and the sync, so the plan's own steady generation time may be somewhat shorter.

    Groups are small enough for an H800 to train one at once.
    """
    demand = replace(PAPER, prompts_per_step=16, group_size=8)
    cluster = read_cluster(DEPLOYMENTS / "clusters" / "paper-h800-8-h20-16.yaml")
    plan = plan_for(cluster, SEVEN, demand, mode="two-phase", exclude_training_bound=True)
    assert plan.train_s <= plan.rollout_s * 1.2 + plan.sync_s + plan.reward_s
    free = plan_for(cluster, SEVEN, demand, mode="two-phase")
    assert free.step_s <= plan.step_s


def test_two_phase_takes_no_budget() -> None:
    with pytest.raises(UserError, match="given cluster"):
        plan_for(HEX, SEVEN, PAPER, mode="two-phase", budget_usd_per_h=10)
