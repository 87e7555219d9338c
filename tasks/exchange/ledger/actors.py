"""The ledger's actors: attempts, heartbeats, and what happens to the work of one that is gone.

A lease lives as long as its actor is the current attempt of its slot, so heartbeats renew leases by being there, and a
long generation keeps its lease. Who replaces or fences an actor gives its prompts out again in the same transaction.
"""

from sqlalchemy import Connection, and_, delete, func, insert, select, update

from tasks.exchange.ledger.database import Database, now_s
from tasks.exchange.ledger.fence import ACTIVE, newest_attempt, require_current, rows_of, run_of
from tasks.exchange.ledger.groups import LEASE_LOST, drop_groups
from tasks.exchange.ledger.rows import Actor, ActorRow
from tasks.exchange.ledger.schema import actors, evaluations, groups, weight_claims

ROLES = ("trainer", "replica", "supervisor")


class Actors(Database):
    """Who works on a run, and whether it still does."""

    def register(self, run_id: str, role: str, slot: int, pid: int, machine: str) -> Actor:
        """Become the newest attempt of a slot.

        Older attempts are fenced, their leases dropped, so that the prompts are leased again, their claims released.
        """
        if role not in ROLES:
            raise ValueError(f"an actor is {', '.join(ROLES)}, not {role}")
        with self.write(run_id) as connection:
            run_of(connection, run_id)
            newest = newest_attempt(connection, run_id, role, slot)
            _fence_slot(connection, run_id, role, slot)
            actor = Actor(run_id, role, slot, 1 if newest is None else newest[0] + 1)
            values = {"run_id": run_id, "role": role, "slot": slot, "attempt": actor.attempt, "state": "starting"}
            values |= {"pid": pid, "machine": machine, "message": "", "registered_s": now_s(), "heartbeat_s": now_s()}
            connection.execute(insert(actors).values(**values))
        return actor

    def heartbeat(self, actor: Actor, state: str = "running", message: str = "") -> None:
        """Say that the actor is alive, which renews its leases.

        A beat that comes after the actor's own `finish` changes nothing.

        Raises:
            Fenced: this attempt is no longer current.
        """
        if state not in ACTIVE:
            raise ValueError(f"an actor that beats is {' or '.join(ACTIVE)}, not {state}; `finish` ends it")
        values = {"state": state, "message": message, "heartbeat_s": now_s()}
        # One short statement on a row of its own, which needs no other writer to wait: who fences it changes the row.
        beat = update(actors).where(*rows_of(actor, actors), actors.c.state.in_(ACTIVE)).values(**values)
        with self.write(None) as connection:
            if connection.execute(beat).rowcount == 0:
                require_current(connection, actor)

    def finish(self, actor: Actor, state: str, message: str = "") -> None:
        """Say that the actor is done or failed. What it still holds is given out again; the first word counts."""
        if state not in ("done", "failed"):
            raise ValueError(f"an actor ends as done or failed, not {state}")
        with self.write(actor.run_id) as connection:
            if require_current(connection, actor) in ACTIVE:
                values = {"state": state, "message": message, "heartbeat_s": now_s()}
                connection.execute(update(actors).where(*rows_of(actor, actors)).values(**values))
                _release(connection, actor.run_id, actor.role, actor.slot)

    def fence(self, run_id: str, role: str, slot: int) -> None:
        """Declare the current attempt of a slot dead: it can write no more, and what it holds is given out again."""
        with self.write(run_id) as connection:
            _fence_slot(connection, run_id, role, slot)

    def actors(self, run_id: str) -> list[ActorRow]:
        """The newest attempt of every slot, by role and slot."""
        newest = (
            select(actors.c.role, actors.c.slot, func.max(actors.c.attempt).label("attempt"))
            .where(actors.c.run_id == run_id)
            .group_by(actors.c.role, actors.c.slot)
            .subquery()
        )
        silent_s = (now_s() - actors.c.heartbeat_s).label("silent_s")
        query = (
            select(actors, silent_s)
            .join(
                newest,
                and_(
                    actors.c.role == newest.c.role,
                    actors.c.slot == newest.c.slot,
                    actors.c.attempt == newest.c.attempt,
                ),
            )
            .where(actors.c.run_id == run_id)
            .order_by(actors.c.role, actors.c.slot)
        )
        with self.read() as connection:
            return [
                ActorRow(
                    role=row.role,
                    slot=row.slot,
                    attempt=row.attempt,
                    state=row.state,
                    pid=row.pid,
                    machine=row.machine,
                    loaded_version=None if row.loaded_number is None else (row.loaded_lineage, row.loaded_number),
                    silent_s=row.silent_s,
                    message=row.message,
                )
                for row in connection.execute(query)
            ]


def _fence_slot(connection: Connection, run_id: str, role: str, slot: int) -> None:
    connection.execute(
        update(actors)
        .where(actors.c.run_id == run_id, actors.c.role == role, actors.c.slot == slot, actors.c.state.in_(ACTIVE))
        .values(state="fenced")
    )
    _release(connection, run_id, role, slot)


def _release(connection: Connection, run_id: str, role: str, slot: int) -> None:
    """Give out again all that attempts of this slot hold."""
    leases = and_(groups.c.role == role, groups.c.slot == slot, groups.c.state == "leased")
    drop_groups(connection, run_id, leases, LEASE_LOST)
    connection.execute(
        delete(weight_claims).where(
            weight_claims.c.run_id == run_id, weight_claims.c.role == role, weight_claims.c.slot == slot
        )
    )
    connection.execute(
        update(evaluations)
        .where(
            evaluations.c.run_id == run_id,
            evaluations.c.role == role,
            evaluations.c.slot == slot,
            evaluations.c.state == "claimed",
        )
        .values(state="requested")
    )
