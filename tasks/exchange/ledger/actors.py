"""The ledger's actors: attempts, heartbeats, and what happens to the work of one that is gone.

The supervisor gives attempts out, and a process registers as exactly the one it was started for; the supervisor's own
is made where its run begins or is taken over (`runs`). A lease lives as long as its actor is the current attempt of its
slot, so heartbeats renew leases by being there, and a long generation keeps its lease. Who replaces or fences an actor
gives its prompts out again in the same transaction; and what an actor was leased without ever hearing of it, its beats
do not name.
"""

import json
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, delete, insert, select, update

from tasks.exchange.ledger.database import Database, now_s
from tasks.exchange.ledger.drops import LEASE_LOST, accuse, drop_groups
from tasks.exchange.ledger.fence import (
    ACTIVE,
    OPEN,
    name_of,
    newest_attempt,
    require_active,
    require_current,
    require_supervisor,
    rows_of,
)
from tasks.exchange.ledger.rows import Actor, ActorRow, Beat, Fenced, Process
from tasks.exchange.ledger.schema import actors, evaluations, groups, is_newest, is_open, runs, weight_claims

ROLES = ("trainer", "replica")
"""What a supervisor gives out."""
_WEAKER = {"drain": ("run",), "leave": ("run", "drain")}
"""What each word to an actor takes the place of."""
_UNNAMED_BEATS = 2
"""Beats begun after a lease that do not name it, until it is given out again."""


