"""What a person sees of a run in the Prefect UI: plan, profiles, progress, the link to MLflow, and the result."""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import httpx
from prefect import runtime
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectException

from flows.running.context import RunContext
from planners.hardware.profile import DeviceProfile
from planners.plan.explain import memory_table, money, seconds
from planners.plan.plan import ClusterPlan
from planners.plan.run import MachineShare
from planners.search.make import rounded_down
from tasks.config.passwords import without_password
from tasks.exchange.ledger import Progress
from tasks.tracking.report import key_figures
from tasks.tracking.tracker import Tracker

_PROGRESS_EVERY_S = 15.0
_log = logging.getLogger(__name__)


@contextmanager
def _shown(what: str) -> Iterator[None]:
    """A server that cannot take what is to be shown does not stop the run."""
    try:
        yield
    except (httpx.HTTPError, PrefectException) as error:
        _log.warning("the Prefect server did not take %s: %s", what, without_password(str(error)))


@_shown("the name of the run")
def name_flow_run(run: RunContext) -> None:
    """Give the flow run the run's id as its name, and the experiment's tags."""
    tags = ["hexflow", *(f"{key}:{value}" for key, value in sorted(run.experiment.tracking.tags.items()))]
    with get_client(sync_client=True) as client:
        client.update_flow_run(UUID(runtime.flow_run.id), name=run.run_id, tags=tags)


@_shown("the link to MLflow")
def show_tracking(tracker: Tracker) -> None:
    """Link to the MLflow run, where there is one with a page; where there is none, say why."""
    if tracker.fault:
        words = f"This run is not in MLflow: {tracker.fault}"
        print(words)
        create_markdown_artifact(words, key="mlflow-run", description="Why there are no curves of this run.")
    uri = without_password(os.environ.get("MLFLOW_TRACKING_URI", "")).replace("…@", "")  # each signs in as himself
    if tracker.run_id and uri.startswith("http"):
        create_link_artifact(
            link=f"{uri}/#/experiments/{tracker.experiment_id}/runs/{tracker.run_id}",
            link_text="This run in MLflow",
            key="mlflow-run",
            description="Metrics, parameters and files of this run.",
        )
        create_link_artifact(
            link=study_page(uri, tracker.experiment_id),
            link_text="All runs of its experiment, as curves",
            key="mlflow-study",
            description="Runs beside each other.",
        )


def study_page(uri: str, experiment_id: str | None) -> str:
    """MLflow's page of an experiment's training runs with their charts; by itself it opens on traces of prompts."""
    return f"{uri}/#/experiments/{experiment_id}/runs?compareRunsMode=CHART&workflowType=machine_learning"


@_shown("the profiles")
def show_profiles(profiles: Mapping[str, DeviceProfile]) -> None:
    """Table of the measured rates."""
    rows = [
        {
            "device type": profile.device_type,
            "GEMM GFLOP/s": round(profile.gemm_flops_per_s / 1e9, 1),
            "memory GB/s": round(profile.memory_bytes_per_s / 1e9, 1),
            "generation tokens/s (by answers in flight)": ", ".join(
                f"{rate:.1f} ({concurrency})" for concurrency, rate in sorted(profile.generation_tokens_per_s.items())
            ),
            "training tokens/s": round(profile.training_tokens_per_s, 1),
            "publish s": round(profile.publish_s, 2),
            "load s": round(profile.load_s, 2),
        }
        for profile in profiles.values()
    ]
    create_table_artifact(rows, key="profiles", description="Measured on one device of each type.")


@_shown("the plan")
def show_plan(plan: ClusterPlan) -> None:
    """A machine's plan: who stands where, the predicted figures with their bound, memory by part, and why."""
    create_table_artifact(
        [_actor_row("train", 0, share) for share in plan.trainer.machines]
        + [_actor_row("rollout", replica.slot, replica, replica.concurrency) for replica in plan.replicas],
        key="plan",
        description=f"Predicted step: {plan.step_s:.1f} s, {plan.throughput_tokens_per_s:.1f} response tokens/s.",
    )
    figures = {**_plan_figures(plan), "best possible tokens/s": _or_dash(plan.upper_bound_tokens_per_s, ".1f")}
    create_table_artifact(
        as_rows(figures), key="plan-figures", description=f"Mode {plan.mode}; bound: {plan.bound_holds}."
    )
    create_markdown_artifact(as_list(plan.explanation), key="plan-explanation", description="Why this split.")
    memory = f"```\n{memory_table(plan)}\n```"
    create_markdown_artifact(memory, key="plan-memory", description="Estimated memory of each process.")


