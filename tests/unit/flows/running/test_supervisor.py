"""The supervisor against a real ledger and a hand-written launcher: completion, restarts, budgets, stalls, endings."""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from flows.running import supervisor as supervising
from flows.running.context import RunContext
from flows.running.supervisor import RunFailed, Supervisor
from planners.errors import UserError
from tasks.exchange.ledger import Actor, ActorRow, Fenced, Process, Progress, sqlite
from tasks.lifecycle.stall import Stall
from tasks.machine.processes import ProcessGroup, group_alive, process_key
from tests.support.checkpoints import damage, make_checkpoint
from tests.support.ledger import RUN, a_process, go_back
from tests.support.supervising import PLAN, finish_run, make, train_run


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "POLL_S", 0.0)


def settle(run: RunContext) -> None:
    """Close the run from outside, as the stack does where its supervisor's process is gone."""
    row = next(row for row in run.ledger.actors(RUN) if row.role == "supervisor")
    assert run.ledger.settle_run(run.supervisor, row.serial, "cancelled")


def test_a_run_ends_when_trained_and_evaluated(tmp_path: Path) -> None:
    run, launcher = make(tmp_path)
    seen: list[int] = []

    def on_progress(progress: object) -> None:
        seen.append(1)
        finish_run(launcher)

    Supervisor(run, 0, PLAN, launcher, on_progress).run()
    assert launcher.started == ["train", "rollout"]
    assert seen


def test_a_dead_replica_is_started_again(tmp_path: Path) -> None:
    run, launcher = make(tmp_path)
    looks = 0

    def on_progress(progress: object) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            launcher.ended.add("rollout-2")  # its flow run is over although its heartbeat is fresh
        if looks >= 3:
            finish_run(launcher)

    Supervisor(run, 0, PLAN, launcher, on_progress).run()
    assert launcher.started == ["train", "rollout", "rollout"]


def test_a_dead_trainer_goes_on_from_its_checkpoint_in_a_new_lineage(tmp_path: Path) -> None:
    run, launcher = make(tmp_path, step_deadline_s=0.2, start_deadline_s=0.2)
    looks = 0

    def on_progress(progress: object) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            launcher.ledger.finish(launcher.actors["train-1"], "failed", "killed")

    go_back(run.ledger, 0)
    before = run.ledger.find_run(run_id=RUN)
    with pytest.raises(RunFailed, match="No step"):
        Supervisor(run, 0, PLAN, launcher, on_progress).run()
    after = run.ledger.find_run(run_id=RUN)
    assert launcher.started[-1] == "train"
    assert before is not None
    assert after is not None
    assert after.lineage == before.lineage + 1


