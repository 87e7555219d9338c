"""Opening a run: new, taken up again by the same flow run, resumed after a crash, refused where somebody is at work."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import update

from flows.running import context
from flows.running.context import SUPERVISOR_SILENCE_S, RunContext, open_run, require_unsupervised
from planners.errors import UserError
from tasks import readiness
from tasks.config.experiment import Experiment
from tasks.config.files import parse_experiment
from tasks.config.settings import Settings
from tasks.exchange.ledger import Fenced, Ledger, Process
from tasks.exchange.ledger.schema import actors
from tasks.machine.devices import hold_devices
from tasks.machine.discovery import discover_machine
from tasks.machine.processes import ProcessGroup, group_alive, process_key
from tests.support.checkpoints import damage, make_checkpoint
from tests.support.ledger import a_process, assign, join, lease, score, take


@pytest.fixture
def experiment() -> Experiment:
    return parse_experiment({"workload": {"prompts_per_step": 2}, "run": {"steps": 3, "name": "short"}}, "test")


def test_a_new_run_is_written_down_before_anything_starts(settings: Settings, experiment: Experiment) -> None:
    run = open_run(experiment, None, "flow-1")
    assert run.run_id.startswith("short-")
    assert Experiment.model_validate_json(run.directory.experiment.read_text()) == experiment
    assert run.ledger.evaluations(run.run_id)["before"].state == "requested"
    assert run.resume_step is None


@pytest.fixture(autouse=True)
def _every_opening_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "this_process", lambda machine: a_process(machine=machine))


def test_a_run_with_a_live_supervisor_is_not_resumed(
    settings: Settings, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(experiment, None, "flow-1")
    beating = partial(require_unsupervised, pause=lambda seconds: run.ledger.heartbeat(run.supervisor))
    monkeypatch.setattr(context, "require_unsupervised", beating)
    with pytest.raises(UserError, match="is being worked on"):
        open_run(experiment, run.run_id, "flow-2")
    run.ledger.heartbeat(run.supervisor)


def test_a_supervisor_that_stays_silent_for_long_enough_is_replaced(settings: Settings, experiment: Experiment) -> None:
    """However old its last beat is on any clock: silence is what is seen."""
    run, clock = open_run(experiment, None, "flow-1"), Clock()
    with run.ledger.write(run.run_id) as connection:
        connection.execute(update(actors).values(heartbeat_s=0.0))
    assert require_unsupervised(run.run_id, run.ledger, clock.pause, clock) == (1, 1)
    assert SUPERVISOR_SILENCE_S <= clock.now_s < SUPERVISOR_SILENCE_S + 2.0


def test_a_supervisor_whose_process_is_gone_is_not_waited_for(settings: Settings, experiment: Experiment) -> None:
    dead = subprocess.Popen(["sleep", "60"])
    process = Process(process_key(dead.pid), dead.pid, "here")
    ledger = Ledger(settings.shared.ledger_url)
    ledger.begin_run("dead", process, prompts_per_step=1, max_staleness=0, steps=1, max_attempts_per_prompt=1)
    clock = Clock()
    dead.kill()
    dead.wait()
    assert require_unsupervised("dead", ledger, clock.pause, clock) == (1, 1)
    assert clock.now_s == 0.0


def test_a_ledger_too_slow_to_tell_is_said(settings: Settings, experiment: Experiment) -> None:
    """Between two looks so much time passes that a beat could have been missed, again and again."""
    run, clock = open_run(experiment, None, "flow-1"), Clock()
    with pytest.raises(UserError, match="could not be told within 60 s"):
        require_unsupervised(run.run_id, run.ledger, lambda seconds: clock.pause(6.0), clock)
    assert clock.now_s < 70.0


def test_what_a_former_supervisor_left_here_is_ended_although_it_hears_nothing(
    settings: Settings, experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped actor would hold its devices against the run that goes on."""
    monkeypatch.setattr(context, "_LEAVE_S", 0.0)
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    groups = [ProcessGroup.start(sleeper, {}, tmp_path / "sleeper.log") for _ in range(2)]
    try:
        run = open_run(experiment, None, "flow-1")
        actor = assign(run.ledger, "replica", run_id=run.run_id)
        run.ledger.register(actor, Process(process_key(groups[0].pid), groups[0].pid, "here"))
        os.kill(groups[0].pid, signal.SIGSTOP)
        stranger = assign(run.ledger, "trainer", run_id=run.run_id)
        run.ledger.register(stranger, Process("another boot/1/1", groups[1].pid, "here"))
        run.ledger.finish(run.supervisor, "failed")
        open_run(experiment, run.run_id, "flow-2")
        assert [group_alive(group.pid) for group in groups] == [False, True]
    finally:
        for group in groups:
            group.stop(0.0)


