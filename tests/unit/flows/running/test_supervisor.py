"""The supervisor against a real ledger and a hand-written launcher: completion, restarts, budgets, stalls, endings."""

import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import httpx
import pytest
from prefect import State
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import WorkerStatus
from prefect.exceptions import TerminationSignal
from sqlalchemy.exc import OperationalError

from flows import rl as running
from flows.rollout import rollout
from flows.running import supervisor as supervising
from flows.running.context import RunContext, open_run
from flows.running.launcher import PrefectLauncher
from flows.running.supervisor import RunFailed, Supervisor
from flows.train import train
from planners.hardware.machine import Machine
from planners.plan.run import MachineShare, ReplicaPlan
from tasks.config.experiment import Experiment
from tasks.config.files import parse_experiment
from tasks.config.settings import Settings
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Actor, Ledger
from tasks.machine.processes import ProcessGroup, group_alive
from tasks.tracking.tracker import Tracker
from tests.support.places import settings_of
from tests.support.plan import run_plan

RUN = "run"
NOBODY = 2**31 - 1
"""A pid that no process has."""


class FakeLauncher:
    """Starting an actor registers it; `script` says what happens to it at each look."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.started: list[tuple[str, int | None]] = []
        self.cancelled: list[str] = []
        self.ended: set[str] = set()
        self.actors: dict[str, Actor] = {}
        self.joins = True
        self.is_away = False
        self.pids: dict[str, int] = {}

    def start(self, share: MachineShare, resume_step: int | None) -> str:
        flow, role = ("rollout", "replica") if isinstance(share, ReplicaPlan) else ("train", "trainer")
        self.started.append((flow, resume_step))
        flow_run_id = f"{flow}-{len(self.started)}"
        if self.joins:
            actor = self.ledger.register(RUN, role, 0, self._pid(flow_run_id), "here")
            self.ledger.heartbeat(actor, "running")
            self.actors[flow_run_id] = actor
        return flow_run_id

    def _pid(self, flow_run_id: str) -> int:
        return self.pids.get(flow_run_id, NOBODY)

    def cancel(self, flow_run_id: str) -> None:
        self.cancelled.append(flow_run_id)
        if not self.is_away:
            self.ended.add(flow_run_id)

    def has_ended(self, flow_run_id: str) -> bool:
        return flow_run_id in self.ended


PLAN = run_plan("here")
HERE = Machine(name="here", devices=())


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "_POLL_S", 0.0)


def make(tmp_path: Path, **run: object) -> tuple[RunContext, FakeLauncher]:
    settings = settings_of(tmp_path, tmp_path, f"sqlite:///{tmp_path / 'ledger.db'}")
    experiment: Experiment = parse_experiment(
        {"workload": {"prompts_per_step": 1}, "run": {"steps": 1, "restarts": 1, **run}}, "test"
    )
    ledger = Ledger(settings.shared.ledger_url)
    ledger.create_run(RUN, prompts_per_step=1, max_staleness=1, steps=1, max_attempts_per_prompt=2)
    ledger.request_evaluation(RUN, "before", 0)
    directory = RunDirectory(tmp_path)
    directory.create()
    actor = ledger.register(RUN, "supervisor", 0, pid=NOBODY, machine="here")
    return RunContext(RUN, experiment, directory, ledger, settings, actor, None, None, HERE), FakeLauncher(ledger)


def finish_run(launcher: FakeLauncher) -> None:
    """What trainer and replica would do: one step, both evaluations."""
    ledger = launcher.ledger
    trainer = max((a for a in launcher.actors.values() if a.role == "trainer"), key=lambda actor: actor.attempt)
    replica = max((a for a in launcher.actors.values() if a.role == "replica"), key=lambda actor: actor.attempt)
    if ledger.progress(RUN).step == 0:
        ledger.record_version(trainer, 0, "w0")
        ledger.set_loaded(replica, 0, 0)
        assert ledger.claim_evaluation(replica, 0)
        ledger.record_evaluation(replica, "before", json.dumps({}))
        lease = ledger.lease_group(replica, 0, "lease")
        assert lease is not None
        ledger.complete_group(replica, lease.group_id, 0, 1.0, {"scored": 2}, 4)
        assert ledger.take_groups(trainer, 0)
        ledger.record_step(trainer, 0, json.dumps({"reward/mean": 1.0}))
        ledger.record_version(trainer, 1, "w1")
        ledger.set_loaded(replica, 0, 1)
    if ledger.claim_evaluation(replica, 1):
        ledger.record_evaluation(replica, "after", json.dumps({}))


def test_a_run_ends_when_trained_and_evaluated(tmp_path: Path) -> None:
    run, launcher = make(tmp_path)
    seen: list[int] = []

    def on_progress(progress: object) -> None:
        seen.append(1)
        finish_run(launcher)

    Supervisor(run, PLAN, launcher, on_progress).run()
    assert [role for role, _ in launcher.started] == ["train", "rollout"]
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

    Supervisor(run, PLAN, launcher, on_progress).run()
    assert launcher.started == [("train", None), ("rollout", None), ("rollout", None)]


def test_a_dead_trainer_goes_on_from_its_checkpoint_in_a_new_lineage(tmp_path: Path) -> None:
    run, launcher = make(tmp_path, step_deadline_s=0.2, start_deadline_s=0.2)
    looks = 0

    def on_progress(progress: object) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            launcher.ledger.finish(launcher.actors["train-1"], "failed", "killed")

    run.ledger.resume_from(RUN, 0)
    before = run.ledger.find_run(run_id=RUN)
    with pytest.raises(RunFailed, match="No step"):
        Supervisor(run, PLAN, launcher, on_progress).run()
    after = run.ledger.find_run(run_id=RUN)
    assert launcher.started[-1] == ("train", 0)
    assert before is not None
    assert after is not None
    assert after.lineage == before.lineage + 1


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

    Supervisor(run, PLAN, launcher, on_progress).run()
    assert [role for role, _ in launcher.started] == ["train", "rollout", "rollout"]


def test_a_run_that_is_ended_elsewhere_is_not_kept_alive(tmp_path: Path) -> None:
    run, launcher = make(tmp_path)
    with pytest.raises(RunFailed, match="ended elsewhere"):
        Supervisor(run, PLAN, launcher, lambda progress: launcher.ledger.set_run_state(RUN, "cancelled")).run()
    assert len(launcher.started) == 2


def test_the_restart_budget_ends(tmp_path: Path) -> None:
    run, launcher = make(tmp_path, restarts=1)

    def on_progress(progress: object) -> None:
        launcher.ended.add(f"rollout-{len(launcher.started)}")

    with pytest.raises(RunFailed, match=r"budget run\.restarts is spent"):
        Supervisor(run, PLAN, launcher, on_progress).run()


def test_what_never_worked_is_not_tried_again(tmp_path: Path) -> None:
    run, launcher = make(tmp_path)

    def on_progress(progress: object) -> None:
        launcher.ledger.heartbeat(launcher.actors["rollout-2"], "starting")
        launcher.ledger.finish(launcher.actors["rollout-2"], "failed", "not enough memory: 2 GiB short")

    with pytest.raises(RunFailed, match="could not start: not enough memory"):
        Supervisor(run, PLAN, launcher, on_progress).run()
    assert len(launcher.started) == 2


def test_a_flow_run_that_ends_before_joining_is_noticed(tmp_path: Path) -> None:
    run, launcher = make(tmp_path, restarts=0)
    launcher.joins = False

    def on_progress(progress: object) -> None:
        launcher.ended.add("train-1")

    with pytest.raises(RunFailed, match="ended before it joined"):
        Supervisor(run, PLAN, launcher, on_progress).run()


def test_a_stall_names_the_actors(tmp_path: Path) -> None:
    run, launcher = make(tmp_path, step_deadline_s=0.1, start_deadline_s=0.1)
    with pytest.raises(RunFailed, match=r"No step was finished.*replica 0 running.*trainer 0 running"):
        Supervisor(run, PLAN, launcher, lambda progress: None).run()


def test_children_that_do_not_leave_are_cancelled(tmp_path: Path) -> None:
    run, launcher = make(tmp_path)
    supervisor = Supervisor(run, PLAN, launcher, lambda progress: finish_run(launcher))
    supervisor.run()
    supervisor.end_children(patience_s=0.1, deadline_s=5.0)
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

    supervisor = Supervisor(run, PLAN, launcher, on_progress)
    supervisor.run()
    assert not group_alive(hung.pid)
    launcher.ended |= set(launcher.actors) - {"rollout-2"}
    launcher.cancelled.clear()
    supervisor.end_children(patience_s=0.0, deadline_s=0.1)
    assert set(launcher.cancelled) == {"rollout-2"}


def test_a_cancellation_that_was_not_heard_is_repeated(tmp_path: Path) -> None:
    run, launcher = make(tmp_path)
    launcher.is_away = True
    supervisor = Supervisor(run, PLAN, launcher, lambda progress: finish_run(launcher))
    supervisor.run()
    cancel = launcher.cancel

    def hear_at_last(flow_run_id: str) -> None:
        launcher.is_away = launcher.cancelled.count(flow_run_id) < 3
        cancel(flow_run_id)

    launcher.cancel = hear_at_last  # type: ignore[method-assign]
    supervisor.end_children(patience_s=0.0, deadline_s=30.0)
    assert launcher.ended == {"train-1", "rollout-2"}


class BusyServer:
    """Refuses the first of all cancellations; flow runs never end."""

    def __init__(self) -> None:
        self.heard = 0
        self._errors = [httpx.ConnectError("the server is away")]

    def read_flow_run(self, flow_run_id: UUID) -> SimpleNamespace:
        return SimpleNamespace(state=None)

    def set_flow_run_state(self, flow_run_id: UUID, state: State[Any]) -> None:
        assert state.is_cancelling()
        if self._errors:
            raise self._errors.pop()
        self.heard += 1


def test_a_flow_run_is_told_once_to_cancel() -> None:
    """Told twice, its worker would interrupt what it does to end."""
    server = BusyServer()
    launcher = PrefectLauncher(cast(SyncPrefectClient, server), Actor(RUN, "supervisor", 0, 1), 0, {})
    flow_run_id = str(uuid4())
    for heard in (0, 1, 1):
        launcher.cancel(flow_run_id)
        assert server.heard == heard


def test_what_does_not_leave_is_fenced_and_killed(tmp_path: Path, hung: ProcessGroup) -> None:
    run, launcher = make(tmp_path)
    launcher.is_away, launcher.pids = True, {"rollout-2": hung.pid}
    supervisor = Supervisor(run, PLAN, launcher, lambda progress: finish_run(launcher))
    supervisor.run()
    supervisor.end_children(patience_s=0.0, deadline_s=0.1)
    assert not group_alive(hung.pid)
    states = {actor.role: actor.state for actor in run.ledger.actors(RUN)}
    assert states == {"supervisor": "starting", "trainer": "fenced", "replica": "fenced"}


@pytest.mark.usefixtures("_own_sigterm")
def test_a_full_disk_keeps_no_actor_alive(tmp_path: Path, hung: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    run, launcher = make(tmp_path)
    launcher.is_away, launcher.pids = True, {"rollout-2": hung.pid}
    supervisor = Supervisor(run, PLAN, launcher, lambda progress: finish_run(launcher))
    supervisor.run()
    asked: list[str] = []

    def refuse(run_id: str, what: str, *_: object) -> None:
        asked.append(what)
        raise OperationalError("", {}, Exception("database or disk is full"))

    monkeypatch.setattr(run.ledger, "set_run_state", refuse)
    monkeypatch.setattr(run.ledger, "fence", refuse)
    monkeypatch.setattr(running, "_CANCEL_S", (0.0, 0.1))
    with pytest.raises(OperationalError):
        running.leave(run, supervisor, "failed")
    assert not group_alive(hung.pid)
    assert asked == ["failed", "replica", "trainer"], "one that could not be fenced hindered the next"


class Leaving(Supervisor):
    """A supervisor whose actors take their leave while `interruption` happens."""

    def __init__(self, interruption: BaseException | None = None) -> None:
        self.interruption = interruption
        self.ended: list[tuple[float, float]] = []

    def end_children(self, patience_s: float, deadline_s: float) -> None:
        self.ended.append((patience_s, deadline_s))
        error, self.interruption = self.interruption, None
        if error is not None:
            raise error


@pytest.fixture
def _own_sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_own_sigterm")
@pytest.mark.parametrize(
    ("state", "outcome"), [("completed", nullcontext()), ("failed", pytest.raises(TerminationSignal))]
)
def test_a_cancellation_hurries_actors_that_are_leaving(
    state: str, outcome: AbstractContextManager[Any], tmp_path: Path
) -> None:
    """A completed run stays one: it would be called cancelled, and `hexflow resume` would refuse it as complete."""
    run, _ = make(tmp_path)
    supervisor = Leaving(TerminationSignal(signal.SIGTERM))
    with outcome:
        running.leave(run, supervisor, state)
    assert supervisor.ended == [running._LEAVE_S, running._CANCEL_S]
    os.kill(os.getpid(), signal.SIGTERM)  # a second one no longer interrupts
    row = run.ledger.find_run(run_id=RUN)
    assert row is not None
    assert row.state == state


@pytest.mark.usefixtures("_own_sigterm")
def test_a_completed_run_is_reported_undisturbed(tmp_path: Path) -> None:
    run, _ = make(tmp_path)

    def terminate(number: int, frame: object) -> None:
        raise TerminationSignal(signal=number)

    signal.signal(signal.SIGTERM, terminate)
    running.leave(run, Leaving(), "failed")
    with pytest.raises(TerminationSignal):
        os.kill(os.getpid(), signal.SIGTERM)
    running.leave(run, Leaving(), "completed")
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("_own_sigterm")
def test_actors_are_ended_although_the_ledger_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = make(tmp_path)

    def fail(**_: object) -> None:
        raise OperationalError("", {}, Exception("database or disk is full"))

    monkeypatch.setattr(run.ledger, "find_run", fail)
    supervisor = Leaving()
    with pytest.raises(OperationalError):
        running.leave(run, supervisor, "failed")
    assert supervisor.ended == [running._CANCEL_S]


@pytest.mark.usefixtures("_own_sigterm")
def test_a_run_that_is_cancelled_before_it_is_tracked_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make(tmp_path)

    def interrupt(*_: object, **__: object) -> None:
        raise TerminationSignal(signal.SIGTERM)

    monkeypatch.setattr(Tracker, "parent", interrupt)
    with pytest.raises(TerminationSignal), running.owned(run), running.tracked(run):
        raise AssertionError("it was not tracked")
    row = run.ledger.find_run(run_id=RUN)
    assert row is not None
    assert row.state == "cancelled"
    assert [actor.state for actor in run.ledger.actors(RUN)] == ["done"]


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who came as far as to ask for its devices, which ends it here."""
    held: list[str] = []

    def note(kind: str, devices: object, holder: str, *_: object) -> None:
        held.append(holder)
        raise RuntimeError(holder)

    monkeypatch.setattr("flows.running.children.hold_devices", note)
    return held


