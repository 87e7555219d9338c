"""An actor's life: it registers, beats, hears that it is to leave, and says how it ended, whatever the ledger does."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from planners.errors import UserError
from tasks.exchange.ledger import Actor, ActorRow, Fenced, Lease, Ledger
from tasks.lifecycle import scope as lifecycle
from tasks.lifecycle.scope import FENCED_EXIT_STATUS, ActorScope
from tests.support.ledger import RUN, a_process, assign, fence, lease, supervisor_of
from tests.support.places import REPOSITORY

FULL = OperationalError("", {}, Exception("database or disk is full"))


@pytest.fixture
def actor(ledger: Ledger) -> Actor:
    """A replica that was given out."""
    return assign(ledger, "replica")


def a_scope(ledger: Ledger, actor: Actor, on_leave: Callable[[str], object]) -> ActorScope:
    return ActorScope(ledger, actor, a_process(), on_leave, interval_s=0.01)


def row_of(ledger: Ledger, actor: Actor) -> ActorRow:
    return next(row for row in ledger.actors(RUN) if (row.role, row.slot) == (actor.role, actor.slot))


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_an_actor_registers_beats_and_ends(ledger: Ledger, actor: Actor) -> None:
    with a_scope(ledger, actor, pytest.fail) as scope:
        scope.report("running", "generating")
        scope.work.add(3)
        scope.work.add()
        wait_until(lambda: row_of(ledger, actor).work == 4)
        row = row_of(ledger, actor)
        assert (row.state, row.message) == ("running", "generating")
        wait_until(lambda: row_of(ledger, actor).serial > row.serial)
    assert row_of(ledger, actor).state == "done"
    serial = row_of(ledger, actor).serial
    assert not [thread for thread in threading.enumerate() if thread.name in ("heartbeat", "sigterm")]
    assert row_of(ledger, actor).serial == serial


def test_beats_tell_what_is_in_hand_and_find_leases_that_were_never_heard_of(ledger: Ledger, actor: Actor) -> None:
    with a_scope(ledger, actor, pytest.fail) as scope:
        held = lease(ledger, actor)
        with scope.work.in_hand(300.0, held.group_id):
            wait_until(lambda: row_of(ledger, actor).may_rest_s == 300.0)
            lost = lease(ledger, actor)
            wait_until(lambda: state_of(ledger, lost) == "dropped")
            assert state_of(ledger, held) == "leased"
            with scope.work.in_hand(900.0):
                wait_until(lambda: row_of(ledger, actor).may_rest_s == 900.0)
        wait_until(lambda: row_of(ledger, actor).may_rest_s is None)


def state_of(ledger: Ledger, leased: Lease) -> str:
    return next(row.state for row in ledger.groups(RUN) if row.group_id == leased.group_id)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("too little memory"), "too little memory"),
        (OSError("gone"), "OSError: gone"),
        (OSError("no answer from http://me:hush@host/api"), "OSError: no answer from http://…@host/api"),
    ],
)
def test_what_ended_an_actor_is_said(error: Exception, message: str, ledger: Ledger, actor: Actor) -> None:
    with pytest.raises(type(error)), a_scope(ledger, actor, pytest.fail):
        raise error
    row = row_of(ledger, actor)
    assert (row.state, row.message) == ("failed", message)


def test_the_first_word_counts(ledger: Ledger, actor: Actor) -> None:
    with a_scope(ledger, actor, pytest.fail):
        ledger.finish(actor, "failed", "ended by SIGTERM")
    assert row_of(ledger, actor).message == "ended by SIGTERM"


def test_a_ledger_that_takes_no_writes_hinders_no_end(
    ledger: Ledger, actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise FULL

    monkeypatch.setattr(ledger, "finish", refuse)
    with pytest.raises(UserError, match="the cause"), a_scope(ledger, actor, pytest.fail):
        raise UserError("the cause")


def test_sigterm_is_heard_although_the_ledger_hangs(
    ledger: Ledger, actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, free = threading.Event(), threading.Event()

    def hang(*_: object, **__: object) -> None:
        free.wait(60)
        raise FULL

    monkeypatch.setattr(ledger, "heartbeat", hang)
    before = signal.getsignal(signal.SIGTERM)
    with a_scope(ledger, actor, lambda reason: heard.set()):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard.wait(30)
    free.set()
    assert signal.getsignal(signal.SIGTERM) == before


def test_it_is_told_once_to_leave(ledger: Ledger, actor: Actor) -> None:
    reasons: list[str] = []
    with a_scope(ledger, actor, reasons.append):
        wait_until(lambda: row_of(ledger, actor).serial > 3)
        assert reasons == []
        ledger.close_run(supervisor_of(ledger), "completed")
        serial = row_of(ledger, actor).serial
        wait_until(lambda: row_of(ledger, actor).serial > serial + 3)
        os.kill(os.getpid(), signal.SIGTERM)
    assert reasons == ["the ledger says so"]


def test_it_is_told_once_to_drain_and_then_to_leave(ledger: Ledger, actor: Actor) -> None:
    told: list[str] = []
    scope = ActorScope(ledger, actor, a_process(), told.append, on_drain=lambda: told.append("drain"), interval_s=0.01)
    with scope:
        for wanted, heard in (("drain", ["drain"]), ("leave", ["drain", "the ledger says so"])):
            ledger.want(supervisor_of(ledger), actor, wanted)
            wait_until(lambda: len(told) == len(heard))  # noqa: B023
            serial = row_of(ledger, actor).serial
            wait_until(lambda: row_of(ledger, actor).serial > serial + 3)  # noqa: B023
            assert told == heard


def test_an_orphan_leaves(ledger: Ledger, actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is going to take the run up again; but as long as the supervisor beats, it stays."""
    monkeypatch.setattr(lifecycle, "ORPHAN_AFTER_S", 0.2)
    reasons: list[str] = []
    supervisor = supervisor_of(ledger)
    with a_scope(ledger, actor, reasons.append):
        for _ in range(50):
            ledger.heartbeat(supervisor)
            time.sleep(0.01)
        assert reasons == []
        wait_until(lambda: reasons != [])
    assert reasons[0].startswith("the supervisor has been silent")


