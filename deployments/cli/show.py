"""What `hexflow status`, `hexflow runs` and the end of a run print."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text
from sqlalchemy.engine import make_url

from deployments.cli.follow import minutes
from deployments.local.servers import MLFLOW, PREFECT, StackState
from deployments.local.sign_in import api_of, fault_of
from deployments.prefect.api import PrefectApi, Unreachable
from deployments.web import answers
from planners.hardware.machine import Machine
from planners.plan.plan import ClusterPlan
from tasks.config.passwords import without_password
from tasks.config.settings import Settings
from tasks.config.trees import SHIPPED
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Ledger
from tasks.exchange.ledger.rows import PlanEpochRow, RunRow
from tasks.tracking.report import figure, key_figures

NAMED_BY = {"Prefect server": "PREFECT_API_URL", "MLflow server": "MLFLOW_TRACKING_URI"}
"""The variable that names a server to use in place of the stack's own."""


_ANSWERS = "answers"


def show_status(settings: Settings, state: StackState | None, console: Console) -> bool:
    """Print servers, workers and running runs; whether the stack is complete and answers."""
    if state is None or not state.members:
        for name, variable in NAMED_BY.items():
            if url := os.environ.get(variable):
                where = f"{without_password(url)}, named by {variable}"
                console.print(f"{name} {_answer(url)}: {where}", soft_wrap=True, markup=False)
        console.print(f"No stack runs for {settings.local.home}: start it with `hexflow up`.", soft_wrap=True)
        return False
    urls = dict(zip(NAMED_BY, (state.prefect_url, state.mlflow_url), strict=True))
    words = dict(zip(NAMED_BY, (_state_of(settings, state, member) for member in (PREFECT, MLFLOW)), strict=True))
    table = Table("part", "state", "where", box=None)
    for name, url in urls.items():
        whose = "" if url in state.own_urls.values() else f", named by {NAMED_BY[name]}"
        table.add_row(name, words[name], without_password(url).removesuffix("/api") + whose)
    complete = set(words.values()) == {_ANSWERS}
    for pool, queue in state.pools.items():
        member = state.members.get(f"worker-{pool}")
        online = bool(member) and words["Prefect server"] == _ANSWERS and _online(api_of(settings, state), pool)
        complete = complete and online
        word = "online" if online else "offline" if member else "not running"
        table.add_row(f"worker of pool {pool}", word, f"queue {queue}")
    console.print(table)
    for name, variable in NAMED_BY.items():
        wanted = (os.environ.get(variable) or urls[name]).rstrip("/")
        if wanted != urls[name]:
            known, new = without_password(urls[name]), without_password(wanted)
            console.print(
                f"{variable} names {new}, but this stack uses {known}: `hexflow down`, then `hexflow up` changes it.",
                soft_wrap=True,
                markup=False,
            )
    console.print(f"{_memory_gib(state):.2f} GiB of memory; logs in {settings.local.logs}", soft_wrap=True)
    show_running(settings, console)
    return complete


def _answers(url: str) -> bool:
    """Whether a server answers; MLflow may be a file or a database, which needs none."""
    return not url.startswith("http") or answers(f"{url.rstrip('/')}/health")


def _answer(url: str) -> str:
    return _ANSWERS if _answers(url) else "does not answer"


def _state_of(settings: Settings, state: StackState, name: str) -> str:
    """The word for one of the stack's two servers."""
    if name in state.own:
        return fault_of(settings, state, name) or _ANSWERS
    return _answer(state.prefect_url if name == PREFECT else state.mlflow_url)


def _online(api: PrefectApi, pool: str) -> bool:
    try:
        return any(worker["status"] == "ONLINE" for worker in api.workers(pool))
    except Unreachable:
        return False


def _memory_gib(state: StackState) -> float:
    total = 0
    for member in state.members.values():
        try:
            process = psutil.Process(member.pid)
            total += sum(part.memory_info().rss for part in (process, *process.children(recursive=True)))
        except psutil.NoSuchProcess:
            continue
    return total / 2**30


def _has_no_ledger(settings: Settings) -> bool:
    """Whether looking would make an empty ledger."""
    place = make_url(settings.shared.ledger_url)
    return place.get_backend_name() == "sqlite" and not Path(place.database or "").exists()


