"""The joint planner: as good as exhaustive search, never hurt by more of anything, always feasible."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planners.costs.sync import SyncMode
from planners.errors import UserError
from planners.hardware.catalogue import CATALOGUE
from planners.hardware.topology import ClusterFile, Topology, parse_cluster
from planners.plan.plan import ClusterPlan
from planners.plan.simulator import simulate
from planners.search.columns import TrainingWish
from planners.search.make import Mode
from planners.workload.demand import Demand
from planners.workload.lengths import Lengths, LogNormal, constant
from planners.workload.model import Model, read_model
from tasks.config.trees import read_cluster
from tests.support.places import DEPLOYMENTS
from tests.support.plan import bound_of, cluster_of, gap_of, plan_for

SMALL = read_model(DEPLOYMENTS / "models" / "r1-distill-qwen-1.5b")
SEVEN = read_model(DEPLOYMENTS / "models" / "r1-distill-qwen-7b")
PAPER = Demand(32, 16, 8, constant(250), LogNormal(mean=5000, q99=16000, cap=27648).lengths(), 28672, minibatches=4)
HEX = read_cluster(DEPLOYMENTS / "clusters" / "paper-h800-8-h20-48.yaml")
SOLVER_GAP = 2e-3
MODES: tuple[Mode, ...] = ("joint", "exhaustive")
SHORT = [  # each thinned to 100 of its points, which every cost integrates over
    Lengths(LogNormal(mean=mean, q99=ratio * mean, cap=4000).lengths().points[10::20])
    for mean in (50.0, 400.0)
    for ratio in (1.5, 3.0)
]


def examples(count: int) -> settings:
    """So many random cases, each as slow as it needs to be."""
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def clusters(draw: st.DrawFn, most: int = 8) -> Topology:
    """One to three machines of one or two device types."""
    left, groups = most, []
    kinds = draw(st.lists(st.sampled_from(["h800", "h20", "l40s", "a100-80"]), min_size=1, max_size=2, unique=True))
    for i in range(draw(st.integers(1, 3))):
        if left < 1:
            break
        devices = draw(st.integers(1, min(4, left)))
        left -= devices
        groups.append({"name": f"m{i}", "device_type": draw(st.sampled_from(kinds)), "devices": devices})
    speed = st.sampled_from([0.5, 1.5, 5, 25])
    pairs = [(a, b) for i, a in enumerate(kinds) for b in kinds[i:]]
    present = {g["device_type"] for g in groups}
    links = [{"between": pair, "gb_per_s": draw(speed)} for pair in pairs if {*pair} <= present]
    return parse_cluster(ClusterFile.model_validate({"name": "random", "machines": groups, "links": links}))


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    """Small steps of short answers, so that the gate and the latency bind now and then."""
    lengths = draw(st.sampled_from(SHORT))
    staleness, reward_s = draw(st.sampled_from([0, 1, 3])), draw(st.sampled_from([0.0, 0.5]))
    budget = draw(st.sampled_from([256, 16384]))  # a group or two for each rank, or all for one
    scorers = draw(st.sampled_from([None, 1, 3]))
    sizes = (2, 2, staleness, constant(50), lengths, 4096)
    return Demand(*sizes, micro_batch_tokens=budget, reward_s=reward_s, scorers=scorers)


modes = st.sampled_from(["storage", "blocking", "tree", "overlapped"])


@examples(200)
@given(clusters(6), demands(), modes, st.booleans())
def test_agrees_with_exhaustive_search(topology: Topology, demand: Demand, sync: SyncMode, what_if: bool) -> None:
    check_agreement(topology, demand, sync, what_if)


@examples(25)
@given(clusters(8), demands(), modes, st.booleans())
def test_agrees_with_exhaustive_search_of_eight(
    topology: Topology, demand: Demand, sync: SyncMode, what_if: bool
) -> None:
    check_agreement(topology, demand, sync, what_if)


def check_agreement(topology: Topology, demand: Demand, sync: SyncMode, what_if: bool) -> None:
    sync = sync if what_if else "storage"
    plans: dict[Mode, ClusterPlan | None] = {}
    for mode in MODES:
        try:
            plans[mode] = plan_for(topology, SMALL, demand, mode=mode, sync_mode=sync, what_if=what_if)
        except UserError:
            plans[mode] = None
    joint, best = plans["joint"], plans["exhaustive"]
    assert (joint is None) == (best is None)
    if joint and best:
        check_feasible(best, topology, demand)
        check_feasible(joint, topology, demand)
        assert joint.step_s == pytest.approx(best.step_s, rel=SOLVER_GAP)
        assert bound_of(joint) >= best.throughput_tokens_per_s * (1 - 1e-6)


@examples(40)
@given(clusters(), demands(), modes, st.data())
def test_the_bound_holds_on_uneven_links(
    topology: Topology, demand: Demand, sync: SyncMode, data: st.DataObject
) -> None:
    """Columns take the best link of any placement, so the bound may be loose and never wrong."""
    pairs = [frozenset((a.name, b.name)) for i, a in enumerate(topology.nodes) for b in topology.nodes[i + 1 :]]
    links = {pair: data.draw(st.sampled_from([1e8, 1e9, 5e10])) for pair in pairs if data.draw(st.booleans())}
    uneven = replace(topology, node_links=links)
    try:
        best = plan_for(uneven, SMALL, demand, mode="exhaustive", sync_mode=sync, what_if=True)
    except UserError:
        return
    plan = joint(uneven, SMALL, demand, sync)
    check_feasible(plan, uneven, demand)
    assert bound_of(plan) >= best.throughput_tokens_per_s * (1 - 1e-6)
    assert plan.throughput_tokens_per_s <= best.throughput_tokens_per_s * (1 + 1e-6)
    assert plan.throughput_tokens_per_s >= best.throughput_tokens_per_s * (1 - gap_of(plan) - 1e-6)


def joint(topology: Topology, model: Model = SEVEN, demand: Demand = PAPER, sync: SyncMode = "tree") -> ClusterPlan:
    return plan_for(topology, model, demand, what_if=True, sync_mode=sync)


def check_feasible(plan: ClusterPlan, topology: Topology, demand: Demand) -> None:
    """Memory, counts, tensor parallelism inside a machine, gate, latency."""
    held: dict[str, list[int]] = {node.name: [] for node in topology.nodes}
    for stage in plan.trainer.stages:
        assert stage.devices == stage.data * stage.tensor
        for share in stage.machines:
            assert len(share.devices) % stage.tensor == 0
            held[share.machine] += share.devices
    for replica in plan.replicas:
        held[replica.machine] += replica.devices
        eta, body_s = demand.max_staleness, plan.step_s - plan.sync_rollout_s
        rest_s = (eta + 1) * body_s - plan.train_s - plan.transfer_s - plan.reward_s
        assert replica.latency_s <= rest_s * (1 + 1e-6) + 1e-9
    for node in topology.nodes:
        assert len(set(held[node.name])) == len(held[node.name])
        assert all(0 <= index < node.devices for index in held[node.name])
    for memory in plan.memory.values():
        parts = memory.weights + memory.gradients + memory.optimiser + memory.activations + memory.kv + memory.workspace
        assert parts <= memory.available * (1 + 1e-9)
    assert sum(r.concurrency for r in plan.replicas) <= demand.gate_answers
    assert plan.throughput_tokens_per_s <= bound_of(plan) * (1 + 1e-9)


@examples(25)
@given(clusters(24), demands(), modes)
def test_plans_are_feasible(topology: Topology, demand: Demand, sync: SyncMode) -> None:
    try:
        plan = joint(topology, SMALL, demand, sync)
    except UserError:
        return
    check_feasible(plan, topology, demand)
    assert ClusterPlan.model_validate_json(plan.model_dump_json()) == plan


@pytest.mark.parametrize("sync", ["storage", "blocking", "tree", "overlapped"])
def test_the_papers_cluster_is_planned_near_its_bound(sync: SyncMode) -> None:
    plan = joint(HEX, sync=sync)
    check_feasible(plan, HEX, PAPER)
    assert gap_of(plan) <= 0.005
    assert plan.trainer.stages[0].device_type == "h800"


@pytest.mark.parametrize("staleness", [1, 2])
def test_the_fastest_plan_is_the_fastest_in_the_simulator_too(staleness: int) -> None:
    """With little staleness the longest answers decide: planned within 5 %, and no slower than Algorithm 1's plan."""
    cluster = read_cluster(DEPLOYMENTS / "clusters" / "paper-h800-24-h20-24.yaml")
    demand = replace(PAPER, prompts_per_step=64, group_size=8, max_staleness=staleness)
    joint, published = (plan_for(cluster, SEVEN, demand, mode=mode) for mode in ("joint", "two-phase"))
    simulated_s = simulate(joint, steps=100, warm_up=20).step_s
    assert simulated_s == pytest.approx(joint.step_s, rel=0.05)
    assert simulated_s <= 1.02 * simulate(published, steps=100, warm_up=20).step_s


