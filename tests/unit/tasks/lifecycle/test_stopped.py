"""An attempt that stops while it writes to the ledger is ended by the supervisor that gave it out, by nobody else."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tasks.exchange.ledger import Actor, Ledger, Process
from tasks.lifecycle import stopped
from tasks.lifecycle.stopped import StoppedWriters, end_if_own
from tasks.machine.processes import process_key
from tests.support.ledger import RUN, a_process, assign, begin, supervisor_of
from tests.support.places import REPOSITORY

WRITER = """
import sys
from tasks.exchange.ledger import Ledger
ledger = Ledger(sys.argv[1])
print("opened", flush=True)
sys.stdin.readline()
with ledger.write("run"):
    print("writes", flush=True)
    sys.stdin.readline()
"""


class Writer:
    """A process of a replica that can be stopped in the middle of a write."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.hears("opened")

    def hears(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{word}\n"

    def stop_in_a_write(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.hears("writes")
        self.process.send_signal(signal.SIGSTOP)
        while psutil.Process(self.process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)


@pytest.fixture
def writer(ledger: Ledger, tmp_path: Path) -> Iterator[Writer]:
    command = [sys.executable, "-c", WRITER, f"sqlite:///{tmp_path / 'ledger.db'}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, text=True, stdin=pipe, stdout=pipe) as process:
        yield Writer(process)
        process.kill()


@pytest.fixture
def actor(ledger: Ledger, writer: Writer) -> Actor:
    """The replica that the writer is."""
    actor = assign(ledger, "replica")
    ledger.register(actor, Process(process_key(writer.process.pid), writer.process.pid, "here"))
    return actor


def test_an_actor_of_its_own_is_ended(
    ledger: Ledger, actor: Actor, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopped, "STOPPED_S", 0.1)
    supervisor = supervisor_of(ledger)
    writer.stop_in_a_write()
    with StoppedWriters(ledger, supervisor, poll_s=0.01):
        assert writer.process.wait(30) == -signal.SIGKILL
        assert ledger.fence(supervisor, actor) is not None


def test_nobody_else_is_ended(ledger: Ledger, writer: Writer) -> None:
    """Neither a process that is no actor, nor one of another supervisor, nor one that goes on."""
    supervisor, pid = supervisor_of(ledger), writer.process.pid
    other = begin(ledger, "another")
    actor = assign(ledger, "replica")
    ledger.register(actor, Process(process_key(pid), pid, "here"))
    assert not end_if_own(ledger, supervisor, pid), "it does not write"
    writer.stop_in_a_write()
    assert not end_if_own(ledger, other, pid)
    assert writer.process.poll() is None
    assert end_if_own(ledger, supervisor, pid)


def test_a_supervisor_that_was_replaced_ends_nobody(ledger: Ledger, actor: Actor, writer: Writer) -> None:
    former = supervisor_of(ledger)
    seen = next((row.attempt, row.serial) for row in ledger.actors(RUN) if row.role == "supervisor")
    ledger.take_over(RUN, a_process(), "flow-2", seen)
    writer.stop_in_a_write()
    assert not end_if_own(ledger, former, writer.process.pid)
    assert writer.process.poll() is None


def test_a_process_that_is_gone_is_nobody(ledger: Ledger, writer: Writer) -> None:
    writer.process.kill()
    writer.process.wait()
    assert not end_if_own(ledger, supervisor_of(ledger), writer.process.pid)