def show_running(settings: Settings, console: Console) -> None:
    """Print the machines that flows have looked at, and the running runs with their plan and actors."""
    if _has_no_ledger(settings):
        return
    ledger = Ledger(settings.shared.ledger_url, patience_s=0)
    for row in ledger.machines():
        counts = Machine.model_validate_json(row.description_json).count_by_type()
        devices = ", ".join(f"{count} × {device_type}" for device_type, count in counts.items())
        console.print(f"machine {row.name}: {devices}; a flow looked {minutes(row.silent_s)} ago", soft_wrap=True)
    for run in [run for run in ledger.list_runs() if run.state == "running"]:
        progress = ledger.progress(run.run_id)
        console.print(f"run {run.run_id}: step {progress.step}/{progress.steps}", soft_wrap=True)
        if epochs := ledger.plan_epochs(run.run_id):
            console.print(_describe_plan(epochs[-1]), soft_wrap=True)
        table = Table("actor", "state", "version", "last heard", "message", box=None)
        for actor in ledger.actors(run.run_id):
            version = "" if actor.loaded_version is None else str(actor.loaded_version[1])
            who = f"{actor.role} {actor.slot} (attempt {actor.attempt}, pid {actor.pid})"
            state = actor.state if actor.wanted == "run" else f"{actor.state}, is to {actor.wanted}"
            table.add_row(who, state, version, f"{actor.silent_s:.0f} s ago", Text(actor.message))
        console.print(table)


def _describe_plan(row: PlanEpochRow) -> str:
    plan = ClusterPlan.model_validate_json(row.plan_json)
    trains = ", ".join(f"{len(s.devices)} × {s.device_type} of {s.machine}" for s in plan.trainer.machines)
    replicas = len(plan.replicas)
    return (
        f"plan epoch {row.epoch}: trains on {trains}, "
        f"generates with {replicas} replica{'s' if replicas > 1 else ''}; {plan.step_s:.1f} s a step predicted"
    )


def show_runs(settings: Settings, console: Console) -> None:
    """Print a table of all runs, the newest last."""
    if _has_no_ledger(settings):
        console.print(f"No run yet under {settings.local.home}; HEXFLOW_HOME names another place.", soft_wrap=True)
        return
    ledger = Ledger(settings.shared.ledger_url, patience_s=0)
    runs = sorted(ledger.list_runs(), key=lambda run: run.created_s)
    if not runs:
        laptop = SHIPPED / "experiments" / "laptop.yaml"
        console.print(f"No run yet: start one with `hexflow train {laptop}`.", soft_wrap=True)
        return
    table = Table(box=None)
    table.add_column("run", no_wrap=True)  # a person copies it into `hexflow resume`
    for column in ("state", "steps", "eval before → after", "last reward", "tokens/s", "MLflow run"):
        table.add_column(column)
    for run in runs:
        table.add_row(*run_row(ledger, run, read_summary(settings, run.run_id)))
    console.print(table)


def run_row(ledger: Ledger, run: RunRow, summary: dict[str, Any]) -> list[str]:
    """The cells of one run; `summary` is empty while there is none."""
    progress = ledger.progress(run.run_id)
    before, after = summary.get("eval_before"), summary.get("eval_after")
    is_reported = summary.get("status") == "completed"  # the run is closed first, so that its actors leave
    return [
        run.run_id,
        run.state if run.state != "completed" or is_reported else "completed, its report follows",
        f"{progress.step}/{run.steps}",
        f"{figure(before)} → {figure(after)}" if before is not None else "",
        figure(progress.reward_mean),
        figure(summary.get("tokens_per_s")),
        (run.mlflow_run_id or "")[:8],
    ]


def read_summary(settings: Settings, run_id: str) -> dict[str, Any]:
    """The run's summary, empty while there is none."""
    path = RunDirectory(settings.shared.runs / run_id).summary
    return dict(json.loads(path.read_text())) if path.exists() else {}


def summary_lines(summary: dict[str, Any], directory: Path) -> Iterable[str]:
    """The key figures of a finished run, one line each."""
    return [f"{name:<28}{value}" for name, value in key_figures(summary, directory).items()]
