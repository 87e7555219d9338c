"""Whole runs on the tiny model through the real stack: two device types, killed processes, cancellation, resume.

One machine whose two cores are labelled as two device types, so two pools, one trains and the other generates.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tasks.exchange.ledger import ActorRow, Ledger
from tasks.settings import Settings

pytestmark = pytest.mark.e2e

EXPERIMENT = Path(__file__).parent.parent / "deployments" / "experiments" / "tiny.yaml"


class Run:
    """`hexflow train` or `hexflow resume` in a process of its own."""

    def __init__(self, settings: Settings, *arguments: str) -> None:
        self.settings = settings
        self.ledger = Ledger(settings.ledger_url)
        self._known = {run.run_id for run in self.ledger.list_runs()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deployments.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A shell starts what it puts into the background with Ctrl-C ignored, and that is inherited.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    @property
    def run_id(self) -> str:
        until(lambda: self._new_runs() != set(), 240, "a run in the ledger")
        (run_id,) = self._new_runs()
        return run_id

    def _new_runs(self) -> set[str]:
        return {run.run_id for run in self.ledger.list_runs()} - self._known

    def wait(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=400)
        return self.process.returncode, output

    def summary(self, run_id: str) -> dict[str, object]:
        return json.loads((self.settings.runs / run_id / "summary.json").read_text())


def until(condition: Callable[[], bool], deadline_s: float, what: str) -> None:
    give_up = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up, f"did not happen within {deadline_s:.0f} s: {what}"
        time.sleep(0.2)


def actor(ledger: Ledger, run_id: str, role: str) -> ActorRow:
    return next(row for row in ledger.actors(run_id) if row.role == role)


def assert_nothing_left(settings: Settings, ledger: Ledger, run_id: str) -> None:
    """Every actor that ever joined is gone, with the processes it started."""
    marked = [
        process
        for process in psutil.process_iter()
        if _environment(process).get("HEXFLOW_HOME") == str(settings.home)
        and any("tasks." in part for part in process.cmdline())
    ]
    assert not marked, f"left behind: {[process.cmdline() for process in marked]}"
    assert all(row.state in ("done", "failed", "fenced") for row in ledger.actors(run_id))


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


@pytest.fixture(scope="module")
def ledger(stack_settings: Settings) -> Ledger:
    return Ledger(stack_settings.ledger_url)


def test_a_run_learns_although_its_processes_are_killed(stack_settings: Settings, ledger: Ledger) -> None:
    run = Run(stack_settings, "train", str(EXPERIMENT))
    run_id = run.run_id
    until(lambda: ledger.progress(run_id).step >= 2, 300, "two steps")
    os.killpg(actor(ledger, run_id, "replica").pid, signal.SIGKILL)
    until(lambda: ledger.progress(run_id).step >= 7, 200, "steps of a second replica and a checkpoint")
    os.kill(actor(ledger, run_id, "trainer").pid, signal.SIGKILL)
    status, output = run.wait()
    assert status == 0, output

    summary = run.summary(run_id)
    assert summary["status"] == "completed"
    assert summary["steps"] == 12
    assert summary["trajectories_consumed"] == 12 * 4 * 4
    assert summary["max_staleness_seen"] <= summary["max_staleness_allowed"] == 2
    assert summary["eval_after"] > summary["eval_before"]
    assert actor(ledger, run_id, "replica").attempt == 2
    assert actor(ledger, run_id, "trainer").attempt == 2
    found = ledger.find_run(run_id=run_id)
    assert found is not None
    assert found.lineage == 1
    plan = json.loads((stack_settings.runs / run_id / "plan.json").read_text())
    assert {plan["training"]["stages"][0]["device_type"], plan["replicas"][0]["device_type"]} == {"fast", "slow"}
    assert plan["upper_bound_tokens_per_s"] >= plan["throughput_tokens_per_s"] > 0
    for part in ("step_s", "train_s", "rollout_s", "publish_s", "load_s"):
        assert summary[f"{part}_predicted"] > 0
        assert summary[f"{part}_measured"] > 0
    assert (stack_settings.runs / run_id / "curves.png").stat().st_size > 1000
    assert_nothing_left(stack_settings, ledger, run_id)
    assert_tracked(stack_settings, str(summary["mlflow_run_id"]), "FINISHED")


def test_a_cancelled_run_leaves_nothing_behind_and_can_be_resumed(stack_settings: Settings, ledger: Ledger) -> None:
    # Long enough not to end by itself while the cancellation travels: a step takes a third of a second.
    run = Run(stack_settings, "train", str(EXPERIMENT), "run.steps=100", "run.checkpoint_every=10")
    run_id = run.run_id
    until(lambda: ledger.progress(run_id).step >= 11, 300, "a checkpoint and one more step")
    run.process.send_signal(signal.SIGINT)
    status, output = run.wait()
    assert status == 130, output
    assert_nothing_left(stack_settings, ledger, run_id)
    summary = run.summary(run_id)
    assert summary["status"] == "cancelled"
    assert_tracked(stack_settings, str(summary["mlflow_run_id"]), "KILLED")

    resumed = Run(stack_settings, "resume", run_id)
    status, output = resumed.wait()
    assert status == 0, output
    summary = resumed.summary(run_id)
    assert summary["status"] == "completed"
    assert summary["trajectories_consumed"] == 100 * 4 * 4
    assert summary["max_staleness_seen"] <= 2
    assert_nothing_left(stack_settings, ledger, run_id)


def assert_tracked(settings: Settings, mlflow_run_id: str, status: str) -> None:
    """The parent run in MLflow ended with `status`, and no child is still called running."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{settings.home / 'mlflow.db'}")
    parent = client.get_run(mlflow_run_id)
    assert parent.info.status == status
    assert parent.data.params["algorithm.lr"] == "0.001"
    children = client.search_runs([parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{mlflow_run_id}'")
    assert {child.data.tags["hexflow.role"] for child in children} == {"trainer", "replica"}
    assert "RUNNING" not in {child.info.status for child in children}
    assert any("reward/mean" in child.data.metrics for child in children)