def test_an_actor_whose_write_was_refused_leaves_with_its_own_status(ledger: Ledger, actor: Actor) -> None:
    with pytest.raises(SystemExit) as left, a_scope(ledger, actor, pytest.fail):
        raise Fenced("replaced")
    assert left.value.code == FENCED_EXIT_STATUS


def test_a_process_that_comes_too_late_leaves_with_the_same_status(ledger: Ledger, actor: Actor) -> None:
    """It was stopped before it registered, and another attempt has its place by now."""
    before = signal.getsignal(signal.SIGTERM)
    replacement = assign(ledger, "replica")
    with pytest.raises(SystemExit) as left, a_scope(ledger, actor, pytest.fail):
        pytest.fail("it began")
    assert left.value.code == FENCED_EXIT_STATUS
    assert signal.getsignal(signal.SIGTERM) == before
    assert row_of(ledger, replacement).state == "assigned"


PROCESS = """
import sys, time
from tasks.exchange.ledger import Actor, Ledger
from tasks.lifecycle.scope import ActorScope, this_process
ledger, actor = Ledger(sys.argv[1]), Actor("run", "replica", 0, 1)
with ActorScope(ledger, actor, this_process("here"), lambda reason: None, interval_s=0.05):
    while True:
        time.sleep(0.1)
"""


def test_a_fenced_process_ends_at_once(ledger: Ledger, actor: Actor, tmp_path: Path) -> None:
    """Whatever its main thread does, and without a word: what it holds belongs to its replacement."""
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    process = subprocess.Popen([sys.executable, "-c", PROCESS, url], cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    wait_until(lambda: row_of(ledger, actor).serial > 2)
    fence(ledger, actor)
    assert process.wait(30) == FENCED_EXIT_STATUS
    assert row_of(ledger, actor).state == "fenced"
