"""The ledger's groups: leased → scored → consumed | dropped(reason).

A group is generated and scored within one replica, which hands it over whole, so "generated" is never seen by another
process and is no state here. The rules of admission and consumption are `planners.staleness`; this module counts and
records within the transaction that asks them. A dropped group's prompt goes back to waiting and is leased again before
any new prompt.

Every step consumes B groups, so the groups out are B for each consumed step and those open now, of which the gate lets
there be at most (η + 1)·B: no call reads more the longer the run gets. Who asks again and again reads first, and opens
a writing transaction, which makes others wait, only where it can succeed.
"""

from collections.abc import Collection
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)

from planners.errors import UserError
from planners.staleness import may_lease
from tasks.exchange.ledger.consumption import decide, decided, has_nothing_to_decide, next_step, take_back
from tasks.exchange.ledger.database import OUTAGE_S, Database, now_s
from tasks.exchange.ledger.drops import (
    ABANDONED,
    DAMAGED,
    QUARANTINED,
    SUSPECTED,
    acquit,
    becomes_suspect,
    drop_groups,
    may_hold_another,
    waiting_suspect,
)
from tasks.exchange.ledger.fence import OPEN, require_active, require_supervisor, rows_of, run_of
from tasks.exchange.ledger.rows import Actor, GroupRow, Lease, RunRow, columns_of
from tasks.exchange.ledger.schema import (
    actors,
    consumed_steps,
    evaluations,
    groups,
    is_newest,
    is_open,
    is_waiting,
    policy_versions,
    prompts,
    runs,
    steps,
    survives,
    weight_claims,
)
from tasks.exchange.ledger.versions import newest_possible_version, usable_version
from tasks.exchange.trajectories import Outcome


