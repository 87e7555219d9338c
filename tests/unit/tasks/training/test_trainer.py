"""The trainer's processes against the real ledger, with a replica made of this test's thread."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file

from planners.errors import UserError
from planners.plan.run import RunPlan
from planners.workload.step import Workload
from tasks.config.experiment import Experiment
from tasks.config.sections import ModelSection, RunSection
from tasks.config.settings import Settings
from tasks.config.training import OptimizerSection
from tasks.exchange.files import write_json
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Fenced, Ledger
from tasks.exchange.trajectories import load_group, save_group
from tasks.exchange.weights import verify_weights
from tasks.lifecycle.scope import ActorScope
from tasks.machine.processes import ProcessGroup
from tasks.tracking.tracker import Tracker
from tasks.training.checkpoints import found_checkpoints, latest_checkpoint
from tasks.training.engine import Engine, StepResult
from tasks.training.groups import with_advantages
from tasks.training.launch import run_ranks, run_trainer
from tasks.training.leader import Leader, batch_metrics
from tasks.training.packing import TrainingGroup
from tasks.training.trainer import Trainer
from tests.support.ledger import a_process, assign, begin, join
from tests.support.plan import run_plan
from tests.support.training import free_port, make_engine, one_rank, parameters_of, random_groups, save_tiny_model

RUN = "training-test"
PLAN = run_plan(micro_batch_tokens=40)


class FakeReplica(threading.Thread):
    """Delivers random groups under the newest version for as long as it lives, `limit` at most."""

    def __init__(self, ledger: Ledger, run: RunDirectory, limit: int) -> None:
        super().__init__(daemon=True)
        self._ledger, self._run, self._limit = ledger, run, limit
        self._stopped = threading.Event()

    def run(self) -> None:
        actor = join(self._ledger, "replica", run_id=RUN)
        loaded = None
        while not self._stopped.wait(0.02):
            latest = self._ledger.latest_version(RUN)
            if latest is not None and latest != loaded and self._ledger.claim_version(actor, *latest):
                self._ledger.set_loaded(actor, *latest)
                loaded = latest
            if loaded is None or not self._limit:
                continue
            lease = self._ledger.lease_group(actor, loaded[1], f"lease-{self._limit}")
            if lease is None:
                continue
            self._limit -= 1
            (group,) = random_groups(1, seed=lease.prompt_index, version=lease.version)
            save_group(self._run.group_path(lease.group_id), replace(group, group_id=lease.group_id))
            tokens = sum(len(t.token_ids) for t in group.trajectories)
            self._ledger.complete_group(actor, lease.group_id, lease.version, 0.5, {"scored": 4}, tokens)

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def make_run(settings: Settings, experiment: Experiment, plan: RunPlan = PLAN) -> tuple[RunDirectory, Ledger]:
    run = RunDirectory(settings.shared.runs / RUN)
    run.create()
    write_json(run.experiment, experiment.model_dump(mode="json"))
    ledger = Ledger(settings.shared.ledger_url)
    sizes = experiment.workload
    supervisor = begin(ledger, RUN, (sizes.prompts_per_step, sizes.max_staleness, experiment.run.steps))
    assert ledger.add_plan_epoch(supervisor, plan) == 0
    return run, ledger


def make_experiment(model_path: Path, steps: int) -> Experiment:
    return Experiment(
        model=ModelSection(source=str(model_path)),
        optimizer=OptimizerSection(lr=1e-3),
        workload=Workload(prompts_per_step=3, group_size=4),
        run=RunSection(steps=steps, checkpoint_every=2, start_deadline_s=120, step_deadline_s=120),
    )


def replayed(run: RunDirectory, ledger: Ledger, experiment: Experiment) -> dict[str, torch.Tensor]:
    """The weights after training in this process, without interruption, on the groups that the ledger names."""
    engine = make_engine(experiment.algorithm, experiment.optimizer, steps=experiment.run.steps, micro_batch_tokens=40)
    for step in range(experiment.run.steps):
        ids = [row.group_id for row in ledger.groups(RUN) if row.step == step]
        groups = [load_group(run.group_path(group_id)) for group_id in ids]
        engine.train_step(with_advantages(groups, experiment.algorithm), step)
    return parameters_of(engine)


def assert_published(run: RunDirectory, version: tuple[int, int], expected: dict[str, torch.Tensor]) -> None:
    path = run.weights_path(*version)
    verify_weights(path)
    published = load_file(path / "model.safetensors")
    assert published.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(published[name], value, atol=2e-5, rtol=0, msg=name)


@pytest.mark.e2e
def test_two_ranks_train_like_one(settings: Settings, tmp_path: Path) -> None:
    experiment = make_experiment(save_tiny_model(tmp_path / "model"), steps=3)
    run, ledger = make_run(settings, experiment, run_plan(ranks=2, zero_stage=2, micro_batch_tokens=40))
    replica = FakeReplica(ledger, run, limit=100)
    replica.start()
    argv = [sys.executable, "-m", "tasks.training.trainer", "--run", RUN, "--epoch", "0"]
    argv += ["--attempt", str(assign(ledger, "trainer", run_id=RUN).attempt)]
    run_ranks(argv, {}, [run.log_path("trainer", 0, rank) for rank in (0, 1)])
    replica.stop()

    assert_published(run, (0, 3), replayed(run, ledger, experiment))
    assert found_checkpoints(run) == [(0, 2), (0, 3)]
    progress = ledger.progress(RUN)
    assert (progress.step, progress.consumed, progress.latest_version) == (3, 9, (0, 3))
    assert progress.max_staleness_seen <= experiment.workload.max_staleness
    metrics = ledger.steps(RUN)[-1].metrics
    assert {"reward/mean", "loss", "grad_norm", "lr", "mismatch_kl", "staleness/max", "train_s"} <= metrics.keys()
    assert metrics["response_tokens"] == metrics["trained_tokens"]
    assert {span.kind for span in ledger.spans(RUN)} == {"busy", "wait", "publish"}
    assert {actor.state for actor in ledger.actors(RUN) if actor.role == "trainer"} == {"done"}


@pytest.mark.e2e
def test_a_trainer_that_is_ended_and_resumed_trains_like_one_that_was_not(settings: Settings, tmp_path: Path) -> None:
    experiment = make_experiment(save_tiny_model(tmp_path / "model"), steps=4)
    run, ledger = make_run(settings, experiment)
    replica = FakeReplica(ledger, run, limit=8)  # two steps of three groups, and two groups that are too few
    replica.start()
    argv = [sys.executable, "-m", "tasks.training.trainer", "--run", RUN, "--epoch", "0"]
    argv += ["--attempt", str(assign(ledger, "trainer", run_id=RUN).attempt)]
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    process = ProcessGroup.start(argv, alone, run.log_path("trainer", 0))
    try:
        wait_until(lambda: trainer_says(ledger)[1] == "waiting for the groups of step 2", process)
        os.kill(process.pid, signal.SIGTERM)
        wait_until(lambda: process.poll() is not None, process)
        assert process.poll() == 128 + signal.SIGTERM
    finally:
        process.stop()
        replica.stop()
    assert trainer_says(ledger) == ("failed", "ended by SIGTERM")
    assert found_checkpoints(run) == [(0, 2)]

    assert ledger.resume_from(RUN, 2) == 1
    replica = FakeReplica(ledger, run, limit=100)
    replica.start()
    run_trainer(RUN, 0, "here", assign(ledger, "trainer", run_id=RUN).attempt, resume_step=2)
    replica.stop()
    assert_published(run, (1, 4), replayed(run, ledger, experiment))
    assert [row.step for row in ledger.steps(RUN)] == [0, 1, 2, 3]
    assert ledger.progress(RUN).dropped.get("stale", 0) == 0


def trainer_says(ledger: Ledger) -> tuple[str, str]:
    """State and message of the trainer's newest attempt."""
    return next(((a.state, a.message) for a in ledger.actors(RUN) if a.role == "trainer"), ("absent", ""))


