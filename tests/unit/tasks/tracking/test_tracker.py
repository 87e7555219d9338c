"""Tracking reaches a real store, and without one costs nothing but the points."""

import math
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tasks.exchange.ledger import Ledger
from tasks.tracking import tracker as tracking
from tasks.tracking.tracker import Tracker, attempt_tags, end_attempts, end_run, flatten
from tests.support.ledger import begin
from tests.support.places import REPOSITORY

if TYPE_CHECKING:
    from mlflow import MlflowClient


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A SQLite store; its artifacts go below the working directory, as MLflow does without a server."""
    directory = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        yield f"sqlite:///{directory / 'mlflow.db'}"


@pytest.fixture(scope="module")
def client(store: str) -> "MlflowClient":
    from mlflow import MlflowClient

    return MlflowClient(store)


@pytest.fixture
def dead_uri() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_a_run_and_its_attempts_reach_the_store(store: str, client: "MlflowClient", tmp_path: Path) -> None:
    params = {"optimizer": {"lr": 1e-6}, "cluster": {"device_types": None}, "prompt": {"template": "x" * 7000}}
    parent = Tracker.parent(store, "study", "run-1", params, {"hexflow.run": "run-1"})
    assert parent.run_id is not None
    picture = tmp_path / "curves.png"
    picture.write_bytes(b"png")
    parent.log_artifact(picture)
    for step in range(2500):
        parent.log({"reward/mean": step / 10}, step)
    child = Tracker.child(store, lambda: parent.run_id, "replica-0", {"hexflow.role": "replica"})
    child.log({"throughput/response_tokens_per_s": 12.0}, 3)
    child.finish("KILLED")
    parent.finish("FINISHED")

    run = client.get_run(parent.run_id)
    assert (run.info.status, run.info.experiment_id) == ("FINISHED", parent.experiment_id)
    assert run.data.params["optimizer.lr"] == "1e-06"
    assert run.data.params["cluster.device_types"] == "null"
    assert run.data.params["prompt.template"].startswith("xxx")
    assert run.data.tags["hexflow.run"] == "run-1"
    history = client.get_metric_history(parent.run_id, "reward/mean")
    assert sorted((m.step, m.value) for m in history) == [(step, step / 10) for step in range(2500)]
    assert [file.path for file in client.list_artifacts(parent.run_id)] == ["curves.png"]
    attempt = client.get_run(child.run_id)
    assert attempt.info.status == "KILLED"
    assert attempt.data.tags["mlflow.parentRunId"] == parent.run_id
    assert attempt.data.metrics == {"throughput/response_tokens_per_s": 12.0}
    assert parent.dropped == child.dropped == 0


def test_values_that_are_not_finite_are_counted_instead(store: str, client: "MlflowClient") -> None:
    tracker = Tracker.parent(store, "study", "nan", {}, {})
    tracker.log({"loss": math.nan, "reward": 1.0}, 0)
    tracker.log({"loss": math.inf, "reward": 2.0}, 1)
    tracker.finish("FINISHED")
    assert tracker.nonfinite == {"loss": 2}
    assert client.get_run(tracker.run_id).data.metrics == {"nonfinite/loss": 2.0, "reward": 2.0}


def test_a_resumed_run_goes_on_under_its_id(store: str, client: "MlflowClient") -> None:
    first = Tracker.parent(store, "study", "resumed", {"run": {"steps": 2}}, {})
    first.log({"reward": 1.0}, 0)
    first.finish("FAILED")
    second = Tracker.parent(store, "study", "resumed", {"run": {"steps": 9}}, {}, run_id=first.run_id)
    assert second.run_id == first.run_id
    assert client.get_run(first.run_id).info.status == "RUNNING"
    second.log({"reward": 2.0}, 1)
    second.finish("FINISHED")
    run = client.get_run(first.run_id)
    assert (run.info.status, run.data.params["run.steps"]) == ("FINISHED", "2")
    assert len(client.get_metric_history(first.run_id, "reward")) == 2


def test_a_run_that_mlflow_refuses_says_why(store: str, client: "MlflowClient") -> None:
    client.delete_experiment(client.create_experiment("deleted"))
    tracker = Tracker.parent(store, "deleted", "refused", {}, {})
    assert tracker.run_id is None
    assert "deleted" in str(tracker.fault)
    assert Tracker.parent(None, "study", "nowhere", {}, {}).fault


def test_an_experiment_opens_on_its_training_runs(store: str, client: "MlflowClient") -> None:
    client.create_experiment("of before")
    for name in ("new", "of before"):
        tracker = Tracker.parent(store, name, "run", {}, {})
        assert tracker.fault is None
        tracker.finish("FINISHED")
        tags = client.get_experiment_by_name(name).tags
        assert tags["mlflow.experimentKind"] == "custom_model_development"


def test_runs_of_dead_attempts_are_ended_from_outside(store: str, client: "MlflowClient") -> None:
    parent = Tracker.parent(store, "study", "dying", {}, {})
    children = {
        slot: Tracker.child(store, lambda: parent.run_id, f"replica-{slot}", attempt_tags("replica", slot, 2))
        for slot in (0, 1)
    }
    for child in children.values():
        assert child.wait_for_run(30)
    assert end_attempts(store, parent.run_id, "FAILED", {("replica", 0): 1, ("replica", 1): 2}) == 1
    assert client.get_run(children[0].run_id).info.status == "RUNNING", "one of a later supervisor's was ended"
    assert client.get_run(children[1].run_id).info.status == "FAILED"
    children[0].finish("FINISHED")
    assert end_attempts(store, parent.run_id, "FAILED", {("replica", 0): 3}) == 0
    parent.finish("FINISHED")


def test_what_the_store_refuses_is_dropped_and_the_rest_arrives(
    store: str, client: "MlflowClient", tmp_path: Path
) -> None:
    tracker = Tracker.parent(store, "study", "refused", {}, {})
    tracker.log({"no*such:name?": 1.0}, 0)
    tracker.log_artifact(tmp_path / "absent")
    time.sleep(2 * tracking.GATHER_S)  # so that the good point travels in a call of its own
    tracker.log({"reward": 1.0}, 0)
    tracker.finish("FINISHED")
    assert client.get_run(tracker.run_id).data.metrics == {"reward": 1.0, "tracking/dropped": 2.0}
    assert tracker.dropped == 2


def test_without_a_server_the_run_goes_on(
    dead_uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "QUEUE_POINTS", 10)
    tracker = Tracker.parent(dead_uri.replace("//", "//me:hush@"), "study", "lost", {}, {})
    assert tracker.run_id is None
    for step in range(15):
        tracker.log({"reward": 1.0}, step)
    assert tracker.dropped == 5
    assert tracker.fault
    assert "hush" not in tracker.fault + caplog.text, "pages show the reason, logs the trouble, and neither a password"
    tracker.finish("FAILED", flush_s=1.0)
    assert tracker.run_id is None
    assert end_attempts(dead_uri, "0" * 32, "FAILED", {}) == 0
    end_run(dead_uri, "0" * 32, "FAILED", {})


def test_the_run_is_created_once_the_store_answers(
    store: str, client: "MlflowClient", monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    def fails_once(*arguments: Any) -> Any:
        attempts.append(arguments)
        if len(attempts) == 1:
            raise ConnectionError("the server is away")
        return create(*arguments)

    create = tracking.create_run
    monkeypatch.setattr(tracking, "create_run", fails_once)
    tracker = Tracker.parent(store, "study", "late", {"run": {"steps": 1}}, {})
    assert tracker.run_id is None
    tracker.log({"reward": 1.0}, 0)
    tracker.finish("FINISHED")
    run = client.get_run(tracker.run_id)
    assert (run.info.status, run.data.metrics, run.data.params) == ("FINISHED", {"reward": 1.0}, {"run.steps": "1"})


def test_actors_are_tracked_although_their_run_came_late(store: str, client: "MlflowClient", tmp_path: Path) -> None:
    """MLflow was away when the run began: its actors ask the ledger for it until the ledger has been told."""
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    supervisor = begin(ledger)
    child = Tracker.child(store, partial(ledger.mlflow_run, "run"), "replica-0", {})
    child.log({"throughput": 1.0}, 0)
    assert child.wait_for_run(30)
    assert child.run_id is None
    told: list[str] = []

    def tell(run_id: str) -> None:
        told.append(run_id)
        if len(told) == 1:
            raise ConnectionError("the ledger is away")
        ledger.set_mlflow_run(supervisor, run_id)

    parent = Tracker.parent(store, "study", "late", {}, {}, on_open=tell)
    parent.finish("FINISHED")
    child.finish("FINISHED")
    assert told == [parent.run_id] * 2
    attempt = client.get_run(child.run_id)
    assert attempt.data.tags["mlflow.parentRunId"] == parent.run_id
    assert attempt.data.metrics == {"throughput": 1.0}


def test_what_a_killed_run_left_open_is_ended(store: str, client: "MlflowClient") -> None:
    """With its attempts; one that has ended keeps its word."""
    experiment = client.create_experiment("killed")
    parent = client.create_run(experiment).info.run_id
    tags = {"mlflow.parentRunId": parent, **attempt_tags("trainer", 0, 1)}
    children = [client.create_run(experiment, tags=tags).info.run_id for _ in range(2)]
    stranger = client.create_run(experiment).info.run_id
    client.set_terminated(children[0], "FINISHED")
    for status in ("KILLED", "FAILED"):
        end_run(store, parent, status, {("trainer", 0): 1})
    statuses = [client.get_run(run_id).info.status for run_id in (parent, *children, stranger)]
    assert statuses == ["KILLED", "FINISHED", "KILLED", "RUNNING"]


def test_no_uri_counts_only_and_imports_nothing() -> None:
    program = (
        "import sys; from tasks.tracking.tracker import Tracker, end_attempts;"
        "t = Tracker.parent(None, 'e', 'r', {}, {});"
        "c = Tracker.child('', lambda: t.run_id, 'c', {}); c.log({'loss': float('nan')}, 0); c.finish('FINISHED');"
        "t.finish('FAILED'); assert end_attempts(None, None, 'FAILED', {}) == 0;"
        "assert c.nonfinite == {'loss': 1} and c.dropped == 0; assert 'mlflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True)


def test_flatten_names_leaves_by_their_path() -> None:
    tree = {"a": {"b": {"c": 1}, "d": [1, "x"]}, "e": "text", "f": {}, "g": True}
    assert flatten(tree) == {"a.b.c": "1", "a.d": '[1, "x"]', "e": "text", "g": "true"}
