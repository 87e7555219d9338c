"""A ledger that does not answer is asked again until it does, or for as long as who asks has patience."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from filelock import FileLock
from sqlalchemy.exc import OperationalError

from planners.errors import UserError
from tasks.exchange.ledger import Fenced, Ledger, sqlite
from tests.support.ledger import RUN, begin, fence, join, supervisor_of
from tests.support.places import REPOSITORY
from tests.support.postgres import PostgresServer, private_postgres

QUICK_S = 0.3


# PostgreSQL: a restart


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    with private_postgres(durable=False) as started:
        yield started


def test_a_restart_of_the_server_fails_no_call(server: PostgresServer, caplog: pytest.LogCaptureFixture) -> None:
    """Whether the call is made before it or meanwhile, and neither does opening the ledger."""
    with closing(Ledger(server.url("postgres"))) as ledger:
        begin(ledger)
        trainer = join(ledger, "trainer")
        server.stop()
        done = []

        def work() -> None:
            ledger.record_version(trainer, 0, "path")
            with closing(Ledger(server.url("postgres"))) as other:
                done.append(other.latest_version(RUN))

        caplog.set_level("WARNING")
        worker = threading.Thread(target=work)
        worker.start()
        while "has not answered record_version" not in caplog.text:
            assert worker.is_alive()
            time.sleep(0.01)
        server.start()
        worker.join()
        assert done == [(0, 0)]


def ask_in_vain(ledger: Ledger) -> None:
    with pytest.raises(OperationalError):
        ledger.progress(RUN)


def test_patience_ends(server: PostgresServer) -> None:
    """After its time; at once for who has none, and for a process that is to end."""
    url = server.url("postgres")
    with closing(Ledger(url, patience_s=QUICK_S)) as ledger, closing(Ledger(url)) as patient:
        begin(ledger)
        server.stop()
        ask_in_vain(ledger)
        ask_in_vain(patient.at_once())
        with pytest.raises(UserError, match="cannot be opened"):
            Ledger(url, patience_s=0)
        waiting = threading.Thread(target=ask_in_vain, args=(patient,))
        waiting.start()
        patient.hurry.set()
        waiting.join(60)
        assert not waiting.is_alive()


def test_a_refusal_is_not_asked_for_again(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    actor = join(ledger, "replica")
    fence(ledger, actor)
    with pytest.raises(Fenced):
        ledger.lease_group(actor, 0, "key")
    with pytest.raises(ValueError, match="never leased"):
        ledger.drop_group(join(ledger, "replica"), 1, "aborted")
    with pytest.raises(UserError, match="knows no run"):
        ledger.progress("another")
    assert caplog.text == ""


# SQLite: who has stopped with the lock

HOLDER = """
import sys, time
from tasks.exchange.ledger import Ledger
with Ledger(sys.argv[1]).write("run"):
    print("writes", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger whose waiters soon give up."""
    monkeypatch.setattr(sqlite, "LOCK_WAIT_S", QUICK_S)
    return tmp_path / "ledger.db"


@pytest.fixture
def opened(place: Path) -> Iterator[Ledger]:
    with closing(Ledger(f"sqlite:///{place}", patience_s=QUICK_S)) as ledger:
        begin(ledger)
        yield ledger


@pytest.fixture
def holder(opened: Ledger, place: Path) -> Iterator[psutil.Process]:
    """A process in the middle of a write."""
    command = [sys.executable, "-c", HOLDER, f"sqlite:///{place}"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writes\n"
        yield psutil.Process(process.pid)
        process.kill()


def test_who_keeps_others_from_writing_is_named(opened: Ledger, place: Path, holder: psutil.Process) -> None:
    supervisor = supervisor_of(opened)
    with pytest.raises(OperationalError, match=rf"process {holder.pid} \(.*\) has locked {place} for"):
        opened.close_run(supervisor, "failed")
    assert opened.stopped_writer() is None
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(OperationalError, match=rf"process {holder.pid} \(.*\) has stopped .*`kill -CONT {holder.pid}`"):
        opened.close_run(supervisor, "failed")
    assert opened.stopped_writer() == holder.pid
    with closing(Ledger(f"sqlite:///{place}", patience_s=0)) as another:
        assert another.progress(RUN).step == 0, "who only reads was held up"
    holder.kill()
    assert opened.close_run(supervisor, "completed") == "completed"
    assert opened.stopped_writer() is None


def test_who_keeps_others_from_opening_is_named(place: Path, opened: Ledger) -> None:
    with FileLock(f"{place}.lock"), pytest.raises(UserError, match=rf"process {os.getpid()} \(.*\) has locked {place}"):
        Ledger(f"sqlite:///{place}", patience_s=QUICK_S)


def test_who_waits_writes_when_the_stopped_one_is_gone(
    place: Path, opened: Ledger, holder: psutil.Process, caplog: pytest.LogCaptureFixture
) -> None:
    holder.send_signal(signal.SIGSTOP)
    said: list[str] = []
    with closing(Ledger(f"sqlite:///{place}")) as patient:
        supervisor = supervisor_of(patient)
        waiting = threading.Thread(target=lambda: said.append(patient.close_run(supervisor, "completed")))
        waiting.start()
        while "has not answered close_run" not in caplog.text:
            assert waiting.is_alive()
            time.sleep(0.01)
        holder.kill()
        waiting.join()
    assert said == ["completed"]
