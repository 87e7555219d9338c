"""The ledger's record of what happened: evaluations, spans of time, finished steps, progress."""

import json
from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Table, and_, delete, func, insert, or_, select, update

from tasks.exchange.ledger.consumption import last_totals, next_step
from tasks.exchange.ledger.database import Database, now_s
from tasks.exchange.ledger.drops import ENGINE_DIED, GUILTY_FROM, QUARANTINED, SUSPECTED_FROM, given_up
from tasks.exchange.ledger.fence import require_active, require_current, require_supervisor, rows_of, run_of
from tasks.exchange.ledger.rows import (
    Actor,
    Evaluation,
    EvaluationRow,
    Progress,
    QuarantinedPrompt,
    SpanRow,
    StepRow,
    columns_of,
)
from tasks.exchange.ledger.schema import drops, evaluations, groups, is_accused, is_open, prompts, runs, spans, steps
from tasks.exchange.ledger.versions import newest_live_version, usable_version
from tasks.exchange.trajectories import Outcome

_IDS_AT_ONCE = 1000
"""Ids in one statement; SQLite takes 32,766 parameters."""
SPAN_KINDS = ("busy", "wait", "publish", "load")


class Reports(Database):
    """What the actors did, on the database's clock."""

    def request_evaluation(self, supervisor: Actor, purpose: str, version: int) -> None:
        """Ask for version number `version` to be evaluated; the same question again changes nothing.

        Another version for the same purpose replaces the question and its answer.

        Raises:
            Fenced: this supervisor is no longer current.
        """
        run_id = supervisor.run_id
        this = (evaluations.c.run_id == run_id, evaluations.c.purpose == purpose)
        asked = select(evaluations.c.version).where(*this)
        with self.read() as connection:  # a supervisor asks every second until it is answered
            require_supervisor(connection, supervisor)
            if connection.scalar(asked) == version:
                return
        with self.write(run_id) as connection:
            require_supervisor(connection, supervisor)
            if connection.scalar(asked) == version:
                return
            connection.execute(delete(evaluations).where(*this))
            values = {"run_id": run_id, "purpose": purpose, "version": version, "state": "requested"}
            connection.execute(insert(evaluations).values(**values))

    def claim_evaluation(self, actor: Actor, loaded_version: int) -> Evaluation | None:
        """Take on an evaluation of the version that the replica has loaded, or the one it has taken on already.

        Raises:
            Fenced: this attempt is no longer current.
        """
        with self.read() as connection:
            if _evaluation_for(connection, actor, loaded_version) is None:
                return None
        with self.write(actor.run_id) as connection:
            purpose = _evaluation_for(connection, actor, loaded_version)
            if purpose is None:
                return None
            deaths = select(evaluations.c.deaths).where(
                evaluations.c.run_id == actor.run_id, evaluations.c.purpose == purpose
            )
            is_careful = connection.execute(deaths).scalar_one() >= SUSPECTED_FROM
            skipped = given_up(connection, actor.run_id)
            holder = {"role": actor.role, "slot": actor.slot, "attempt": actor.attempt}
            this = (evaluations.c.run_id == actor.run_id, evaluations.c.purpose == purpose)
            connection.execute(update(evaluations).where(*this).values(state="claimed", **holder))
        return Evaluation(purpose, loaded_version, is_careful, skipped)

    def try_question(self, actor: Actor, purpose: str, key: str) -> None:
        """Say which question of a careful evaluation is asked next, alone. Safe to repeat.

        Raises:
            Fenced: this attempt is no longer current.
        """
        with self.write(actor.run_id) as connection:
            require_active(connection, actor)
            own = (*rows_of(actor, evaluations), evaluations.c.purpose == purpose, evaluations.c.state == "claimed")
            connection.execute(update(evaluations).where(*own).values(trying=key))

    def record_evaluation(self, actor: Actor, purpose: str, result_json: str) -> None:
        """Give the result (a JSON object) of an evaluation that this actor took on. Safe to repeat.

        Raises:
            Fenced: this attempt is no longer current.
        """
        with self.write(actor.run_id) as connection:
            require_active(connection, actor)
            connection.execute(
                update(evaluations)
                .where(*rows_of(actor, evaluations), evaluations.c.purpose == purpose, evaluations.c.state == "claimed")
                .values(state="done", result_json=result_json)
            )

    def evaluations(self, run_id: str) -> dict[str, EvaluationRow]:
        """The run's evaluations by purpose."""
        with self.read() as connection:
            rows = connection.execute(select(evaluations).where(evaluations.c.run_id == run_id)).all()
        return {
            row.purpose: EvaluationRow(
                row.purpose, row.version, row.state, None if row.result_json is None else json.loads(row.result_json)
            )
            for row in rows
        }

    def record_span(self, actor: Actor, kind: str, key: str, seconds: float, end_ago_s: float = 0.0) -> None:
        """Say that the actor was busy, waiting, publishing or loading for `seconds` that ended `end_ago_s` ago.

        `key` is the attempt's name for this span, another one for every span of the kind; the first word counts.

        Raises:
            Fenced: this attempt is no longer current.
        """
        if kind not in SPAN_KINDS:
            raise ValueError(f"a span is {', '.join(SPAN_KINDS)}, not {kind}")
        with self.write(actor.run_id) as connection:
            require_current(connection, actor)
            this = (*rows_of(actor, spans), spans.c.kind == kind, spans.c.span_key == key)
            if connection.scalar(select(spans.c.span_id).where(*this)) is None:
                keys = {"run_id": actor.run_id, "role": actor.role, "slot": actor.slot, "attempt": actor.attempt}
                times = {"start_s": now_s() - (end_ago_s + seconds), "end_s": now_s() - end_ago_s}
                connection.execute(insert(spans).values(**keys, kind=kind, span_key=key, **times))

    def spans(self, run_id: str, since_s: float | None = None) -> list[SpanRow]:
        """The spans of all attempts, or those that ended after `since_s`, in the order of their ends."""
        query = select(*columns_of(SpanRow, spans)).where(spans.c.run_id == run_id)
        if since_s is not None:
            query = query.where(spans.c.end_s > since_s)
        with self.read() as connection:
            return [SpanRow(*row) for row in connection.execute(query.order_by(spans.c.end_s, spans.c.span_id))]

    def record_step(self, actor: Actor, step: int, metrics_json: str) -> None:
        """Say that step `step` is over, with its metrics (a JSON object). The first word counts.

        Raises:
            Fenced: this trainer is no longer current.
        """
        with self.write(actor.run_id) as connection:
            require_active(connection, actor)
            run = run_of(connection, actor.run_id)
            this = (steps.c.run_id == run.run_id, steps.c.step == step)
            if connection.scalar(select(steps.c.step).where(*this)) is None:
                values = {"run_id": run.run_id, "step": step, "lineage": run.lineage, "metrics_json": metrics_json}
                connection.execute(insert(steps).values(**values, end_s=now_s()))

    def steps(self, run_id: str, since: int = 0) -> list[StepRow]:
        """The finished steps of the surviving lineage from step `since` on, in order."""
        query = select(steps).where(steps.c.run_id == run_id, steps.c.step >= since).order_by(steps.c.step)
        with self.read() as connection:
            return [StepRow(row.step, row.end_s, json.loads(row.metrics_json)) for row in connection.execute(query)]

    def proven_checkpoints(self, run_id: str, found: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of the (lineage, step) found on storage that a resume may use, the newest last.

        A checkpoint of step s is proven by step s - 1: finished in the checkpoint's lineage, and not taken back since.
        A trainer writes the checkpoint before it reports that step, so the step that has consumed groups last counts as
        finished in the current lineage. What a trainer that was replaced puts on storage afterwards is not proven.
        """
        before = [step - 1 for _, step in found]
        query = select(steps.c.lineage, steps.c.step).where(steps.c.run_id == run_id, steps.c.step.in_(before))
        with self.read() as connection:
            finished = [(row.lineage, row.step) for row in connection.execute(query)]
            last = next_step(connection, run_id) - 1
            if last in before and last not in [step for _, step in finished]:
                finished.append((run_of(connection, run_id).lineage, last))
        proven = {(lineage, step + 1) for lineage, step in finished if step >= 0}
        return sorted(proven & set(found), key=lambda checkpoint: checkpoint[1])

    def disposable_groups(self, run_id: str, found: Collection[int], keep_steps: int, checkpoint_step: int) -> set[int]:
        """Those of the groups `found` whose payload nobody will read again, for `trajectories.delete_payloads`.

        They are dropped, or were consumed before the last `keep_steps` steps and before `checkpoint_step`, the step of
        the oldest checkpoint that a resume may use. `found` are the groups whose payloads are on storage, see
        `trajectories.found_payloads`: what is gone is not asked about again, and what could not be deleted is.
        """
        ids = sorted(found)
        disposable: set[int] = set()
        with self.read() as connection:
            kept_from = min(checkpoint_step, next_step(connection, run_id) - keep_steps)
            condition = or_(groups.c.state == "dropped", groups.c.step < kept_from)
            for start in range(0, len(ids), _IDS_AT_ONCE):
                these = groups.c.group_id.in_(ids[start : start + _IDS_AT_ONCE])
                query = select(groups.c.group_id).where(groups.c.run_id == run_id, these, condition)
                disposable.update(connection.scalars(query))
        return disposable

    def quarantined_prompts(self, run_id: str) -> list[QuarantinedPrompt]:
        """The prompts that are not asked any more, in order; for a report, since it looks at all prompts."""
        query = select(prompts.c.prompt_index, prompts.c.question_key, prompts.c.deaths >= GUILTY_FROM)
        given_up = (prompts.c.run_id == run_id, prompts.c.state == QUARANTINED)
        with self.read() as connection:
            rows = connection.execute(query.where(*given_up).order_by(prompts.c.prompt_index))
            return [QuarantinedPrompt(index, key, bool(ended)) for index, key, ended in rows]

    def progress(self, run_id: str) -> Progress:
        """How far the run is, in one consistent reading of what is open, what is new, and the totals."""
        with self.read() as connection:
            run = run_of(connection, run_id)
            opened = _open_by_state(connection, run_id)
            totals = last_totals(connection, run_id)
            dropped = connection.execute(select(drops).where(drops.c.run_id == run_id).order_by(drops.c.reason)).all()
            finished = connection.scalar(
                select(steps.c.step).where(steps.c.run_id == run_id).order_by(steps.c.step.desc()).limit(1)
            )
            latest = newest_live_version(connection, run_id)
            accused = _count(connection, prompts, prompts.c.run_id == run_id, is_accused)
            is_under_way = and_(evaluations.c.deaths > 0, evaluations.c.state != "done")
            accused += _count(connection, evaluations, evaluations.c.run_id == run_id, is_under_way)
            deadly = len(given_up(connection, run_id))
            died = connection.scalar(select(runs.c.engine_deaths).where(runs.c.run_id == run_id)) or 0
        consumed = 0 if totals is None else run.prompts_per_step * (int(totals.step) + 1)
        states = {"consumed": consumed, "dropped": sum(row.groups for row in dropped)}
        states |= {state: opened[state].groups if state in opened else 0 for state in ("leased", "scored")}
        return Progress(
            step=0 if finished is None else finished + 1,
            steps=run.steps,
            groups=states,
            dropped={row.reason: row.groups for row in dropped},
            outcomes={outcome.value: _answers(outcome, totals, opened.get("scored")) for outcome in Outcome},
            quarantined_prompts=sum(row.quarantined_prompts for row in dropped),
            accused_prompts=accused,
            deadly_prompts=deadly + sum(row.quarantined_prompts for row in dropped if row.reason == ENGINE_DIED),
            engine_deaths=died,
            response_tokens=totals.response_tokens if totals else 0,
            consumed=consumed,
            max_staleness_seen=totals.max_staleness if totals else 0,
            latest_version=latest,
            reward_mean=totals.reward_mean if totals else None,
        )


def _evaluation_for(connection: Connection, actor: Actor, loaded_version: int) -> str | None:
    """The purpose of the evaluation that this replica, which must be current, may take on or has taken on."""
    require_active(connection, actor)
    if usable_version(connection, actor, loaded_version) != loaded_version:
        return None
    is_own = and_(*rows_of(actor, evaluations), evaluations.c.state == "claimed")
    of_version = (evaluations.c.run_id == actor.run_id, evaluations.c.version == loaded_version)
    query = select(evaluations.c.purpose).where(*of_version, or_(evaluations.c.state == "requested", is_own))
    return connection.scalar(query.order_by(evaluations.c.purpose).limit(1))


def _open_by_state(connection: Connection, run_id: str) -> dict[str, Row[Any]]:
    """Number of open groups, and the sums of their answers by outcome, for each state there is."""
    sums = [func.sum(groups.c[f"{outcome}_answers"]).label(f"{outcome}_answers") for outcome in Outcome]
    query = select(groups.c.state, func.count().label("groups"), *sums).where(groups.c.run_id == run_id, is_open)
    return {row.state: row for row in connection.execute(query.group_by(groups.c.state))}


def _count(connection: Connection, table: Table, *which: ColumnElement[bool]) -> int:
    return connection.scalar(select(func.count()).select_from(table).where(*which)) or 0


def _answers(outcome: Outcome, *rows: Row[Any] | None) -> int:
    return sum(int(row._mapping[f"{outcome}_answers"]) for row in rows if row is not None)
