"""How a run hears that it is to end, and what it does not hear any more once it leaves.

What should become of a run stands in the ledger, where `hexflow train` writes it on Ctrl-C and the supervisor's beats
read it. A cancel in Prefect's page comes there in two ways. Its worker sends SIGTERM; but a worker of Prefect 3.7
listens for cancellations on one connection, and polls when it has lost that: seen with a server that was killed
(SIGKILL) and started again by `hexflow up` two minutes later, the worker's polling had given up after 25 s. So the flow
asks the server itself, and passes on to the ledger what that says.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import PrefectException
from sqlalchemy.exc import SQLAlchemyError

from flows.running.context import RunContext
from tasks.exchange.ledger import Ledger
from tasks.lifecycle.scope import BEAT_S, ActorScope
from tasks.lifecycle.stopped import StoppedWriters

SERVER_POLL_S = 5.0
WORKER_GRACE_POLLS = 2
_INSIST_S = 2.0
_log = logging.getLogger(__name__)

ReadState = Callable[[UUID], State[Any] | None]


def read_state(flow_run_id: UUID) -> State[Any] | None:
    """State of a flow run on the Prefect server.

    Raises:
        httpx.HTTPError: the server is away or fails.
        PrefectException: it does not know the flow run, or refuses.
    """
    with get_client(sync_client=True) as client:
        return client.read_flow_run(flow_run_id).state


@contextmanager
def supervised(
    run: RunContext, flow_run_id: str, read: ReadState = read_state, interval_s: float = BEAT_S
) -> Iterator[ActorScope]:
    """Be the run's supervisor in the ledger. SIGTERM comes to this process once its run is to be cancelled.

    `read` gives the flow run's state, and may raise what `read_state` does; `interval_s` is the time between beats.
    """
    over = threading.Event()

    def terminate(reason: str) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        threading.Thread(target=_insist, args=(handler, over), name="termination", daemon=True).start()

    scope = ActorScope(run.ledger, run.supervisor, run.process, terminate, hears_sigterm=False, interval_s=interval_s)
    try:
        watch = _ServerWatch(run.ledger, flow_run_id, read, terminate)
        scope.report("running")
        with watch, StoppedWriters(run.ledger, run.supervisor), scope:  # last: once it beats, a signal may come
            yield scope
    finally:
        over.set()


def _insist(handler: Any, over: threading.Event) -> None:
    """Send this process SIGTERM until it leaves, and so has another handler.

    Once is not enough: what the handler raises is swallowed where a library has a bare `except:`, as PuLP has.
    """
    while signal.getsignal(signal.SIGTERM) is handler:
        os.kill(os.getpid(), signal.SIGTERM)
        if over.wait(_INSIST_S):
            return


def only_hurry(hurry: threading.Event) -> None:
    """Let this process leave in peace from now on: SIGTERM no longer interrupts it, it sets `hurry`.

    The ledger's beat, Prefect's worker and `hexflow down` may each send one.
    """

    def hear(number: int, frame: FrameType | None) -> None:
        hurry.set()

    signal.signal(signal.SIGTERM, hear)  # unlike SIG_IGN, a handler is not inherited


class _ServerWatch:
    """While entered, asks the ledger to cancel once the server says Cancelling, or Cancelled already.

    Its worker gets the time to do the same first. A server that is away takes nothing back, and delays nobody else.
    """

    def __init__(self, ledger: Ledger, flow_run_id: str, read: ReadState, terminate: Callable[[str], object]) -> None:
        self._ledger = ledger
        self._flow_run_id = flow_run_id
        self._read = read
        self._terminate = terminate
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="server-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        seen = 0
        while not self._stopped.wait(SERVER_POLL_S):
            try:
                state = self._read(UUID(self._flow_run_id))
                seen = seen + 1 if state is not None and (state.is_cancelling() or state.is_cancelled()) else 0
            except (httpx.HTTPError, PrefectException):
                continue  # no answer takes nothing back: a busy server fails to answer every other time
            if seen > WORKER_GRACE_POLLS:
                self._ask()
                return

    def _ask(self) -> None:
        try:
            self._ledger.at_once().ask_to_cancel(self._flow_run_id)
        except SQLAlchemyError as error:
            _log.warning("the ledger did not take the cancellation, which is done without it: %s", error)
            self._terminate("the server says so")
