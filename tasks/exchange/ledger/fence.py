"""The check in every transaction of an actor, the supervisor included: is this attempt still the current one?"""

from sqlalchemy import ColumnElement, Connection, Table, select

from planners.errors import UserError
from tasks.exchange.ledger.rows import Actor, Fenced, RunRow, columns_of
from tasks.exchange.ledger.schema import actors, runs

ACTIVE = ("starting", "running")
"""States of an actor whose process has registered and has not ended."""
OPEN = ("assigned", *ACTIVE)
"""States of an actor that has not ended: at most one attempt of a slot is in one of them."""


def run_of(connection: Connection, run_id: str) -> RunRow:
    """The run. Raises UserError where the ledger does not know it."""
    row = connection.execute(select(*columns_of(RunRow, runs)).where(runs.c.run_id == run_id)).one_or_none()
    if row is None:
        raise UserError(f"The ledger knows no run {run_id}: `hexflow runs` lists those it knows.")
    return RunRow(*row)


def rows_of(actor: Actor, table: Table) -> list[ColumnElement[bool]]:
    """The conditions that a row of `table` belongs to this attempt."""
    columns = table.c
    return [
        columns.run_id == actor.run_id,
        columns.role == actor.role,
        columns.slot == actor.slot,
        columns.attempt == actor.attempt,
    ]


def newest_attempt(connection: Connection, run_id: str, role: str, slot: int) -> tuple[int, str] | None:
    """(attempt, state) of the newest attempt of a slot, or None."""
    newest = connection.execute(
        select(actors.c.attempt, actors.c.state)
        .where(actors.c.run_id == run_id, actors.c.role == role, actors.c.slot == slot)
        .order_by(actors.c.attempt.desc())
        .limit(1)
    ).one_or_none()
    return None if newest is None else (newest.attempt, newest.state)


def require_current(connection: Connection, actor: Actor) -> str:
    """Return the actor's state if it may still write.

    Raises:
        Fenced: another attempt has its place, or it was declared dead.
    """
    newest = newest_attempt(connection, actor.run_id, actor.role, actor.slot)
    if newest is None:
        raise Fenced(f"{name_of(actor)} was never given out")
    attempt, state = newest
    if attempt != actor.attempt:
        raise Fenced(f"{name_of(actor)} was replaced by attempt {attempt}")
    if state == "fenced":
        raise Fenced(f"{name_of(actor)} was declared dead")
    return state


def require_active(connection: Connection, actor: Actor) -> None:
    """Like `require_current`, for writes that make no sense before the actor's begin or after its own end."""
    state = require_current(connection, actor)
    if state == "assigned":
        raise Fenced(f"{name_of(actor)} has not registered")
    if state not in ACTIVE:
        raise Fenced(f"{name_of(actor)} has ended as {state}")


def require_supervisor(connection: Connection, supervisor: Actor) -> None:
    """Check who decides about a run: its supervisor, as long as nobody has taken over.

    Raises:
        Fenced: this supervisor is no longer current.
        ValueError: the actor is none.
    """
    if supervisor.role != "supervisor":
        raise ValueError(f"{name_of(supervisor)} is no supervisor: it decides nothing about others")
    require_active(connection, supervisor)


def name_of(actor: Actor) -> str:
    """The actor as messages name it."""
    return f"{actor.role} {actor.slot}, attempt {actor.attempt}, of run {actor.run_id}"
