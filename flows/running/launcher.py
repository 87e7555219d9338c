"""Starts actors as sub-deployments: `train/<device type>` and `rollout/<device type>` on the machine's queue.

What an actor is told stands on the Prefect server, for all to read who may sign in there. Where its ledger and storage
are, its worker knows from its own environment.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import Any, TypeVar, cast
from uuid import UUID, uuid4

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, WorkerStatus
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelling

from flows.running.supervisor import RunFailed
from planners.plan.run import MachineShare
from tasks.config.passwords import without_password
from tasks.exchange.ledger import Actor

_WORKER_DEADLINE_S = 60.0
_SERVER_DEADLINE_S = 600.0
RETRY_S = 5.0
FLOWS = {"trainer": "train", "replica": "rollout"}
"""The flow that runs an actor of each role."""
_STATE_MAX_AGE_S = 3.0
_log = logging.getLogger(__name__)
_Started = TypeVar("_Started")


def without_repeats() -> AbstractContextManager[Any]:
    """Prefect would repeat a request for a minute while its server is away; who supervises or leaves cannot wait."""
    return temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0})


def patiently(start: Callable[[str], _Started], what: str) -> _Started:
    """Start something by the Prefect server, again and again while that is away.

    Args:
        start: is given a key, the same each time: a request whose answer was lost must not start a second flow run.
        what: what is started, for the message.

    Raises:
        RunFailed: the server did not come back.
    """
    give_up, key = time.monotonic() + _SERVER_DEADLINE_S, str(uuid4())
    while True:
        try:
            return start(key)
        except (httpx.HTTPError, PrefectException) as error:
            if time.monotonic() > give_up:
                said = without_password(str(error))
                raise RunFailed(
                    f"The Prefect server did not start {what} within {_SERVER_DEADLINE_S:.0f} s: {said}"
                ) from None
            _log.warning("the Prefect server is away: %s", without_password(str(error)))
        time.sleep(RETRY_S)


class PrefectLauncher:
    """Launches through the Prefect server; keeps what it last heard of each flow run while the server is away.

    It asks beside: a server that hangs must not keep who supervises from looking at the ledger.
    """

    def __init__(self, client: SyncPrefectClient, run_id: str, epoch: int) -> None:
        self._client = client
        self._run_id = run_id
        self._epoch = epoch
        self._ended: dict[str, bool] = {}
        self._asked: dict[str, float] = {}
        self._asking: set[str] = set()
        self._cancelled: set[str] = set()

    def start(self, actor: Actor, share: MachineShare) -> str:
        """Start an actor's flow; see `Launcher.start`. While the server is away this waits for it.

        Raises:
            RunFailed: no worker polls the pool, or the server did not come back.
        """

        def start(key: str) -> str:
            self._wait_for_worker(share.device_type)
            return self._start(actor, share, key)

        return patiently(start, f"an actor on {share.machine}")

    def _start(self, actor: Actor, share: MachineShare, key: str) -> str:
        flow = FLOWS[actor.role]
        part: dict[str, object] = {"slot": actor.slot}
        if flow == "train":
            part = {"machine": share.machine, "master": None}  # its ranks are on one machine
        created = run_deployment(
            f"{flow}/{share.device_type}",
            parameters={"run_id": self._run_id, "epoch": self._epoch, "attempt": actor.attempt, **part},
            work_queue_name=share.machine,
            tags=["hexflow", f"run:{self._run_id}"],
            timeout=0,
            idempotency_key=key,
            as_subflow=True,
        )
        return str(cast(FlowRun, created).id)  # outside an event loop it is no coroutine

    def cancel(self, flow_run_id: str) -> None:
        """Ask for cancellation; see `Launcher.cancel`."""
        if flow_run_id in self._cancelled or self.has_ended(flow_run_id):
            return
        try:
            self._client.set_flow_run_state(UUID(flow_run_id), Cancelling())
            self._cancelled.add(flow_run_id)  # told twice, a worker interrupts what the first time has begun
        except (httpx.HTTPError, PrefectException):
            _log.warning("flow run %s could not be cancelled now", flow_run_id)

    def has_ended(self, flow_run_id: str) -> bool:
        """Whether the flow run is over, as last heard, and asked every few seconds; see `Launcher.has_ended`."""
        is_over, asked = self._ended.get(flow_run_id, False), self._asked.get(flow_run_id, -math.inf)
        if not is_over and flow_run_id not in self._asking and time.monotonic() - asked > _STATE_MAX_AGE_S:
            self._asking.add(flow_run_id)
            settings = copy_context()  # Prefect's, which a new thread would not have
            threading.Thread(target=settings.run, args=(self._ask, flow_run_id), daemon=True).start()
        return is_over

    def _ask(self, flow_run_id: str) -> None:
        try:
            state = self._client.read_flow_run(UUID(flow_run_id)).state
            self._ended[flow_run_id] = state is not None and state.is_final()
        except ObjectNotFound:
            self._ended[flow_run_id] = True
        except (httpx.HTTPError, PrefectException):
            _log.warning("the Prefect server did not tell the state of flow run %s", flow_run_id)
        self._asked[flow_run_id] = time.monotonic()
        self._asking.discard(flow_run_id)

    def _wait_for_worker(self, pool: str) -> None:
        """A flow run in a pool that nobody polls would wait for ever."""
        deadline = time.monotonic() + _WORKER_DEADLINE_S
        while True:
            workers = self._client.read_workers_for_work_pool(pool)
            if any(worker.status == WorkerStatus.ONLINE for worker in workers):
                return
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"No worker of the work pool '{pool}' has been online for {_WORKER_DEADLINE_S:.0f} s: "
                    "start it with `hexflow up`."
                )
            time.sleep(1.0)
