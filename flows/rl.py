"""Flow `rl`, the whole run: discover → profile → plan → train and roll out → evaluate → report."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from prefect import State, flow, runtime
from prefect.client.orchestration import get_client
from prefect.exceptions import TerminationSignal
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Failed
from sqlalchemy.exc import SQLAlchemyError

from flows.pages import ProgressArtifact, name_flow_run, show_plan, show_summary, show_tracking
from flows.preparation import announce, choose_plan
from flows.running.context import RunContext, open_run
from flows.running.ending import CancellationWatch, ignore_further_signals
from flows.running.launcher import PrefectLauncher
from flows.running.readying import ready_and_measured
from flows.running.supervisor import Supervisor
from planners.errors import UserError
from planners.plan.plan import ClusterPlan
from planners.plan.run import RunPlan
from planners.search.this_machine import require_startable
from tasks.config.experiment import Experiment
from tasks.config.settings import Settings
from tasks.exchange.files import write_atomic
from tasks.lifecycle.heartbeat import Heartbeat
from tasks.machine.devices import hold_devices
from tasks.tracking.report import predicted_times, write_report
from tasks.tracking.tracker import FLUSH_DEADLINE_S, Status, Tracker, end_attempts

_LEAVE_S = (30.0, 60.0)
_CANCEL_S = (0.0, 12.0)
"""Seconds until the actors of a finished or a cancelled run are cancelled, and until they are killed."""
_CANCEL_FLUSH_S = 4.0


@flow(name="rl", flow_run_name="rl-{experiment.run.name}", log_prints=True)
def rl(experiment: Experiment = Experiment(), resume: str | None = None) -> dict[str, Any] | State[Any]:
    """Improve a language model by asynchronous reinforcement learning with verifiable rewards.

    Args:
        experiment: Everything that decides the run; the defaults are the laptop run.
        resume: Id of an unfinished run to continue from its last checkpoint, under the experiment it was started with.
    """
    try:
        run = open_run(experiment, resume, runtime.flow_run.id)
        print(f"run {run.run_id} in {run.directory.root}")
        return conduct(run)
    except UserError as error:
        return Failed(message=str(error))  # raised, the log would have a traceback of ours before it


def conduct(run: RunContext) -> dict[str, Any] | State[Any]:
    """Own, watch and track the run while it is carried out; returns the summary, or that it was cancelled."""
    try:
        with owned(run), CancellationWatch(run, runtime.flow_run.id), tracked(run) as tracker:
            name_flow_run(run)
            return carry_out(run, tracker)
    except TerminationSignal:
        return Cancelled(message=f"Cancelled; `hexflow resume {run.run_id}` continues it.")


def carry_out(run: RunContext, tracker: Tracker) -> dict[str, Any]:
    """Everything between a run's begin and its end; returns the summary."""
    show_tracking(tracker)
    announce(run.machine)
    profiles = ready_and_measured(run.experiment, run.machine, run.run_id)
    plan = choose_plan(run.experiment, run.machine, profiles, run.written_by)
    require_startable(plan)
    epoch = record_plan(run, plan, tracker)
    require_free(plan, run.settings)
    try:
        train_and_roll_out(run, epoch, plan)
    finally:
        summary = report(run, plan, tracker)
    return summary


@contextmanager
def owned(run: RunContext) -> Iterator[None]:
    """Beat as the run's supervisor; the ledger learns how the run ended."""
    heartbeat = Heartbeat(run.ledger, run.supervisor, leaves_with_run=False).start()
    heartbeat.report("running")
    try:
        yield
    except TerminationSignal:
        ignore_further_signals()
        close_run(run, "cancelled")
        raise
    except BaseException:
        close_run(run, "failed")
        raise
    finally:
        heartbeat.stop()
        run.ledger.finish(run.supervisor, "done")


@contextmanager
def tracked(run: RunContext) -> Iterator[Tracker]:
    """Track the run in MLflow, which learns how it ended."""
    tracking_uri = os.environ.get("MLFLOW_TRACKING_URI")
    tracker = Tracker.parent(
        tracking_uri,
        run.experiment.tracking.experiment,
        run.run_id,
        run.experiment.model_dump(mode="json"),
        {**run.experiment.tracking.tags, "hexflow.run": run.run_id},
        run_id=run.mlflow_run_id,
        on_open=partial(run.ledger.set_mlflow_run, run.run_id),
    )
    status: Status = "FAILED"
    try:
        yield tracker
        status = "FINISHED"
    except TerminationSignal:
        ignore_further_signals()
        status = "KILLED"
        raise
    finally:
        # Attempts that were killed could not say so themselves.
        end_attempts(tracking_uri, tracker.run_id, "KILLED", {})
        tracker.finish(status, flush_s=_CANCEL_FLUSH_S if status == "KILLED" else FLUSH_DEADLINE_S)


