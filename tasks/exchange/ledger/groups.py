"""The ledger's groups: leased → scored → consumed | dropped(reason).

A group is generated and scored within one replica, which hands it over whole, so "generated" is never seen by another
process and is no state here. The rules of admission and consumption are `planners.staleness`; this module counts and
records within the transaction that asks them. A dropped group's prompt goes back to waiting and is leased again before
any new prompt.
"""

from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, case, delete, exists, func, insert, not_, or_, select, update

from planners.errors import UserError
from planners.staleness import choose_groups, may_lease
from tasks.exchange.ledger.database import Database, now_s
from tasks.exchange.ledger.fence import ACTIVE, require_active, rows_of, run_of
from tasks.exchange.ledger.rows import Actor, GroupRow, Lease, RunRow, columns_of
from tasks.exchange.ledger.schema import (
    actors,
    evaluations,
    groups,
    policy_versions,
    prompts,
    runs,
    steps,
    weight_claims,
)
from tasks.exchange.ledger.versions import newest_possible_version, usable_version
from tasks.exchange.trajectories import Outcome

ABANDONED = "abandoned"
ABORTED = "aborted"
LEASE_LOST = "lease_lost"
STALE = "stale"
QUARANTINED = "quarantined"
NOT_THE_PROMPTS_FAULT = frozenset({ABANDONED, ABORTED, LEASE_LOST, STALE})
"""Reasons that do not count towards a prompt's quarantine: long answers are lost more often, and must not be biased."""


class Groups(Database):
    """The groups of a run, from lease to consumption."""

    def lease_group(self, actor: Actor, loaded_version: int) -> Lease | None:
        """Lease the next prompt to a replica: dropped prompts first, then a new one; quarantined ones never.

        Args:
            actor: the replica.
            loaded_version: number of the policy version its engine has loaded.

        Returns:
            None while the gate is shut, all groups of the run are out, the run is not running, or the replica still has
            a policy that a resume abandoned. Ask again later.

        Raises:
            Fenced: this attempt is no longer current.
        """
        with self.write(actor.run_id) as connection:
            require_active(connection, actor)
            run = run_of(connection, actor.run_id)
            version = usable_version(connection, actor, loaded_version)
            if run.state != "running" or version is None:
                return None
            out = connection.scalar(
                select(func.count())
                .select_from(groups)
                .where(groups.c.run_id == run.run_id, groups.c.state.in_(("leased", "scored", "consumed")))
            )
            groups_out = int(out or 0)
            if groups_out >= run.steps * run.prompts_per_step:
                return None
            if not may_lease(groups_out, version, run.prompts_per_step, run.max_staleness):
                return None
            lease = Lease(_next_group_id(connection, run.run_id), _hold_prompt(connection, run.run_id), version)
            keys = {"run_id": run.run_id, "group_id": lease.group_id, "prompt_index": lease.prompt_index}
            holder = {"role": actor.role, "slot": actor.slot, "attempt": actor.attempt}
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
            False if the group is not to be answered: that question is quarantined, and so is this prompt now, or the
            group was dropped meanwhile.

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
                connection.execute(update(prompts).where(this).values(state=QUARANTINED))
        return bad is None

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
            if _state_for(connection, actor, group_id) != "leased":
                return _state_for(connection, actor, group_id) != "dropped"
            possible = newest_possible_version(connection, actor)
            newest = possible if newest_version is None else newest_version
            if not 0 <= oldest_version <= newest <= possible:
                raise ValueError(f"group {group_id} claims versions {oldest_version} to {newest}, not up to {possible}")
            facts: dict[str, Any] = {"version": oldest_version, "newest_version": newest, "reward_mean": reward_mean}
            facts |= {"response_tokens": response_tokens, "completed_s": now_s(), **answers}
            connection.execute(update(groups).where(*_is(actor.run_id, group_id)).values(state="scored", **facts))
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
        with self.write(actor.run_id) as connection:
            require_active(connection, actor)
            run = run_of(connection, actor.run_id)
            if decided := _consumed_by(connection, run.run_id, step):
                return decided
            expected = next_step(connection, run.run_id)
            if step != expected:
                raise ValueError(f"step {step} of run {run.run_id} asks for groups, but the next step is {expected}")
            unconsumed = groups.c.state.in_(("leased", "scored"))
            drop_groups(connection, run.run_id, unconsumed & (groups.c.version + run.max_staleness < step), STALE)
            rows = connection.execute(
                select(groups.c.group_id, groups.c.state, groups.c.version + run.max_staleness).where(
                    groups.c.run_id == run.run_id, unconsumed
                )
            ).all()
            chosen = choose_groups(
                finished=[(group_id, deadline) for group_id, state, deadline in rows if state == "scored"],
                unfinished_deadlines=[deadline for _, state, deadline in rows if state == "leased"],
                step=step,
                prompts_per_step=run.prompts_per_step,
            )
            if chosen is None:
                return None
            for place, group_id in enumerate(chosen):
                consumed = {"state": "consumed", "step": step, "place": place}
                connection.execute(update(groups).where(*_is(run.run_id, group_id)).values(**consumed))
            return _consumed_by(connection, run.run_id, step)

    def resume_from(self, run_id: str, step: int, actor: Actor | None = None) -> int:
        """Go back to the checkpoint of `step`, the next step to train, in a new lineage; one transaction.

        The trainer of the old lineage is fenced; versions above `step` are abandoned; groups consumed at `step` or
        later go back to scored; groups that have, or while leased may have, a token of an abandoned version are dropped
        and leased again. The trainer then publishes version `step` in the new lineage, for the files of the old one may
        be gone. A trainer that died between its checkpoint and `record_step` left its last step unrecorded: the step
        gets its row here, without metrics.

        Args:
            run_id: the run.
            step: steps behind the checkpoint.
            actor: the supervisor or trainer that decides it, whose fence is checked; None for a person. A trainer that
                decides it goes on in the new lineage.

        Returns:
            The new lineage.

        Raises:
            Fenced: this actor is no longer current.
            UserError: the ledger has not seen the steps before `step`.
        """
        with self.write(run_id) as connection:
            run = run_of(connection, run_id)
            if actor is not None:
                require_active(connection, actor)
            expected = next_step(connection, run_id)
            if not 0 <= step <= expected:
                raise UserError(
                    f"The checkpoint is of step {step}, but the ledger of run {run_id} knows {expected} steps: they do "
                    "not belong together. Resume from a checkpoint of this ledger."
                )
            connection.execute(update(runs).where(runs.c.run_id == run_id).values(lineage=run.lineage + 1))
            _fence_trainers(connection, run_id, keep=actor)
            connection.execute(
                update(policy_versions)
                .where(policy_versions.c.run_id == run_id, policy_versions.c.number > step)
                .values(state="abandoned")
            )
            connection.execute(
                update(groups)
                .where(groups.c.run_id == run_id, groups.c.step >= step)
                .values(state="scored", step=None, place=None)
            )
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

    def disposable_groups(self, run_id: str, keep_steps: int, checkpoint_step: int) -> set[int]:
        """Groups whose payload nobody will read again, for `trajectories.delete_payloads`.

        They are dropped, or were consumed before the last `keep_steps` steps and before `checkpoint_step`, the step of
        the oldest checkpoint that a resume may use.
        """
        with self.read() as connection:
            kept_from = min(checkpoint_step, next_step(connection, run_id) - keep_steps)
            disposable = or_(groups.c.state == "dropped", groups.c.step < kept_from)
            return set(connection.scalars(select(groups.c.group_id).where(groups.c.run_id == run_id, disposable)))


