"""A run that is cancelled on the server ends, whatever became of its worker and of the server meanwhile."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from uuid import UUID, uuid4

import httpx
import prefect
import pytest
from prefect import State
from prefect.exceptions import TerminationSignal
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Cancelling, Running
from sqlalchemy.exc import OperationalError

from flows.running import ending
from flows.running.context import RunContext, open_run
from flows.running.ending import only_hurry, read_state, supervised
from tasks.config.experiment import Experiment
from tasks.config.settings import Settings

FLOW_RUN = str(uuid4())
AWAY = httpx.ConnectError("the server is away")
Said = State[Any] | Exception


class FakeServer:
    """Says `answers` one after the other, the last one for ever; exceptions are raised."""

    def __init__(self, *answers: Said) -> None:
        self._answers = list(answers)
        self.asked = 0

    def read(self, flow_run_id: UUID) -> State[Any] | None:
        assert str(flow_run_id) == FLOW_RUN
        self.asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def run(settings: Settings) -> RunContext:
    return open_run(Experiment(), None, FLOW_RUN)


@pytest.fixture(autouse=True)
def _as_in_a_flow_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SIGTERM raises TerminationSignal, as Prefect's engine has it; polls are quick."""

    def terminate(number: int, frame: object) -> None:
        raise TerminationSignal(signal=number)

    monkeypatch.setattr(ending, "SERVER_POLL_S", 0.01)
    before = signal.signal(signal.SIGTERM, terminate)
    yield
    signal.signal(signal.SIGTERM, before)


def work(run: RunContext, server: FakeServer, until: Callable[[], bool]) -> None:
    """The flow's body: goes on until `until`, unless it is ended."""
    give_up = time.monotonic() + 30
    with supervised(run, FLOW_RUN, server.read, interval_s=0.01):
        while not until():
            assert time.monotonic() < give_up, "the flow was neither ended nor done"
            time.sleep(0.01)


def taken_up_again() -> RunContext:
    """The run, after its flow run was started once more."""
    return open_run(Experiment(), None, FLOW_RUN)


def test_a_server_that_answers_every_other_time_is_believed(run: RunContext) -> None:
    asked: list[Said] = [Cancelling(), AWAY]
    said = [Running(), *asked * (1 + ending.WORKER_GRACE_POLLS), Running()]
    with pytest.raises(TerminationSignal):
        work(run, FakeServer(*said), until=lambda: False)


@pytest.mark.parametrize("state", [Cancelling(), Cancelled()])
def test_a_run_whose_worker_does_not_act_is_ended(run: RunContext, state: State[Any]) -> None:
    server = FakeServer(Running(), state)
    with pytest.raises(TerminationSignal):
        work(run, server, until=lambda: False)
    assert server.asked == 1 + 1 + ending.WORKER_GRACE_POLLS, "the worker was not given its time"


def test_a_cancel_on_the_server_needs_no_ledger_that_takes_writes(
    run: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk is full, and the worker does not act."""

    def refuse(flow_run_id: str) -> None:
        raise OperationalError("", {}, Exception("database or disk is full"))

    monkeypatch.setattr(run.ledger, "ask_to_cancel", refuse)
    with pytest.raises(TerminationSignal):
        work(run, FakeServer(Cancelling()), until=lambda: False)


def test_while_the_server_is_away_the_run_goes_on_and_is_ended_when_it_is_back(run: RunContext) -> None:
    away = FakeServer(Running(), AWAY)
    work(run, away, until=lambda: away.asked > 20)
    with pytest.raises(TerminationSignal):
        work(taken_up_again(), FakeServer(Cancelling(), *[AWAY] * 20, Cancelling()), until=lambda: False)


def test_a_run_that_is_not_cancelled_goes_on(run: RunContext) -> None:
    server = FakeServer(Running())
    work(run, server, until=lambda: server.asked > 10)


def test_a_run_that_is_over_is_left_to_end(run: RunContext) -> None:
    """The worker did act, and the run is leaving: a second signal would interrupt that."""
    run.ledger.close_run(run.supervisor, "cancelled")
    server = FakeServer(Cancelling())
    work(run, server, until=lambda: not any(thread.name == "server-watch" for thread in threading.enumerate()))
    assert server.asked == 1 + ending.WORKER_GRACE_POLLS


def test_what_the_ledger_was_asked_for_needs_neither_server_nor_worker(run: RunContext) -> None:
    """Nor does it reach a run that another flow run has resumed, or one that was not asked to end."""
    server = FakeServer(AWAY)
    for other in ("some other flow run", str(uuid4())):
        run.ledger.ask_to_cancel(other)
    work(run, server, until=lambda: server.asked > 10)
    run = taken_up_again()
    for _ in range(2):
        run.ledger.ask_to_cancel(FLOW_RUN)
    with pytest.raises(TerminationSignal):
        work(run, FakeServer(AWAY), until=lambda: False)


def test_a_request_outlasts_a_ledger_that_fails(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([OperationalError("", {}, Exception("database is locked"))] * 3)
    heartbeat = run.ledger.heartbeat

    def fail_at_first(*said: Any, **also: Any) -> Any:
        if error := next(failures, None):
            raise error
        return heartbeat(*said, **also)

    run.ledger.ask_to_cancel(FLOW_RUN)
    monkeypatch.setattr(run.ledger, "heartbeat", fail_at_first)
    with pytest.raises(TerminationSignal):
        work(run, FakeServer(AWAY), until=lambda: False)
    assert next(failures, None) is None


def test_a_run_that_leaves_hears_no_second_signal() -> None:
    """The ledger's beat, the worker and `hexflow down` may each send one."""
    with pytest.raises(TerminationSignal):
        os.kill(os.getpid(), signal.SIGTERM)
    hurry = threading.Event()
    only_hurry(hurry)
    assert not hurry.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    assert hurry.is_set()
    inherits = [sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)"]
    assert subprocess.check_output(inherits, text=True) == "True\n"


def test_the_state_is_read_from_the_server() -> None:
    flow_run = {"id": FLOW_RUN, "flow_id": FLOW_RUN, "state": {"type": "CANCELLING", "name": "Cancelling"}}
    answers = {f"/api/flow_runs/{FLOW_RUN}": flow_run, "/api/admin/version": prefect.__version__}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answers[self.path]).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}/api"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        with temporary_settings({PREFECT_API_URL: url}):
            state = read_state(UUID(FLOW_RUN))
        server.shutdown()
        thread.join()
    assert state is not None
    assert state.is_cancelling()
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(httpx.HTTPError):
        read_state(UUID(FLOW_RUN))
