"""Flow `rl`, the whole run: discover → profile → plan → train and roll out → evaluate → report."""

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prefect import State, flow, runtime
from prefect.client.orchestration import get_client
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled, Failed
from sqlalchemy.exc import SQLAlchemyError

from flows.pages import ProgressArtifact, name_flow_run, show_plan, show_replaced, show_summary, show_tracking
from flows.preparation import announce, choose_plan
from flows.running.context import RunContext, open_run
from flows.running.ending import only_hurry, supervised
from flows.running.launcher import PrefectLauncher, without_repeats
from flows.running.readying import ready_and_measured
from flows.running.supervisor import HURRY_S, Supervisor
from planners.errors import UserError
from planners.plan.plan import ClusterPlan
from planners.plan.run import RunPlan
from planners.search.this_machine import require_startable
from tasks.config.experiment import LAPTOP, Experiment
from tasks.config.settings import Settings
from tasks.exchange.files import write_atomic
from tasks.exchange.ledger import Progress
from tasks.exchange.ledger.rows import newest_attempts
from tasks.machine.devices import hold_devices
from tasks.tracking.curves import Curves
from tasks.tracking.report import predicted_times, write_report
from tasks.tracking.tracker import FLUSH_DEADLINE_S, Status, Tracker, end_attempts

