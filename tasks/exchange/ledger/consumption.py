"""Which groups a training step consumes: chosen once by the rule of `planners.staleness`, with the totals up to it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, func, insert, select, update

from planners.staleness import choose_groups
from tasks.exchange.ledger.drops import STALE, drop_groups
from tasks.exchange.ledger.fence import require_active, run_of
from tasks.exchange.ledger.rows import Actor, GroupRow, RunRow, columns_of
from tasks.exchange.ledger.schema import consumed_steps, groups, is_open
from tasks.exchange.trajectories import Outcome


@dataclass(frozen=True, slots=True)
class _Open:
    """An open group as the rule of consumption sees it."""

    group_id: int
    state: str
    version: int


def next_step(connection: Connection, run_id: str) -> int:
    """The step after the last one that consumed groups."""
    last = last_totals(connection, run_id)
    return 0 if last is None else int(last.step) + 1


def last_totals(connection: Connection, run_id: str) -> Row[Any] | None:
    """The row of `consumed_steps` of the last step that consumed groups, with the totals up to it."""
    query = select(consumed_steps).where(consumed_steps.c.run_id == run_id)
    return connection.execute(query.order_by(consumed_steps.c.step.desc()).limit(1)).one_or_none()


def decided(connection: Connection, actor: Actor, step: int) -> list[GroupRow]:
    """The groups that `step` has consumed; none if it is the next one.

    Raises:
        Fenced: this trainer is no longer current.
        ValueError: it is neither.
    """
    require_active(connection, actor)
    rows = _consumed_by(connection, actor.run_id, step)
    expected = next_step(connection, actor.run_id)
    if not rows and step != expected:
        raise ValueError(f"step {step} of run {actor.run_id} asks for groups, but the next step is {expected}")
    return rows


def decide(connection: Connection, run_id: str, step: int) -> list[GroupRow] | None:
    """Drop what is stale, and let `step` consume its groups; None if it has to wait."""
    run, waiting = run_of(connection, run_id), _open_groups(connection, run_id)
    if stale := _stale(waiting, run, step):
        drop_groups(connection, run_id, groups.c.version + run.max_staleness < step, STALE)
    chosen = _choice([group for group in waiting if group not in stale], run, step)
    if chosen is None:
        return None
    consume = update(groups).where(groups.c.run_id == run_id, groups.c.group_id == bindparam("chosen_id"))
    places = [{"chosen_id": group_id, "chosen_place": place} for place, group_id in enumerate(chosen)]
    values = {"state": "consumed", "step": step, "place": bindparam("chosen_place")}
    connection.execute(consume.values(**values), places)
    _record_totals(connection, run_id, step)
    return _consumed_by(connection, run_id, step)


def take_back(connection: Connection, run_id: str, step: int) -> None:
    """Let the groups that `step` and later ones have consumed wait to be consumed again."""
    consumed = (groups.c.run_id == run_id, groups.c.step >= step)
    connection.execute(update(groups).where(*consumed).values(state="scored", step=None, place=None))
    connection.execute(delete(consumed_steps).where(consumed_steps.c.run_id == run_id, consumed_steps.c.step >= step))


def has_nothing_to_decide(connection: Connection, run_id: str, step: int) -> bool:
    """Whether `decide` would change nothing now."""
    run, waiting = run_of(connection, run_id), _open_groups(connection, run_id)
    return not _stale(waiting, run, step) and _choice(waiting, run, step) is None


def _open_groups(connection: Connection, run_id: str) -> list[_Open]:
    columns = (groups.c.group_id, groups.c.state, groups.c.version)
    return [_Open(*row) for row in connection.execute(select(*columns).where(groups.c.run_id == run_id, is_open))]


def _stale(opened: Sequence[_Open], run: RunRow, step: int) -> list[_Open]:
    return [group for group in opened if group.version + run.max_staleness < step]


def _choice(opened: Sequence[_Open], run: RunRow, step: int) -> list[int] | None:
    """The open groups that `step` consumes, in order, or None if it has to wait."""
    return choose_groups(
        finished=[(group.group_id, group.version + run.max_staleness) for group in opened if group.state == "scored"],
        unfinished_deadlines=[group.version + run.max_staleness for group in opened if group.state == "leased"],
        step=step,
        prompts_per_step=run.prompts_per_step,
    )


def _record_totals(connection: Connection, run_id: str, step: int) -> None:
    """Write down what the run has consumed up to and with `step`, whose groups have just got their places."""
    added = ("response_tokens", *(f"{outcome}_answers" for outcome in Outcome))
    of_step = connection.execute(
        select(
            func.avg(groups.c.reward_mean).label("reward_mean"),
            func.max(groups.c.step - groups.c.version).label("max_staleness"),
            *[func.sum(groups.c[name]).label(name) for name in added],
        ).where(groups.c.run_id == run_id, groups.c.step == step)
    ).one()
    before = last_totals(connection, run_id)
    totals = {name: int(of_step._mapping[name]) + (before._mapping[name] if before else 0) for name in added}
    staleness = max(of_step.max_staleness, before.max_staleness if before else 0)
    facts = {"reward_mean": of_step.reward_mean, "max_staleness": staleness, **totals}
    connection.execute(insert(consumed_steps).values(run_id=run_id, step=step, **facts))


def _consumed_by(connection: Connection, run_id: str, step: int) -> list[GroupRow]:
    query = select(*columns_of(GroupRow, groups)).where(groups.c.run_id == run_id, groups.c.step == step)
    return [GroupRow(*row) for row in connection.execute(query.order_by(groups.c.place))]