ACTORS: list[tuple[Callable[..., None], str | int]] = [(train.fn, "here"), (rollout.fn, 0)]
"""Each flow and what it is told of its part of the plan."""


@pytest.mark.parametrize(("start", "part"), ACTORS)
def test_a_run_that_is_over_gets_no_actor(
    start: Callable[..., None], part: str | int, settings: Settings, hold: list[str]
) -> None:
    """Its flow run may have waited in the queue until the server was back."""
    run = open_run(Experiment(), None, None)
    run.ledger.set_run_state(run.run_id, "cancelled")
    epoch = run.ledger.add_plan_epoch(run.run_id, PLAN)
    start(run.run_id, epoch, part, run.supervisor.attempt)
    assert not hold


@pytest.mark.parametrize(("start", "part"), ACTORS)
def test_a_late_flow_run_does_not_get_into_the_resumed_run(
    start: Callable[..., None], part: str | int, settings: Settings, hold: list[str]
) -> None:
    """It would fence the actor that the run has now."""
    cancelled = open_run(Experiment(), None, "flow-1")
    cancelled.ledger.set_run_state(cancelled.run_id, "cancelled")
    cancelled.ledger.finish(cancelled.supervisor, "done")
    resumed = open_run(Experiment(), cancelled.run_id, "flow-2")
    epoch = resumed.ledger.add_plan_epoch(resumed.run_id, PLAN)
    start(resumed.run_id, epoch, part, cancelled.supervisor.attempt)
    assert not hold
    with pytest.raises(RuntimeError, match=resumed.run_id):
        start(resumed.run_id, epoch, part, resumed.supervisor.attempt)


def test_the_launcher_names_plan_epoch_part_and_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def run_deployment(name: str, **options: Any) -> SimpleNamespace:
        asked.update(options["parameters"], name=name)
        return SimpleNamespace(id=uuid4())

    online = SimpleNamespace(read_workers_for_work_pool=lambda pool: [SimpleNamespace(status=WorkerStatus.ONLINE)])
    monkeypatch.setattr("flows.running.launcher.run_deployment", run_deployment)
    launcher = PrefectLauncher(cast(SyncPrefectClient, online), Actor(RUN, "supervisor", 0, 7), 3, {})
    for share, flow in ((PLAN.trainer.machines[0], train), (PLAN.replicas[0], rollout)):
        asked.clear()
        launcher.start(share, None)
        assert asked.pop("name") == f"{flow.name}/cpu"
        assert (asked["run_id"], asked["epoch"], asked["supervisor"]) == (RUN, 3, 7)
        assert asked["machine" if flow is train else "slot"] == ("here" if flow is train else 0)
        assert set(asked) == set(inspect.signature(flow.fn).parameters)