@pytest.mark.parametrize(("reward_s", "slower"), [(30.0, 0.0), (300.0, 0.1)])
def test_scoring_beside_generation_costs_a_plan_little(reward_s: float, slower: float) -> None:
    """It was added to every step once, which shrank the trainer and made plans up to twice as slow.

    300 s are half of the time that staleness leaves an answer, so that replicas need answers that end sooner.
    """
    cluster = cluster_of(h100=8, h20=8)
    without = joint(cluster, SEVEN, PAPER)
    plan = joint(cluster, SEVEN, replace(PAPER, reward_s=reward_s))
    assert plan.step_s <= without.step_s * (1 + slower + SOLVER_GAP)
    assert simulate(plan, steps=60, warm_up=20).step_s == pytest.approx(plan.step_s, rel=0.05)


@pytest.mark.parametrize("goal", [{"budget_usd_per_h": 0.5}, {"target_tokens_per_s": 100.0}])
def test_devices_that_cost_nothing_are_used_as_well_as_they_can_be(goal: dict[str, float]) -> None:
    """Any plan on them is the cheapest: asked for 100 tokens/s, they gave 2,212 s a step for 0 USD/h."""
    machines = [
        {"name": "own", "device_type": "l40s", "devices": 4, "count": 2, "usd_per_h": 0.0},
        {"name": "rented", "device_type": "h800", "devices": 8},
    ]
    links = [{"between": ["l40s", other], "gb_per_s": 1.5} for other in ("l40s", "h800")]
    cluster = parse_cluster(ClusterFile.model_validate({"name": "own", "machines": machines, "links": links}))
    demand = replace(PAPER, prompts_per_step=16, group_size=8)
    free = plan_for(cluster.restricted({"own-0": 4, "own-1": 4}), SMALL, demand)
    plan = plan_for(cluster, SMALL, demand, **goal)
    assert plan.usd_per_h == 0
    assert plan.step_s == pytest.approx(free.step_s, rel=SOLVER_GAP)


