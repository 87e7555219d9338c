"""What every part of one run shares, and how a run is opened: new, or resumed from its last checkpoint."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from planners.errors import UserError
from planners.hardware.machine import Machine
from tasks.config.experiment import Experiment
from tasks.config.files import read_resolved_experiment
from tasks.config.settings import Settings, load_settings
from tasks.exchange.files import write_json
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Actor, Ledger, Process, RunRow
from tasks.exchange.ledger.fence import ACTIVE
from tasks.lifecycle.scope import this_process
from tasks.lifecycle.silence import Silence
from tasks.machine.discovery import discover_machine
from tasks.machine.private import make_private
from tasks.machine.processes import end_sessions, is_alive, is_gone
from tasks.readiness import require_free_devices
from tasks.rewards.python import keep_functions
from tasks.training.checkpoints import resume_point

SUPERVISOR_SILENCE_S = 20.0
"""Silence after which a run's supervisor counts as gone; it beats every 2 s."""
_LOOK_DEADLINE_S = 3 * SUPERVISOR_SILENCE_S
_LONGEST_GAP_S = 5.0
_POLL_S = 0.5
_LEAVE_S = 8.0


@dataclass(frozen=True)
class RunContext:
    """One run, as the flow that owns it sees it.

    `supervisor` is the flow's own place in the ledger, for its `process`; `resume_step` is None for a new run, else the
    step its trainer continues from; `machine` is where the flow runs.
    """

    run_id: str
    experiment: Experiment
    directory: RunDirectory
    ledger: Ledger
    settings: Settings
    supervisor: Actor
    process: Process
    resume_step: int | None
    mlflow_run_id: str | None
    machine: Machine


def open_run(experiment: Experiment, resume: str | None, flow_run_id: str | None) -> RunContext:
    """Create a run, or take up `resume` under the experiment it was started with.

    A flow run that Prefect starts a second time takes up the run it has begun before. Actors that are still alive are
    fenced: they belong to a supervisor that is gone.

    Raises:
        UserError: `resume` names no run, or one that is complete or has a supervisor, or others hold devices that it
            may use; nothing has changed then. Or its checkpoints are gone; then it has failed.
    """
    settings = load_settings()
    make_private(settings.local.home, "HEXFLOW_HOME")
    ledger, machine = Ledger(settings.shared.ledger_url), discover_machine()
    begun = ledger.find_run(flow_run_id=flow_run_id) if flow_run_id else None
    if begun is not None:
        return _take_over(begun, _require_resumable(begun, machine, settings), machine, settings, ledger, flow_run_id)
    if resume is None:
        return _begin_run(experiment, machine, settings, ledger, flow_run_id)
    run = ledger.find_run(run_id=resume)
    if run is None:
        known = ", ".join(run.run_id for run in ledger.list_runs()[-5:]) or "none"
        raise UserError(f"There is no run {resume} to resume; the latest runs are: {known}.")
    experiment = _require_resumable(run, machine, settings)
    seen = require_unsupervised(run.run_id, ledger)
    return _take_over(run, experiment, machine, settings, ledger, flow_run_id, seen)


def _begin_run(
    experiment: Experiment, machine: Machine, settings: Settings, ledger: Ledger, flow_run_id: str | None
) -> RunContext:
    run_id = f"{experiment.run.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    directory = RunDirectory(settings.shared.runs / run_id)
    directory.create()
    experiment = experiment.model_copy(update={"rewards": keep_functions(experiment.rewards, directory.rewards)})
    write_json(directory.experiment, experiment.model_dump(mode="json"))
    workload, process = experiment.workload, this_process(machine.name)
    supervisor = ledger.begin_run(
        run_id,
        process,
        prompts_per_step=workload.prompts_per_step,
        max_staleness=workload.max_staleness,
        steps=experiment.run.steps,
        max_attempts_per_prompt=experiment.rollout.max_attempts_per_prompt,
        flow_run_id=flow_run_id,
    )
    ledger.request_evaluation(supervisor, "before", 0)
    return RunContext(run_id, experiment, directory, ledger, settings, supervisor, process, None, None, machine)


