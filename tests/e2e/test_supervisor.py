"""Supervisors in real processes that are stopped, replaced and continued, killed, or told to end without a ledger."""

import os
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tasks.config.settings import Settings
from tasks.exchange.ledger import ActorRow, Ledger, Process
from tasks.lifecycle.scope import FENCED_EXIT_STATUS
from tasks.machine.processes import ProcessGroup, group_alive, process_key
from tests.support.ledger import a_process
from tests.support.places import REPOSITORY
from tests.support.stack import until
from tests.support.supervised import SLEEPER

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


FIRST, SECOND = (f"00000000-0000-4000-8000-00000000000{number}" for number in (1, 2))
"""Flow runs."""


class Scene:
    """Supervisors in processes of their own, each with two sleeping actors, and the ledger that they write to."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        self.directory = directory
        self.ledger = Ledger(settings.shared.ledger_url)
        self.processes: list[ProcessGroup] = []
        self.sleepers: set[int] = set()

    def start(self, flow_run_id: str, *resume: str) -> ProcessGroup:
        environment = {"PYTHONPATH": str(REPOSITORY), "PREFECT_API_URL": "http://127.0.0.1:1/api"}
        argv = [sys.executable, "-m", "tests.support.supervised", str(self.directory), flow_run_id, *resume]
        self.processes.append(ProcessGroup.start(argv, environment, self.directory / "supervisor.log"))
        return self.processes[-1]

    def at_work(self, flow_run_id: str) -> str:
        """Wait until the run of a flow run has both actors at work; returns its id."""
        process = self.processes[-1]

        def run_id() -> str | None:
            assert process.poll() is None, process.tail()
            run = self.ledger.find_run(flow_run_id=flow_run_id)
            return run.run_id if run and [row.state for row in self.rows(run.run_id)] == ["running"] * 3 else None

        until(lambda: run_id() is not None, 120, "a run with its actors at work")
        found = run_id()
        assert found
        self.sleepers |= {row.pid for row in self.rows(found) if row.pid and row.role != "supervisor"}
        return found

    def rows(self, run_id: str) -> list[ActorRow]:
        return self.ledger.actors(run_id)

    def wrote(self) -> set[str]:
        return {name for name in ("tracked", "reported") if (self.directory / name).exists()}

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)
            process.stop(0.0)
        for pid in filter(group_alive, self.sleepers):
            os.killpg(pid, signal.SIGKILL)
        self.ledger.close()


@pytest.fixture
def scene(settings: Settings, tmp_path: Path) -> Iterator[Scene]:
    directory = tmp_path / "scene"
    directory.mkdir()
    with closing(Scene(settings, directory)) as opened:
        yield opened


@pytest.fixture
def successors_actor(tmp_path: Path) -> Iterator[ProcessGroup]:
    group = ProcessGroup.start(SLEEPER, {}, tmp_path / "successor.log")
    yield group
    group.stop(0.0)


@pytest.mark.parametrize("stopped", ["at work", "while it ends its actors"])
def test_a_supervisor_that_was_stopped_and_replaced_touches_nothing_of_its_successor(
    scene: Scene, successors_actor: ProcessGroup, stopped: str
) -> None:
    """It neither closes the run nor kills, fences, reports or tracks: it leaves with the status of who was fenced."""
    process = scene.start(FIRST)
    run_id = scene.at_work(FIRST)
    if stopped != "at work":
        assert scene.ledger.ask_to_cancel(FIRST)
        until((scene.directory / "ending").exists, 120, "the end of its actors")
    os.kill(process.pid, signal.SIGSTOP)
    seen = next((row.attempt, row.serial) for row in scene.rows(run_id) if row.role == "supervisor")
    successor = scene.ledger.take_over(run_id, a_process(), SECOND, seen)
    actor = scene.ledger.assign(successor, "replica", 0, 1, 0, ["here"])
    scene.ledger.register(actor, Process(process_key(successors_actor.pid), successors_actor.pid, "here"))
    (scene.directory / "go").touch()
    os.kill(process.pid, signal.SIGCONT)
    until(lambda: process.poll() is not None, 120, "its end")
    assert process.poll() == FENCED_EXIT_STATUS, process.tail()
    assert group_alive(successors_actor.pid)
    run = scene.ledger.find_run(run_id=run_id)
    assert run is not None
    assert (run.state, run.flow_run_id) == ("running", SECOND)
    states = {(row.role, row.attempt): row.state for row in scene.rows(run_id)}
    assert states == {("supervisor", 2): "starting", ("replica", 2): "starting", ("trainer", 1): "fenced"}
    scene.ledger.confirm(successor)
    scene.ledger.confirm(actor)
    assert scene.wrote() == set()


def test_a_run_whose_supervisor_was_killed_is_resumed_at_once(scene: Scene, settings: Settings) -> None:
    """Its actors went on, and one of them has stopped: fenced by the resume, both are ended, and others started."""
    process = scene.start(FIRST)
    run_id = scene.at_work(FIRST)
    former = set(scene.sleepers)
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: process.poll() is not None, 60, "its end")
    assert all(map(group_alive, former))
    os.kill(min(former), signal.SIGSTOP)
    scene.start(SECOND, run_id)
    assert scene.at_work(SECOND) == run_id
    assert not any(map(group_alive, former))
    states = {(row.role, row.attempt): row.state for row in scene.rows(run_id)}
    assert states == {("supervisor", 2): "running", ("replica", 2): "running", ("trainer", 2): "running"}


def test_sigterm_ends_a_run_whose_ledger_takes_no_writes(scene: Scene, settings: Settings) -> None:
    """With its actors, although nobody can be told; three signals are not needed, and do no harm."""
    (scene.directory / "go").touch()
    process = scene.start(FIRST)
    run_id = scene.at_work(FIRST)
    file = settings.shared.ledger_url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(file, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        for _ in range(3):
            os.kill(process.pid, signal.SIGTERM)
        until(lambda: process.poll() is not None, 300, "its end")
        assert not any(map(group_alive, scene.sleepers))
        run = scene.ledger.find_run(run_id=run_id)
        assert run is not None
        assert run.state == "running", "the ledger did take a write"
        holder.execute("ROLLBACK")
    assert process.poll() != 0
