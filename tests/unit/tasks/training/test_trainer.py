"""The trainer's loop and its leader against the real ledger."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file

from planners.errors import UserError
from planners.workload.step import Workload
from tasks.config.experiment import Experiment
from tasks.config.sections import RunSection
from tasks.config.settings import Settings
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Fenced, Ledger
from tasks.exchange.payloads import save_group
from tasks.lifecycle.scope import ActorScope
from tasks.tracking.tracker import Tracker
from tasks.training.checkpoints import found_checkpoints, resume_point
from tasks.training.engine import Engine, StepData, StepResult
from tasks.training.leader import Leader, batch_metrics
from tasks.training.packing import TrainingGroup
from tasks.training.trainer import Trainer
from tests.support.checkpoints import make_checkpoint
from tests.support.ledger import a_process, go_back, join, lease, score, take
from tests.support.trainer import RUN, make_run
from tests.support.training import one_rank, random_groups, save_tiny_model


class StubEngine:
    """Every update it makes is refused for not being finite, unless `skipped` says otherwise."""

    def __init__(self, skipped: list[int]) -> None:
        self._skipped = iter(skipped)
        self.steps: list[int] = []

    def state_dict(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {}

    def read(self, groups: list[TrainingGroup]) -> StepData:
        for group in groups:
            group.read()
        return StepData([], [])

    def train(self, data: StepData, step: int) -> StepResult:
        self.steps.append(step)
        return StepResult({}, updates=1, skipped=next(self._skipped))


def follower(settings: Settings, engine: StubEngine, max_staleness: int) -> Trainer:
    """A trainer of 20 steps without a ledger, fed with one group of version 0 again and again."""
    experiment = Experiment(
        workload=Workload(prompts_per_step=1, max_staleness=max_staleness),
        run=RunSection(steps=20, checkpoint_every=100),
    )
    run = RunDirectory(settings.shared.runs / RUN)
    run.create()
    save_group(run.group_path(0), random_groups(1, seed=0)[0])
    return Trainer(run, experiment, cast(Engine, engine), one_rank(), None)


def test_training_is_given_up_after_several_updates_in_a_row_that_are_not_finite(settings: Settings) -> None:
    engine = StubEngine([1, 1, 1, 1, 0, 1, 1, 1, 1, 1])
    with pytest.raises(UserError, match="not finite in 5 steps in a row, the last being step 9"):
        follower(settings, engine, max_staleness=20).train(0)
    assert engine.steps == list(range(10))


def test_a_group_past_the_bound_is_never_trained_on(settings: Settings) -> None:
    engine = StubEngine([0] * 20)
    with pytest.raises(RuntimeError, match="group 0 has a token of version 0, more than 2 versions older than step 3"):
        follower(settings, engine, max_staleness=2).train(0)
    assert engine.steps == [0, 1, 2]


def make_leader(run: RunDirectory, experiment: Experiment, ledger: Ledger, model_path: Path) -> Leader:
    actor = join(ledger, "trainer", run_id=RUN)
    lineage = ledger.lineage_of(actor)
    scope = ActorScope(ledger, actor, a_process(), lambda reason: None)
    return Leader(run, experiment, model_path, ledger, actor, lineage, scope, Tracker(None))


def weights_of(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2,), value)}


def test_a_replaced_trainer_that_wakes_up_publishes_nothing(settings: Settings, tmp_path: Path) -> None:
    experiment, model_path = Experiment(), save_tiny_model(tmp_path / "model")
    run, ledger = make_run(settings, experiment)
    zombie = make_leader(run, experiment, ledger, model_path)
    zombie.publish(0, weights_of(0.0))
    go_back(ledger, 0, RUN)
    successor = make_leader(run, experiment, ledger, model_path)
    for number in (0, 1):
        with pytest.raises(Fenced):
            zombie.publish(number, weights_of(1.0))
    assert list(run.weights.iterdir()) == [run.weights_path(0, 0)]
    successor.publish(0, weights_of(2.0))
    assert ledger.latest_version(RUN) == (1, 0)
    assert load_file(run.weights_path(1, 0) / "model.safetensors")["weight"].tolist() == [2.0, 2.0]


def test_what_a_trainer_names_after_it_was_replaced_is_nobodys_checkpoint(settings: Settings, tmp_path: Path) -> None:
    """It may be paused between its last look at its fence and the rename, or before it deletes old ones."""
    experiment = Experiment()
    run, ledger = make_run(settings, experiment)
    zombie = make_leader(run, experiment, ledger, tmp_path)
    go_back(ledger, 0, RUN)
    successor = make_leader(run, experiment, ledger, tmp_path)
    make_checkpoint(run, 0, 2)
    assert resume_point(run, ledger, RUN, experiment.run) == 0
    with pytest.raises(UserError, match=r"no checkpoint of step 2, it has \[\]: .* `hexflow resume"):
        successor.checkpoint_lineage(2)
    with pytest.raises(Fenced):
        zombie.delete_checkpoints()
    assert found_checkpoints(run) == [(0, 2)]
    successor.delete_checkpoints()
    assert found_checkpoints(run) == []


def test_only_a_recorded_version_is_taken_as_published(settings: Settings, tmp_path: Path) -> None:
    experiment, model_path = Experiment(), save_tiny_model(tmp_path / "model")
    run, ledger = make_run(settings, experiment)
    leader = make_leader(run, experiment, ledger, model_path)
    leader.publish(0, weights_of(0.0))
    leader.publish(0, weights_of(1.0))
    assert load_file(run.weights_path(0, 0) / "model.safetensors")["weight"].tolist() == [0.0, 0.0]
    run.weights_path(0, 1).mkdir()
    with pytest.raises(FileExistsError, match="published already"):
        leader.publish(1, weights_of(1.0))
    assert ledger.latest_version(RUN) == (0, 0)


def test_the_message_of_a_silent_rollout_side_says_who_is_silent(settings: Settings) -> None:
    experiment = Experiment(run=RunSection(step_deadline_s=0.2, start_deadline_s=0.2))
    run, ledger = make_run(settings, experiment)
    replica = join(ledger, "replica", run_id=RUN, machine="there")
    ledger.heartbeat(replica, "running", "hangs")
    leader = make_leader(run, experiment, ledger, run.root)
    ledger.heartbeat(leader.actor)
    with pytest.raises(UserError, match=r"8 are needed; replica 0 on there is running \(hangs\), last heard \d+ s"):
        leader.take_groups(0, lambda: None)


def test_damaged_payloads_are_dropped_and_their_step_is_decided_anew(settings: Settings, tmp_path: Path) -> None:
    """The outline of one, and the tokens of another, of a step that was decided before, as after a resume."""
    experiment = Experiment(
        workload=Workload(prompts_per_step=2, max_staleness=1),
        run=RunSection(steps=3, checkpoint_every=100, step_deadline_s=0.2),
    )
    run, ledger = make_run(settings, experiment)
    replica = join(ledger, "replica", run_id=RUN)
    leader = make_leader(run, experiment, ledger, save_tiny_model(tmp_path / "model"))

    def deliver(count: int) -> list[Path]:
        leases = [lease(ledger, replica) for _ in range(count)]
        for leased in leases:
            (group,) = random_groups(1, seed=leased.prompt_index)
            save_group(run.group_path(leased.group_id), replace(group, group_id=leased.group_id))
            score(ledger, replica, leased)
        return [run.group_path(leased.group_id) for leased in leases]

    first, second, *_ = deliver(4)
    first.write_bytes(first.read_bytes()[:50])
    second.write_bytes(second.read_bytes()[:-1])
    engine = StubEngine([0, 0])
    for actor in (replica, leader.actor):
        ledger.heartbeat(actor)
    decided = take(ledger, leader.actor, 0)
    assert [row.group_id for row in decided] == [1, 2]
    trainer = Trainer(run, experiment, cast(Engine, engine), one_rank(), leader)
    with pytest.raises(UserError, match="did not deliver the groups of step 1"):
        trainer.train(0)
    assert engine.steps == [0]
    assert ledger.progress(RUN).dropped == {"damaged": 2}
    assert [row.group_id for row in take(ledger, leader.actor, 0)] == [3, 4]
    assert [lease(ledger, replica).prompt_index for _ in range(2)] == [0, 1]


def test_metrics_of_the_data() -> None:
    groups = random_groups(3, seed=0, version=4)
    metrics = batch_metrics([], [group.outline for group in groups], step=6)
    rewards = [t.reward for g in groups for t in g.trajectories]
    assert metrics["reward/mean"] == pytest.approx(sum(rewards) / 12)
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (2, 2)
    assert metrics["reward/zero_variance_groups"] == 0