class Actors(Database):
    """Who works on a run, and whether it still does."""

    def assign(self, supervisor: Actor, role: str, slot: int, after: int, epoch: int, machines: Sequence[str]) -> Actor:
        """Give out the attempt that follows `after` in a slot; the former one is fenced, its work given out again.

        Args:
            supervisor: who decides it.
            role: "trainer" or "replica".
            slot: number among those of the role.
            after: newest attempt of the slot, 0 where there is none. Asking again gives the same attempt.
            epoch: plan epoch that it is to work for.
            machines: where its processes start; the first leads and registers.

        Raises:
            Fenced: this supervisor is no longer current.
            ValueError: `after` is not the newest attempt.
        """
        if role not in ROLES:
            raise ValueError(f"a supervisor gives out {' and '.join(ROLES)}, not {role}")
        run_id = supervisor.run_id
        actor = Actor(run_id, role, slot, after + 1)
        with self.write(run_id) as connection:
            require_supervisor(connection, supervisor)
            newest = newest_attempt(connection, run_id, role, slot)
            found = 0 if newest is None else newest[0]
            if found == actor.attempt and _assigned_by(connection, actor) == supervisor.attempt:
                return actor
            if found != after:
                raise ValueError(f"{name_of(actor)} cannot be given out: attempt {found} is the newest")
            end_slots(connection, run_id, actors.c.role == role, actors.c.slot == slot)
            values = {"assigned_by": supervisor.attempt, "epoch": epoch, "machines": json.dumps(list(machines))}
            add_actor(connection, actor, state="assigned", message="waiting for its process", **values)
        return actor

    def want(self, supervisor: Actor, actor: Actor, wanted: str) -> None:
        """Say what an attempt should do from now on: its beats tell it. Safe to repeat, and the stronger word stands.

        Args:
            supervisor: who decides it.
            actor: an attempt that this supervisor has given out; one that has ended stays as it is.
            wanted: "drain": lease and evaluate nothing new, hand over what is begun, then leave; replicas only.
                "leave": at once.

        Raises:
            Fenced: this supervisor is no longer current.
            ValueError: the attempt is not this supervisor's, or cannot do that.
        """
        if wanted not in _WEAKER or (wanted == "drain" and actor.role != "replica"):
            raise ValueError(f"{name_of(actor)} cannot be told to {wanted}")
        with self.write(supervisor.run_id) as connection:
            require_supervisor(connection, supervisor)
            if _assigned_by(connection, actor) != supervisor.attempt:
                raise ValueError(f"{name_of(actor)} was not given out by attempt {supervisor.attempt}")
            this = (*rows_of(actor, actors), actors.c.state.in_(OPEN), actors.c.wanted.in_(_WEAKER[wanted]))
            connection.execute(update(actors).where(*this).values(wanted=wanted))

    def register(self, actor: Actor, process: Process) -> None:
        """Begin as an attempt that was given out; once per process, which may repeat it.

        Raises:
            Fenced: the attempt is no longer current, has ended, or is another process's.
        """
        with self.write(actor.run_id) as connection:
            state = require_current(connection, actor)
            this = rows_of(actor, actors)
            if state == "assigned":
                who = {"process_key": process.key, "pid": process.pid, "machine": process.machine}
                values = {"state": "starting", "message": "", "serial": 1, "heartbeat_s": now_s(), **who}
                connection.execute(update(actors).where(*this).values(**values))
                return
            require_active(connection, actor)
            if connection.scalar(select(actors.c.process_key).where(*this)) != process.key:
                raise Fenced(f"{name_of(actor)} is another process already")

    def heartbeat(
        self,
        actor: Actor,
        state: str = "running",
        message: str = "",
        work: int = 0,
        *,
        may_rest_s: float | None = None,
        named: Collection[int] | None = None,
        number: int | None = None,
    ) -> Beat:
        """Say that the actor is alive, which renews its leases, and hear what it should do.

        One update of the actor's own row, without waiting for the run's other writers. A beat that comes after the
        actor's own `finish` changes nothing.

        Args:
            actor: who beats.
            state: "starting" or "running".
            message: what it does, or waits for.
            work: work done since it registered.
            may_rest_s: seconds for which `work` may stand still in what it does now; None: it has nothing in hand.
            named: the groups that it works on. What two beats begun after its lease do not name is given out again:
                the answer to the lease was lost. None: it leases none.
            number: which beat of its process this is, the first after its registration being 2; a later one is begun
                when those before it are over. The same one repeated changes nothing. None: the next.

        Raises:
            Fenced: this attempt is no longer current.
        """
        if state not in ACTIVE:
            raise ValueError(f"an actor that beats is {' or '.join(ACTIVE)}, not {state}; `finish` ends it")
        serial = actors.c.serial + 1 if number is None else number
        values = {"state": state, "message": message, "work": work, "may_rest_s": may_rest_s, "serial": serial}
        own = (*rows_of(actor, actors), actors.c.state.in_(ACTIVE), actors.c.serial < serial)
        with self.write(None) as connection:  # who fences it changes this row, so nobody else needs to wait
            beaten = connection.execute(update(actors).where(*own).values(**values, heartbeat_s=now_s())).rowcount
        with self.read() as connection:
            if not beaten and require_current(connection, actor) == "assigned":
                raise Fenced(f"{name_of(actor)} has not registered")
            answer = _answer(connection, actor)
            unnamed = _leased_to(connection, actor).difference(named) if beaten and named is not None else set()
        if unnamed:
            self._count_unnamed(actor, unnamed)
        return answer

    def _count_unnamed(self, actor: Actor, unnamed: Collection[int]) -> None:
        """Note that a beat has not named these leases, and give out again what enough beats have not named.

        The first beat that finds a lease may have been begun before it, each later one was begun after. An attempt that
        has ended meanwhile, which is no fault of its beat, holds none any more.
        """
        with self.write(actor.run_id) as connection:
            these = and_(*rows_of(actor, groups), groups.c.state == "leased", groups.c.group_id.in_(unnamed))
            more = {"unnamed_beats": groups.c.unnamed_beats + 1}
            connection.execute(update(groups).where(these).values(**more))
            drop_groups(connection, actor.run_id, and_(these, groups.c.unnamed_beats > _UNNAMED_BEATS), LEASE_LOST)

    def confirm(self, actor: Actor) -> None:
        """Look whether the actor may still write, without a beat.

        Raises:
            Fenced: this attempt is no longer current, or has ended.
        """
        with self.read() as connection:
            require_active(connection, actor)

    def is_wanted(self, actor: Actor) -> bool:
        """Whether the attempt may be begun, or is under way: it was given out, and nobody has ended it since."""
        with self.read() as connection:
            return connection.scalar(select(actors.c.state).where(*rows_of(actor, actors))) in OPEN

    def finish(self, actor: Actor, state: str, message: str = "") -> None:
        """Say how the actor has ended. What it still holds is given out again; the first word counts.

        Args:
            actor: who has ended.
            state: "done"; "failed"; or "died", which is for whoever has seen that the process, or that of its engine,
                ended without a word and that nobody from outside ended it. All that it was answering is accused, except
                beside an evaluation, which may be at fault as well; what was starting still has failed.
            message: why, for people.

        Raises:
            Fenced: this attempt is no longer current.
        """
        if state not in ("done", "failed", "died"):
            raise ValueError(f"an actor ends as done, failed or died, not {state}")
        with self.write(actor.run_id) as connection:
            if (before := require_current(connection, actor)) in ACTIVE:
                if state == "died" and not accuse(connection, actor) and before == "starting":
                    state = "failed"  # it never worked, which is no question's fault
                values = {"state": state, "message": message, "heartbeat_s": now_s()}
                connection.execute(update(actors).where(*rows_of(actor, actors)).values(**values))
                if state == "died":
                    one_more = {"engine_deaths": runs.c.engine_deaths + 1}
                    connection.execute(update(runs).where(runs.c.run_id == actor.run_id).values(one_more))
                end_slots(connection, actor.run_id, actors.c.role == actor.role, actors.c.slot == actor.slot)

    def fence(
        self,
        supervisor: Actor,
        actor: Actor,
        *,
        reason: str = "",
        seen_serial: int | None = None,
        seen_work: int | None = None,
    ) -> ActorRow | None:
        """Declare an attempt dead: it can write no more, and what it holds is given out again. Safe to repeat.

        Args:
            supervisor: who decides it.
            actor: an attempt that this supervisor has given out.
            reason: what is said of it from now on; empty: what it said last.
            seen_serial: serial number of the beat that it was silent since; None: it is to end, beat or not.
            seen_work: count of work that stood still while it had work in hand; None: it is to end, work or not.

        Returns:
            The attempt as it was left, whose process may be killed now; None if it has beaten or got on since.

        Raises:
            Fenced: this supervisor is no longer current.
            ValueError: the attempt is not this supervisor's.
        """
        this = rows_of(actor, actors)
        with self.write(supervisor.run_id) as connection:
            require_supervisor(connection, supervisor)
            if _assigned_by(connection, actor) != supervisor.attempt:
                raise ValueError(f"{name_of(actor)} was not given out by attempt {supervisor.attempt}")
            still = [] if seen_serial is None else [actors.c.serial == seen_serial]
            still += [] if seen_work is None else [actors.c.work == seen_work, actors.c.may_rest_s.is_not(None)]
            values = {"state": "fenced", **({"message": reason} if reason else {})}
            if connection.execute(
                update(actors).where(*this, actors.c.state.in_(OPEN), *still).values(values)
            ).rowcount:
                end_slots(connection, actor.run_id, actors.c.role == actor.role, actors.c.slot == actor.slot)
            row = _row(connection.execute(_with_silence().where(*this)).one())
        return None if row.state in OPEN else row

    def actors(self, run_id: str) -> list[ActorRow]:
        """The newest attempt of every slot, by role and slot."""
        query = _with_silence().where(actors.c.run_id == run_id, is_newest).order_by(actors.c.role, actors.c.slot)
        with self.read() as connection:
            return [_row(row) for row in connection.execute(query)]


