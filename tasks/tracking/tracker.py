"""MLflow behind a tracker that neither stops nor slows training.

Invariant: `log` and `log_artifact` only append to a bounded queue; one background thread speaks to MLflow, retries what
failed with growing pauses, and nothing it meets reaches the caller. Only `Tracker.parent` (to learn the run's id) and
`finish` (to flush) wait, each up to a deadline. While the server is away points gather; what does not fit is dropped
and counted, and the run itself is created as soon as the server answers, those of its actors after it.
"""

import json
import logging
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from tasks.config.passwords import without_password

Status = Literal["FINISHED", "FAILED", "KILLED"]

QUEUE_POINTS = 20_000
"""Points kept while MLflow is away: hours of a run's metrics, a few MB."""
FLUSH_DEADLINE_S = 20.0
"""How long `finish` spends on what is still in the queue, unless told otherwise."""
OPEN_DEADLINE_S = 60.0
"""Longest time `Tracker.parent` waits for the first attempt to create the run (importing MLflow takes seconds)."""

_POINTS_PER_CALL = 1000  # MLflow's limit
_PARAMS_PER_CALL = 100  # MLflow's limit
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.5, 30.0
GATHER_S = 1.0
"""Points of this time go in one call."""
_ENVIRONMENT = {
    # MLflow's own limits would hold one call for up to 8 minutes; the retries are ours.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_KIND = "mlflow.experimentKind"
_TRAINING = {_KIND: "custom_model_development"}
"""Makes MLflow's page show training runs and their charts first, not traces and evaluations of prompts."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Point:
    name: str
    value: float
    step: int
    timestamp_ms: int


class _MlflowRun:
    """One run of MLflow's. Every method may raise what `_is_refusal` judges."""

    def __init__(self, client: Any, run: Any) -> None:
        self._client = client
        self.run_id: str = run.info.run_id
        self.experiment_id: str = run.info.experiment_id

    def send_points(self, points: Sequence[_Point]) -> None:
        from mlflow.entities import Metric

        # Sending a point twice, after an answer that was lost, stores it once.
        metrics = [Metric(p.name, p.value, p.timestamp_ms, p.step) for p in points]
        self._client.log_batch(self.run_id, metrics=metrics)

    def send_params(self, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        items = [Param(name, value) for name, value in params.items()]
        for start in range(0, len(items), _PARAMS_PER_CALL):
            self._client.log_batch(self.run_id, params=items[start : start + _PARAMS_PER_CALL])

    def send_artifact(self, path: Path) -> None:
        self._client.log_artifact(self.run_id, str(path))

    def end(self, status: Status) -> None:
        self._client.set_terminated(self.run_id, status)


_Job = Callable[[_MlflowRun], None]


class Tracker:
    """The metrics and artifacts of one MLflow run. Made by `parent` or `child`; ended by `finish` on every way out."""

    def __init__(self, open_run: Callable[[], _MlflowRun] | None, on_open: Callable[[str], None] | None = None) -> None:
        """`open_run` creates or reopens the run (None counts only), `on_open` is then told its id."""
        self._open_run = open_run
        self._on_open = on_open
        self._run: _MlflowRun | None = None
        self._fault: str | None = "no server is named (MLFLOW_TRACKING_URI)" if open_run is None else None
        self._news = threading.Condition()
        self._points: deque[_Point] = deque()
        self._jobs: deque[_Job] = deque()
        self._nonfinite: Counter[str] = Counter()
        self._dropped = 0
        self._status: Status = "FINISHED"
        self._closing = threading.Event()
        self._give_up = math.inf
        self._tried = threading.Event()
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        if open_run is not None:
            self._thread.start()

    @classmethod
    def parent(
        cls,
        tracking_uri: str | None,
        experiment: str,
        run_name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        run_id: str | None = None,
        on_open: Callable[[str], None] | None = None,
    ) -> Self:
        """Track a whole run; waits until the run's id is known or the first attempt has failed.

        Args:
            tracking_uri: an MLflow server or `sqlite:///…`; None or "" tracks nothing and imports nothing.
            experiment: name of the MLflow experiment, created if absent.
            run_name: name of the MLflow run.
            params: nested values, such as the resolved experiment; logged under dotted names.
            tags: tags of the MLflow run.
            run_id: an existing run to go on with, whose parameters stay as they are; None creates one.
            on_open: told the run's id, from another thread, once MLflow has given it; may raise SQLAlchemyError or
                OSError, and is then told again.
        """
        if not tracking_uri:
            return cls(None)
        if run_id is not None:
            tracker = cls(lambda: _reopen(tracking_uri, run_id), on_open)
        else:
            tracker = cls(lambda: create_run(tracking_uri, experiment, run_name, tags), on_open)
            tracker._add_job(lambda run: run.send_params(flatten(params)))
        tracker.wait_for_run(OPEN_DEADLINE_S)
        return tracker

    @classmethod
    def child(
        cls, tracking_uri: str | None, find_parent: Callable[[], str | None], name: str, tags: Mapping[str, str]
    ) -> Self:
        """Track one attempt of an actor under its run; does not wait.

        Args:
            tracking_uri: as for `parent`.
            find_parent: MLflow's id of the run; asked again while it is None, since the run itself may come late.
            name: name of the MLflow run.
            tags: tags of the MLflow run.
        """
        if not tracking_uri:
            return cls(None)
        return cls(lambda: _create_child(tracking_uri, find_parent, name, tags))

    def wait_for_run(self, deadline_s: float) -> bool:
        """Wait until the first attempt to create the run is over; whether it is."""
        return self._tried.wait(deadline_s)

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None while it could not be created."""
        return self._run.run_id if self._run else None

    @property
    def experiment_id(self) -> str | None:
        """MLflow's id of the experiment the run belongs to; None while the run could not be created."""
        return self._run.experiment_id if self._run else None

    @property
    def fault(self) -> str | None:
        """Why the run is not in MLflow, in MLflow's words; None while it is, or while nothing has gone wrong."""
        return None if self._run else self._fault

    @property
    def dropped(self) -> int:
        """Points and artifacts that will never reach MLflow."""
        return self._dropped

    @property
    def nonfinite(self) -> dict[str, int]:
        """How often each metric was not a finite number."""
        return dict(self._nonfinite)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics at `step`. A value that is not finite counts up `nonfinite/<name>` instead."""
        now_ms = time.time_ns() // 1_000_000
        with self._news:
            for name, value in metrics.items():
                if not math.isfinite(value):
                    self._nonfinite[name] += 1
                    name, value = f"nonfinite/{name}", float(self._nonfinite[name])
                if self._open_run is None:
                    continue
                if len(self._points) < QUEUE_POINTS:
                    self._points.append(_Point(name, value, step, now_ms))
                else:
                    self._dropped += 1
            self._news.notify()

    def log_artifact(self, path: Path) -> None:
        """Store a file with the run; it must stay as it is until it is sent."""
        self._add_job(lambda run: run.send_artifact(path))

    def finish(self, status: Status, flush_s: float = FLUSH_DEADLINE_S) -> None:
        """Send what is left, for at most `flush_s` seconds, and end the run with `status`. Safe to repeat."""
        if self._open_run is None or self._closing.is_set():
            return
        self._status = status
        self._give_up = time.monotonic() + flush_s
        self._closing.set()
        with self._news:
            self._news.notify()
        self._thread.join(flush_s)
        lost = self._dropped + len(self._points) + len(self._jobs)
        if lost:
            logger.warning("%d points or artifacts did not reach MLflow", lost)

    def _add_job(self, job: _Job) -> None:
        if self._open_run is None:
            return
        with self._news:
            self._jobs.append(job)
            self._news.notify()

    # The background thread

    def _work(self) -> None:
        self._attempt(self._open, "open the run")
        run = self._run
        if run is not None and self._on_open is not None:
            self._attempt(partial(self._on_open, run.run_id), "be named in the ledger")
        while (item := self._next()) is not None:
            job, size = item
            if run is None or not self._attempt(partial(job, run), f"log {size} items"):
                self._drop(size)
        if run is not None:
            if self._dropped:
                lost = _Point("tracking/dropped", float(self._dropped), 0, time.time_ns() // 1_000_000)
                self._attempt(lambda: run.send_points([lost]), "say what was dropped")
            self._attempt(lambda: run.end(self._status), "end the run")

    def _open(self) -> None:
        assert self._open_run is not None
        self._run = self._open_run()

    def _next(self) -> tuple[_Job, int] | None:
        """One artifact or the parameters, or one call's worth of points, with the number of items in it.

        None once the tracker is closing and has nothing left.
        """
        with self._news:
            self._news.wait_for(lambda: self._points or self._jobs or self._closing.is_set())
            if self._jobs:
                return self._jobs.popleft(), 1
        self._closing.wait(GATHER_S)
        with self._news:
            points = [self._points.popleft() for _ in range(min(_POINTS_PER_CALL, len(self._points)))]
        return (lambda run: run.send_points(points), len(points)) if points else None

    def _drop(self, size: int) -> None:
        with self._news:
            self._dropped += size

    def _attempt(self, call: Callable[[], None], purpose: str) -> bool:
        """Repeat `call` until it succeeds. False: MLflow refused it for good, or the flush deadline has passed."""
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        pause_s = _FIRST_RETRY_S
        while True:
            try:
                call()
                return True
            except (MlflowException, SQLAlchemyError, OSError) as error:
                self._fault = _words_of(error)
                logger.warning("MLflow could not %s: %s", purpose, self._fault)
                if _is_refusal(error):
                    return False
            finally:
                self._tried.set()
            self._closing.wait(pause_s)
            left_s = self._give_up - time.monotonic()
            if left_s <= 0:
                return False
            if self._closing.is_set():
                time.sleep(min(_FIRST_RETRY_S, left_s))
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values under dotted names, as MLflow parameters: `{"optimizer": {"lr": 1e-6}}` → `optimizer.lr`."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value if isinstance(value, str) else json.dumps(value)
    return flat


def end_attempts(
    tracking_uri: str | None, parent_run_id: str | None, status: Status, newest: Mapping[tuple[str, int], int]
) -> int:
    """End the child runs that dead attempts left RUNNING; returns how many. A failure is logged, never raised.

    Args:
        tracking_uri: as for `Tracker.parent`; without it, or without a parent, there is nothing to end.
        parent_run_id: MLflow's id of the parent run.
        status: what they become.
        newest: by role and slot, the newest attempt that is over. Those after it are of who supervises next.
    """
    if not tracking_uri or not parent_run_id:
        return 0
    client = _client(tracking_uri)
    condition = f"tags.`mlflow.parentRunId` = '{parent_run_id}' and attributes.status = 'RUNNING'"
    ended = 0
    with _logged("end the runs of dead attempts"):
        experiment = client.get_run(parent_run_id).info.experiment_id
        for run in client.search_runs([experiment], condition):
            if _is_up_to(run.data.tags, newest):
                client.set_terminated(run.info.run_id, status)
                ended += 1
    return ended


def attempt_tags(role: str, slot: int, attempt: int) -> dict[str, str]:
    """The tags by which the run of an attempt is known."""
    return {"hexflow.role": role, "hexflow.slot": str(slot), "hexflow.attempt": str(attempt)}


def _is_up_to(tags: Mapping[str, str], newest: Mapping[tuple[str, int], int]) -> bool:
    """Whether these are the tags of an attempt that is not newer than `newest` says."""
    return any(
        tags.items() >= attempt_tags(role, slot, attempt).items()
        for (role, slot), last in newest.items()
        for attempt in range(1, last + 1)
    )


def end_run(
    tracking_uri: str | None, run_id: str | None, status: Status, newest: Mapping[tuple[str, int], int]
) -> None:
    """End a run, and its attempts, whose processes were killed and left it RUNNING. A failure is logged, never raised.

    Args:
        tracking_uri: as for `Tracker.parent`; without it, or without a run, there is nothing to end.
        run_id: MLflow's id of the parent run.
        status: what they become; a run that has ended keeps its own.
        newest: as for `end_attempts`.
    """
    if not tracking_uri or not run_id:
        return
    end_attempts(tracking_uri, run_id, status, newest)
    client = _client(tracking_uri)
    with _logged("end the run"):
        if client.get_run(run_id).info.status == "RUNNING":
            client.set_terminated(run_id, status)


@contextmanager
def _logged(purpose: str) -> Iterator[None]:
    """A failure of MLflow's in here is logged, and no more."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        logger.warning("MLflow could not %s: %s", purpose, _words_of(error))


def _words_of(error: Exception) -> str:
    """What went wrong, on one line, as logs and pages may show it."""
    return without_password(" ".join(str(error).split()))[:300]


def _is_refusal(error: Exception) -> bool:
    """Whether repeating the call is useless: MLflow understood it and said no."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        status = error.get_http_status_code()
        return 400 <= status < 500 and status not in (408, 409, 429)
    return isinstance(error, FileNotFoundError)


def _client(tracking_uri: str) -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri)


def create_run(tracking_uri: str, experiment: str, run_name: str, tags: Mapping[str, str]) -> _MlflowRun:
    """A new run in an experiment, which is created if absent."""
    client = _client(tracking_uri)
    run = client.create_run(_experiment_id(client, experiment), tags=dict(tags), run_name=run_name)
    return _MlflowRun(client, run)


def _create_child(
    tracking_uri: str, find_parent: Callable[[], str | None], name: str, tags: Mapping[str, str]
) -> _MlflowRun:
    parent_run_id = find_parent()
    if parent_run_id is None:
        raise ConnectionError("the run that this is a part of is not there yet")
    client = _client(tracking_uri)
    experiment_id = client.get_run(parent_run_id).info.experiment_id
    run = client.create_run(experiment_id, tags={**tags, "mlflow.parentRunId": parent_run_id}, run_name=name)
    return _MlflowRun(client, run)


def _reopen(tracking_uri: str, run_id: str) -> _MlflowRun:
    client = _client(tracking_uri)
    client.update_run(run_id, status="RUNNING")
    return _MlflowRun(client, client.get_run(run_id))


def _experiment_id(client: Any, name: str) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return client.create_experiment(name, tags=_TRAINING)
        except MlflowException:
            # Another run may have created it in between.
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if _KIND not in found.tags:
        client.set_experiment_tag(found.experiment_id, _KIND, _TRAINING[_KIND])
    return found.experiment_id