class Groups(Database):
    """The groups of a run, from lease to consumption."""

    def __init__(self, url: str, patience_s: float = OUTAGE_S) -> None:
        """See `Database`."""
        super().__init__(url, patience_s)
        self._refused: set[Actor] = set()

    def lease_group(self, actor: Actor, loaded_version: int, key: str) -> Lease | None:
        """Lease the next prompt to a replica: a suspect, else a dropped one, else a new one; quarantined ones never.

        Args:
            actor: the replica.
            loaded_version: number of the policy version its engine has loaded.
            key: the replica's name for this lease, another one for every lease it wants. Asking again under the same
                key, after an answer that was lost, gives the same lease for as long as the group is open.

        Returns:
            None while the gate is shut, all groups of the run are out, the run is not running, the replica still has a
            policy that a resume abandoned, is to drain or leave, or is to be alone with a suspect. Ask again later.

        Raises:
            Fenced: this attempt is no longer current.
        """
        if actor in self._refused:  # it polls: no write, which makes others wait, before there is one to have
            with self.read() as connection:
                if _admission(connection, actor, loaded_version) is None:
                    return _lease_under(connection, actor, key)
            self._refused.discard(actor)
        with self.write(actor.run_id) as connection:
            admission = _admission(connection, actor, loaded_version)
            known = _lease_under(connection, actor, key)
            if known is not None:
                return known
            if admission is None:
                self._refused.add(actor)
                return None
            run, version = admission
            lease = Lease(_next_group_id(connection, run.run_id), _hold_prompt(connection, run.run_id), version)
            keys = {"run_id": run.run_id, "group_id": lease.group_id, "prompt_index": lease.prompt_index}
            holder = {"role": actor.role, "slot": actor.slot, "attempt": actor.attempt, "lease_key": key}
            facts = {"lineage": run.lineage, "state": "leased", "version": version, "leased_s": now_s()}
            connection.execute(insert(groups).values(**keys, **holder, **facts))
        return lease

    def name_question(self, actor: Actor, group_id: int, key: str) -> bool:
        """Say which question the prompt of a leased group is, before it is answered. Safe to repeat.

        Args:
            actor: the replica that leased the group.
            group_id: the group.
            key: the question's stable key from its source, the same at every prompt index that asks it.

        Returns:
            False if the group is not to be answered: that question is quarantined, and so is this prompt now; or it is
            a suspect at another index, and so to be tried alone here too; or the group was dropped meanwhile.

        Raises:
            Fenced: this attempt is no longer current.
            ValueError: the group was never leased to this attempt.
        """
        with self.write(actor.run_id) as connection:
            require_active(connection, actor)
            if (state := _state_for(connection, actor, group_id)) != "leased":
                return state != "dropped"
            same = and_(prompts.c.run_id == actor.run_id, prompts.c.question_key == key)
            bad = connection.scalar(select(prompts.c.state).where(same, prompts.c.state == QUARANTINED).limit(1))
            index = select(groups.c.prompt_index).where(*_is(actor.run_id, group_id)).scalar_subquery()
            this = and_(prompts.c.run_id == actor.run_id, prompts.c.prompt_index == index)
            connection.execute(update(prompts).where(this).values(question_key=key))
            if bad is not None:
                drop_groups(connection, actor.run_id, groups.c.group_id == group_id, QUARANTINED)
            elif is_suspect := becomes_suspect(connection, actor.run_id, group_id, key):
                drop_groups(connection, actor.run_id, groups.c.group_id == group_id, SUSPECTED)
        return bad is None and not is_suspect

    def complete_group(
        self,
        actor: Actor,
        group_id: int,
        oldest_version: int,
        reward_mean: float,
        counts: dict[str, int],
        response_tokens: int,
        newest_version: int | None = None,
    ) -> bool:
        """leased → scored, after the payload has its final name. Safe to repeat.

        Args:
            actor: the replica that leased the group.
            group_id: the group.
            oldest_version: version number of the oldest trained token.
            reward_mean: mean reward of the answers that are not masked.
            counts: answers by `Outcome`; outcomes left out are 0.
            response_tokens: tokens in all answers.
            newest_version: version number of the newest token, which decides whether a resume abandons the group; None:
                the newest that the replica has claimed.

        Returns:
            False if the group was dropped meanwhile (stale, or abandoned by a resume): its payload is not used.

        Raises:
            Fenced: this attempt is no longer current.
            ValueError: the versions cannot be true, or the group was never leased to this attempt.
        """
        answers = {f"{outcome}_answers": counts.get(outcome, 0) for outcome in Outcome}
        if unknown := counts.keys() - set(Outcome):
            raise ValueError(f"group {group_id} counts the outcome {unknown.pop()!r}, which does not exist")
        with self.write(actor.run_id) as connection:
            require_active(connection, actor)
            state = _state_for(connection, actor, group_id)
            if state != "leased":
                return state != "dropped"
            possible = newest_possible_version(connection, actor)
            newest = possible if newest_version is None else newest_version
            if not 0 <= oldest_version <= newest <= possible:
                raise ValueError(f"group {group_id} claims versions {oldest_version} to {newest}, not up to {possible}")
            facts: dict[str, Any] = {"version": oldest_version, "newest_version": newest, "reward_mean": reward_mean}
            facts |= {"response_tokens": response_tokens, "completed_s": now_s(), **answers}
            connection.execute(update(groups).where(*_is(actor.run_id, group_id)).values(state="scored", **facts))
            acquit(connection, actor.run_id, group_id)
        return True

    def drop_group(self, actor: Actor, group_id: int, reason: str) -> None:
        """Give up a leased group; its prompt is leased again, or quarantined after too many failed attempts.

        Reasons in `NOT_THE_PROMPTS_FAULT` are no failed attempts. A group that is scored or dropped already stays so.

        Raises:
            Fenced: this attempt is no longer current.
            ValueError: the group was never leased to this attempt.
        """
        with self.write(actor.run_id) as connection:
            require_active(connection, actor)
            if _state_for(connection, actor, group_id) == "leased":
                drop_groups(connection, actor.run_id, groups.c.group_id == group_id, reason)

    def take_groups(self, actor: Actor, step: int) -> list[GroupRow] | None:
        """The groups that training step `step` (0-based) consumes, or None if it has to wait.

        The choice is made once: asking again for a step that was decided gives the same groups in the same order.
        Groups past their deadline, which exist only after a failure, are dropped first.

        Raises:
            Fenced: this trainer is no longer current.
            ValueError: `step` is not the step after the last one consumed.
        """
        with self.read() as connection:
            if rows := decided(connection, actor, step):
                return rows
            if has_nothing_to_decide(connection, actor.run_id, step):
                return None
        with self.write(actor.run_id) as connection:
            return decided(connection, actor, step) or decide(connection, actor.run_id, step)

    def drop_damaged(self, actor: Actor, step: int, damaged: Collection[int]) -> list[GroupRow] | None:
        """Drop groups that `step` has taken and whose payloads cannot be read, and choose the step's groups anew.

        The others of the step are free again, and may be chosen again. Asking again, after an answer that was lost,
        takes nothing back a second time.

        Returns:
            The groups that the step consumes now, or None if it has to wait: see `take_groups`.

        Raises:
            Fenced: this trainer is no longer current.
            ValueError: `step` is neither the last one consumed nor the one after it.
        """
        with self.write(actor.run_id) as connection:
            rows = decided(connection, actor, step)
            if rows and {row.group_id for row in rows}.isdisjoint(damaged):
                return rows
            if rows:
                if next_step(connection, actor.run_id) != step + 1:
                    raise ValueError(f"step {step} of run {actor.run_id} is not the last one that has consumed groups")
                take_back(connection, actor.run_id, step)
                drop_groups(connection, actor.run_id, groups.c.group_id.in_(sorted(damaged)), DAMAGED)
            return decide(connection, actor.run_id, step)

    def resume_from(self, supervisor: Actor, step: int, key: str) -> int:
        """Go back to the checkpoint of `step`, the next step to train, in a new lineage; one transaction.

        The trainer of the old lineage is fenced; versions above `step` are abandoned; groups consumed at `step` or
        later go back to scored; groups that have, or while leased may have, a token of an abandoned version are dropped
        and leased again. The trainer then publishes version `step` in the new lineage, for the files of the old one may
        be gone. A trainer that died between its checkpoint and `record_step` left its last step unrecorded: the step
        gets its row here, without metrics.

        Args:
            supervisor: who decides it.
            step: steps behind the checkpoint.
            key: the supervisor's name for this going back, another one each time. Asking again under the key of the
                last one, after an answer that was lost, changes nothing and gives the same lineage.

        Returns:
            The new lineage.

        Raises:
            Fenced: this supervisor is no longer current.
            UserError: the ledger has not seen the steps before `step`.
        """
        run_id = supervisor.run_id
        name = f"{supervisor.attempt}/{key}"
        with self.write(run_id) as connection:
            require_supervisor(connection, supervisor)
            run = run_of(connection, run_id)
            if connection.scalar(select(runs.c.resumed_by).where(runs.c.run_id == run_id)) == name:
                return run.lineage
            expected = next_step(connection, run_id)
            if not 0 <= step <= expected:
                raise UserError(
                    f"The checkpoint is of step {step}, but the ledger of run {run_id} knows {expected} steps: they do "
                    "not belong together. Resume from a checkpoint of this ledger."
                )
            begun = {"lineage": run.lineage + 1, "resumed_by": name}
            connection.execute(update(runs).where(runs.c.run_id == run_id).values(**begun))
            _fence_trainers(connection, run_id)
            connection.execute(
                update(policy_versions)
                .where(policy_versions.c.run_id == run_id, policy_versions.c.number > step, survives)
                .values(state="abandoned")
            )
            take_back(connection, run_id, step)
            drop_groups(connection, run_id, _may_have_token_above(step), ABANDONED)
            connection.execute(delete(steps).where(steps.c.run_id == run_id, steps.c.step >= step))
            _record_last_step(connection, run, step)
            connection.execute(delete(evaluations).where(evaluations.c.run_id == run_id, evaluations.c.version > step))
        return run.lineage + 1

    def groups(self, run_id: str) -> list[GroupRow]:
        """All groups of the run in the order of their leases."""
        query = select(*columns_of(GroupRow, groups)).where(groups.c.run_id == run_id).order_by(groups.c.group_id)
        with self.read() as connection:
            return [GroupRow(*row) for row in connection.execute(query)]


