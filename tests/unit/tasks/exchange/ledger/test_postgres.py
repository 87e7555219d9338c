"""On PostgreSQL every call ends in time, whoever has stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from select import select as wait_readable

import psycopg
import pytest
from sqlalchemy import Connection, func, select, text
from sqlalchemy.exc import DBAPIError, OperationalError

from tasks.exchange.ledger import Ledger
from tasks.exchange.ledger import postgres as connections
from tests.support.ledger import RUN, supervisor_of
from tests.support.places import REPOSITORY
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
    monkeypatch.setattr(connections, "STATEMENT_S", 6 * QUICK_S)
    monkeypatch.setattr(connections, "SILENCE_S", 8 * QUICK_S)
    monkeypatch.setattr(connections, "REACH_S", 4 * QUICK_S)


@pytest.fixture
def other(quick: None, ledger: Ledger, url: str) -> Iterator[Ledger]:
    """Another process's connection to the ledger, with quick deadlines."""
    opened = Ledger(url, patience_s=0)
    yield opened
    opened.close()


def state_of_run(ledger: Ledger) -> str:
    run = ledger.find_run(run_id=RUN)
    assert run is not None
    return run.state


def backend_of(connection: Connection) -> int:
    return connection.scalar(select(func.pg_backend_pid())) or 0


def test_the_deadlines_end_every_call_within_ten_seconds() -> None:
    assert connections.IDLE_IN_TRANSACTION_S < connections.LOCK_WAIT_S < connections.STATEMENT_S
    assert connections.STATEMENT_S < connections.SILENCE_S < 10
    assert 3 * connections.REACH_S < 10, "a connection of before, and the two addresses of a host"


def test_who_stops_inside_a_transaction_holds_up_nobody(ledger: Ledger, other: Ledger, url: str) -> None:
    stopped = Ledger(url, patience_s=0)

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


def test_a_statement_that_takes_too_long_is_ended_by_the_server(ledger: Ledger, other: Ledger) -> None:
    def take_long() -> None:
        with other.write(RUN) as connection:
            connection.execute(text("SELECT count(*) FROM generate_series(1, 10000000000)"))

    with pytest.raises(OperationalError, match="statement timeout"):
        take_long()


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


WANTS_A_SERVER = """
import time
from tests.support.postgres import private_postgres
with private_postgres(durable=False) as server:
    print(server.directory, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_test_server_does_not_outlive_who_wanted_it(number: signal.Signals) -> None:
    command = [sys.executable, "-c", WANTS_A_SERVER]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        directory = Path(process.stdout.readline().strip())
        pid = int((directory / "data/postmaster.pid").read_text().split()[0])
        server = os.pidfd_open(pid)
        process.send_signal(number)
    assert wait_readable([server], [], [], 30)[0], "the server runs on"
    os.close(server)
    give_up = time.monotonic() + 30
    while directory.exists():
        assert time.monotonic() < give_up, "its directory stays"
        time.sleep(0.02)
