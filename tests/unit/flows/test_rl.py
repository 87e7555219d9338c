"""How a run ends: closed once, its actors ended, reported and tracked, whoever interrupts it or has it now."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest
from prefect import State
from prefect.exceptions import TerminationSignal
from sqlalchemy.exc import OperationalError

from flows import rl
from flows.rl import Work, conduct
from flows.running.context import RunContext, open_run
from flows.running.supervisor import RunFailed, Supervisor
from tasks.config.experiment import Experiment
from tasks.config.settings import Settings
from tasks.tracking.curves import Curves
from tasks.tracking.tracker import Tracker
from tests.support.ledger import a_process
from tests.support.plan import gpu_plan

FLOW_RUN = str(uuid4())
FULL = OperationalError("", {}, Exception("database or disk is full"))


def signal_myself() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def _as_in_a_flow_run() -> Iterator[None]:
    """SIGTERM raises TerminationSignal, as Prefect's engine has it."""

    def terminate(number: int, frame: object) -> None:
        raise TerminationSignal(signal=number)

    before = signal.signal(signal.SIGTERM, terminate)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def run(settings: Settings) -> RunContext:
    return open_run(Experiment(), None, FLOW_RUN)


class FakeSupervisor(Supervisor):
    """A supervisor whose actors take their leave while `meanwhile` happens."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.meanwhile = meanwhile
        self.ended: list[tuple[float, float, bool]] = []

    def end_children(self, patience_s: float, deadline_s: float, hurry: threading.Event) -> None:
        self.meanwhile()
        self.ended.append((patience_s, deadline_s, hurry.is_set()))


class FakeTracker:
    """Takes down how it was finished."""

    def __init__(self) -> None:
        self.run_id = None
        self.finished: list[str] = []

    def finish(self, status: str, flush_s: float) -> None:
        self.finished.append(status)


class Scene:
    """A run whose body does `act`, after which its supervisor has the actors to end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, supervisor: FakeSupervisor, act: Callable[[], None]) -> None:
        self.supervisor, self.tracker, self.act = supervisor, FakeTracker(), act
        self.reported: Callable[[], None] = lambda: None
        monkeypatch.setattr(rl, "carry_out", self._carry_out)
        monkeypatch.setattr(rl, "report", self._report)

    def _carry_out(self, run: RunContext, work: Work) -> None:
        work.supervisor, work.plan = self.supervisor, gpu_plan("here", "fast", 2)
        work.tracker = cast(Tracker, self.tracker)
        work.curves = Curves(work.tracker, run.ledger, run.run_id, 0)
        self.act()

    def _report(self, *_: object) -> dict[str, Any]:
        self.reported()
        return {"status": "reported"}


def state_of(run: RunContext) -> str:
    row = run.ledger.find_run(run_id=run.run_id)
    assert row is not None
    return row.state


def supervisors(run: RunContext) -> list[tuple[int, str]]:
    return [(row.attempt, row.state) for row in run.ledger.actors(run.run_id) if row.role == "supervisor"]


def test_a_run_that_is_told_to_end_is_cancelled(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, FakeSupervisor(), signal_myself)
    state = conduct(run, FLOW_RUN)
    assert isinstance(state, State)
    assert state.is_cancelled()
    assert state_of(run) == "cancelled"
    assert [ended[:2] for ended in scene.supervisor.ended] == [rl.CANCEL_S]
    assert scene.tracker.finished == ["KILLED"]
    assert supervisors(run) == [(1, "done")]
    signal_myself()  # a second one no longer interrupts


