"""A run's own eye on its cancellation: heartbeats are the truth, and what Prefect's worker does is a courtesy.

A worker of Prefect 3.7 listens for cancellations on one connection, and polls when it has lost that; seen with a server
that was killed (SIGKILL) and started again by `hexflow up` two minutes later: the worker's polling had given up after
25 s, and it was this watch that cancelled, 14 s after it was asked for. What Ctrl-C asks for stands in the ledger, too,
and is heard whatever has become of server and worker.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Self
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import PrefectException
from sqlalchemy.exc import SQLAlchemyError

from flows.running.context import RunContext

_LEDGER_POLL_S = 2.0
_SERVER_POLL_S = 5.0
_WORKER_GRACE_POLLS = 2
_log = logging.getLogger(__name__)


def read_state(flow_run_id: UUID) -> State[Any] | None:
    """State of a flow run on the Prefect server.

    Raises:
        httpx.HTTPError: the server is away or fails.
        PrefectException: it does not know the flow run, or refuses.
    """
    with get_client(sync_client=True) as client:
        return client.read_flow_run(flow_run_id).state


def ignore_further_signals() -> None:
    """Let this process leave in peace, now that it was told to: the watch, Prefect's worker and `hexflow down` may each
    send SIGTERM, and a second one would interrupt it while it ends its actors.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # unlike SIG_IGN, it is not inherited


class CancellationWatch:
    """While entered, sends this process SIGTERM once its flow run is to end.

    At once where the ledger was asked for it (`Ledger.ask_to_cancel`); where only the Prefect server says Cancelling,
    or Cancelled already, after its worker had the time to do the same. Each is asked every few seconds by a thread of
    its own, so that one which is away delays nothing, and neither does anything more once the run is said to be over.
    """

    def __init__(
        self, run: RunContext, flow_run_id: str, read: Callable[[UUID], State[Any] | None] = read_state
    ) -> None:
        """`read` gives the flow run's state, and may raise what `read_state` does."""
        self._run = run
        self._flow_run_id = flow_run_id
        self._read = read
        self._stopped = threading.Event()
        self._ending = threading.Lock()
        watches = (
            (self._ledger_says_so, _LEDGER_POLL_S, 0),
            (self._server_says_so, _SERVER_POLL_S, _WORKER_GRACE_POLLS),
        )
        self._threads = [
            threading.Thread(target=self._watch, args=watch, name="cancellation-watch", daemon=True)
            for watch in watches
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=_LEDGER_POLL_S)

    def _watch(self, is_to_end: Callable[[], bool], poll_s: float, grace_polls: int) -> None:
        seen = 0
        while not self._stopped.wait(poll_s):
            try:
                seen = seen + 1 if is_to_end() else 0
                if seen > grace_polls:
                    self._end()
            except (httpx.HTTPError, PrefectException, SQLAlchemyError):
                continue  # no answer takes nothing back: a busy server fails to answer every other time

    def _ledger_says_so(self) -> bool:
        return self._run.ledger.is_to_cancel(self._flow_run_id)

    def _server_says_so(self) -> bool:
        state = self._read(UUID(self._flow_run_id))
        return state is not None and (state.is_cancelling() or state.is_cancelled())

    def _end(self) -> None:
        with self._ending:
            row = self._run.ledger.find_run(run_id=self._run.run_id)
            if not self._stopped.is_set() and row is not None and row.state == "running":
                _log.warning("run %s is to be cancelled: ending it", self._run.run_id)
                os.kill(os.getpid(), signal.SIGTERM)
            self._stopped.set()