class Clock:
    """Time that passes only while somebody pauses."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_resume_fences_what_the_dead_attempt_left(settings: Settings, experiment: Experiment) -> None:
    run = open_run(experiment, None, "flow-1")
    orphan = join(run.ledger, "replica", 1, run.run_id)
    run.ledger.heartbeat(orphan)
    assert run.ledger.lease_group(orphan, 0, "lease") is not None
    assert run.ledger.claim_evaluation(orphan, 0) is not None
    run.ledger.finish(run.supervisor, "failed")  # as a crash does after SUPERVISOR_SILENCE_S

    resumed = open_run(experiment, run.run_id, "flow-2")
    assert resumed.run_id == run.run_id
    assert resumed.resume_step == 0
    with pytest.raises(Fenced):
        run.ledger.heartbeat(orphan)
    assert run.ledger.progress(run.run_id).groups["leased"] == 0
    assert run.ledger.evaluations(run.run_id)["before"].state == "requested"


def test_a_refused_resume_leaves_everything_as_it_is(
    settings: Settings, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one from the Prefect page, where no command has looked at the devices before."""
    monkeypatch.setattr(readiness, "LEAVING_S", 0.0)
    run = open_run(experiment, None, "flow-1")
    replica = join(run.ledger, "replica", 0, run.run_id)
    run.ledger.finish(run.supervisor, "failed")
    before = run.ledger.find_run(run_id=run.run_id), run.ledger.actors(run.run_id)[0].attempt
    machine = discover_machine()
    device = machine.devices[0]
    with (
        hold_devices(machine.name, device.kind, [device.index], "other-1 (train 0)", settings),
        pytest.raises(UserError, match=r"is held by other-1 \(train 0\)"),
    ):
        open_run(experiment, run.run_id, "flow-2")
    assert (run.ledger.find_run(run_id=run.run_id), run.ledger.actors(run.run_id)[0].attempt) == before
    run.ledger.heartbeat(replica)
    with hold_devices(machine.name, device.kind, [device.index], f"{run.run_id} (rollout 0)", settings):
        open_run(experiment, run.run_id, "flow-2")


def with_two_checkpoints(settings: Settings, experiment: Experiment) -> RunContext:
    """A failed run of two finished steps with a checkpoint of each."""
    experiment = experiment.model_copy(update={"run": experiment.run.model_copy(update={"checkpoint_every": 1})})
    run = open_run(experiment, None, "flow-1")
    trainer = join(run.ledger, "trainer", 0, run.run_id)
    replica = join(run.ledger, "replica", 0, run.run_id)
    for step in (0, 1):
        for _ in range(2):
            score(run.ledger, replica, lease(run.ledger, replica))
        take(run.ledger, trainer, step)
        run.ledger.record_step(trainer, step, "{}")
        make_checkpoint(run.directory, 0, step + 1)
    run.ledger.finish(run.supervisor, "failed")
    return run


def test_a_resume_takes_the_newest_whole_checkpoint_and_names_the_damaged_one(
    settings: Settings, experiment: Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    run = with_two_checkpoints(settings, experiment)
    part = damage(run.directory.checkpoint_path(0, 2))
    assert open_run(experiment, run.run_id, "flow-2").resume_step == 1
    assert f"The checkpoint of step 2 cannot be continued: {part} differs in size" in capsys.readouterr().out
    assert [row.step for row in run.ledger.steps(run.run_id)] == [0]


def test_a_resume_without_a_whole_checkpoint_says_so_and_takes_nothing_back(
    settings: Settings, experiment: Experiment
) -> None:
    run = with_two_checkpoints(settings, experiment)
    for step in (1, 2):
        damage(run.directory.checkpoint_path(0, step))
    with pytest.raises(UserError, match="none of its checkpoints is whole"):
        open_run(experiment, run.run_id, "flow-2")
    row = run.ledger.find_run(run_id=run.run_id)
    assert row is not None
    supervisor = next(actor for actor in run.ledger.actors(run.run_id) if actor.role == "supervisor")
    assert (row.state, row.lineage) == ("failed", 0)
    assert (supervisor.state, supervisor.attempt) == ("failed", 2)
    assert [row.step for row in run.ledger.steps(run.run_id)] == [0, 1]


def test_the_same_flow_run_takes_its_run_up_again(settings: Settings, experiment: Experiment) -> None:
    first = open_run(experiment, None, "flow-1")
    again = open_run(experiment, None, "flow-1")
    assert again.run_id == first.run_id
    with pytest.raises(Fenced):
        first.ledger.heartbeat(first.supervisor)


def test_runs_that_cannot_be_resumed(settings: Settings, experiment: Experiment) -> None:
    with pytest.raises(UserError, match="There is no run absent to resume"):
        open_run(experiment, "absent", "flow-1")
    run = open_run(experiment, None, "flow-2")
    run.ledger.close_run(run.supervisor, "completed")
    run.ledger.finish(run.supervisor, "done")
    with pytest.raises(UserError, match="is complete"):
        open_run(experiment, run.run_id, "flow-3")


def test_a_run_whose_directory_is_gone(settings: Settings, experiment: Experiment) -> None:
    run = open_run(experiment, None, "flow-1")
    run.ledger.finish(run.supervisor, "failed")
    run.directory.experiment.unlink()
    with pytest.raises(UserError, match="its directory"):
        open_run(experiment, run.run_id, "flow-2")
    assert Ledger(settings.shared.ledger_url).find_run(run_id=run.run_id) is not None


def test_paths_are_under_the_settings(settings: Settings, experiment: Experiment) -> None:
    run = open_run(experiment, None, None)
    assert Path(settings.shared.runs) in run.directory.root.parents
