"""What becomes of a group that is given up, and of its prompt: it waits, is tried alone, or is asked never again.

A question may end the engine that answers it, and so every engine after it. Nobody is blamed for the first deaths: with
each, all prompts count one that were being answered, and one that is answered counts none again. Who counts
`SUSPECTED_FROM` is a suspect, and so is its question at every index: suspects are leased before all others, and each
only by itself to a replica that holds nothing else. So a suspect's further deaths are its own, and with `GUILTY_FROM`
it goes into quarantine. The questions of an evaluation are asked one by one once two engines have died in it, and given
up as prompts are. Only deaths that somebody saw on a living machine count, see `Actors.finish`: who is fenced,
killed, cancelled or lost with a machine leaves no word, and leases that were lost so blame nobody.
"""

from sqlalchemy import ColumnElement, Connection, and_, case, insert, or_, select, true, update

from tasks.exchange.ledger.fence import rows_of
from tasks.exchange.ledger.rows import Actor
from tasks.exchange.ledger.schema import (
    deadly_questions,
    drops,
    evaluations,
    groups,
    is_accused,
    is_open,
    is_waiting,
    prompts,
    runs,
)

ABANDONED = "abandoned"
ABORTED = "aborted"
DAMAGED = "damaged"
ENGINE_DIED = "engine_died"
LEASE_LOST = "lease_lost"
QUARANTINED = "quarantined"
STALE = "stale"
SUSPECTED = "suspected"
TOO_FEW_SCORED = "too_few_scored"
NOT_THE_PROMPTS_FAULT = frozenset({ABANDONED, ABORTED, DAMAGED, ENGINE_DIED, LEASE_LOST, STALE, SUSPECTED})
"""Reasons that are no failed attempts of a prompt: long answers are lost more often, and must not be biased."""
SUSPECTED_FROM = 2
"""Deaths of engines, without an answer since, after which a prompt is tried alone."""
GUILTY_FROM = SUSPECTED_FROM + 2
"""Deaths after which it is in quarantine: from `SUSPECTED_FROM` on it was alone."""
_is_suspect = and_(is_accused, prompts.c.deaths >= SUSPECTED_FROM)


def drop_groups(connection: Connection, run_id: str, condition: ColumnElement[bool], reason: str) -> int:
    """Drop all open groups of the run that meet `condition`, and let their prompts wait or go into quarantine.

    They go there after too many failed attempts, because their question is there, or for what it did to engines.

    Returns:
        How many groups were dropped.
    """
    doomed = and_(groups.c.run_id == run_id, is_open, condition)
    failed = prompts.c.failed_attempts + (0 if reason in NOT_THE_PROMPTS_FAULT else 1)
    deaths = prompts.c.deaths + (1 if reason == ENGINE_DIED else 0)
    limit = select(runs.c.max_attempts_per_prompt).where(runs.c.run_id == run_id).scalar_subquery()
    is_given_up = true() if reason == QUARANTINED else or_(failed >= limit, deaths >= GUILTY_FROM)
    next_states = connection.scalars(
        update(prompts)
        .where(prompts.c.run_id == run_id, prompts.c.prompt_index.in_(select(groups.c.prompt_index).where(doomed)))
        .values(failed_attempts=failed, deaths=deaths, state=case((is_given_up, QUARANTINED), else_="waiting"))
        .returning(prompts.c.state)
    ).all()
    if not next_states:
        return 0
    connection.execute(update(groups).where(doomed).values(state="dropped", drop_reason=reason))
    counted = {"groups": len(next_states), "quarantined_prompts": next_states.count(QUARANTINED)}
    this = (drops.c.run_id == run_id, drops.c.reason == reason)
    more = {name: drops.c[name] + count for name, count in counted.items()}
    if connection.execute(update(drops).where(*this).values(**more)).rowcount == 0:
        connection.execute(insert(drops).values(run_id=run_id, reason=reason, **counted))
    return len(next_states)


