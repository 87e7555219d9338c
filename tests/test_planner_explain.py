"""What a person sees of a plan: words, maps, charts; and the planner on machines that discovery found."""

from pathlib import Path
from typing import Any

import pytest

from planners import explain as explaining
from planners.cluster import Device, Machine
from planners.cluster_plan import read_plan
from planners.demand import Demand, demand_of
from planners.errors import UserError
from planners.explain import budget_curve, cluster_map, explain, gantt, memory_table, next_device_gains
from planners.joint import Choice
from planners.lengths import LogNormal, constant
from planners.make import make_plan
from planners.model import model_from_config, read_model
from planners.profile import DeviceProfile
from planners.simulator import simulate
from planners.topology import discovered, read_cluster
from planners.workload import Workload
from tasks.cluster_planning import ClusterStudy
from tasks.experiment import load_experiment
from tests.plan_support import cluster_of

DEPLOYMENTS = Path(__file__).parent.parent / "deployments"
SEVEN = read_model(DEPLOYMENTS / "models" / "r1-distill-qwen-7b")
PAPER = Demand(32, 16, 8, constant(250), LogNormal(mean=5000, q99=16000, cap=27648).lengths(), 28672, minibatches=4)
SMALL = read_cluster(DEPLOYMENTS / "clusters" / "paper-h800-8-h20-16.yaml")
PLAN = make_plan(SMALL, SEVEN, PAPER)
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def test_the_explanation_says_what_limits_and_what_helps() -> None:
    gains = next_device_gains(SMALL, SEVEN, PAPER, PLAN)
    assert set(gains) == {"h800-sxm", "h20"}
    assert all(gain >= -1e-3 for gain in gains.values())
    text = explain(PLAN, gains)
    assert ("Training limits" in text) == (PLAN.train_s >= PLAN.rollout_s)
    assert "One more h20" in text
    assert "below the best there is, within the listed layouts" in text
    assert "What-if" not in text
    published = make_plan(SMALL, SEVEN, PAPER, mode="two-phase", what_if=True, sync_mode="tree")
    assert "proves no bound" in explain(published)


def test_one_more_device_may_be_used_as_the_plan_was_allowed_to_be() -> None:
    """Of what-if this plan needs nothing; but only with it may one more h100 train from a second machine."""
    cluster, model = cluster_of(h100=1, h20=4), read_model(DEPLOYMENTS / "models" / "r1-distill-qwen-1.5b")
    plan = make_plan(cluster, model, PAPER, what_if=True)
    assert not plan.what_if
    today, opened = (ClusterStudy(plan, cluster, model, PAPER, {"what_if": w}).explain() for w in (False, True))
    assert "One more h100 brings nothing" in today
    assert "One more h100 brings +71" in opened


def test_where_one_more_device_has_no_answer_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*what: Any, time_limit_s: float = 60.0) -> Choice:
        assert time_limit_s <= 10
        raise UserError("The solver found no plan.")

    monkeypatch.setattr(explaining, "solve_joint", slow)
    assert next_device_gains(SMALL, SEVEN, PAPER, PLAN) == {}


def test_the_map_shows_every_device_once() -> None:
    lines = cluster_map(PLAN).splitlines()
    assert len(lines) == len(SMALL.nodes)
    letters = "".join(line.split()[-1] for line in lines)
    assert len(letters) == SMALL.devices
    assert letters.count("T") == sum(m.training for m in PLAN.machines) > 0
    assert letters.count("G") == sum(len(r.devices) for r in PLAN.replicas)


def test_the_memory_table_has_a_row_per_kind_of_device() -> None:
    assert len(memory_table(PLAN).splitlines()) == 1 + len(PLAN.memory)


def test_the_chart_shows_who_trains_and_who_generates() -> None:
    chart = gantt(simulate(PLAN, steps=6, keep_spans=True), width=60)
    trainer = next(line for line in chart.splitlines() if line.startswith("trainer"))
    assert "T" in trainer
    assert "." in trainer  # it waits for the first answers
    assert sum(line.startswith("r") for line in chart.splitlines()) == len(PLAN.replicas)


def test_more_money_never_buys_less() -> None:
    bought = list(budget_curve(SMALL, SEVEN, PAPER, [1, 20, 40, 60]))
    assert [budget for budget, _ in bought] == [20, 40, 60]  # one dollar buys nothing
    rates = [plan.throughput_tokens_per_s for _, plan in bought]
    assert rates == sorted(rates)
    assert all(plan.usd_per_h <= budget for budget, plan in bought)


def test_a_plan_file_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(PLAN.model_dump_json())
    assert read_plan(path) == PLAN
    path.write_text("{}")
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
    plan = make_plan(topology, model, demand_of(Workload()), profiles={"cpu": profile("cpu")})
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
    demand = demand_of(experiment.workload, experiment.algorithm.minibatches)
    assert demand.tokens_per_step == pytest.approx(2.56e6, rel=0.01)
    model = read_model(DEPLOYMENTS / "models" / Path(experiment.model.source).name)
    plan = make_plan(read_cluster(DEPLOYMENTS / "clusters" / "paper-h800-8-h20-48.yaml"), model, demand)
    assert plan.gap <= 0.005


def test_the_laptop_cluster_trains_the_laptop_experiment() -> None:
    experiment = load_experiment(DEPLOYMENTS / "experiments" / "laptop.yaml")
    model = model_from_config(SMOLLM2, "smollm2", element_bytes=4)
    plan = make_plan(read_cluster(DEPLOYMENTS / "clusters" / "laptop.yaml"), model, demand_of(experiment.workload))
    assert [(m.training, m.rollout) for m in plan.machines] == [(1, 1)]