def test_a_dead_trainer_passes_over_a_damaged_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where no other is whole the run ends and says so, and nothing of it is taken back."""
    run, launcher = make(tmp_path, steps=2, checkpoint_every=1)
    looks = 0

    def on_progress(progress: object) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            finish_run(launcher)
            damage(make_checkpoint(run.directory, 0, 1))
            launcher.ledger.finish(launcher.actors["train-1"], "failed", "killed")

    with pytest.raises(UserError, match=r"none of its checkpoints is whole .*part-00000\.safetensors differs"):
        Supervisor(run, 0, PLAN, launcher, on_progress).run()
    assert "The checkpoint of step 1 cannot be continued" in capsys.readouterr().out
    assert launcher.started == ["train", "rollout"]
    assert [row.step for row in run.ledger.steps(RUN)] == [0]


def test_a_replica_that_left_before_the_end_is_started_again(tmp_path: Path) -> None:
    run, launcher = make(tmp_path)
    looks = 0

    def on_progress(progress: object) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            launcher.ledger.finish(launcher.actors["rollout-2"], "done")
        if looks >= 3:
            finish_run(launcher)

    Supervisor(run, 0, PLAN, launcher, on_progress).run()
    assert launcher.started == ["train", "rollout", "rollout"]


@pytest.mark.parametrize("dies", [False, True])
def test_a_replica_that_was_to_leave_is_not_started_again(dies: bool, tmp_path: Path) -> None:
    """Whether it says that it is done, or dies before it can."""
    run, launcher = make(tmp_path)
    looks = 0

    def on_progress(progress: object) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            run.ledger.want(run.supervisor, launcher.actors["rollout-2"], "drain")
            if dies:
                launcher.ended.add("rollout-2")
            else:
                run.ledger.finish(launcher.actors["rollout-2"], "done")
        if looks == 5:
            settle(run)

    with pytest.raises(Fenced):
        Supervisor(run, 0, PLAN, launcher, on_progress).run()
    assert launcher.started == ["train", "rollout"]
    assert launcher.cancelled == (["rollout-2"] if dies else [])


def test_a_run_that_is_ended_elsewhere_is_not_kept_alive(tmp_path: Path) -> None:
    run, launcher = make(tmp_path)

    with pytest.raises(Fenced, match="declared dead"):
        Supervisor(run, 0, PLAN, launcher, lambda progress: settle(run)).run()
    assert len(launcher.started) == 2


def test_the_restart_budget_ends(tmp_path: Path) -> None:
    run, launcher = make(tmp_path, restarts=1)

    def on_progress(progress: object) -> None:
        launcher.ended.add(f"rollout-{len(launcher.started)}")

    with pytest.raises(RunFailed, match=r"budget run\.restarts is spent"):
        Supervisor(run, 0, PLAN, launcher, on_progress).run()


def test_what_never_worked_is_not_tried_again(tmp_path: Path) -> None:
    run, launcher = make(tmp_path)

    def on_progress(progress: object) -> None:
        launcher.ledger.heartbeat(launcher.actors["rollout-2"], "starting")
        launcher.ledger.finish(launcher.actors["rollout-2"], "failed", "not enough memory: 2 GiB short")

    with pytest.raises(RunFailed, match="could not start: not enough memory"):
        Supervisor(run, 0, PLAN, launcher, on_progress).run()
    assert len(launcher.started) == 2


def test_a_restarted_actor_that_fails_while_starting_is_started_again(tmp_path: Path) -> None:
    """It did work: its devices may not be free yet, or it met a file that the next attempt does without."""
    run, launcher = make(tmp_path, restarts=2)
    looks = 0

    def on_progress(progress: object) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            launcher.ended.add("rollout-2")
        if looks == 2:
            launcher.ledger.heartbeat(launcher.actors["rollout-3"], "starting")
            launcher.ledger.finish(launcher.actors["rollout-3"], "failed", "GPU 0 is held")
        if looks >= 4:
            finish_run(launcher)

    Supervisor(run, 0, PLAN, launcher, on_progress).run()
    assert launcher.started == ["train", "rollout", "rollout", "rollout"]


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("gets_on", [True, False])
def test_an_evaluation_longer_than_the_step_deadline_fails_no_trained_run(
    gets_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it gets on; on a resume as well, which finds every step trained."""
    run, launcher = make(tmp_path, step_deadline_s=5.0)
    clock = Clock()
    monkeypatch.setattr(supervising, "Stall", lambda ledger, run_id: Stall(ledger, run_id, clock))
    answers = 0

    def evaluate(progress: Progress) -> None:
        nonlocal answers
        clock.now_s += 2.0
        train_run(launcher)
        replica = launcher.actors["rollout-2"]
        answers += gets_on
        launcher.ledger.heartbeat(replica, work=answers)
        if answers > 20 and launcher.ledger.claim_evaluation(replica, 1):
            launcher.ledger.record_evaluation(replica, "after", json.dumps({}))

    supervisor = Supervisor(run, 0, PLAN, launcher, evaluate)
    if gets_on:
        supervisor.run()
        assert clock.now_s > 40.0
    else:
        with pytest.raises(RunFailed, match="The last evaluation did not get on for 6 s"):
            supervisor.run()


