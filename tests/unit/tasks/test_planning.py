"""Plans for described clusters keep to what the experiment asks; shipped experiments fit shipped clusters."""

from pathlib import Path

import pytest

from planners.errors import UserError
from planners.hardware.topology import read_cluster
from planners.search.columns import Problem, TrainingWish, rollout_columns, training_columns
from planners.workload.model import read_model
from tasks import planning as cluster_planning
from tasks.config.experiment import Experiment
from tasks.config.files import load_experiment
from tasks.config.settings import Settings, load_settings
from tasks.planning import demand_for, study_cluster
from tests.support.places import DEPLOYMENTS

CLUSTERS = DEPLOYMENTS / "clusters"


def shipped(size: str, *overrides: str) -> Experiment:
    source = f"model.source={DEPLOYMENTS / 'models' / f'r1-distill-qwen-{size}'}"
    return load_experiment(DEPLOYMENTS / "experiments" / f"r1-distill-qwen-{size}.yaml", [source, *overrides])


@pytest.mark.parametrize("size", ["1.5b", "7b", "14b"])
def test_shipped_experiments_fit_every_shipped_cluster_of_gpus(size: str) -> None:
    """With the longest answer in a micro-batch, the ZeRO stage they name, and a cache for their longest context."""
    experiment = shipped(size)
    model, demand = read_model(Path(experiment.model.source)), demand_for(experiment)
    for file in sorted(CLUSTERS.glob("*.yaml")):
        wish = TrainingWish(zero=experiment.algorithm.zero_stage)
        problem = Problem(read_cluster(file), model, demand, training_wish=wish)
        if file.stem != "laptop":
            assert {c.layout.zero for c in training_columns(problem)} == {experiment.algorithm.zero_stage}
            assert rollout_columns(problem)


def test_a_cluster_is_planned_as_the_experiment_asks() -> None:
    """What-if opens layouts that it has no words for; devices it may not use are left out of both."""
    asked = ("planner.train_type=h20", "planner.train_devices=4", "algorithm.zero_stage=2", "rollout.concurrency=40")
    file, settings = CLUSTERS / "paper-h800-8-h20-16.yaml", load_settings()
    study = study_cluster(shipped("1.5b", *asked), file, settings)
    (stage,) = study.plan.trainer.stages
    assert (stage.device_type, stage.data, study.plan.trainer.zero_stage) == ("h20", 4, 2)
    assert {replica.concurrency for replica in study.plan.replicas} == {32}
    assert "One more h20" in study.explain()
    free = study_cluster(shipped("1.5b", *asked), file, settings, what_if=True)
    assert free.plan.step_s < study.plan.step_s
    assert "training_wish" not in free.wishes
    for what_if in (False, True):
        only = study_cluster(shipped("1.5b", "cluster.device_types=[h20]"), file, settings, what_if=what_if)
        assert set(only.topology.types) == {"h20"}
    for unknown in ("planner.train_type=h2O", "cluster.device_types=[h2O]"):
        with pytest.raises(UserError, match=r"'h2O', which cluster paper-h800-8-h20-16 lacks .*mean 'h20'"):
            study_cluster(shipped("1.5b", unknown), file, settings)
    with pytest.raises(UserError, match=r"planner.train_devices 9 asks: .* on paper-h800-8-h20-16 that are at most 8"):
        study_cluster(shipped("1.5b", "planner.train_devices=9"), file, settings)


def test_cluster_and_wishes_are_checked_before_a_model_is_made_ready(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may take a minute."""

    def prepare(*_: object) -> Path:
        raise AssertionError("a model would have been made ready")

    monkeypatch.setattr(cluster_planning, "prepare_model", prepare)
    tiny, laptop = load_experiment(DEPLOYMENTS / "experiments" / "tiny.yaml"), CLUSTERS / "laptop.yaml"
    with pytest.raises(UserError, match=r"no cluster file .*none\.yaml"):
        study_cluster(tiny, tmp_path / "none.yaml", settings)
    with pytest.raises(UserError, match="The target is -1 tokens/s"):
        study_cluster(tiny, laptop, settings, target_tokens_per_s=-1.0)
    with pytest.raises(UserError, match="Mode exhaustive plans a given cluster"):
        study_cluster(tiny, laptop, settings, mode="exhaustive", budget_usd_per_h=1.0)
