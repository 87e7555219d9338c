"""A run's plan is kept, shown and tracked, and measured times come to stand beside the predicted ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prefect import State

from deployments.cli import main as cli
from deployments.cli import running as cli_running
from flows import pages as artifacts
from flows import preparation
from flows import prepare as preparing
from flows import rl as running
from flows.plan import plan
from flows.running import context
from flows.running.context import open_run
from planners.hardware.machine import Machine
from planners.plan.plan import ClusterPlan, read_plan
from tasks import readiness
from tasks.config.experiment import Experiment
from tasks.config.settings import Settings
from tasks.machine import discovery
from tasks.planning import ClusterWish
from tasks.tracking.curves import Curves
from tasks.tracking.tracker import Tracker
from tests.support.places import EXPERIMENTS
from tests.support.plan import gpu_plan

PLAN = gpu_plan("here", "gpu", 3)


class Noted(Tracker):
    """A tracker that only remembers."""

    def __init__(self) -> None:
        super().__init__(None)
        self.metrics: dict[str, float] = {}
        self.files: list[str] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.metrics |= metrics

    def log_artifact(self, path: Path) -> None:
        self.files.append(path.name)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the Prefect UI would show, by key."""
    pages: dict[str, Any] = {}

    def keep(content: Any, key: str, description: str) -> None:
        pages[key] = content

    monkeypatch.setattr(artifacts, "create_table_artifact", keep)
    monkeypatch.setattr(artifacts, "create_markdown_artifact", keep)
    return pages


@pytest.mark.usefixtures("settings")
def test_the_plan_is_kept_whole_and_shown(shown: dict[str, Any]) -> None:
    run, tracker = open_run(Experiment(), None, None), Noted()
    running.record_plan(run, PLAN, tracker)
    assert read_plan(run.directory.plan) == PLAN
    (epoch,) = run.ledger.plan_epochs(run.run_id)
    assert ClusterPlan.model_validate_json(epoch.plan_json) == PLAN
    assert tracker.files == ["experiment.json", "plan.json"]
    assert [(row["role"], row["devices"]) for row in shown["plan"]] == [
        ("train", "0"),
        ("rollout", "1"),
        ("rollout", "2"),
    ]
    figures = {row["figure"]: row["value"] for row in shown["plan-figures"]}
    assert (figures["mode"], figures["gap"]) == ("joint", "0.00%")
    assert float(figures["best possible tokens/s"]) == pytest.approx(PLAN.throughput_tokens_per_s, rel=1e-3)
    assert shown["plan-explanation"].splitlines()[0] == f"- {PLAN.explanation.splitlines()[0]}"
    assert "training stage 0" in shown["plan-memory"]


@pytest.mark.usefixtures("settings")
def test_measured_times_are_tracked_beside_predicted_ones(
    shown: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not known, as in a run that never trained, is left out."""
    times = {"step_s": 9.0, "train_s": 8.5, "rollout_s": None, "publish_s": 0.5, "load_s": None}
    summary = {"run_id": "r", "status": "failed", **{f"{name}_measured": value for name, value in times.items()}}
    monkeypatch.setattr(running, "write_report", lambda *_: summary)
    run, tracker, child = open_run(Experiment(), None, None), Noted(), Noted()
    monkeypatch.setattr(Tracker, "child", lambda *_: child)
    assert running.report(run, PLAN, tracker, Curves(tracker, run.ledger, run.run_id, 0)) == summary
    measured = {name: value for name, value in child.metrics.items() if name.startswith("plan/measured")}
    assert measured == {"plan/measured_step_s": 9.0, "plan/measured_train_s": 8.5, "plan/measured_publish_s": 0.5}
    assert child.metrics["plan/predicted_step_s"] == PLAN.step_s
    assert child.metrics["plan/predicted_load_s"] == 0.5
    assert all(name.startswith("summary/") for name in tracker.metrics), "first in the charts are the curves"
    assert tracker.files == ["summary.json", "curves.png"]
    labels = [row["figure"] for row in shown["summary"]]
    assert labels == ["step, predicted / measured", "files"]
    assert shown["summary"][-1]["value"] == str(run.directory.root)


@pytest.mark.usefixtures("settings")
def test_a_fault_that_a_person_can_mend_ends_a_flow_with_its_sentence_alone() -> None:
    """Raised, it would stand in the log below a traceback; Prefect's own, of any run that failed, follows."""
    ended = [
        (running.rl.fn(Experiment(), "absent"), "There is no run absent to resume"),
        (plan.fn(Experiment(), ClusterWish(file="/none/such.yaml")), "There is no cluster file /none/such.yaml"),
    ]
    for state, sentence in ended:
        assert isinstance(state, State)
        assert state.is_failed()
        assert str(state.message).startswith(sentence)


class Chosen(Exception):
    """The run has come as far as its plan."""


def test_each_command_and_flow_looks_at_its_machine_once_and_makes_it_ready_once(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's machine by its flow `prepare`; `hexflow train` checks for itself before it starts anything."""
    machine = discovery.discover_machine()
    looks: list[str] = []

    def look() -> Machine:
        looks.append("discover")
        return machine

    def ready(*_: object) -> Path:
        looks.append("make ready")
        return settings.local.models

    def choose(*_: object) -> ClusterPlan:
        raise Chosen

    for module in (discovery, context, preparation):
        monkeypatch.setattr(module, "discover_machine", look)
    for module in (readiness, preparation):
        monkeypatch.setattr(module, "make_ready", ready)
    monkeypatch.setattr(running, "ready_and_measured", lambda *_: {})
    monkeypatch.setattr(running, "choose_plan", choose)
    monkeypatch.setattr(running, "name_flow_run", lambda run: None)
    monkeypatch.setattr(running, "open_tracker", lambda run: Noted())
    monkeypatch.setattr(running, "show_tracking", lambda tracker: None)
    with pytest.raises(Chosen):
        running.carry_out(open_run(Experiment(), None, None), running.Work())
    assert looks == ["discover"]

    looks.clear()
    for step in ("discover", "prepare_here"):
        monkeypatch.setattr(preparing, step, getattr(preparation, step).fn)
    preparing.prepare.fn(Experiment())
    assert looks == ["discover", "make ready"]

    looks.clear()
    monkeypatch.setattr(cli_running, "run_and_follow", lambda *what: looks.append(what[-1].name))
    cli.train(EXPERIMENTS / "tiny.yaml")
    assert looks == ["discover", "make ready", machine.name]
