"""What every part of one run shares, and how a run is opened: new, or resumed from its last checkpoint."""

import math
import os
import secrets
import time
from dataclasses import dataclass

from planners.errors import UserError
from planners.hardware.machine import Machine
from tasks.config.experiment import Experiment
from tasks.config.settings import Settings, load_settings
from tasks.exchange.files import write_json
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Actor, Ledger, RunRow
from tasks.machine.discovery import discover_machine
from tasks.readiness import require_free_devices
from tasks.training.checkpoints import WrittenBy, latest_checkpoint, latest_written_by

SUPERVISOR_SILENCE_S = 20.0
"""Silence after which a run's supervisor counts as gone; it beats every 2 s."""


@dataclass(frozen=True)
class RunContext:
    """One run, as the flow that owns it sees it.

    `supervisor` is the flow's own place in the ledger; `resume_step` is None for a new run, else the step its trainer
    continues from, whose checkpoint a trainer like `written_by` has to continue; `machine` is where the flow runs.
    """

    run_id: str
    experiment: Experiment
    directory: RunDirectory
    ledger: Ledger
    settings: Settings
    supervisor: Actor
    resume_step: int | None
    mlflow_run_id: str | None
    machine: Machine
    written_by: WrittenBy | None = None


def open_run(experiment: Experiment, resume: str | None, flow_run_id: str | None) -> RunContext:
    """Create a run, or take up `resume` under the experiment it was started with.

    A flow run that Prefect starts a second time takes up the run it has begun before. Actors that are still alive are
    fenced: they belong to a supervisor that is gone.

    Raises:
        UserError: `resume` names no run, or one that is complete or has a supervisor, or others hold devices that it
            may use. Nothing has changed then.
    """
    settings = load_settings()
    settings.local.home.mkdir(parents=True, exist_ok=True)
    ledger, machine = Ledger(settings.shared.ledger_url), discover_machine()
    begun = ledger.find_run(flow_run_id=flow_run_id) if flow_run_id else None
    if begun is not None:
        return _reopen_run(begun, _require_resumable(begun, machine, settings), machine, settings, ledger, flow_run_id)
    if resume is None:
        return _create_run(experiment, machine, settings, ledger, flow_run_id)
    run = ledger.find_run(run_id=resume)
    if run is None:
        known = ", ".join(run.run_id for run in ledger.list_runs()[-5:]) or "none"
        raise UserError(f"There is no run {resume} to resume; the latest runs are: {known}.")
    experiment = _require_resumable(run, machine, settings)
    require_unsupervised(run, ledger)
    return _reopen_run(run, experiment, machine, settings, ledger, flow_run_id)


def _create_run(
    experiment: Experiment, machine: Machine, settings: Settings, ledger: Ledger, flow_run_id: str | None
) -> RunContext:
    run_id = f"{experiment.run.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    directory = RunDirectory(settings.shared.runs / run_id)
    directory.create()
    write_json(directory.experiment, experiment.model_dump(mode="json"))
    workload = experiment.workload
    ledger.create_run(
        run_id,
        prompts_per_step=workload.prompts_per_step,
        max_staleness=workload.max_staleness,
        steps=experiment.run.steps,
        max_attempts_per_prompt=experiment.rollout.max_attempts_per_prompt,
        flow_run_id=flow_run_id,
    )
    ledger.request_evaluation(run_id, "before", 0)
    supervisor = _supervise(ledger, run_id, machine)
    return RunContext(run_id, experiment, directory, ledger, settings, supervisor, None, None, machine)


def _require_resumable(run: RunRow, machine: Machine, settings: Settings) -> Experiment:
    """The run's experiment, if the run can be taken up now. Raises UserError."""
    directory = RunDirectory(settings.shared.runs / run.run_id)
    if run.state == "completed":
        raise UserError(f"Run {run.run_id} is complete: there is nothing to resume. Start a new run instead.")
    if not directory.experiment.exists():
        raise UserError(f"Run {run.run_id} cannot be resumed: its directory {directory.root} is gone.")
    experiment = Experiment.model_validate_json(directory.experiment.read_text())
    require_free_devices(experiment, machine, settings, run.run_id)
    return experiment


def _reopen_run(
    run: RunRow, experiment: Experiment, machine: Machine, settings: Settings, ledger: Ledger, flow_run_id: str | None
) -> RunContext:
    directory = RunDirectory(settings.shared.runs / run.run_id)
    supervisor = _supervise(ledger, run.run_id, machine)
    for actor in ledger.actors(run.run_id):
        if actor.role != supervisor.role:
            ledger.fence(run.run_id, actor.role, actor.slot)
    step = latest_checkpoint(directory, ledger, run.run_id) or 0
    written_by = latest_written_by(directory, ledger, run.run_id)
    ledger.reopen_run(run.run_id, flow_run_id)
    ledger.resume_from(run.run_id, step, supervisor)
    return RunContext(
        run.run_id, experiment, directory, ledger, settings, supervisor, step, run.mlflow_run_id, machine, written_by
    )


def _supervise(ledger: Ledger, run_id: str, machine: Machine) -> Actor:
    return ledger.register(run_id, "supervisor", 0, os.getpid(), machine.name)


def require_unsupervised(run: RunRow, ledger: Ledger) -> None:
    """Refuse to resume a run that a flow run is at work on.

    Raises:
        UserError: its supervisor was heard a moment ago.
    """
    for actor in ledger.actors(run.run_id):
        alive = actor.state in ("starting", "running") and actor.silent_s < SUPERVISOR_SILENCE_S
        if actor.role == "supervisor" and alive:
            raise UserError(
                f"Run {run.run_id} is being worked on, last heard of {actor.silent_s:.0f} s ago: cancel its flow run "
                f"first, or, if that crashed, try again in {math.ceil(SUPERVISOR_SILENCE_S - actor.silent_s)} s."
            )
