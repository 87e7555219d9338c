"""Commands that run a flow on the stack: it is brought up, its flow run is followed, and decides the exit status."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markdown import Markdown
from sqlalchemy.exc import SQLAlchemyError

from deployments.cli.follow import Follower, interrupts_kept, sigterm_as_ctrl_c
from deployments.cli.show import read_summary, summary_lines
from deployments.cli.terminal import CANCELLED, FAILED, complain, telling
from deployments.local import stack
from deployments.local.sign_in import api_of
from deployments.local.stack import Stack
from deployments.prefect.api import PrefectApi, Unreachable
from planners.errors import UserError
from planners.hardware.machine import Machine
from tasks.config.experiment import Experiment
from tasks.config.passwords import without_password
from tasks.config.settings import Settings
from tasks.exchange.ledger import Ledger
from tasks.exchange.ledger.database import cause_of
from tasks.machine.discovery import discover_machine
from tasks.readiness import make_ready

EXIT_STATUS = {"COMPLETED": 0, "FAILED": FAILED, "CRASHED": FAILED}
"""Exit status by the flow run's last state; any other means that it was cancelled, or left to that."""
PREPARING = "preparing {} and checking the experiment"
MEASURING = "Measuring the devices, unless that was done before: up to 4 minutes."
_FLOW_ERROR = "Flow run encountered an exception: "


def open_console() -> Console:
    """Where a command prints."""
    # A file or a pipe has no width; tables are not cut for one.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def bring_up(settings: Settings, console: Console, machine: Machine | None = None) -> Stack:
    """Start what is missing of the stack, and say where its pages are."""
    try:
        found = stack.up(settings, lambda line: console.print(line, soft_wrap=True, markup=False), machine)
    except KeyboardInterrupt:
        console.print("Interrupted; what has started runs on. `hexflow down` ends it.")
        raise typer.Exit(CANCELLED) from None
    console.print(f"Prefect: {found.prefect_page}", soft_wrap=True)
    console.print(f"MLflow:  {without_password(found.mlflow_url)}", soft_wrap=True)
    if found.pair:
        console.print("Sign in: hexflow open (or: make open)", soft_wrap=True)
    return found


def run_and_follow(settings: Settings, parameters: dict[str, Any], machine: Machine | None = None) -> None:
    """Run the `rl` deployment, show it to its end, print the key figures, leave with its status."""
    console = open_console()
    # Refused here if another version made it: nothing has been started.
    ledger = Ledger(settings.shared.ledger_url, patience_s=0)
    with sigterm_as_ctrl_c():
        api = bring_up(settings, console, machine).api
        flow_run_id, state = _start_and_follow(settings, api, "rl/rl", parameters, console)
    with _started():
        run = ledger.find_run(flow_run_id=flow_run_id)
    if run is not None:
        console.print(f"run {run.run_id}: {state['name'].lower()}", soft_wrap=True)
        if summary := read_summary(settings, run.run_id):
            for line in summary_lines(summary, settings.shared.runs / run.run_id):
                console.print(line, soft_wrap=True, markup=False)
        command = f"hexflow resume {run.run_id}"
        if state["type"] != "COMPLETED" and command not in str(state.get("message")):  # else it is said below
            console.print(f"Continue it with: {command}", soft_wrap=True)
    leave(state, console)


def plan_here(settings: Settings, experiment: Experiment, console: Console) -> None:
    """Run the `plan` deployment, show what it made, leave with its status."""
    machine = discover_machine()
    with telling(console.print) as tell:
        tell(PREPARING.format(experiment.model.source))
        make_ready(experiment, machine, settings)
    # Refused here if another version made it: nothing has been started.
    Ledger(settings.shared.ledger_url, patience_s=0)
    api = bring_up(settings, console, machine).api
    console.print(MEASURING)
    parameters = {"experiment": experiment.model_dump(mode="json")}
    flow_run_id, state = _start_and_follow(settings, api, "plan/plan", parameters, console)
    with _started():
        for text in api.markdown_artifacts(flow_run_id):
            console.print(Markdown(text))
    leave(state, console)


def cancel_run(settings: Settings, run_id: str, console: Console) -> None:
    """Cancel a run that goes on, whoever started it, show its end, and leave with its status.

    Raises:
        UserError: there is no such run, or it does not go on.
    """
    ledger = Ledger(settings.shared.ledger_url, patience_s=0)
    run = ledger.find_run(run_id=run_id)
    if run is None:
        raise UserError(f"The ledger knows no run {run_id}: `hexflow runs` lists those it knows.")
    if run.state != "running" or run.flow_run_id is None:
        raise UserError(f"Run {run_id} is {run.state}: there is nothing to cancel.")
    known = stack.find(settings)
    if known is None:
        raise UserError(f"No stack was ever started for {settings.local.home}: set HEXFLOW_HOME as the run had it.")
    api = api_of(settings, known)
    with _started():
        state = Follower(api, ledger, run.flow_run_id, console).cancel()
    leave(state, console)


def leave(state: dict[str, Any], console: Console) -> None:
    """Leave with the status that tells how the flow run ended."""
    if state["type"] != "COMPLETED":
        message = str(state.get("message") or "without a message").removeprefix(_FLOW_ERROR)
        said = message if message.startswith(state["name"]) else f"{state['name']}: {message}"
        console.print(said, soft_wrap=True, markup=False)
    raise typer.Exit(EXIT_STATUS.get(state["type"], CANCELLED))


@contextmanager
def _started() -> Iterator[None]:
    """What goes wrong in here does so after the flow run was created: the exit status must not say that none was."""
    try:
        yield
    except (Unreachable, UserError) as error:
        cause = str(error).rstrip(".")
    except SQLAlchemyError as error:
        cause = f"The ledger failed: {cause_of(error)}"
    else:
        return
    complain(
        f"{cause}. The run may go on: see `hexflow status`; `hexflow up` starts a lost server. `hexflow cancel RUN` "
        "ends it."
    )
    raise typer.Exit(FAILED)


def _start_and_follow(
    settings: Settings, api: PrefectApi, deployment: str, parameters: dict[str, Any], console: Console
) -> tuple[str, dict[str, Any]]:
    """Create a flow run and show it to its end; returns its id and last state. Ctrl-C meanwhile cancels it."""
    with interrupts_kept():
        flow_run_id = api.create_flow_run(deployment, parameters)
        with _started():
            page = f"{without_password(api.url).removesuffix('/api')}/runs/flow-run/{flow_run_id}"
            console.print(f"Flow run: {page}", soft_wrap=True)
            ledger = Ledger(settings.shared.ledger_url, patience_s=0)
            return flow_run_id, Follower(api, ledger, flow_run_id, console).follow()