def as_list(words: str) -> str:
    """Lines as a Markdown list, which would otherwise run together."""
    return "\n".join(f"- {line}" for line in words.splitlines())


def as_rows(figures: Mapping[str, Any]) -> list[dict[str, str]]:
    """A table of two columns: a page shows no more than a few."""
    return [{"figure": name, "value": str(value)} for name, value in figures.items()]


def _plan_figures(plan: ClusterPlan) -> dict[str, Any]:
    return {
        "mode": plan.mode,
        "response tokens/s": rounded_down(plan.throughput_tokens_per_s),
        "step s": seconds(plan.step_s),
        "training s": seconds(plan.train_s),
        "publish s": seconds(plan.sync_train_s),
        "rollout s": seconds(plan.rollout_s),
        "load s": seconds(plan.sync_rollout_s),
        "trains": plan.trainer.layout,
        "replicas": len(plan.replicas),
        "gap": _or_dash(plan.gap, ".2%"),
    }


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


@_shown("the plan of the cluster")
def show_cluster_plan(
    plan: ClusterPlan, words: str, pictures: Mapping[str, str], curve: Sequence[tuple[float, ClusterPlan]]
) -> None:
    """A described cluster's plan: figures, words, pictures in characters, and throughput against budget."""
    figures = {**_plan_figures(plan), "USD/h": round(plan.usd_per_h, 2)}
    create_table_artifact(as_rows(figures), key="cluster-plan", description=f"{plan.model} on {plan.cluster}.")
    create_markdown_artifact(as_list(words), key="cluster-plan-explanation", description="Why this split.")
    for key, picture in pictures.items():
        create_markdown_artifact(f"```\n{picture}\n```", key=key, description=f"{plan.model} on {plan.cluster}.")
    if curve:
        rows = [
            {
                "budget USD/h": round(budget, 2),
                "response tokens/s": rounded_down(affordable.throughput_tokens_per_s),
                "USD per million tokens": money(affordable.usd_per_million_tokens),
                "trains": affordable.trainer.layout,
                "replicas": len(affordable.replicas),
            }
            for budget, affordable in curve
        ]
        create_table_artifact(rows, key="budget-curve", description="What each budget would buy.")


@_shown("who was replaced")
def show_replaced(lines: Sequence[str]) -> None:
    """The actors that were started again, and why."""
    words = "\n".join(" ".join(line.split()) for line in lines)
    create_markdown_artifact(as_list(words), key="replaced", description="Actors that were started again, and why.")


@_shown("the summary")
def show_summary(summary: Mapping[str, Any], directory: Path) -> None:
    """The run's key figures as a table; all of them are in `summary.json` in its `directory`."""
    description = f"Run {summary['run_id']}: {summary['status']}. All figures are in summary.json, among its files."
    create_table_artifact(as_rows(key_figures(summary, directory)), key="summary", description=description)


def _actor_row(role: str, slot: int, share: MachineShare, concurrency: int | None = None) -> dict[str, Any]:
    return {
        "role": role,
        "slot": slot,
        "machine": share.machine,
        "device type": share.device_type,
        "devices": ", ".join(map(str, share.devices)),
        "answers in flight": concurrency or "",
    }


class ProgressArtifact:
    """The run's progress bar; at most one call in 15 s, and none that could stop the run."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._artifact_id: UUID | None = None
        self._updated = float("-inf")

    def __call__(self, progress: Progress) -> None:
        """Show this progress, unless it was shown just now."""
        is_last = progress.step >= progress.steps
        if time.monotonic() - self._updated < _PROGRESS_EVERY_S and not is_last:
            return
        self._updated = time.monotonic()
        percent = 100.0 * progress.step / progress.steps
        with _shown("the progress"):
            if self._artifact_id is None:
                description = f"Training steps of {self._run_id}."
                created = create_progress_artifact(percent, key="progress", description=description)
                self._artifact_id = cast(UUID, created)  # outside an event loop it is no coroutine
            else:
                update_progress_artifact(self._artifact_id, percent)
