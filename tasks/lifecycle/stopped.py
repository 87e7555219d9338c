"""What a supervisor does about an actor of its own that has stopped in the middle of a write to the ledger.

SQLite takes the lock from nobody, so such an actor keeps everybody from writing: it cannot even be fenced. Reading goes
on, so its supervisor can make sure that it is still in charge and that the process is an attempt that it gave out.
"""

import logging
import os
import signal
import threading
import time
from typing import Self

from sqlalchemy.exc import SQLAlchemyError

from tasks.exchange.ledger import Actor, Fenced, Ledger
from tasks.machine.processes import process_key

STOPPED_S = 6.0
"""Who has stopped for so long in the middle of a write is ended: sooner than those who wait for it give up."""
_POLL_S = 1.0
_log = logging.getLogger(__name__)


class StoppedWriters:
    """While entered, ends attempts that this supervisor gave out and that keep all others from writing."""

    def __init__(self, ledger: Ledger, supervisor: Actor, poll_s: float = _POLL_S) -> None:
        """`poll_s`: seconds between two looks."""
        self._ledger = ledger
        self._supervisor = supervisor
        self._poll_s = poll_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stopped-writers", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        seen, since = None, 0.0
        while not self._stopped.wait(self._poll_s):
            pid = self._ledger.stopped_writer()
            if pid is None or pid != seen:
                seen, since = pid, time.monotonic()
            elif time.monotonic() - since >= STOPPED_S:
                end_if_own(self._ledger, self._supervisor, pid)


def end_if_own(ledger: Ledger, supervisor: Actor, pid: int) -> bool:
    """End a process that keeps the ledger from being written, if it is an attempt that this supervisor gave out.

    Nothing is written. Returns whether it was ended; one that has gone on meanwhile, or is gone, is not.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        key = process_key(pid)  # if the pid is another's by now, so is the key, and the handle is nobody's
        ledger.confirm(supervisor)
        rows = ledger.actors(supervisor.run_id)
        own = [row for row in rows if (row.process_key, row.assigned_by) == (key, supervisor.attempt)]
        if not own or ledger.stopped_writer() != pid:
            return False
        _log.warning("%s %d has stopped while it writes to the ledger: process %d ends", own[0].role, own[0].slot, pid)
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except (Fenced, ProcessLookupError, SQLAlchemyError) as error:
        _log.warning("process %d, which has stopped while it writes to the ledger, is let be: %s", pid, error)
        return False
    finally:
        os.close(handle)
    return True