def run_and_groups_out(connection: Connection, run_id: str) -> tuple[RunRow, int]:
    """The run, and its groups leased, scored or consumed in this lineage: B for every consumed step, and the open ones.

    In one statement, for every lease asks it twice.
    """
    opened = select(func.count()).select_from(groups).where(groups.c.run_id == run_id, is_open).scalar_subquery()
    consumed = select(consumed_steps.c.step + 1).where(consumed_steps.c.run_id == run_id)
    last = consumed.order_by(consumed_steps.c.step.desc()).limit(1).scalar_subquery()
    run_columns = columns_of(RunRow, runs)
    *columns, steps_consumed, groups_open = connection.execute(
        select(*run_columns, func.coalesce(last, 0), opened).where(runs.c.run_id == run_id)
    ).one()
    run = RunRow(*columns)
    return run, run.prompts_per_step * steps_consumed + groups_open


def _fence_trainers(connection: Connection, run_id: str) -> None:
    """A trainer that only looked dead must not write its weights into the new lineage when it wakes up."""
    trainers = and_(actors.c.run_id == run_id, actors.c.role == "trainer", is_newest, actors.c.state.in_(OPEN))
    connection.execute(update(actors).where(trainers).values(state="fenced"))


def _record_last_step(connection: Connection, run: RunRow, step: int) -> None:
    """Give the step before `step`, which a checkpoint proves finished, a row without metrics if it has none."""
    this = (steps.c.run_id == run.run_id, steps.c.step == step - 1)
    if step > 0 and connection.scalar(select(steps.c.step).where(*this)) is None:
        values = {"run_id": run.run_id, "step": step - 1, "lineage": run.lineage, "metrics_json": "{}"}
        connection.execute(insert(steps).values(**values, end_s=now_s()))