def _require_resumable(run: RunRow, machine: Machine, settings: Settings) -> Experiment:
    """The run's experiment, if the run can be taken up now. Raises UserError."""
    directory = RunDirectory(settings.shared.runs / run.run_id)
    if run.state == "completed":
        raise UserError(f"Run {run.run_id} is complete: there is nothing to resume. Start a new run instead.")
    if not directory.experiment.exists():
        raise UserError(f"Run {run.run_id} cannot be resumed: its directory {directory.root} is gone.")
    experiment = read_resolved_experiment(directory.experiment)
    require_free_devices(experiment, machine, run.run_id)
    return experiment


def _take_over(
    run: RunRow,
    experiment: Experiment,
    machine: Machine,
    settings: Settings,
    ledger: Ledger,
    flow_run_id: str | None,
    seen: tuple[int, int] | None = None,
) -> RunContext:
    directory, process = RunDirectory(settings.shared.runs / run.run_id), this_process(machine.name)
    supervisor = ledger.take_over(run.run_id, process, flow_run_id, seen)
    _end_former(supervisor, ledger)
    # Looked for only now: a former trainer may have written one, and deleted others, until it was fenced.
    try:
        step = resume_point(directory, ledger, run.run_id, experiment.run)
    except UserError as error:
        ledger.close_run(supervisor, "failed")
        ledger.finish(supervisor, "failed", str(error))
        raise
    ledger.resume_from(supervisor, step, "taken over")
    ledger.request_evaluation(supervisor, "before", 0)
    mlflow = run.mlflow_run_id
    return RunContext(run.run_id, experiment, directory, ledger, settings, supervisor, process, step, mlflow, machine)


def _end_former(supervisor: Actor, ledger: Ledger) -> None:
    """End what the former supervisor's attempts have here: taking over has fenced them, and they hold devices.

    They leave by themselves at their next beat; one that is stopped or hangs would not.
    """
    rows = ledger.actors(supervisor.run_id)
    former = [row for row in rows if row.assigned_by is not None and row.assigned_by < supervisor.attempt]
    end_sessions([row.pid for row in former if row.pid and row.process_key and is_alive(row.process_key)], _LEAVE_S)


def require_unsupervised(
    run_id: str,
    ledger: Ledger,
    pause: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[int, int] | None:
    """Make sure that nobody is at work on a run, which takes SUPERVISOR_SILENCE_S where that has to be waited for.

    Args:
        run_id: the run.
        ledger: knows it.
        pause: waits for so many seconds.
        clock: seconds that pass meanwhile.

    Returns:
        (attempt, serial) of a supervisor that is gone or silent but has not said that it leaves, else None.

    Raises:
        UserError: its supervisor beats, or the ledger was read too slowly to tell.
    """
    silence, first, give_up = Silence(_LONGEST_GAP_S, clock), None, clock() + _LOOK_DEADLINE_S
    while True:
        row = next(row for row in ledger.actors(run_id) if row.role == "supervisor")
        if row.state not in ACTIVE:
            return None
        seen = (row.attempt, row.serial)
        if first not in (None, seen):
            raise UserError(f"Run {run_id} is being worked on: `hexflow cancel {run_id}` ends that first.")
        silent_s = silence.look({row.attempt: row.serial})[row.attempt]
        if silent_s >= SUPERVISOR_SILENCE_S or (row.process_key and is_gone(row.process_key)):
            return seen
        if clock() > give_up:
            raise UserError(
                f"Whether run {run_id} is being worked on could not be told within {_LOOK_DEADLINE_S:.0f} s, so slowly "
                "was the ledger read: try again when its disk or its server is less busy."
            )
        first = seen
        pause(_POLL_S)