LEAVE_S = (30.0, 60.0)
CANCEL_S = (0.0, HURRY_S)
"""Seconds until the actors of a finished or a cancelled run are cancelled, and until they are killed."""
_CANCEL_FLUSH_S = 4.0
_STATUS: dict[str, Status] = {"completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


@flow(name="rl", flow_run_name="rl-{experiment.run.name}", log_prints=True)
def rl(experiment: Experiment = LAPTOP, resume: str | None = None) -> dict[str, Any] | State[Any]:
    """Improve a language model by asynchronous reinforcement learning with verifiable rewards.

    Args:
        experiment: Everything that decides the run; the defaults are the laptop run.
        resume: Id of an unfinished run to continue from its last checkpoint, under the experiment it was started with.
    """
    try:
        run = open_run(experiment, resume, runtime.flow_run.id)
        print(f"run {run.run_id} in {run.directory.root}")
        return conduct(run, runtime.flow_run.id)
    except UserError as error:
        return Failed(message=str(error))  # raised, the log would have a traceback of ours before it


@dataclass
class Work:
    """What a run has begun so far, which is to be ended however the run ends."""

    tracker: Tracker | None = None
    plan: ClusterPlan | None = None
    curves: Curves | None = None
    supervisor: Supervisor | None = None
    say: Callable[[str], object] = print
    """Takes what the run is at, for those who watch."""
    connections: ExitStack = field(default_factory=ExitStack)


def conduct(run: RunContext, flow_run_id: str) -> dict[str, Any] | State[Any]:
    """Supervise the run while it is carried out, and end it; returns the summary, or that it was cancelled.

    The only place that hears of Prefect's termination: whatever asks for the run's end, it comes here as SIGTERM, once.
    """
    work, hurry, how = Work(), run.ledger.hurry, "failed"
    with ExitStack() as stack:
        try:
            try:
                scope = stack.enter_context(supervised(run, flow_run_id))  # a request may be there already
                work.say = partial(scope.report, "running")
                carry_out(run, work)
                how = "completed"
            finally:
                only_hurry(hurry)
        except TerminationSignal:
            how = "cancelled"
            hurry.set()
        except SQLAlchemyError:  # the ledger was asked for long enough
            hurry.set()
            raise
        finally:
            summary = end(run, work, how, hurry)
    if how == "cancelled":
        return Cancelled(message=f"Cancelled; `hexflow resume {run.run_id}` continues it.")
    return summary


def carry_out(run: RunContext, work: Work) -> None:
    """Everything between a run's begin and its end."""
    name_flow_run(run)
    work.say("opening its run in MLflow")
    work.tracker = open_tracker(run)
    show_tracking(work.tracker)
    announce(run.machine)

    def tell(what: str) -> None:
        print(what)
        work.say(what)

    profiles = ready_and_measured(run.experiment, run.machine, run.run_id, tell)
    work.say("planning, and starting the trainer and the replicas")
    plan = choose_plan(run.experiment, run.machine, profiles)
    require_startable(plan)
    epoch = record_plan(run, plan, work.tracker)
    require_free(plan, run.settings)
    train_and_roll_out(run, epoch, plan, work)


def end(run: RunContext, work: Work, how: str, hurry: threading.Event) -> dict[str, Any]:
    """Close the run, end its actors, report it, and end its tracking; returns the summary, if any.

    The first word about a run counts, so a page that cannot be shown does not undo one, and a run that is complete
    cannot be cancelled any more, only hurried. Its actors are ended also where the ledger takes no writes.

    Raises:
        Fenced: another supervisor has taken the run over; nothing of it was touched.
    """
    refusal = None
    try:
        how = run.ledger.close_run(run.supervisor, how)
    except SQLAlchemyError as error:
        refusal = error
        hurry.set()
    try:
        with work.connections:
            if work.supervisor:
                work.supervisor.end_children(*(CANCEL_S if how == "cancelled" else LEAVE_S), hurry)
        if refusal:
            raise refusal
        run.ledger.confirm(run.supervisor)  # a summary is the word of who supervises now
        if work.plan and work.tracker and work.curves:
            return report(run, work.plan, work.tracker, work.curves)
        return {}
    finally:
        rows = run.ledger.actors(run.run_id)
        run.ledger.confirm(run.supervisor)  # an MLflow run belongs to who supervises now, and so do these attempts
        if work.tracker:
            end_tracking(work.tracker, how, newest_attempts(rows))


def open_tracker(run: RunContext) -> Tracker:
    """Track the run in MLflow; a resumed one goes on where it was tracked before.

    Raises:
        Fenced: another supervisor has taken the run over; its MLflow run was not touched.
    """
    run.ledger.confirm(run.supervisor)
    return Tracker.parent(
        os.environ.get("MLFLOW_TRACKING_URI"),
        run.experiment.tracking.experiment,
        run.run_id,
        run.experiment.model_dump(mode="json"),
        {**run.experiment.tracking.tags, "hexflow.run": run.run_id},
        run_id=run.mlflow_run_id,
        on_open=partial(run.ledger.set_mlflow_run, run.supervisor),
    )


def end_tracking(tracker: Tracker, how: str, newest: Mapping[tuple[str, int], int]) -> None:
    """Tell MLflow how the run ended, for its attempts as well: those that were killed could not say so themselves.

    `newest` is the last attempt of each role and slot: one that came later is another supervisor's.
    """
    end_attempts(os.environ.get("MLFLOW_TRACKING_URI"), tracker.run_id, "KILLED", newest)
    tracker.finish(_STATUS[how], flush_s=_CANCEL_FLUSH_S if how == "cancelled" else FLUSH_DEADLINE_S)


def record_plan(run: RunContext, plan: ClusterPlan, tracker: Tracker) -> int:
    """Keep the plan with the run and as a plan epoch in the ledger, and show it; returns the epoch."""
    epoch = run.ledger.add_plan_epoch(run.supervisor, plan)  # first: whoever was replaced leaves the files alone
    write_atomic(run.directory.plan, plan.model_dump_json(indent=2).encode())
    tracker.log_artifact(run.directory.experiment)
    tracker.log_artifact(run.directory.plan)
    show_plan(plan)
    return epoch


def track_plan(tracker: Tracker, plan: ClusterPlan, summary: Mapping[str, Any]) -> None:
    """The predicted times of a step and its parts beside the measured ones, as a run of its own below the run."""
    tags = {"hexflow.role": "plan"}
    child = Tracker.child(os.environ.get("MLFLOW_TRACKING_URI"), lambda: tracker.run_id, "plan", tags)
    for name, predicted in predicted_times(plan).items():
        measured = summary[f"{name}_measured"]
        times = {f"plan/predicted_{name}": predicted, f"plan/measured_{name}": measured}
        child.log({key: value for key, value in times.items() if value is not None}, step=0)
    child.finish("FINISHED", flush_s=_CANCEL_FLUSH_S)


def require_free(plan: RunPlan, settings: Settings) -> None:
    """Refuse to start beside another run: its actors would wait for their devices one after the other.

    Raises:
        UserError: another run holds one of the plan's devices.
    """
    for share in plan.shares:
        with hold_devices(share.machine, share.kind, share.devices, "a run that starts", settings, deadline_s=10.0):
            pass


def train_and_roll_out(run: RunContext, epoch: int, plan: ClusterPlan, work: Work) -> None:
    """Run the plan's actors until the last step is trained and evaluated."""
    work.connections.enter_context(without_repeats())
    client = work.connections.enter_context(get_client(sync_client=True))
    launcher = PrefectLauncher(client, run.run_id, epoch)
    assert work.tracker
    curves = Curves(work.tracker, run.ledger, run.run_id, run.resume_step or 0)
    artifact = ProgressArtifact(run.run_id)

    def show(progress: Progress) -> None:
        artifact(progress)
        curves.follow(progress)

    work.plan, work.curves = plan, curves
    work.supervisor = Supervisor(run, epoch, plan, launcher, show, show_replaced)
    work.supervisor.run()


def report(run: RunContext, plan: ClusterPlan, tracker: Tracker, curves: Curves) -> dict[str, Any]:
    """Write the run's summary and curves, and show them."""
    curves.follow(run.ledger.progress(run.run_id))
    curves.track_evaluations()
    summary = write_report(run.directory, run.ledger, run.run_id, plan, tracker.fault)
    figures = {name: float(value) for name, value in summary.items() if isinstance(value, int | float)}
    # On the run itself, for MLflow's compare page; its charts come in the order of names, and so after the curves.
    tracker.log({f"summary/{name}": value for name, value in figures.items()}, step=run.experiment.run.steps)
    if summary["status"] != "cancelled":  # there is little time then
        track_plan(tracker, plan, summary)
    tracker.log_artifact(run.directory.summary)
    tracker.log_artifact(run.directory.curves)
    with without_repeats() if summary["status"] == "cancelled" else nullcontext():
        show_summary(summary, run.directory.root)
    return summary