def test_what_the_ledger_is_asked_for_ends_the_run(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has become of Prefect's server and worker."""
    run.ledger.ask_to_cancel(FLOW_RUN)
    Scene(monkeypatch, FakeSupervisor(), lambda: signal.sigtimedwait([], 60.0) and None)
    conduct(run, FLOW_RUN)
    assert state_of(run) == "cancelled"


def test_a_request_is_heard_though_a_library_swallows_what_it_raises(
    run: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swallow_once() -> None:
        with suppress(TerminationSignal):
            signal.sigtimedwait([], 60.0)
        signal.sigtimedwait([], 60.0)

    run.ledger.ask_to_cancel(FLOW_RUN)
    Scene(monkeypatch, FakeSupervisor(), swallow_once)
    conduct(run, FLOW_RUN)
    assert state_of(run) == "cancelled"


@pytest.mark.parametrize(("fails", "state"), [(False, "completed"), (True, "failed")])
def test_a_cancellation_hurries_actors_that_are_leaving(
    fails: bool, state: str, run: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A completed run stays one: it would be called cancelled, and `hexflow resume` would refuse it as complete."""

    def act() -> None:
        if fails:
            raise RunFailed("an actor died")

    scene = Scene(monkeypatch, FakeSupervisor(meanwhile=signal_myself), act)
    if fails:
        with pytest.raises(RunFailed):
            conduct(run, FLOW_RUN)
    else:
        assert conduct(run, FLOW_RUN) == {"status": "reported"}
    assert scene.supervisor.ended == [(*rl.LEAVE_S, True)]
    assert state_of(run) == state
    assert scene.tracker.finished == ["FAILED" if fails else "FINISHED"]


def test_a_completed_run_is_reported_undisturbed(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, FakeSupervisor(), lambda: None)
    scene.reported = signal_myself
    assert conduct(run, FLOW_RUN) == {"status": "reported"}
    assert scene.tracker.finished == ["FINISHED"]


def test_a_page_that_cannot_be_shown_does_not_undo_a_run(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, FakeSupervisor(), lambda: None)

    def fail() -> None:
        raise RuntimeError("no page")

    scene.reported = fail
    with pytest.raises(RuntimeError, match="no page"):
        conduct(run, FLOW_RUN)
    assert state_of(run) == "completed"


def test_actors_are_ended_although_the_ledger_fails(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk takes no writes; SIGTERM is heard all the same."""

    def refuse(*_: object) -> None:
        raise FULL

    scene = Scene(monkeypatch, FakeSupervisor(), signal_myself)
    for call in ("close_run", "finish"):
        monkeypatch.setattr(run.ledger, call, refuse)
    with pytest.raises(OperationalError):
        conduct(run, FLOW_RUN)
    assert scene.supervisor.ended == [(*rl.CANCEL_S, True)]
    assert scene.tracker.finished == ["KILLED"]


def test_a_run_that_is_cancelled_before_it_is_tracked_is_closed(
    run: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rl, "name_flow_run", lambda run: None)
    monkeypatch.setattr(Tracker, "parent", lambda *_, **__: signal_myself())
    assert isinstance(conduct(run, FLOW_RUN), State)
    assert state_of(run) == "cancelled"
    assert supervisors(run) == [(1, "done")]


@pytest.mark.parametrize("wakes", ["while it works", "while its actors leave"])
def test_a_run_that_was_taken_over_is_left_to_its_new_supervisor(
    wakes: str, run: RunContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This one was stopped, replaced and woken: it closes, kills, reports and tracks nothing any more."""

    def replace() -> None:
        seen = next((row.attempt, row.serial) for row in run.ledger.actors(run.run_id))
        run.ledger.take_over(run.run_id, a_process(), "flow-2", seen)

    def fail() -> None:
        raise RunFailed("an actor died")

    works = wakes == "while it works"
    supervisor = FakeSupervisor() if works else FakeSupervisor(meanwhile=replace)
    scene = Scene(monkeypatch, supervisor, replace if works else fail)
    monkeypatch.setattr("tasks.lifecycle.scope.os._exit", lambda status: None)  # the beats may be first to notice
    reports: list[str] = []
    scene.reported = lambda: reports.append("reported")
    with pytest.raises(SystemExit) as left:
        conduct(run, FLOW_RUN)
    assert left.value.code == 75
    assert len(supervisor.ended) == (0 if works else 1)
    assert reports == []
    assert scene.tracker.finished == []
    assert supervisors(run) == [(2, "starting")]
    assert state_of(run) == "running"