def test_a_flow_run_that_ends_before_joining_is_noticed(tmp_path: Path) -> None:
    run, launcher = make(tmp_path, restarts=0)
    launcher.joins = False

    def on_progress(progress: object) -> None:
        launcher.ended.add("train-1")

    with pytest.raises(RunFailed, match="ended before it joined"):
        Supervisor(run, 0, PLAN, launcher, on_progress).run()


def test_a_stall_names_the_actors(tmp_path: Path) -> None:
    run, launcher = make(tmp_path, step_deadline_s=0.1, start_deadline_s=0.1)
    with pytest.raises(RunFailed, match=r"No step was finished.*replica 0 running.*trainer 0 running"):
        Supervisor(run, 0, PLAN, launcher, lambda progress: None).run()


def test_children_that_do_not_leave_are_cancelled(tmp_path: Path) -> None:
    run, launcher = make(tmp_path)
    supervisor = Supervisor(run, 0, PLAN, launcher, lambda progress: finish_run(launcher))
    supervisor.run()
    supervisor.end_children(0.1, 5.0, threading.Event())
    assert launcher.cancelled == ["train-1", "rollout-2"]


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[ProcessGroup]:
    """A process that stands for an actor which is past hearing."""
    group = ProcessGroup.start([sys.executable, "-c", "import time; time.sleep(600)"], {}, tmp_path / "hung.log")
    os.kill(group.pid, signal.SIGSTOP)
    yield group
    group.stop(0.0)


def test_a_dead_actor_is_ended_although_its_cancellation_is_lost(tmp_path: Path, hung: ProcessGroup) -> None:
    """The end of its process ends its flow run, which gives the devices back; until then it is not forgotten."""
    run, launcher = make(tmp_path, heartbeat_deadline_s=5.0, restarts=10)
    launcher.is_away, launcher.pids = True, {"rollout-2": hung.pid}

    def on_progress(progress: object) -> None:
        current = {actor.role: actor for actor in launcher.actors.values()}
        for actor in current.values():
            if actor is not launcher.actors["rollout-2"]:
                launcher.ledger.heartbeat(actor)
        if "rollout-3" in launcher.actors:
            finish_run(launcher)

    supervisor = Supervisor(run, 0, PLAN, launcher, on_progress)
    supervisor.run()
    assert not group_alive(hung.pid)
    launcher.ended |= set(launcher.actors) - {"rollout-2"}
    launcher.cancelled.clear()
    supervisor.end_children(0.0, 0.1, threading.Event())
    assert set(launcher.cancelled) == {"rollout-2"}


def test_a_cancellation_that_was_not_heard_is_repeated(tmp_path: Path) -> None:
    run, launcher = make(tmp_path)
    launcher.is_away = True
    supervisor = Supervisor(run, 0, PLAN, launcher, lambda progress: finish_run(launcher))
    supervisor.run()
    cancel = launcher.cancel

    def hear_at_last(flow_run_id: str) -> None:
        launcher.is_away = launcher.cancelled.count(flow_run_id) < 3
        cancel(flow_run_id)

    launcher.cancel = hear_at_last  # type: ignore[method-assign]
    supervisor.end_children(0.0, 30.0, threading.Event())
    assert launcher.ended == {"train-1", "rollout-2"}


def test_what_does_not_leave_is_fenced_and_killed(tmp_path: Path, hung: ProcessGroup) -> None:
    run, launcher = make(tmp_path)
    launcher.is_away, launcher.pids = True, {"rollout-2": hung.pid}
    supervisor = Supervisor(run, 0, PLAN, launcher, lambda progress: finish_run(launcher))
    supervisor.run()
    supervisor.end_children(0.0, 0.1, threading.Event())
    assert not group_alive(hung.pid)
    states = {actor.role: actor.state for actor in run.ledger.actors(RUN)}
    assert states == {"supervisor": "starting", "trainer": "fenced", "replica": "fenced"}