def close_run(run: RunContext, state: str) -> None:
    """Say how the run ended; the first word counts, since a page that cannot be shown does not undo a run."""
    row = run.ledger.find_run(run_id=run.run_id)
    if row is not None and row.state == "running":
        run.ledger.set_run_state(run.run_id, state)


def has_completed(run: RunContext) -> bool:
    """Whether the ledger calls the run completed."""
    row = run.ledger.find_run(run_id=run.run_id)
    return row is not None and row.state == "completed"


def record_plan(run: RunContext, plan: ClusterPlan, tracker: Tracker) -> int:
    """Keep the plan with the run and as a plan epoch in the ledger, and show it; returns the epoch."""
    write_atomic(run.directory.plan, plan.model_dump_json(indent=2).encode())
    epoch = run.ledger.add_plan_epoch(run.run_id, plan)
    tracker.log_artifact(run.directory.experiment)
    tracker.log_artifact(run.directory.plan)
    tracker.log({f"plan/predicted_{name}": value for name, value in predicted_times(plan).items()}, step=0)
    show_plan(plan)
    return epoch


def require_free(plan: RunPlan, settings: Settings) -> None:
    """Refuse to start beside another run: its actors would wait for their devices one after the other.

    Raises:
        UserError: another run holds one of the plan's devices.
    """
    for share in plan.shares:
        with hold_devices(share.kind, share.devices, "a run that starts", settings, deadline_s=10.0):
            pass


def train_and_roll_out(run: RunContext, epoch: int, plan: RunPlan) -> None:
    """Run the plan's actors until the last step is trained and evaluated; none is left on any way out."""
    with _without_repeats(), get_client(sync_client=True) as client:
        launcher = PrefectLauncher(client, run.supervisor, epoch, run.settings.shared.environment())
        supervisor = Supervisor(run, plan, launcher, ProgressArtifact(run.run_id))
        state = "failed"
        try:
            supervisor.run()
            state = "completed"
        except TerminationSignal:
            ignore_further_signals()
            state = "cancelled"
            raise
        finally:
            leave(run, supervisor, state)


def leave(run: RunContext, supervisor: Supervisor, state: str) -> None:
    """Close the run and end its actors; in haste if it is cancelled, also while they leave, or the ledger fails.

    A run that the ledger calls completed cannot be cancelled any more, only hurried.
    """
    try:
        close_run(run, state)
        supervisor.end_children(*(_CANCEL_S if state == "cancelled" else _LEAVE_S))
    except (TerminationSignal, SQLAlchemyError) as error:
        ignore_further_signals()
        # Prefect kills a cancelled flow 30 s after telling it.
        supervisor.end_children(*_CANCEL_S)
        if isinstance(error, SQLAlchemyError) or not has_completed(run):
            raise
    if state == "completed":
        ignore_further_signals()  # what is left is to report it


def report(run: RunContext, plan: ClusterPlan, tracker: Tracker) -> dict[str, Any]:
    """Write the run's summary and curves, and show them."""
    summary = write_report(run.directory, run.ledger, run.run_id, plan)
    figures = {name: float(value) for name, value in summary.items() if isinstance(value, int | float)}
    # On the parent, so that MLflow's compare page shows the results of whole runs beside each other.
    tracker.log({f"result/{name}": value for name, value in figures.items()}, step=run.experiment.run.steps)
    measured = {name: summary[f"{name}_measured"] for name in predicted_times(plan)}
    tracker.log({f"plan/measured_{name}": value for name, value in measured.items() if value is not None}, step=0)
    tracker.log_artifact(run.directory.summary)
    tracker.log_artifact(run.directory.curves)
    with _without_repeats() if summary["status"] == "cancelled" else nullcontext():
        show_summary(summary, run.directory.root)
    return summary


def _without_repeats() -> AbstractContextManager[Any]:
    """Prefect would repeat a request for a minute while its server is away; who supervises or leaves cannot wait."""
    return temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0})
