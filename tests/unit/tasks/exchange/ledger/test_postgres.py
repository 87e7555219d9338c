"""On PostgreSQL every call ends in time, whoever has stopped, and may be repeated when its answer was lost."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, func, select, text
from sqlalchemy.exc import DBAPIError, OperationalError

from tasks.exchange.ledger import Ledger
from tasks.exchange.ledger import postgres as connections
from tests.support.cut import CuttingWay, cutting_way
from tests.support.ledger import ETA, RUN, STEPS, B, a_process, join, lease, supervisor_of, take
from tests.support.postgres import PostgresServer

QUICK_S = 0.5


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.empty_ledger()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that a test can wait for; who holds a lock still goes before who waits for it gives up."""
    monkeypatch.setattr(connections, "IDLE_IN_TRANSACTION_S", QUICK_S)
    monkeypatch.setattr(connections, "LOCK_WAIT_S", 4 * QUICK_S)
    monkeypatch.setattr(connections, "SILENCE_S", 8 * QUICK_S)
    monkeypatch.setattr(connections, "REACH_S", 4 * QUICK_S)


@pytest.fixture
def other(quick: None, ledger: Ledger, url: str) -> Iterator[Ledger]:
    """Another process's connection to the ledger, with quick deadlines."""
    opened = Ledger(url)
    yield opened
    opened.close()


def state_of_run(ledger: Ledger) -> str:
    run = ledger.find_run(run_id=RUN)
    assert run is not None
    return run.state


def backend_of(connection: Connection) -> int:
    return connection.scalar(select(func.pg_backend_pid())) or 0


def test_the_deadlines_end_every_call_within_ten_seconds() -> None:
    assert connections.IDLE_IN_TRANSACTION_S < connections.LOCK_WAIT_S < connections.SILENCE_S < 10
    assert 2 * connections.REACH_S < 10


def test_who_stops_inside_a_transaction_holds_up_nobody(ledger: Ledger, other: Ledger, url: str) -> None:
    stopped = Ledger(url)

    def stop_inside() -> None:
        with stopped.write(RUN) as connection:
            connection.execute(text("UPDATE runs SET state = 'failed'"))
            other.close_run(supervisor_of(other), "completed")

    with pytest.raises(DBAPIError, match=r"terminating connection|closed"):
        stop_inside()
    assert state_of_run(other) == "completed"
    stopped.close()


def test_who_waits_for_a_lock_gets_an_error_in_time(ledger: Ledger, other: Ledger, url: str) -> None:
    supervisor = supervisor_of(other)
    with psycopg.connect(url, autocommit=True) as holder:
        holder.execute("SELECT pg_advisory_lock(hashtext(%s))", [RUN])
        with pytest.raises(OperationalError, match="lock timeout"):
            other.close_run(supervisor, "failed")
    other.close_run(supervisor_of(other), "completed")
    assert state_of_run(other) == "completed"


def test_a_server_that_is_silent_is_given_up(ledger: Ledger, other: Ledger) -> None:
    """In the middle of a call with an error; between two calls, the second gets another connection."""
    stopped = []

    def stop_and_ask() -> None:
        with other.read() as connection:
            stopped.append(backend_of(connection))
            os.kill(stopped[-1], signal.SIGSTOP)
            connection.scalar(select(1))

    try:
        with pytest.raises(OperationalError, match="has not answered"):
            stop_and_ask()
        with other.read() as connection:
            stopped.append(backend_of(connection))
        os.kill(stopped[-1], signal.SIGSTOP)
        assert other.progress(RUN).step == 0
    finally:
        for backend in stopped:
            os.kill(backend, signal.SIGCONT)


def test_the_call_after_a_lost_connection_works(ledger: Ledger, postgres: PostgresServer) -> None:
    postgres.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND query <> ''")
    assert ledger.progress(RUN).step == 0


# Lost answers


@pytest.fixture
def way(postgres: PostgresServer) -> Iterator[CuttingWay]:
    with tempfile.TemporaryDirectory() as directory, cutting_way(postgres.directory, Path(directory)) as opened:
        yield opened


def test_a_call_whose_answer_was_lost_gives_the_same_when_repeated(
    postgres: PostgresServer, url: str, way: CuttingWay
) -> None:
    """The connection is cut when the server has committed, for every call that changes something."""
    ledger = Ledger(url.replace(str(postgres.directory), str(way.directory)))

    def repeated(call: Callable[[], Any]) -> Any:
        way.cut_next_commit()
        with pytest.raises(OperationalError):
            call()
        assert way.has_cut
        return call()

    process = a_process()
    sizes: dict[str, Any] = {"prompts_per_step": B, "max_staleness": ETA, "steps": STEPS, "max_attempts_per_prompt": 2}
    supervisor = repeated(partial(ledger.begin_run, RUN, process, **sizes))
    trainer = repeated(lambda: ledger.assign(supervisor, "trainer", 0, 0, 0, ["here"]))
    assert trainer.attempt == 1
    repeated(lambda: ledger.register(trainer, process))
    replica = join(ledger, "replica")
    repeated(lambda: ledger.heartbeat(trainer))
    repeated(lambda: ledger.record_version(trainer, 0, "path"))
    assert repeated(lambda: ledger.claim_version(replica, 0, 0))
    repeated(lambda: ledger.set_loaded(replica, 0, 0))
    repeated(lambda: ledger.request_evaluation(supervisor, "before", 0))
    assert repeated(lambda: ledger.claim_evaluation(replica, 0)).purpose == "before"
    repeated(lambda: ledger.record_evaluation(replica, "before", "{}"))
    first = repeated(lambda: ledger.lease_group(replica, 0, "first"))
    assert first.group_id == 1
    assert repeated(lambda: ledger.name_question(replica, first.group_id, "question"))
    repeated(lambda: ledger.drop_group(replica, first.group_id, "too_few_scored"))
    leased = [lease(ledger, replica) for _ in range(B)]
    assert [row.prompt_index for row in leased] == [0, 1]
    for row in leased:
        assert repeated(partial(ledger.complete_group, replica, row.group_id, 0, 0.5, {"scored": 2}, 9))
    assert repeated(lambda: ledger.take_groups(trainer, 0)) == take(ledger, trainer, 0)
    repeated(lambda: ledger.record_step(trainer, 0, "{}"))
    for number in (1, 2):
        ledger.record_version(trainer, number, "path")
    assert repeated(lambda: ledger.retire_versions(trainer, 1, [(0, 1)])) == {(0, 1)}
    progress = ledger.progress(RUN)
    assert progress.groups == {"leased": 0, "scored": 0, "consumed": B, "dropped": 1}
    assert (progress.dropped, progress.response_tokens, progress.step) == ({"too_few_scored": 1}, 9 * B, 1)
    assert ledger.evaluations(RUN)["before"].result == {}
    ledger.close()