def accuse(connection: Connection, actor: Actor) -> bool:
    """Count an engine's death for all that its replica had in hand, and drop that; False where it had nothing."""
    leases = and_(*rows_of(actor, groups), groups.c.state == "leased")
    return _accuse_evaluation(connection, actor) or drop_groups(connection, actor.run_id, leases, ENGINE_DIED) > 0


def acquit(connection: Connection, run_id: str, group_id: int) -> None:
    """The group's prompt was answered: it ended no engine."""
    this = (prompts.c.run_id == run_id, prompts.c.prompt_index == _prompt_of(run_id, group_id))
    connection.execute(update(prompts).where(*this, prompts.c.deaths > 0).values(deaths=0))


def waiting_suspect(connection: Connection, run_id: str) -> int | None:
    """The first suspect that waits to be tried alone."""
    of_run = (prompts.c.run_id == run_id, _is_suspect, is_waiting)
    return connection.scalar(select(prompts.c.prompt_index).where(*of_run).order_by(prompts.c.prompt_index).limit(1))


def may_hold_another(connection: Connection, actor: Actor) -> bool:
    """Whether a replica may be given one more group: a suspect is alone, and who waits for it takes nothing new."""
    suspects = connection.execute(
        select(prompts.c.prompt_index, prompts.c.state).where(prompts.c.run_id == actor.run_id, _is_suspect)
    ).all()
    if not suspects:
        return True
    leased = select(groups.c.prompt_index).where(*rows_of(actor, groups), is_open, groups.c.state == "leased")
    held = set(connection.scalars(leased))
    if not held:
        return True
    return all(suspect.state != "waiting" and suspect.prompt_index not in held for suspect in suspects)


def becomes_suspect(connection: Connection, run_id: str, group_id: int, key: str) -> bool:
    """Whether the group's question is a suspect at another index while it is none here; from now on it is one here."""
    index = _prompt_of(run_id, group_id)
    this = (prompts.c.run_id == run_id, prompts.c.prompt_index == index)
    others = (prompts.c.run_id == run_id, prompts.c.question_key == key, prompts.c.prompt_index != index, _is_suspect)
    deaths = connection.scalar(select(prompts.c.deaths).where(*others).order_by(prompts.c.deaths.desc()).limit(1))
    if deaths is None:
        return False
    accused = update(prompts).where(*this, prompts.c.deaths < SUSPECTED_FROM).values(deaths=deaths)
    return bool(connection.execute(accused).rowcount)


def _accuse_evaluation(connection: Connection, actor: Actor) -> bool:
    """Count an engine's death for the evaluation that it was busy with, and for the question that it was asked alone.

    Returns:
        False where it was busy with none.
    """
    claimed = (*rows_of(actor, evaluations), evaluations.c.state == "claimed")
    trying = connection.execute(select(evaluations.c.trying).where(*claimed)).first()
    if trying is None:
        return False
    counted = update(evaluations).where(*claimed).values(deaths=evaluations.c.deaths + 1, trying=None)
    connection.execute(counted)
    if trying.trying is not None:
        this = (deadly_questions.c.run_id == actor.run_id, deadly_questions.c.question_key == trying.trying)
        more = update(deadly_questions).where(*this).values(deaths=deadly_questions.c.deaths + 1)
        if connection.execute(more).rowcount == 0:
            row = {"run_id": actor.run_id, "question_key": trying.trying, "deaths": 1}
            connection.execute(insert(deadly_questions).values(**row))
    return True


def given_up(connection: Connection, run_id: str) -> frozenset[str]:
    """Keys of the questions of evaluations that have ended engines alone, and too many."""
    guilty = (deadly_questions.c.run_id == run_id, deadly_questions.c.deaths >= GUILTY_FROM - SUSPECTED_FROM)
    return frozenset(connection.scalars(select(deadly_questions.c.question_key).where(*guilty)))


def _prompt_of(run_id: str, group_id: int) -> ColumnElement[int]:
    this = (groups.c.run_id == run_id, groups.c.group_id == group_id)
    return select(groups.c.prompt_index).where(*this).scalar_subquery()
