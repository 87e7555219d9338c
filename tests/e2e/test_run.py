"""A whole run on the tiny model through the real stack: two device types, killed processes, cancellation, resume.

One machine whose two cores are labelled as two device types, so two pools, one trains and the other generates.
"""

import json
import os
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest

from deployments.local import stack
from deployments.local.sign_in import api_of
from tasks.config.settings import Settings
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import ActorRow, Ledger
from tasks.training.checkpoints import found_checkpoints
from tests.support.checkpoints import damage
from tests.support.places import EXPERIMENTS
from tests.support.stack import hexflow, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

EXPERIMENT = EXPERIMENTS / "tiny.yaml"
STEPS = 60


class Run:
    """`hexflow train` or `hexflow resume` in a process of its own."""

    def __init__(self, settings: Settings, *arguments: str) -> None:
        self.settings = settings
        self.ledger = Ledger(settings.shared.ledger_url)
        self._known = {run.run_id for run in self.ledger.list_runs()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deployments.cli.main", *arguments],
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

    def summary(self, run_id: str) -> dict[str, Any]:
        return json.loads((self.settings.shared.runs / run_id / "summary.json").read_text())


def actor(ledger: Ledger, run_id: str, role: str) -> ActorRow:
    return next(row for row in ledger.actors(run_id) if row.role == role)


def assert_nothing_left(settings: Settings, ledger: Ledger, run_id: str) -> None:
    """Every actor that ever joined is gone, with the processes it started."""
    marked = [
        process
        for process in psutil.process_iter()
        if _environment(process).get("HEXFLOW_HOME") == str(settings.local.home)
        and any("tasks." in part for part in process.cmdline())
    ]
    assert not marked, f"left behind: {[process.cmdline() for process in marked]}"
    assert all(row.state in ("done", "failed", "fenced") for row in ledger.actors(run_id))


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def test_ctrl_c_cancels_a_run_here_and_on_the_server(stack_settings: Settings) -> None:
    """While its actors start; its flow runs end as well."""
    assert hexflow("up").returncode == 0
    ledger = Ledger(stack_settings.shared.ledger_url)
    run = Run(stack_settings, "train", str(EXPERIMENT))
    run_id = run.run_id
    until(lambda: [row.pid is None for row in ledger.actors(run_id)] == [False] * 3, 400, "all three processes")
    run.process.send_signal(signal.SIGINT)
    status, output = run.wait()
    assert status == 130, output
    assert run.summary(run_id)["status"] == "cancelled"
    assert_nothing_left(stack_settings, ledger, run_id)
    found, row = stack.find(stack_settings), ledger.find_run(run_id=run_id)
    assert found is not None
    assert row is not None
    api = api_of(stack_settings, found)
    assert api.flow_run(str(row.flow_run_id))["state"]["type"] == "CANCELLED"
    until(lambda: not api.flow_runs(["PENDING", "RUNNING", "CANCELLING"]), 60, "an end of its children's flow runs")
    home, directory = stack_settings.local.home, stack_settings.shared.runs / run_id
    databases = (home / "ledger.db", home / "mlflow.db", *(home / "prefect").glob("*.db"))
    places = (home, home / "stack.json", *databases, *(home / "logs").iterdir(), directory, *directory.rglob("*"))
    assert [place for place in places if place.stat().st_mode & 0o077] == [], "other users could read it"


def test_a_run_survives_kills_is_cancelled_without_a_server_and_completes_when_resumed(
    stack_settings: Settings,
) -> None:
    """Trainer, replica and Prefect's server are killed, and the newest checkpoint is damaged; what the run learnt up to
    the one before, and what it generated, is kept all the same.
    """
    assert hexflow("up").returncode == 0
    ledger = Ledger(stack_settings.shared.ledger_url)
    # Long enough not to end by itself while the cancellation travels: a step takes a third of a second.
    run = Run(stack_settings, "train", str(EXPERIMENT), f"run.steps={STEPS}")
    run_id = run.run_id
    until(lambda: ledger.progress(run_id).step >= 7, 300, "a checkpoint and one more step")
    replica, trainer = (actor(ledger, run_id, role).pid for role in ("replica", "trainer"))
    assert replica
    assert trainer
    os.killpg(replica, signal.SIGKILL)
    os.kill(trainer, signal.SIGKILL)
    until(lambda: ledger.progress(run_id).step >= 13, 300, "steps of second ones and a checkpoint")
    assert [actor(ledger, run_id, role).attempt for role in ("trainer", "replica")] == [2, 2]

    found = stack.find(stack_settings)
    assert found is not None
    os.killpg(found.members["prefect"].pid, signal.SIGKILL)
    run.process.send_signal(signal.SIGINT)
    status, output = run.wait()
    assert status == 130, output
    assert ledger.progress(run_id).step < STEPS
    assert_nothing_left(stack_settings, ledger, run_id)
    summary = run.summary(run_id)
    assert summary["status"] == "cancelled"
    assert_tracked(stack_settings, str(summary["mlflow_run_id"]), "KILLED")

    directory = RunDirectory(stack_settings.shared.runs / run_id)
    *_, newest = found_checkpoints(directory)
    damage(directory.checkpoint_path(*newest))
    resumed = Run(stack_settings, "resume", run_id)
    status, output = resumed.wait()
    assert status == 0, output
    assert_nothing_left(stack_settings, ledger, run_id)
    assert_completed(stack_settings, ledger, run_id, resumed.summary(run_id))
    assert newest not in found_checkpoints(directory)
    kept = list((stack_settings.local.home / "prefect" / "storage").iterdir())
    assert kept, "Prefect kept nothing of the actors that were killed"
    assert all(json.loads(path.read_bytes()) for path in kept), "a pickle"


def assert_completed(settings: Settings, ledger: Ledger, run_id: str, summary: dict[str, Any]) -> None:
    """In the lineage after a killed trainer and a resume, with each trajectory used once, within the bound."""
    assert summary["status"] == "completed"
    assert summary["steps"] == STEPS
    assert summary["trajectories_consumed"] == STEPS * 4 * 4
    assert summary["max_staleness_seen"] <= summary["max_staleness_allowed"] == 2
    assert summary["eval_after"] > summary["eval_before"]
    row = ledger.find_run(run_id=run_id)
    assert row is not None
    assert row.lineage == 2
    plan = json.loads((settings.shared.runs / run_id / "plan.json").read_text())
    assert {share["device_type"] for share in (*plan["trainer"]["stages"][0]["machines"], *plan["replicas"])} == {
        "fast",
        "slow",
    }
    assert plan["upper_bound_tokens_per_s"] >= plan["throughput_tokens_per_s"] > 0
    for part in ("step_s", "train_s", "rollout_s", "publish_s", "load_s"):
        assert summary[f"{part}_predicted"] > 0
        assert summary[f"{part}_measured"] > 0
    assert (settings.shared.runs / run_id / "curves.png").stat().st_size > 1000
    assert_tracked(settings, str(summary["mlflow_run_id"]), "FINISHED")


def assert_tracked(settings: Settings, mlflow_run_id: str, status: str) -> None:
    """The parent run in MLflow ended with `status`, and no child is still called running."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{settings.local.home / 'mlflow.db'}")
    parent = client.get_run(mlflow_run_id)
    assert parent.info.status == status
    assert parent.data.params["optimizer.lr"] == "0.001"
    children = client.search_runs([parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{mlflow_run_id}'")
    roles = {"trainer", "replica"} | (set() if status == "KILLED" else {"plan"})
    assert {child.data.tags["hexflow.role"] for child in children} == roles
    assert "RUNNING" not in {child.info.status for child in children}
    assert any("reward/mean" in child.data.metrics for child in children)
