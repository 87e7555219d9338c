"""A supervisor's process that is stopped, replaced and continued: what it may still do, and what not."""

import os
import signal
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
from tests.support.supervised import FLOW_RUN, SLEEPER

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


class Scene:
    """A supervisor's process with its two sleeping actors, and the ledger that it writes to."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        self.directory = directory
        self.ledger = Ledger(settings.shared.ledger_url)
        environment = {"PYTHONPATH": str(REPOSITORY), "PREFECT_API_URL": "http://127.0.0.1:1/api"}
        argv = [sys.executable, "-m", "tests.support.supervised", str(directory)]
        self.process = ProcessGroup.start(argv, environment, directory / "supervisor.log")
        self.actors: list[int] = []

    def begin(self) -> str:
        """Wait until both actors are at work; returns the run's id."""
        self.until(lambda: self.ledger.find_run(flow_run_id=FLOW_RUN) is not None, "a run")
        run = self.ledger.find_run(flow_run_id=FLOW_RUN)
        assert run is not None
        self.until(lambda: [row.state for row in self.rows(run.run_id)] == ["running"] * 3, "its actors at work")
        self.actors = [row.pid for row in self.rows(run.run_id) if row.pid and row.role != "supervisor"]
        return run.run_id

    def rows(self, run_id: str) -> list[ActorRow]:
        return self.ledger.actors(run_id)

    def until(self, condition: object, what: str) -> None:
        assert self.process.poll() is None or what == "its end", self.process.tail()
        until(condition, 120, what)  # type: ignore[arg-type]

    def wrote(self) -> set[str]:
        return {name for name in ("tracked", "reported") if (self.directory / name).exists()}

    def close(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT) if self.process.poll() is None else None
        self.process.stop(0.0)
        for pid in self.actors:
            if group_alive(pid):
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
    run_id = scene.begin()
    if stopped != "at work":
        assert scene.ledger.ask_to_cancel(FLOW_RUN)
        scene.until(lambda: (scene.directory / "ending").exists(), "the end of its actors")
    os.kill(scene.process.pid, signal.SIGSTOP)
    seen = next((row.attempt, row.serial) for row in scene.rows(run_id) if row.role == "supervisor")
    successor = scene.ledger.take_over(run_id, a_process(), "flow-2", seen)
    actor = scene.ledger.assign(successor, "replica", 0, 1, 0, ["here"])
    scene.ledger.register(actor, Process(process_key(successors_actor.pid), successors_actor.pid, "here"))
    (scene.directory / "go").touch()
    os.kill(scene.process.pid, signal.SIGCONT)
    scene.until(lambda: scene.process.poll() is not None, "its end")
    assert scene.process.poll() == FENCED_EXIT_STATUS, scene.process.tail()
    assert group_alive(successors_actor.pid)
    run = scene.ledger.find_run(run_id=run_id)
    assert run is not None
    assert (run.state, run.flow_run_id) == ("running", "flow-2")
    states = {(row.role, row.attempt): row.state for row in scene.rows(run_id)}
    assert states == {("supervisor", 2): "starting", ("replica", 2): "starting", ("trainer", 1): "fenced"}
    scene.ledger.confirm(successor)
    scene.ledger.confirm(actor)
    assert scene.wrote() == set()
