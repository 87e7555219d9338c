"""Flow runs of actors are asked for as the plan says and told once to cancel; a late one does nothing."""

import inspect
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import httpx
import pytest
from prefect import State
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import WorkerStatus
from prefect.states import Completed

from flows.rollout import rollout
from flows.running.context import open_run
from flows.running.launcher import PrefectLauncher
from flows.train import train
from planners.errors import UserError
from tasks.config.experiment import Experiment
from tasks.config.settings import Settings
from tasks.exchange.ledger import Actor
from tests.support.ledger import assign
from tests.support.plan import run_plan

RUN, PLAN = "run", run_plan("here")


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
    launcher = PrefectLauncher(cast(SyncPrefectClient, server), RUN, 0)
    flow_run_id = str(uuid4())
    for heard in (0, 1, 1):
        launcher.cancel(flow_run_id)
        assert server.heard == heard


def test_a_prefect_server_that_hangs_keeps_nobody_from_looking_at_the_ledger() -> None:
    """Whether a flow run has ended is heard when it is heard."""
    answers = threading.Event()

    def hang(flow_run_id: UUID) -> SimpleNamespace:
        assert answers.wait(60)
        return SimpleNamespace(state=Completed())

    launcher = PrefectLauncher(cast(SyncPrefectClient, SimpleNamespace(read_flow_run=hang)), RUN, 0)
    flow_run_id = str(uuid4())
    assert [launcher.has_ended(flow_run_id) for _ in range(3)] == [False] * 3
    answers.set()
    give_up = time.monotonic() + 30
    while not launcher.has_ended(flow_run_id):
        assert time.monotonic() < give_up
        time.sleep(0.01)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who came as far as to ask for its devices, which ends it here."""
    held: list[str] = []

    def note(machine: str, kind: str, devices: object, holder: str, *_: object) -> None:
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
    epoch = run.ledger.add_plan_epoch(run.supervisor, PLAN)
    actor = assign(run.ledger, "trainer" if start is train.fn else "replica", run_id=run.run_id)
    run.ledger.close_run(run.supervisor, "cancelled")
    start(run.run_id, epoch, part, actor.attempt)
    assert not hold


@pytest.mark.parametrize(("start", "part"), ACTORS)
def test_a_worker_of_another_ledger_says_so(
    start: Callable[..., None], part: str | int, settings: Settings, hold: list[str]
) -> None:
    """Where its ledger is a worker knows from its own environment alone; left for late, it would be tried for ever."""
    with pytest.raises(UserError, match=r"ledger of this worker does not know run run-1: .* HEXFLOW_LEDGER_URL"):
        start("run-1", 0, part, 1)
    assert not hold


@pytest.mark.parametrize(("start", "part"), ACTORS)
def test_a_late_flow_run_does_not_get_into_the_resumed_run(
    start: Callable[..., None], part: str | int, settings: Settings, hold: list[str]
) -> None:
    """It would fence the actor that the run has now."""
    cancelled = open_run(Experiment(), None, "flow-1")
    role = "trainer" if start is train.fn else "replica"
    late = assign(cancelled.ledger, role, run_id=cancelled.run_id)
    cancelled.ledger.finish(cancelled.supervisor, "done")
    resumed = open_run(Experiment(), cancelled.run_id, "flow-2")
    epoch = resumed.ledger.add_plan_epoch(resumed.supervisor, PLAN)
    start(resumed.run_id, epoch, part, late.attempt)
    assert not hold
    with pytest.raises(RuntimeError, match=resumed.run_id):
        start(resumed.run_id, epoch, part, assign(resumed.ledger, role, run_id=resumed.run_id).attempt)


def test_the_launcher_names_plan_epoch_part_and_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def run_deployment(name: str, **options: Any) -> SimpleNamespace:
        assert "job_variables" not in options, "what stands there, all can read who may sign in to the server"
        asked.update(options["parameters"], name=name)
        return SimpleNamespace(id=uuid4())

    online = SimpleNamespace(read_workers_for_work_pool=lambda pool: [SimpleNamespace(status=WorkerStatus.ONLINE)])
    monkeypatch.setattr("flows.running.launcher.run_deployment", run_deployment)
    launcher = PrefectLauncher(cast(SyncPrefectClient, online), RUN, 3)
    for role, share, flow in (("trainer", PLAN.trainer.machines[0], train), ("replica", PLAN.replicas[0], rollout)):
        asked.clear()
        launcher.start(Actor(RUN, role, 0, 7), share)
        assert asked.pop("name") == f"{flow.name}/cpu"
        assert (asked["run_id"], asked["epoch"], asked["attempt"]) == (RUN, 3, 7)
        assert asked["machine" if flow is train else "slot"] == ("here" if flow is train else 0)
        assert set(asked) == set(inspect.signature(flow.fn).parameters)
