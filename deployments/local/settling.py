"""What becomes of runs whose processes are gone or are about to be ended with the stack.

What is wanted is written into the ledger before anybody is told; and a run is closed only if its supervisor is the one
whose process was found gone, which the ledger checks in the transaction that closes it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy.exc import SQLAlchemyError

from deployments.local import servers
from deployments.local.servers import StackState
from deployments.local.sign_in import api_of, signed_in
from deployments.prefect.api import PrefectApi, Unreachable
from planners.errors import UserError
from tasks.config.settings import Settings
from tasks.exchange.ledger import Actor, ActorRow, Ledger, RunRow
from tasks.exchange.ledger.database import cause_of
from tasks.exchange.ledger.rows import newest_attempts
from tasks.tracking.tracker import end_run

STARTING_S = 20.0
"""Longest time from a worker's word that it starts a flow run until its process is there."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Running:
    """A run that goes on as far as the ledger knows, with the newest attempts of its supervisor and actors."""

    run: RunRow
    rows: Sequence[ActorRow]


def running_runs(settings: Settings, say: Say) -> list[Running]:
    """The runs that go on; none where the ledger cannot be read, which `say` is told."""
    try:
        ledger = Ledger(settings.shared.ledger_url, patience_s=0)
        return [Running(run, ledger.actors(run.run_id)) for run in ledger.list_runs() if run.state == "running"]
    except (UserError, SQLAlchemyError) as error:
        say(f"The runs in the ledger are left as they are: {_told(error)}")
        return []


def want_the_end(settings: Settings, say: Say) -> None:
    """Write down that the runs supervised on this machine are to end: a signal may be lost, what is written is not."""
    here = _flow_runs_here(settings)
    for found in running_runs(settings, say):
        if found.run.flow_run_id in here:
            try:
                Ledger(settings.shared.ledger_url, patience_s=0).ask_to_cancel(found.run.flow_run_id)
            except SQLAlchemyError as error:
                say(f"Run {found.run.run_id} is told by a signal only: {_told(error)}")


def settle_flow_runs(settings: Settings, state: StackState, state_type: str, message: str, say: Say) -> None:
    """Close flow runs of the own server whose process is gone: a killed worker leaves them Running for ever.

    Gone is who has no process at two looks and is in the same state at both, be the server's clock what it may; where
    workers are at work, one that is Pending gets STARTING_S between them for its process to appear.
    """
    waiting = ["SCHEDULED"] if state_type == "CANCELLED" else []
    going_on = running_runs(settings, say)  # first: who takes a run over from here on is not found gone
    types = ["RUNNING", "CANCELLING", "PENDING", *waiting]
    try:
        api = api_of(settings, state)
        before, _ = _without_process(settings, api, types)
        if state_type == "CRASHED" and any(kind == "PENDING" for kind, _ in before.values()):
            time.sleep(STARTING_S)
        now, living = _without_process(settings, api, types)
        gone = [flow_run_id for flow_run_id, found in before.items() if now.get(flow_run_id) == found]
        for flow_run_id in gone:
            api.set_state(flow_run_id, state_type, message, force=True)
        # Of those that their worker saw die, the ledger has not heard either.
        crashed = [run["id"] for run in api.flow_runs(["CRASHED"]) if run["id"] not in living]
    except (Unreachable, UserError):  # away, or the secret was changed under it: the next `up` does this
        return
    lost = [found for found in going_on if found.run.flow_run_id in {*gone, *crashed}]
    with signed_in(settings, state):
        settle_runs(settings, state.mlflow_url, lost, is_cancelled=state_type == "CANCELLED")


def settle_runs(settings: Settings, mlflow_url: str, lost: Sequence[Running], is_cancelled: bool) -> None:
    """Close runs that could not do so themselves, also in MLflow; their actors are fenced: none may go on."""
    state = "cancelled" if is_cancelled else "failed"
    for run, rows in ((found.run, found.rows) for found in lost):
        supervisor = next(row for row in rows if row.role == "supervisor")
        actor = Actor(run.run_id, "supervisor", supervisor.slot, supervisor.attempt)
        if Ledger(settings.shared.ledger_url, patience_s=0).settle_run(actor, supervisor.serial, state):
            end_run(mlflow_url, run.mlflow_run_id, "KILLED" if is_cancelled else "FAILED", newest_attempts(rows))


def _without_process(
    settings: Settings, api: PrefectApi, state_types: list[str]
) -> tuple[dict[str, tuple[str, str]], set[str]]:
    """(type, time) of the state of each open flow run that has no process here, and the flow runs that have one.

    Processes are looked at last: one that is there then has not ended before the server said that it is open.
    """
    states = {run["id"]: (run["state"]["type"], run["state"]["timestamp"]) for run in api.flow_runs(state_types)}
    living = _flow_runs_here(settings)
    return {flow_run_id: found for flow_run_id, found in states.items() if flow_run_id not in living}, living


def _flow_runs_here(settings: Settings) -> set[str]:
    """The flow runs that have a process of this stack."""
    found = (variables.get("PREFECT__FLOW_RUN_ID") for _, variables in servers.marked_processes(settings))
    return {flow_run_id for flow_run_id in found if flow_run_id}


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{cause_of(error)}."