def test_exhaustive_search_stops_at_eight_devices() -> None:
    with pytest.raises(UserError, match="stops at 8 devices"):
        plan_for(HEX, SEVEN, PAPER, mode="exhaustive")


def test_only_what_runs_is_planned_unless_asked() -> None:
    plan = plan_for(HEX, SEVEN, PAPER)
    assert not plan.what_if
    (stage,) = plan.trainer.stages
    assert stage.tensor == 1
    assert len(stage.machines) == 1
    assert all(len(replica.devices) == 1 for replica in plan.replicas)
    with pytest.raises(UserError, match=r"Add what-if to plan"):
        plan_for(HEX, SEVEN, PAPER, sync_mode="tree")


@examples(15)
@given(clusters(12), demands(), modes, st.sampled_from(["h800", "h20", "l40s"]))
def test_more_devices_never_worsen_the_bound(topology: Topology, demand: Demand, sync: SyncMode, kind: str) -> None:
    try:
        before = joint(topology, SMALL, demand, sync)
    except UserError:
        return
    donor = next((n for n in topology.nodes if n.type_name == kind), topology.nodes[0])
    links = {**topology.type_links}
    links.setdefault(frozenset((donor.type_name,)), 5e9)
    grown = replace(topology, nodes=(*topology.nodes, replace(donor, name="extra-0")), type_links=links)
    after = joint(grown, SMALL, demand, sync)
    assert bound_of(after) >= bound_of(before) * (1 - SOLVER_GAP)
    assert after.throughput_tokens_per_s >= before.throughput_tokens_per_s * (1 - gap_of(after) - SOLVER_GAP)


@examples(15)
@given(clusters(12), demands(), modes)
def test_more_bandwidth_never_worsens_the_bound(topology: Topology, demand: Demand, sync: SyncMode) -> None:
    try:
        before = joint(topology, SMALL, demand, sync)
    except UserError:
        return
    faster = replace(topology, type_links={pair: 2 * value for pair, value in topology.type_links.items()})
    after = joint(faster, SMALL, demand, sync)
    assert bound_of(after) >= bound_of(before) * (1 - SOLVER_GAP)
    assert after.throughput_tokens_per_s >= before.throughput_tokens_per_s * (1 - gap_of(after) - SOLVER_GAP)