def test_a_full_disk_keeps_no_actor_alive(tmp_path: Path, hung: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    run, launcher = make(tmp_path)
    launcher.is_away, launcher.pids = True, {"rollout-2": hung.pid}
    supervisor = Supervisor(run, 0, PLAN, launcher, lambda progress: finish_run(launcher))
    supervisor.run()
    asked: list[str] = []

    def refuse(supervisor: Actor, actor: Actor) -> None:
        asked.append(actor.role)
        raise OperationalError("", {}, Exception("database or disk is full"))

    monkeypatch.setattr(run.ledger, "fence", refuse)
    supervisor.end_children(0.0, 0.1, threading.Event())
    assert not group_alive(hung.pid)
    assert asked == ["trainer", "replica"], "one that could not be fenced hindered the next"


def test_a_ledger_that_is_locked_is_not_waited_for_at_the_end(
    tmp_path: Path, hung: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other call of the supervisor's would be made again for minutes."""
    monkeypatch.setattr(sqlite, "LOCK_WAIT_S", 0.1)
    run, launcher = make(tmp_path)
    launcher.is_away, launcher.pids = True, {"rollout-2": hung.pid}
    supervisor = Supervisor(run, 0, PLAN, launcher, lambda progress: finish_run(launcher))
    supervisor.run()
    with run.ledger.write(RUN):
        supervisor.end_children(0.0, 0.1, threading.Event())
    assert not group_alive(hung.pid)


def test_a_ledger_that_cannot_be_read_keeps_no_actor_alive(
    tmp_path: Path, hung: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, launcher = make(tmp_path)
    launcher.is_away, launcher.pids = True, {"rollout-2": hung.pid}
    supervisor = Supervisor(run, 0, PLAN, launcher, lambda progress: finish_run(launcher))
    supervisor.run()

    def refuse(*_: object) -> None:
        raise OperationalError("", {}, Exception("the server closed the connection"))

    for call in ("actors", "fence"):
        monkeypatch.setattr(run.ledger, call, refuse)
    supervisor.end_children(0.0, 0.1, threading.Event())
    assert not group_alive(hung.pid)


def test_a_supervisor_that_was_replaced_touches_no_actor_of_its_successor(tmp_path: Path, hung: ProcessGroup) -> None:
    """It was stopped, its run resumed, and it goes on: the actor in its slot is another one now."""
    run, launcher = make(tmp_path)
    launcher.is_away = True

    def resume(progress: object) -> None:
        seen = next((row.attempt, row.serial) for row in run.ledger.actors(RUN) if row.role == "supervisor")
        successor = run.ledger.take_over(RUN, a_process(), "flow-2", seen)
        actor = run.ledger.assign(successor, "replica", 0, 1, 0, ["here"])
        run.ledger.register(actor, Process(process_key(hung.pid), hung.pid, "here"))

    zombie = Supervisor(run, 0, PLAN, launcher, resume)
    with pytest.raises(Fenced):
        zombie.run()
    with pytest.raises(Fenced):
        zombie.end_children(0.0, 0.0, threading.Event())
    assert group_alive(hung.pid)
    assert {row.role: row.state for row in run.ledger.actors(RUN)}["replica"] == "starting"


def test_who_beats_while_it_is_to_be_fenced_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fencing waited for a lock for longer than the silence lasted."""
    run, launcher = make(tmp_path, heartbeat_deadline_s=5.0)
    fence, looks = run.ledger.fence, iter(range(10))

    def beat_first(supervisor: Actor, actor: Actor, **seen: Any) -> ActorRow | None:
        run.ledger.heartbeat(actor)
        return fence(supervisor, actor, **seen)

    def on_progress(progress: object) -> None:
        if next(looks) >= 1:
            finish_run(launcher)

    monkeypatch.setattr(run.ledger, "fence", beat_first)
    supervisor = Supervisor(run, 0, PLAN, launcher, on_progress)
    monkeypatch.setattr(supervisor, "_silence", EverybodyIsSilent())
    supervisor.run()
    assert len(launcher.started) == 2


class EverybodyIsSilent:
    """A watch to which nobody has beaten for a long time."""

    def look(self, serials: dict[Actor, int]) -> dict[Actor, float]:
        return dict.fromkeys(serials, 1e6)
