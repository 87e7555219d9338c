"""The sign of life of an actor, from a thread of its own so that a long computation does not look like death.

Invariant: a process whose attempt is no longer current, whose run is over, or whose supervisor is gone for good, does
not go on.
"""

import logging
import os
import signal
import threading

from sqlalchemy.exc import SQLAlchemyError

from tasks.exchange.ledger import Actor, Fenced, Ledger

FENCED_EXIT_STATUS = 75
ORPHAN_AFTER_S = 600.0
"""Silence of the supervisor after which an actor leaves: nobody is going to take the run up again."""
_log = logging.getLogger(__name__)


class Heartbeat:
    """Renews an actor's leases every `interval_s` seconds until `stop`.

    A fenced actor's process ends at once with status 75: whatever it holds belongs to its replacement. If the run ends
    (completed, failed or cancelled) or is orphaned, the process gets SIGTERM once, so that it leaves in order; the
    supervisor, which ends runs, passes `leaves_with_run=False`.
    """

    def __init__(self, ledger: Ledger, actor: Actor, interval_s: float = 2.0, leaves_with_run: bool = True) -> None:
        self._ledger = ledger
        self._actor = actor
        self._interval_s = interval_s
        self._may_leave = leaves_with_run
        self._state = "starting"
        self._message = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat_until_stopped, name="heartbeat", daemon=True)

    def start(self) -> "Heartbeat":
        """Begin beating."""
        self._thread.start()
        return self

    def report(self, state: str, message: str = "") -> None:
        """Set what the next beats say: a state (`starting`, `running`) and what the actor is doing or waiting for."""
        self._state, self._message = state, message

    def stop(self) -> None:
        """Stop beating; returns when the last beat is over."""
        self._stopped.set()
        self._thread.join()

    def _beat_until_stopped(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self._ledger.heartbeat(self._actor, self._state, self._message)
                is_over = self._may_leave and self._run_is_over()
            except Fenced:
                _log.error("%s %d was replaced by a newer attempt and ends", self._actor.role, self._actor.slot)
                os._exit(FENCED_EXIT_STATUS)
            except SQLAlchemyError:
                # A ledger that cannot be reached now may be back at the next beat; the supervisor counts the silence.
                _log.warning("the ledger did not take a heartbeat", exc_info=True)
                continue
            if is_over:
                self._may_leave = False
                os.kill(os.getpid(), signal.SIGTERM)

    def _run_is_over(self) -> bool:
        run = self._ledger.find_run(run_id=self._actor.run_id)
        if run is None or run.state != "running":
            return True
        supervisors = [actor for actor in self._ledger.actors(self._actor.run_id) if actor.role == "supervisor"]
        return any(supervisor.silent_s > ORPHAN_AFTER_S for supervisor in supervisors)
