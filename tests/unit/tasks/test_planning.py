"""Plans for described clusters keep to what the experiment asks; shipped experiments fit shipped clusters."""

from pathlib import Path
from typing import Any

import pytest

from planners.errors import CHOICES, UserError
from planners.hardware.machine import Device, Machine
from planners.search.columns import Problem, TrainingWish, rollout_columns, training_columns
from planners.workload.model import read_model
from tasks.config.experiment import Experiment
from tasks.config.files import load_experiment
from tasks.config.trees import read_cluster
from tasks.planning import NAMES, ClusterStudy, ClusterWish, plan_run
from tasks.planning import study_cluster as study
from tasks.wishes import demand_for
from tests.support.places import DEPLOYMENTS
from tests.support.plan import profile_of

CLUSTERS = DEPLOYMENTS / "clusters"


def study_cluster(experiment: Experiment, file: Path, **wishes: Any) -> ClusterStudy:
    return study(experiment, ClusterWish(file=str(file), **wishes))


def shipped(size: str, *overrides: str) -> Experiment:
    source = f"model.source={DEPLOYMENTS / 'models' / f'r1-distill-qwen-{size}'}"
    return load_experiment(DEPLOYMENTS / "experiments" / f"r1-distill-qwen-{size}.yaml", [source, *overrides])


@pytest.mark.parametrize("size", ["1.5b", "7b", "14b"])
def test_shipped_experiments_fit_every_shipped_cluster_of_gpus(size: str) -> None:
    """With the longest answer in a micro-batch, the ZeRO stage they name, and a cache for their longest context."""
    experiment = shipped(size)
    model, demand = (
        read_model(Path(experiment.model.source)),
        demand_for(experiment, experiment.planner.micro_batch_tokens or 0),
    )
    for file in sorted(CLUSTERS.glob("*.yaml")):
        wish = TrainingWish(zero=experiment.planner.zero_stage)
        problem = Problem(read_cluster(file), model, demand, training_wish=wish)
        if file.stem != "laptop":
            assert {c.layout.zero for c in training_columns(problem)} == {experiment.planner.zero_stage}
            assert rollout_columns(problem)


def test_a_cluster_is_planned_as_the_experiment_asks() -> None:
    """What-if opens layouts that it has no words for; devices it may not use are left out of both."""
    asked = ("planner.train_type=h20", "planner.train_devices=4", "planner.zero_stage=2", "planner.concurrency=40")
    file = CLUSTERS / "paper-h800-8-h20-16.yaml"
    kept = study_cluster(shipped("1.5b", *asked), file)
    (stage,) = kept.plan.trainer.stages
    assert (stage.device_type, stage.data, kept.plan.trainer.zero_stage) == ("h20", 4, 2)
    assert {replica.concurrency for replica in kept.plan.replicas} == {32}
    assert "One more h20" in kept.explain()
    free = study_cluster(shipped("1.5b", *asked), file, what_if=True)
    assert free.plan.step_s < kept.plan.step_s
    assert free.problem.training_wish == TrainingWish()
    for what_if in (False, True):
        only = study_cluster(shipped("1.5b", "cluster.device_types=[h20]"), file, what_if=what_if)
        assert set(only.problem.topology.types) == {"h20"}
    for unknown in ("planner.train_type=h2O", "cluster.device_types=[h2O]"):
        with pytest.raises(UserError, match=r"'h2O', which cluster paper-h800-8-h20-16 lacks .*mean 'h20'"):
            study_cluster(shipped("1.5b", unknown), file)
    with pytest.raises(UserError, match=r"planner.train_devices 9 asks: .* on paper-h800-8-h20-16 that are at most 8"):
        study_cluster(shipped("1.5b", "planner.train_devices=9"), file)


