"""The life of an actor in the ledger, from its registration to its last word; the same for every kind of actor.

Invariant: a process whose attempt is no longer current, that was told to end, whose run is over, or whose supervisor is
gone for good, does not go on, whatever the main thread computes and whether or not the ledger takes writes.
"""

import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from sqlalchemy.exc import SQLAlchemyError

from planners.errors import UserError
from tasks.config.passwords import without_password
from tasks.exchange.ledger import Actor, Beat, Fenced, Ledger, Process
from tasks.lifecycle.silence import LONGEST_GAP_S, Silence
from tasks.lifecycle.work import Work
from tasks.machine.processes import process_key

FENCED_EXIT_STATUS = 75
BEAT_S = 2.0
"""Seconds between two beats."""
ORPHAN_AFTER_S = 600.0
"""Silence of the supervisor after which an actor leaves: nobody is going to take the run up again."""
_log = logging.getLogger(__name__)


def this_process(machine: str) -> Process:
    """This process, as it registers."""
    return Process(process_key(), os.getpid(), machine)


def say_last_word(ledger: Ledger, actor: Actor, state: str, message: str = "") -> None:
    """Say how the actor ended; a ledger that does not take it is told of in the log and hinders no end."""
    try:
        ledger.finish(actor, state, message)
    except (Fenced, SQLAlchemyError) as error:
        _log.warning("the ledger did not hear that %s %d is %s: %s", actor.role, actor.slot, state, error)


class ActorScope:
    """While entered, this process is the actor: it has registered, beats, and hears when it is to leave.

    A thread of its own beats, so that a long computation does not look like death. A fenced actor's process ends at
    once with status 75: whatever it holds belongs to its replacement. What asks the actor to leave is told to
    `on_leave` once, from another thread, with the reason: SIGTERM (within about a second, also while the main thread is
    held up by a backward pass, since the interpreter's wake-up byte is written at once), the ledger, or a supervisor
    that is gone for good; from then on nobody waits for a ledger that does not answer. In the same way `on_drain` hears
    that it is to take on nothing new and to leave when that is done. At the end of the scope the ledger hears that the
    actor is done, or failed and why; the first word counts. `work` is what its beats tell of what it has in hand.
    """

    def __init__(
        self,
        ledger: Ledger,
        actor: Actor,
        process: Process,
        on_leave: Callable[[str], object],
        *,
        on_drain: Callable[[], object] = lambda: None,
        hears_sigterm: bool = True,
        interval_s: float = BEAT_S,
    ) -> None:
        """`hears_sigterm`: False where somebody else handles the signal."""
        self.actor = actor
        self.work = Work()
        self._ledger = ledger
        self._process = process
        self._on_leave = on_leave
        self._on_drain = on_drain
        self._interval_s = interval_s
        self._state, self._message = "starting", ""
        self._stopped = threading.Event()
        self._told = threading.Lock()
        self._beats = threading.Thread(target=self._beat_until_stopped, name="heartbeat", daemon=True)
        self._ear = _Ear(lambda: self._leave("ended by SIGTERM")) if hears_sigterm else None

    def report(self, state: str, message: str = "") -> None:
        """Set what the next beats say: a state (`starting`, `running`) and what the actor is doing or waiting for."""
        self._state, self._message = state, message

    def say(self, message: str) -> None:
        """Set what the next beats say besides the state."""
        self._message = message

    def __enter__(self) -> Self:
        if self._ear:
            self._ear.open()
        try:
            self._ledger.register(self.actor, self._process)
        except Fenced as error:
            self._leave_to_another(error)
        self._beats.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Fenced):
            self._leave_to_another(error)
        self._close()
        if isinstance(error, SQLAlchemyError):
            self._ledger.hurry.set()  # it was asked for long enough
        if error is None:
            say_last_word(self._ledger, self.actor, "done")
        else:
            message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            say_last_word(self._ledger, self.actor, "failed", without_password(message))
        self._beats.join(self._interval_s)

    def _close(self) -> None:
        self._stopped.set()
        if self._ear:
            self._ear.close()

    def _leave_to_another(self, error: Fenced) -> NoReturn:
        self._close()
        _log.error("%s", error)
        raise SystemExit(FENCED_EXIT_STATUS) from None

    def _leave(self, reason: str) -> None:
        if self._told.acquire(blocking=False):
            _log.warning("%s %d leaves: %s", self.actor.role, self.actor.slot, reason)
            self._ledger.hurry.set()
            self._on_leave(reason)

    def _beat_until_stopped(self) -> None:
        silence, drains = Silence(LONGEST_GAP_S), False
        for number in itertools.count(2):
            try:
                beat = self._beat(number)
            except Fenced as error:
                _log.error("%s", error)
                os._exit(FENCED_EXIT_STATUS)
            except SQLAlchemyError:
                # A ledger that cannot be reached now may be back at the next beat; the supervisor counts the silence.
                _log.warning("the ledger did not take a heartbeat", exc_info=True)
            else:
                attempt, serial = beat.supervisor
                silent_s = silence.look({attempt: serial})[attempt]
                if beat.wanted == "leave":
                    self._leave("the ledger says so")
                elif beat.wanted == "drain" and not drains:
                    drains = True
                    self._on_drain()
                elif silent_s > ORPHAN_AFTER_S:
                    self._leave(f"the supervisor has been silent for {silent_s:.0f} s")
            if self._stopped.wait(self._interval_s):
                return

    def _beat(self, number: int) -> Beat:
        told = self.work.told()
        return self._ledger.heartbeat(
            self.actor,
            self._state,
            self._message,
            told.count,
            may_rest_s=told.may_rest_s,
            named=told.groups,
            number=number,
        )


class _Ear:
    """Hears SIGTERM in a thread. Python runs signal handlers between bytecodes of the main thread, which a backward
    pass of seconds holds up; the wake-up byte is written at once.
    """

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self._on_signal = on_signal
        self._thread = threading.Thread(target=self._listen, name="sigterm", daemon=True)
        self._before: Any = None

    def open(self) -> None:
        """Begin to hear; to be called by the main thread, as `close`."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = signal.signal(signal.SIGTERM, _do_nothing)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread.start()

    def close(self) -> None:
        """Hear no more; the signal is handled as it was before."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, self._before)
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)

    def _listen(self) -> None:
        while heard := os.read(self._reader, 1):
            if heard[0] == signal.SIGTERM:
                self._on_signal()


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A handler, so that the signal ends nothing by itself."""