def wait_until(condition: Callable[[], bool], process: ProcessGroup) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, process.tail()
        time.sleep(0.05)


class StubEngine:
    """Every update it makes is refused for not being finite, unless `skipped` says otherwise."""

    def __init__(self, skipped: list[int]) -> None:
        self._skipped = iter(skipped)
        self.steps: list[int] = []

    def state_dict(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {}

    def train_step(self, groups: list[TrainingGroup], step: int) -> StepResult:
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
    ledger.resume_from(RUN, 0)
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
    ledger.resume_from(RUN, 0)
    successor = make_leader(run, experiment, ledger, tmp_path)
    run.checkpoint_path(0, 2).mkdir()
    assert latest_checkpoint(run, ledger, RUN) is None
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
    ledger.heartbeat(replica, "starting", "loading vLLM")
    leader = make_leader(run, experiment, ledger, run.root)
    with pytest.raises(
        UserError, match=r"8 are needed; replica 0 on there is starting \(loading vLLM\), last heard \d+ s"
    ):
        leader.take_groups(0)


def test_metrics_of_the_data() -> None:
    groups = random_groups(3, seed=0, version=4)
    metrics = batch_metrics([], [group.outline for group in groups], step=6)
    rewards = [t.reward for g in groups for t in g.trajectories]
    assert metrics["reward/mean"] == pytest.approx(sum(rewards) / 12)
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (2, 2)
    assert metrics["reward/zero_variance_groups"] == 0