def add_actor(connection: Connection, actor: Actor, **values: object) -> None:
    """Write an attempt down, the newest of its slot; `values` are the columns that its state needs."""
    slot = (actors.c.run_id == actor.run_id, actors.c.role == actor.role, actors.c.slot == actor.slot)
    connection.execute(update(actors).where(*slot, is_newest).values(is_newest=False))
    keys = {"run_id": actor.run_id, "role": actor.role, "slot": actor.slot, "attempt": actor.attempt}
    defaults = {"message": "", "machines": "[]", "wanted": "run", "serial": 0, "work": 0, "heartbeat_s": now_s()}
    defaults["is_newest"] = True
    connection.execute(insert(actors).values(**(defaults | keys | values)))


def end_slots(connection: Connection, run_id: str, *which: ColumnElement[bool]) -> None:
    """Fence the attempts under way of some slots, and give out again all that attempts of these slots hold.

    Args:
        connection: a writing transaction.
        run_id: the run.
        which: conditions on role and slot; none: all slots of the run.
    """
    of_slots = (actors.c.run_id == run_id, is_newest, *which)  # others have ended
    connection.execute(update(actors).where(*of_slots, actors.c.state.in_(OPEN)).values(state="fenced"))
    slots = connection.execute(select(actors.c.role, actors.c.slot).where(*of_slots))
    for role, slot in slots.all():
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


def _leased_to(connection: Connection, actor: Actor) -> set[int]:
    """The groups that are leased to this attempt: as many as it may have in flight."""
    leased = (*rows_of(actor, groups), is_open, groups.c.state == "leased")
    return set(connection.scalars(select(groups.c.group_id).where(*leased)))


def _assigned_by(connection: Connection, actor: Actor) -> int | None:
    return connection.scalar(select(actors.c.assigned_by).where(*rows_of(actor, actors)))


def _answer(connection: Connection, actor: Actor) -> Beat:
    """What the ledger wants of an actor that has just beaten."""
    is_running = connection.scalar(select(runs.c.state).where(runs.c.run_id == actor.run_id)) == "running"
    wanted = str(connection.scalar(select(actors.c.wanted).where(*rows_of(actor, actors))))
    if not is_running:
        wanted = "run" if actor.role == "supervisor" else "leave"  # who supervises ends the run that is over
    attempt, serial = connection.execute(
        select(actors.c.attempt, actors.c.serial)
        .where(actors.c.run_id == actor.run_id, actors.c.role == "supervisor")
        .order_by(actors.c.attempt.desc())
        .limit(1)
    ).one()
    return Beat(wanted, (attempt, serial))


def _with_silence() -> Select[Any]:
    return select(actors, (now_s() - actors.c.heartbeat_s).label("silent_s"))


def _row(row: Row[Any]) -> ActorRow:
    return ActorRow(
        role=row.role,
        slot=row.slot,
        attempt=row.attempt,
        state=row.state,
        pid=row.pid,
        machine=row.machine,
        loaded_version=None if row.loaded_number is None else (row.loaded_lineage, row.loaded_number),
        silent_s=row.silent_s,
        message=row.message,
        serial=row.serial,
        work=row.work,
        may_rest_s=row.may_rest_s,
        process_key=row.process_key,
        machines=tuple(json.loads(row.machines)),
        epoch=row.epoch,
        assigned_by=row.assigned_by,
        wanted=row.wanted,
    )
