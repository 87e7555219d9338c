"""A run's own eye on its cancellation: heartbeats are the truth, and what Prefect's worker does is a courtesy.

A worker of Prefect 3.7 listens for cancellations on one connection, and polls when it has lost that; seen with a server
that was killed (SIGKILL) and started again by `hexflow up` two minutes later: the worker's polling had given up after
25 s, and it was this watch that cancelled, 14 s after it was asked for.
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

from flows.context import RunContext

_POLL_S = 5.0
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


class CancellationWatch:
    """While entered, sends this process SIGTERM if its flow run stays Cancelling, or is called Cancelled already.

    That is what the worker would do. The watch asks the Prefect server every few seconds, bears its absence, and does
    nothing more once the run is said to be over.
    """

    def __init__(
        self, run: RunContext, flow_run_id: str, read: Callable[[UUID], State[Any] | None] = read_state
    ) -> None:
        """`read` gives the flow run's state, and may raise what `read_state` does."""
        self._run = run
        self._flow_run_id = UUID(flow_run_id)
        self._read = read
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cancellation-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join(timeout=_POLL_S)

    def _watch(self) -> None:
        seen = 0
        while seen <= _WORKER_GRACE_POLLS:
            if self._stopped.wait(_POLL_S):
                return
            is_to_end = self._is_to_end()
            if is_to_end is not None:  # no answer takes nothing back: a busy server fails to answer every other time
                seen = seen + 1 if is_to_end else 0
        row = self._run.ledger.find_run(run_id=self._run.run_id)
        if row is not None and row.state == "running":
            _log.warning("run %s is being cancelled, but its worker does not act: ending it", self._run.run_id)
            os.kill(os.getpid(), signal.SIGTERM)

    def _is_to_end(self) -> bool | None:
        """None where the server does not say."""
        try:
            state = self._read(self._flow_run_id)
        except (httpx.HTTPError, PrefectException):
            return None
        return state is not None and (state.is_cancelling() or state.is_cancelled())