def _may_have_token_above(number: int) -> ColumnElement[bool]:
    replica_may = exists().where(
        weight_claims.c.run_id == groups.c.run_id,
        weight_claims.c.role == groups.c.role,
        weight_claims.c.slot == groups.c.slot,
        weight_claims.c.attempt == groups.c.attempt,
        weight_claims.c.number > number,
    )
    return or_(groups.c.newest_version > number, and_(groups.c.state == "leased", replica_may))


def _admission(connection: Connection, actor: Actor, loaded_version: int) -> tuple[RunRow, int] | None:
    """The run, and the version number of a group that this replica, which must be current, begins now; or None."""
    require_active(connection, actor)
    run, out = run_and_groups_out(connection, actor.run_id)
    version = usable_version(connection, actor, loaded_version)
    if run.state != "running" or version is None or out >= run.steps * run.prompts_per_step:
        return None
    if not may_lease(out, version, run.prompts_per_step, run.max_staleness):
        return None
    return (run, version) if may_hold_another(connection, actor) else None


def _lease_under(connection: Connection, actor: Actor, key: str) -> Lease | None:
    """The open lease that this attempt has under `key`."""
    query = select(groups.c.group_id, groups.c.prompt_index, groups.c.version)
    this = (*rows_of(actor, groups), groups.c.lease_key == key, is_open)
    row = connection.execute(query.where(*this)).one_or_none()
    return None if row is None else Lease(*row)


def _hold_prompt(connection: Connection, run_id: str) -> int:
    of_run = prompts.c.run_id == run_id
    waiting = waiting_suspect(connection, run_id)
    if waiting is None:
        first = select(prompts.c.prompt_index).where(of_run, is_waiting).order_by(prompts.c.prompt_index).limit(1)
        waiting = connection.scalar(first)
    if waiting is not None:
        connection.execute(update(prompts).where(of_run, prompts.c.prompt_index == waiting).values(state="held"))
        return int(waiting)
    last = connection.scalar(
        select(prompts.c.prompt_index).where(of_run).order_by(prompts.c.prompt_index.desc()).limit(1)
    )
    new = 0 if last is None else int(last) + 1
    values = {"state": "held", "failed_attempts": 0, "deaths": 0}
    connection.execute(insert(prompts).values(run_id=run_id, prompt_index=new, **values))
    return new


def _next_group_id(connection: Connection, run_id: str) -> int:
    ids = select(groups.c.group_id).where(groups.c.run_id == run_id)
    last = connection.scalar(ids.order_by(groups.c.group_id.desc()).limit(1))
    return 1 if last is None else int(last) + 1


def _state_for(connection: Connection, actor: Actor, group_id: int) -> str:
    state = connection.scalar(select(groups.c.state).where(*rows_of(actor, groups), groups.c.group_id == group_id))
    if state is None:
        raise ValueError(f"group {group_id} of run {actor.run_id} was never leased to {actor.role} {actor.slot}")
    return state


def _is(run_id: str, group_id: int) -> list[ColumnElement[bool]]:
    return [groups.c.run_id == run_id, groups.c.group_id == group_id]