@examples(10)
@given(clusters(10), demands(), st.randoms())
def test_the_order_of_machines_changes_nothing(topology: Topology, demand: Demand, random: Random) -> None:
    shuffled = list(topology.nodes)
    random.shuffle(shuffled)
    try:
        plan = joint(topology, SMALL, demand)
    except UserError:
        return
    other = joint(replace(topology, nodes=tuple(shuffled)), SMALL, demand)
    assert other.step_s == pytest.approx(plan.step_s, rel=1e-9)
    assert other.trainer.layout == plan.trainer.layout
    assert sorted(r.layout for r in other.replicas) == sorted(r.layout for r in plan.replicas)


def test_lower_prices_rent_at_least_as_much() -> None:
    cheap = replace(
        HEX, nodes=tuple(replace(n, device=replace(n.device, usd_per_h=n.device.usd_per_h / 2)) for n in HEX.nodes)
    )
    before = plan_for(HEX, SEVEN, PAPER, budget_usd_per_h=30)
    after = plan_for(cheap, SEVEN, PAPER, budget_usd_per_h=30)
    assert before.usd_per_h <= 30
    assert after.usd_per_h <= 30
    assert bound_of(after) >= bound_of(before) * (1 - SOLVER_GAP)


def test_generation_has_headroom_where_devices_are_left() -> None:
    plan = plan_for(HEX, SEVEN, PAPER, what_if=True)
    assert sum(m.training + m.rollout for m in plan.machines) < HEX.devices
    work_s = PAPER.tokens_per_step / sum(r.tokens_per_s for r in plan.replicas)
    assert 1.05 * work_s + plan.sync_rollout_s <= plan.step_s * (1 + 1e-4)
    assert simulate(plan, steps=100, warm_up=40).step_s <= 1.02 * plan.step_s


def test_a_target_is_met_for_less_than_the_whole_cluster() -> None:
    full = plan_for(HEX, SEVEN, PAPER)
    half = plan_for(HEX, SEVEN, PAPER, target_tokens_per_s=full.throughput_tokens_per_s / 2)
    assert half.throughput_tokens_per_s >= full.throughput_tokens_per_s / 2 * (1 - 1e-6)
    assert half.usd_per_h < full.usd_per_h
    assert half.price_bound_usd_per_h is not None
    assert half.price_bound_usd_per_h <= half.usd_per_h <= half.price_bound_usd_per_h * (1 + SOLVER_GAP)


def test_the_best_that_is_named_is_reached_as_a_target() -> None:
    with pytest.raises(UserError) as refused:
        plan_for(HEX, SEVEN, PAPER, target_tokens_per_s=1e9)
    best = float(str(refused.value).split("the best is ")[1].split()[0])
    plan = plan_for(HEX, SEVEN, PAPER, target_tokens_per_s=best)
    assert plan.throughput_tokens_per_s >= best * (1 - 1e-6)


def test_of_plans_at_the_price_of_a_target_the_fastest_is_taken() -> None:
    """Where every device costs a dollar two are cheapest for a low target; which two makes a fourfold difference."""
    equal = replace(HEX, nodes=tuple(replace(n, device=replace(n.device, usd_per_h=1.0)) for n in HEX.nodes))
    best = plan_for(equal, SMALL, PAPER, budget_usd_per_h=2)
    plan = plan_for(equal, SMALL, PAPER, target_tokens_per_s=best.throughput_tokens_per_s / 4)
    assert plan.usd_per_h == best.usd_per_h == 2
    assert plan.step_s == pytest.approx(best.step_s, rel=SOLVER_GAP)


def test_a_budget_where_nothing_has_a_price_is_refused() -> None:
    free = replace(HEX, nodes=tuple(replace(n, device=replace(n.device, usd_per_h=0.0)) for n in HEX.nodes))
    with pytest.raises(UserError, match="has a price, so a budget says nothing"):
        plan_for(free, SEVEN, PAPER, budget_usd_per_h=5)


def test_wishes_that_cannot_be_met_name_what_can() -> None:
    with pytest.raises(UserError, match=r"cheapest is training on .* USD/h") as told:
        plan_for(HEX, SEVEN, PAPER, budget_usd_per_h=1)
    price = float(str(told.value).split(" for ")[-1].removesuffix(" USD/h."))
    assert plan_for(HEX, SEVEN, PAPER, budget_usd_per_h=price).usd_per_h == pytest.approx(price)
    with pytest.raises(UserError, match=r"the best is \d+(\.\d+)? tokens/s"):
        plan_for(HEX, SEVEN, PAPER, target_tokens_per_s=1e9)
    with pytest.raises(UserError, match="not both"):
        plan_for(HEX, SEVEN, PAPER, target_tokens_per_s=1, budget_usd_per_h=1)


