"""What a person sees of a plan: words, maps, charts; and the planner on machines that discovery found."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planners.errors import UserError
from planners.hardware.machine import Device, Machine
from planners.hardware.profile import DeviceProfile
from planners.hardware.topology import Topology, discovered
from planners.plan.explain import budget_curve, cluster_map, explain, gantt, memory_table
from planners.plan.plan import read_plan
from planners.plan.simulator import simulate, with_simulated_step
from planners.search import next_device
from planners.search.columns import Problem
from planners.search.joint import solve_fastest
from planners.search.make import Goal, rounded_down
from planners.search.next_device import Gain, memory_remedy, next_device_gains
from planners.workload.demand import Demand, demand_of
from planners.workload.lengths import LogNormal, constant
from planners.workload.model import model_from_config, read_model
from planners.workload.step import Workload
from tasks.config.files import load_experiment
from tasks.config.trees import read_cluster
from tasks.planning import ClusterStudy
from tasks.wishes import demand_for
from tests.support.places import DEPLOYMENTS
from tests.support.plan import SMOLLM2, cluster_of, gap_of, plan_for

SEVEN = read_model(DEPLOYMENTS / "models" / "r1-distill-qwen-7b")
PAPER = Demand(32, 16, 8, constant(250), LogNormal(mean=5000, q99=16000, cap=27648).lengths(), 28672, minibatches=4)
SMALL = read_cluster(DEPLOYMENTS / "clusters" / "paper-h800-8-h20-16.yaml")
PLAN = plan_for(SMALL, SEVEN, PAPER)


def test_the_explanation_says_what_limits_and_what_helps() -> None:
    gains = next_device_gains(Problem(SMALL, SEVEN, PAPER), PLAN)
    assert set(gains) == {"h800", "h20"}
    assert all(gain.share >= 0 for gain in gains.values())
    text = explain(PLAN, gains)
    assert ("Training limits" in text) == (PLAN.train_s >= PLAN.rollout_s)
    assert "One more h20" in text
    assert "below the best there is, within the listed layouts" in text
    assert "What-if" not in text
    published = plan_for(SMALL, SEVEN, PAPER, mode="two-phase", what_if=True, sync_mode="tree")
    assert "proves no bound" in explain(published)


def test_one_more_device_may_be_used_as_the_plan_was_allowed_to_be() -> None:
    """Of what-if this plan needs nothing; but only with it may one more h100 train from a second machine."""
    cluster, model = cluster_of(h100=1, h20=4), read_model(DEPLOYMENTS / "models" / "r1-distill-qwen-1.5b")
    plan = plan_for(cluster, model, PAPER, what_if=True)
    assert not plan.what_if
    today, opened = (
        ClusterStudy(plan, Problem(cluster, model, PAPER, what_if=w), Goal()).explain() for w in (False, True)
    )
    assert "One more h100 brings nothing" in today
    assert "One more h100 brings +71" in opened


def test_where_the_solver_runs_out_of_time_for_one_more_device_a_bound_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, model = cluster_of(h100=1, h20=4), read_model(DEPLOYMENTS / "models" / "r1-distill-qwen-1.5b")
    plan = plan_for(cluster, model, PAPER, what_if=True)
    exact = next_device_gains(Problem(cluster, model, PAPER, what_if=True), plan)["h100"]
    assert not exact.at_most
    solve = solve_fastest

    def slow(*what: Any, time_limit_s: float, **how: Any) -> Any:
        assert time_limit_s <= next_device.ASK_LIMIT_S / 2
        found = solve(*what, time_limit_s=10, **how)
        return replace(found, bound=found.bound / 2)

    monkeypatch.setattr(next_device, "solve_fastest", slow)
    bound = next_device_gains(Problem(cluster, model, PAPER, what_if=True), plan)["h100"]
    assert bound.at_most
    assert bound.share > exact.share > 0.5
    assert f"One more h100 brings at most {bound.share:+.1%}" in explain(plan, {"h100": bound})

    def silent(*what: Any, **how: Any) -> Any:
        raise UserError("The solver found no plan.")

    monkeypatch.setattr(next_device, "solve_fastest", silent)
    assert next_device_gains(Problem(SMALL, SEVEN, PAPER), PLAN) == {}


def left_out(cluster: Topology = SMALL, **how: Any) -> str:
    """The sentence on devices that do nothing."""
    plan = plan_for(cluster, SEVEN, PAPER, **how)
    assert any(m.training + m.rollout < m.devices for m in plan.machines)
    words = explain(plan, budget_usd_per_h=how.get("budget_usd_per_h"))
    (line,) = [
        line for line in words.splitlines() if "left out" in line or "not needed" in line or "not rented" in line
    ]
    return line


def test_why_devices_do_nothing_is_said_of_each_mode_as_it_is() -> None:
    assert "the target is met without" in left_out(target_tokens_per_s=PLAN.throughput_tokens_per_s / 2)
    assert "within 30 USD/h no use of them" in left_out(budget_usd_per_h=30)
    assert "uses one device type" in left_out(mode="homogeneous")
    assert "by Algorithm 1; mode joint would say" in left_out(
        read_cluster(DEPLOYMENTS / "clusters" / "paper-h800-24-h20-24.yaml"), mode="two-phase"
    )
    words = ClusterStudy(IDLE, Problem(MIXED, SEVEN, EAGER), Goal()).explain()
    assert (
        "not needed: no use of them would shorten the step in layouts that run today.\nLayouts that --what-if" in words
    )


MIXED = read_cluster(DEPLOYMENTS / "clusters" / "paper-h800-24-h20-24.yaml")
EAGER = replace(PAPER, prompts_per_step=64, group_size=8, max_staleness=2)
IDLE = plan_for(MIXED, SEVEN, EAGER)


def test_what_generation_waits_for_is_said_where_it_is_not_its_work() -> None:
    assert "its work takes" not in explain(PLAN)
    words = explain(IDLE)
    assert f"Of generation's {IDLE.rollout_s:.2f} s its work takes" in words
    assert "with staleness 2 they have 3 steps, training included" in words


def test_one_more_device_that_brings_nothing_although_generation_limits_is_explained() -> None:
    """Of 16.6 s, 16.2 s are work: near enough not to be told apart, and yet more devices do not help."""
    model = read_model(DEPLOYMENTS / "models" / "r1-distill-qwen-1.5b")
    demand = demand_for(load_experiment(DEPLOYMENTS / "experiments" / "r1-distill-qwen-1.5b.yaml"), 16384)
    plan = plan_for(SMALL, model, demand)
    words = ClusterStudy(plan, Problem(SMALL, model, demand), Goal()).explain()
    assert "Generation limits" in words
    assert "One more h20 brings nothing, since the longest answers decide." in words
    assert "nothing, since" not in explain(PLAN, {"h20": Gain(0.0)})


def test_few_device_types_are_spoken_of_and_the_rest_together() -> None:
    gains = {f"type-{n}": Gain(0.1 - n / 100) for n in range(8)}
    lines = [line for line in explain(PLAN, gains).splitlines() if line.startswith("One more")]
    assert len(lines) == 6
    assert lines[-1] == "One more of any of 3 other types brings +5.0% or less."
    nothing = explain(PLAN, dict.fromkeys(map(str, range(200)), Gain(0.0)))
    assert "One more of any of 195 other types brings nothing." in nothing


@pytest.mark.parametrize(
    ("factor", "staleness", "words"),
    [
        (1.04, 8, None),
        (1.2, 8, "trust the simulation, since work and longest answer vary"),
        (0.8, 8, "trust the simulation, since replicas that are not full"),
        (0.8, 90, "steps are too few to leave the start behind"),
    ],
)
def test_which_figure_to_trust_is_said_where_they_differ(factor: float, staleness: int, words: str | None) -> None:
    demand = PLAN.demand.model_copy(update={"max_staleness": staleness})
    update = {"simulated_step_s": factor * PLAN.step_s, "demand": demand}
    said = explain(PLAN.model_copy(update=update))
    assert (words or "takes") in said
    assert ("They differ by more than 5%" in said) == (words is not None)


def test_smaller_micro_batches_are_named_where_memory_keeps_a_faster_layout_out() -> None:
    coarse = replace(PAPER, micro_batch_tokens=2**18)
    plan = plan_for(SMALL, SEVEN, coarse)
    (sentence,) = memory_remedy(Problem(SMALL, SEVEN, coarse), plan)
    tokens = int(sentence.split("tokens per micro-batch=")[1].split()[0])
    fine = plan_for(SMALL, SEVEN, replace(PAPER, micro_batch_tokens=tokens))
    assert f"{fine.train_s:.2f} s" in sentence
    assert fine.train_s < 0.98 * plan.train_s
    assert memory_remedy(Problem(SMALL, SEVEN, replace(PAPER, micro_batch_tokens=tokens)), fine) == []


@pytest.mark.parametrize(
    ("rate", "words"), [(26661.9, "26661"), (999.96, "999.9"), (12.3456, "12.34"), (0.0123456, "0.01234")]
)
def test_a_rate_is_never_printed_above_its_value(rate: float, words: str) -> None:
    assert rounded_down(rate) == words


def test_a_plan_whose_steps_are_too_large_to_simulate_says_so() -> None:
    large = PLAN.demand.model_copy(update={"prompts_per_step": 10**6})
    plan = with_simulated_step(PLAN.model_copy(update={"demand": large}))
    assert plan.simulated_step_s is None
    assert "Not simulated" in explain(plan)


def test_the_map_shows_every_device_once() -> None:
    *lines, legend = cluster_map(PLAN).splitlines()
    assert "T trains" in legend
    assert len(lines) == len(SMALL.nodes)
    letters = "".join(line.split()[-1] for line in lines)
    assert len(letters) == SMALL.devices
    assert letters.count("T") == sum(m.training for m in PLAN.machines) > 0
    assert letters.count("G") == sum(len(r.devices) for r in PLAN.replicas)
    alike = cluster_map(PLAN.model_copy(update={"machines": PLAN.machines[-1:] * 9})).splitlines()
    assert alike[0].endswith("× 9")


def test_the_memory_table_has_a_row_per_kind_of_device() -> None:
    assert len(memory_table(PLAN).splitlines()) == 1 + len(PLAN.memory)


def test_the_chart_shows_who_trains_and_who_generates() -> None:
    chart = gantt(simulate(PLAN, steps=6, keep_spans=True), width=60)
    trainer = next(line for line in chart.splitlines() if line.startswith("trainer"))
    assert "T" in trainer
    assert "." in trainer  # it waits for the first answers
    assert sum(line.startswith("r") for line in chart.splitlines()) == len(PLAN.replicas)


def test_more_money_never_buys_less() -> None:
    bought = list(budget_curve(Problem(SMALL, SEVEN, PAPER), [1, 20, 40, 60]))
    assert [budget for budget, _ in bought] == [20, 40, 60]  # one dollar buys nothing
    rates = [plan.throughput_tokens_per_s for _, plan in bought]
    assert rates == sorted(rates)
    assert all(plan.usd_per_h <= budget for budget, plan in bought)


def test_a_plan_file_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(PLAN.model_dump_json())
    assert read_plan(path) == PLAN
    whole = json.loads(PLAN.model_dump_json())
    for broken in (
        {},
        {**whole, "replicas": []},
        {**whole, "train_s": -1},
        {**whole, "step_s": math.nan},
        {**whole, "train_s": math.inf},
        {**whole, "demand": {**whole["demand"], "response_points": [0.0]}},
        {**whole, "demand": {**whole["demand"], "prompts_per_step": 0}},
    ):
        path.write_text(json.dumps(broken))
        with pytest.raises(UserError, match="is no plan"):
            read_plan(path)
    with pytest.raises(UserError, match="no plan file"):
        read_plan(tmp_path / "none.json")


def profile(kind: str) -> DeviceProfile:
    return DeviceProfile(
        device_type=kind,
        model_key="m",
        versions_key="v",
        gemm_flops_per_s=5e10,
        memory_bytes_per_s=1e10,
        generation_tokens_per_s={8: 10.0, 64: 40.0},
        training_tokens_per_s=30.0,
        publish_s=2.0,
        load_s=1.0,
    )


def test_a_discovered_machine_is_planned_from_its_profiles() -> None:
    """One of two cores trains 512 tokens at 30 tokens/s; publishing and loading were measured."""
    cores = tuple(Device(index=i, device_type="cpu", kind="cpu", memory_bytes=8 * 10**9) for i in range(2))
    topology = discovered("here", [Machine(name="here", devices=cores)], {"cpu": profile("cpu")})
    model = model_from_config(SMOLLM2, "smollm2", element_bytes=4)
    plan = plan_for(topology, model, demand_of(Workload()), profiles={"cpu": profile("cpu")})
    assert plan.train_s == pytest.approx(512 / 30)
    assert (plan.sync_train_s, plan.sync_rollout_s) == (2.0, 1.0)
    assert plan.step_s == pytest.approx(512 / 30 + 2.0)
    assert [(m.training, m.rollout) for m in plan.machines] == [(1, 1)]


def test_a_machine_of_two_types_becomes_two_nodes_that_reach_each_other() -> None:
    kinds = ("cpu", "h20")
    devices = tuple(Device(index=i, device_type=k, kind="cpu", memory_bytes=10**10) for i, k in enumerate(kinds))
    a, b = discovered("here", [Machine(name="host", devices=devices)], {"cpu": profile("cpu")}).nodes
    assert {a.name, b.name} == {"host/cpu", "host/h20"}
    topology = discovered("here", [Machine(name="host", devices=devices)], {"cpu": profile("cpu")})
    assert topology.link(a, b) == min(a.device.link_bytes_per_s, b.device.link_bytes_per_s)


@pytest.mark.parametrize("size", ["1.5b", "7b", "14b"])
def test_shipped_experiments_of_the_paper_are_planned(size: str) -> None:
    experiment = load_experiment(DEPLOYMENTS / "experiments" / f"r1-distill-qwen-{size}.yaml")
    demand = demand_of(experiment.workload, experiment.optimizer.minibatches)
    assert demand.tokens_per_step == pytest.approx(2.56e6, rel=0.01)
    model = read_model(DEPLOYMENTS / "models" / Path(experiment.model.source).name)
    plan = plan_for(read_cluster(DEPLOYMENTS / "clusters" / "paper-h800-8-h20-48.yaml"), model, demand)
    assert gap_of(plan) <= 0.005


def test_the_laptop_cluster_trains_the_laptop_experiment() -> None:
    experiment = load_experiment(DEPLOYMENTS / "experiments" / "laptop.yaml")
    model = model_from_config(SMOLLM2, "smollm2", element_bytes=4)
    plan = plan_for(read_cluster(DEPLOYMENTS / "clusters" / "laptop.yaml"), model, demand_of(experiment.workload))
    assert [(m.training, m.rollout) for m in plan.machines] == [(1, 1)]