def next_step(connection: Connection, run_id: str) -> int:
    """The step after the last one that consumed groups."""
    last = connection.scalar(select(func.max(groups.c.step)).where(groups.c.run_id == run_id))
    return 0 if last is None else last + 1


def drop_groups(connection: Connection, run_id: str, condition: ColumnElement[bool], reason: str) -> None:
    """Drop all groups of the run that meet `condition`, and let their prompts wait or go into quarantine."""
    doomed = and_(groups.c.run_id == run_id, groups.c.state != "dropped", condition)
    failed = prompts.c.failed_attempts + (0 if reason in NOT_THE_PROMPTS_FAULT else 1)
    limit = select(runs.c.max_attempts_per_prompt).where(runs.c.run_id == run_id).scalar_subquery()
    connection.execute(
        update(prompts)
        .where(prompts.c.run_id == run_id, prompts.c.prompt_index.in_(select(groups.c.prompt_index).where(doomed)))
        .values(failed_attempts=failed, state=case((failed >= limit, "quarantined"), else_="waiting"))
    )
    dropped = {"state": "dropped", "drop_reason": reason, "step": None, "place": None}
    connection.execute(update(groups).where(doomed).values(**dropped))


def _fence_trainers(connection: Connection, run_id: str, keep: Actor | None) -> None:
    """A trainer that only looked dead must not write its weights into the new lineage when it wakes up."""
    trainers = and_(actors.c.run_id == run_id, actors.c.role == "trainer", actors.c.state.in_(ACTIVE))
    if keep is not None:
        trainers = and_(trainers, not_(and_(*rows_of(keep, actors))))
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


def _hold_prompt(connection: Connection, run_id: str) -> int:
    waiting = connection.scalar(
        select(func.min(prompts.c.prompt_index)).where(prompts.c.run_id == run_id, prompts.c.state == "waiting")
    )
    if waiting is not None:
        this = and_(prompts.c.run_id == run_id, prompts.c.prompt_index == waiting)
        connection.execute(update(prompts).where(this).values(state="held"))
        return int(waiting)
    last = connection.scalar(select(func.max(prompts.c.prompt_index)).where(prompts.c.run_id == run_id))
    new = 0 if last is None else int(last) + 1
    connection.execute(insert(prompts).values(run_id=run_id, prompt_index=new, state="held", failed_attempts=0))
    return new


def _next_group_id(connection: Connection, run_id: str) -> int:
    last = connection.scalar(select(func.max(groups.c.group_id)).where(groups.c.run_id == run_id))
    return 1 if last is None else int(last) + 1


def _state_for(connection: Connection, actor: Actor, group_id: int) -> str:
    state = connection.scalar(select(groups.c.state).where(*rows_of(actor, groups), groups.c.group_id == group_id))
    if state is None:
        raise ValueError(f"group {group_id} of run {actor.run_id} was never leased to {actor.role} {actor.slot}")
    return state


def _consumed_by(connection: Connection, run_id: str, step: int) -> list[GroupRow]:
    query = select(*columns_of(GroupRow, groups)).where(groups.c.run_id == run_id, groups.c.step == step)
    return [GroupRow(*row) for row in connection.execute(query.order_by(groups.c.place))]


def _is(run_id: str, group_id: int) -> list[ColumnElement[bool]]:
    return [groups.c.run_id == run_id, groups.c.group_id == group_id]