def test_a_model_that_fits_nowhere_is_told_how_much_is_missing() -> None:
    laptop = {"name": "one", "machines": [{"name": "a", "device_type": "rtx-4090", "devices": 2}]}
    with pytest.raises(UserError, match=r"lacks \d+\.\d GiB per device.*smallest that would do is one machine with"):
        plan_for(parse_cluster(ClusterFile.model_validate(laptop)), SEVEN, PAPER)


def test_what_no_machine_can_train_is_told_with_the_largest_device_of_the_catalogue() -> None:
    huge = replace(SEVEN, layers=100 * SEVEN.layers)
    largest = max(CATALOGUE.values(), key=lambda device: (device.kind == "cuda", device.memory_bytes))
    with pytest.raises(UserError, match=f"would do is more than one machine, even with 8 × {largest.name}"):
        plan_for(cluster_of(h100=8), huge, PAPER)


def test_smaller_micro_batches_are_the_remedy_where_they_let_a_model_fit() -> None:
    cluster = cluster_of(**{"a100-80": 2, "h20": 1})
    only = TrainingWish(device_type="a100-80")
    short = replace(PAPER, response=LogNormal(mean=1000, q99=3000, cap=4000).lengths(), longest_tokens=4352)
    with pytest.raises(UserError, match=r"with tokens per micro-batch=\d+ it fits") as refused:
        plan_for(cluster, SEVEN, replace(short, micro_batch_tokens=2**16), training_wish=only)
    tokens = int(str(refused.value).split("tokens per micro-batch=")[1].split()[0])
    plan = plan_for(cluster, SEVEN, replace(short, micro_batch_tokens=tokens), training_wish=only)
    assert plan.trainer.stages[0].device_type == "a100-80"


def test_one_device_cannot_do_both() -> None:
    single = {"name": "one", "machines": [{"name": "a", "device_type": "b200", "devices": 1}]}
    with pytest.raises(UserError, match="not both at once"):
        plan_for(parse_cluster(ClusterFile.model_validate(single)), SMALL, PAPER)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_a_wish_that_is_no_positive_number_is_refused(value: float) -> None:
    with pytest.raises(UserError, match=r"budget is .*: give a positive, finite one"):
        plan_for(HEX, SEVEN, PAPER, budget_usd_per_h=value)
    with pytest.raises(UserError, match=r"target is .*: give a positive, finite one"):
        plan_for(HEX, SEVEN, PAPER, target_tokens_per_s=value)


@pytest.mark.parametrize("budget", [None, 20])
def test_homogeneous_passes_over_a_type_that_cannot_do_both(budget: float | None) -> None:
    plan = plan_for(cluster_of(h100=1, h20=4), SMALL, PAPER, mode="homogeneous", budget_usd_per_h=budget)
    assert {r.device_type for r in plan.replicas} == {"h20"}
    with pytest.raises(UserError, match=r"No single device type of cluster mixed can train and generate alone:"):
        plan_for(cluster_of(h100=1, h20=1), SMALL, PAPER, mode="homogeneous")
    with pytest.raises(UserError, match=r"alone for 0\.5 USD/h: ask for less"):
        plan_for(cluster_of(h100=1, h20=4), SMALL, PAPER, mode="homogeneous", budget_usd_per_h=0.5)


def test_homogeneous_takes_the_cheapest_that_reaches_a_target() -> None:
    cluster, target = cluster_of(h100=8, h20=8), {"target_tokens_per_s": 100.0}
    plan = plan_for(cluster, SMALL, PAPER, mode="homogeneous", **target)
    each = [plan_for(cluster_of(**{kind: 8}), SMALL, PAPER, **target) for kind in ("h100", "h20")]
    assert plan.usd_per_h == pytest.approx(min(p.usd_per_h for p in each))
    assert plan.step_s > min(p.step_s for p in each)


def test_slow_pairs_of_machines_are_avoided() -> None:
    """Of three equal machines two train; the pair with the fast link is found, and the gap says what is lost."""
    tree = {
        "name": "uneven",
        "machines": [{"name": "a", "device_type": "h800", "count": 4, "devices": 8}],
        "links": [
            {"between": ["h800", "h800"], "gb_per_s": 0.2},
            {"between": ["a-1", "a-3"], "gb_per_s": 50},
        ],
    }
    plan = joint(parse_cluster(ClusterFile.model_validate(tree)))
    (stage,) = plan.trainer.stages
    assert {share.machine for share in stage.machines} == {"a-1", "a-3"}
    assert plan.gap_placement is not None
    assert 0 <= plan.gap_placement <= gap_of(plan) + 1e-9 <= 1