def test_a_described_cluster_is_planned_without_making_a_model_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may take a minute; the sizes of a shipped model are known."""
    monkeypatch.setenv("HEXFLOW_HOME", str(tmp_path / "home"))
    tiny = load_experiment(DEPLOYMENTS / "experiments" / "tiny.yaml")
    assert study_cluster(tiny, CLUSTERS / "laptop.yaml").problem.model.name == "tiny-random"
    assert not (tmp_path / "home").exists()


def test_cluster_and_wishes_are_checked(tmp_path: Path) -> None:
    tiny, laptop = load_experiment(DEPLOYMENTS / "experiments" / "tiny.yaml"), CLUSTERS / "laptop.yaml"
    with pytest.raises(UserError, match=r"no cluster file .*none\.yaml"):
        study_cluster(tiny, tmp_path / "none.yaml")
    with pytest.raises(UserError, match="The target is -1 tokens/s"):
        study_cluster(tiny, laptop, target_tokens_per_s=-1.0)
    with pytest.raises(UserError, match="Mode exhaustive plans a given cluster"):
        study_cluster(tiny, laptop, mode="exhaustive", budget_usd_per_h=1.0)


def test_what_the_planner_lets_a_person_choose_is_called_by_key_or_flag() -> None:
    assert NAMES.keys() == CHOICES.keys()
    for name in NAMES.values():
        if "." in name:
            section, key = name.split(".")
            assert hasattr(getattr(Experiment(), section), key), f"the experiment has no key {name}"
    small = [device.model_copy(update={"memory_bytes": 2**33}) for device in GPUS.devices]
    experiment = shipped("7b", "planner.train_type=a", "planner.zero_stage=0")
    asked = r"\(ZeRO 0\) as planner\.train_type a asks comes closest .*; with planner\.zero_stage 3 "
    with pytest.raises(UserError, match=asked):
        plan_run(experiment, Machine(name="host", devices=tuple(small)), RATES, Path(experiment.model.source))


GPUS = Machine(
    name="host",
    devices=tuple(
        Device(index=i, device_type=kind, kind="cuda", memory_bytes=2**38) for kind in ("a", "b") for i in range(4)
    ),
)
RATES = {kind: profile_of(kind, {64: 1e6}, 1e4) for kind in ("a", "b")}


def test_a_run_is_planned_under_its_wishes_on_the_devices_that_it_may_use() -> None:
    experiment = shipped("1.5b", "cluster.device_types=[b]", "planner.train_devices=2", "planner.zero_stage=2")
    plan = plan_run(experiment, GPUS, RATES, Path(experiment.model.source))
    assert {share.device_type for share in plan.shares} == {"b"}
    assert (plan.trainer.ranks, plan.trainer.zero_stage, plan.trainer.micro_batch_tokens) == (2, 2, 16384)
    with pytest.raises(UserError, match="'b' has no profile for this model: run `hexflow prepare"):
        plan_run(experiment, GPUS, {"a": RATES["a"]}, Path(experiment.model.source))


def test_what_nobody_wishes_for_the_planner_chooses() -> None:
    """On GPUs the micro-batch follows memory, the ZeRO stage is the first that fits; cores stay at 1,024 and 0."""
    free = ["planner.micro_batch_tokens=null", "planner.zero_stage=null", "planner.train_devices=4"]
    experiment = shipped("1.5b", *free)
    source = Path(experiment.model.source)
    plans = []
    for gib in (256, 24):
        devices = tuple(device.model_copy(update={"memory_bytes": gib * 2**30}) for device in GPUS.devices)
        plans.append(plan_run(experiment, GPUS.model_copy(update={"devices": devices}), RATES, source).trainer)
    assert [(plan.micro_batch_tokens, plan.zero_stage) for plan in plans] == [(16384, 0), (1024, 3)]
    cores = Machine(
        name="laptop", devices=tuple(Device(index=i, device_type="cpu", kind="cpu", memory_bytes=2**38) for i in (0, 1))
    )
    laptop = plan_run(Experiment(), cores, {"cpu": profile_of("cpu", {64: 10.0}, 10.0)}, source)
    assert (laptop.trainer.micro_batch_tokens, laptop.trainer.zero_stage) == (1024, 0)
