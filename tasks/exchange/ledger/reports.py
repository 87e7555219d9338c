"""The ledger's record of what happened: evaluations, spans of time, finished steps, progress."""

import json
from collections.abc import Collection

from sqlalchemy import Column, ColumnElement, Connection, delete, func, insert, select, update

from tasks.exchange.ledger.database import Database, now_s
from tasks.exchange.ledger.fence import require_active, require_current, rows_of, run_of
from tasks.exchange.ledger.groups import next_step
from tasks.exchange.ledger.rows import Actor, Evaluation, EvaluationRow, Progress, SpanRow, StepRow, columns_of
from tasks.exchange.ledger.schema import evaluations, groups, prompts, spans, steps
from tasks.exchange.ledger.versions import live_versions, usable_version
from tasks.exchange.trajectories import Outcome

SPAN_KINDS = ("busy", "wait", "publish", "load")


class Reports(Database):
    """What the actors did, on the database's clock."""

    def request_evaluation(self, run_id: str, purpose: str, version: int) -> None:
        """Ask for version number `version` to be evaluated; the same question again changes nothing.

        Another version for the same purpose replaces the question and its answer.
        """
        with self.write(run_id) as connection:
            run_of(connection, run_id)
            this = (evaluations.c.run_id == run_id, evaluations.c.purpose == purpose)
            if connection.scalar(select(evaluations.c.version).where(*this)) == version:
                return
            connection.execute(delete(evaluations).where(*this))
            values = {"run_id": run_id, "purpose": purpose, "version": version, "state": "requested"}
            connection.execute(insert(evaluations).values(**values))

    def claim_evaluation(self, actor: Actor, loaded_version: int) -> Evaluation | None:
        """Take on an evaluation of the version that the replica has loaded, or the one it has taken on already.

        Raises:
            Fenced: this attempt is no longer current.
        """
        with self.write(actor.run_id) as connection:
            require_active(connection, actor)
            if usable_version(connection, actor, loaded_version) != loaded_version:
                return None
            open_questions = connection.execute(
                select(evaluations)
                .where(
                    evaluations.c.run_id == actor.run_id,
                    evaluations.c.version == loaded_version,
                    evaluations.c.state != "done",
                )
                .order_by(evaluations.c.purpose)
            ).all()
            holder = {"role": actor.role, "slot": actor.slot, "attempt": actor.attempt}
            for row in open_questions:
                if row.state == "requested" or all(row._mapping[key] == value for key, value in holder.items()):
                    this = (evaluations.c.run_id == actor.run_id, evaluations.c.purpose == row.purpose)
                    connection.execute(update(evaluations).where(*this).values(state="claimed", **holder))
                    return Evaluation(row.purpose, row.version)
        return None

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

    def record_span(self, actor: Actor, kind: str, seconds: float, end_ago_s: float = 0.0) -> None:
        """Say that the actor was busy, waiting, publishing or loading for `seconds` that ended `end_ago_s` ago.

        Raises:
            Fenced: this attempt is no longer current.
        """
        if kind not in SPAN_KINDS:
            raise ValueError(f"a span is {', '.join(SPAN_KINDS)}, not {kind}")
        with self.write(actor.run_id) as connection:
            require_current(connection, actor)
            keys = {"run_id": actor.run_id, "role": actor.role, "slot": actor.slot, "attempt": actor.attempt}
            times = {"start_s": now_s() - (end_ago_s + seconds), "end_s": now_s() - end_ago_s}
            connection.execute(insert(spans).values(**keys, kind=kind, **times))

    def spans(self, run_id: str) -> list[SpanRow]:
        """All spans of all attempts, in the order of their ends."""
        query = select(*columns_of(SpanRow, spans)).where(spans.c.run_id == run_id)
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

    def steps(self, run_id: str) -> list[StepRow]:
        """The finished steps of the surviving lineage, in order."""
        query = select(steps).where(steps.c.run_id == run_id).order_by(steps.c.step)
        with self.read() as connection:
            return [StepRow(row.step, row.end_s, json.loads(row.metrics_json)) for row in connection.execute(query)]

    def proven_checkpoints(self, run_id: str, found: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of the (lineage, step) found on storage that a resume may use, the newest last.

        A checkpoint of step s is proven by step s - 1: finished in the checkpoint's lineage, and not taken back since.
        A trainer writes the checkpoint before it reports that step, so the step that has consumed groups last counts as
        finished in the current lineage. What a trainer that was replaced puts on storage afterwards is not proven.
        """
        query = select(steps.c.lineage, steps.c.step).where(steps.c.run_id == run_id)
        with self.read() as connection:
            finished = [(row.lineage, row.step) for row in connection.execute(query)]
            last = next_step(connection, run_id) - 1
            if last not in [step for _, step in finished]:
                finished.append((run_of(connection, run_id).lineage, last))
        proven = {(lineage, step + 1) for lineage, step in finished if step >= 0}
        return sorted(proven & set(found), key=lambda checkpoint: checkpoint[1])

    def progress(self, run_id: str) -> Progress:
        """How far the run is, in one consistent reading."""
        of_run = groups.c.run_id == run_id
        consumed = (of_run, groups.c.state == "consumed")
        kept = (of_run, groups.c.state.in_(("scored", "consumed")))
        with self.read() as connection:
            run = run_of(connection, run_id)
            by_state = _counts(connection, groups.c.state, of_run)
            by_reason = _counts(connection, groups.c.drop_reason, of_run, groups.c.state == "dropped")
            totals = connection.execute(
                select(
                    func.max(groups.c.step),
                    func.max(groups.c.step - groups.c.version),
                    func.sum(groups.c.response_tokens),
                ).where(*consumed)
            ).one()
            last_step, staleness, tokens = totals
            answers = connection.execute(
                select(*[func.sum(groups.c[f"{outcome}_answers"]) for outcome in Outcome]).where(*kept)
            ).one()
            reward = connection.scalar(
                select(func.avg(groups.c.reward_mean)).where(*consumed, groups.c.step == last_step)
            )
            finished = connection.scalar(select(func.max(steps.c.step)).where(steps.c.run_id == run_id))
            quarantined = connection.scalar(
                select(func.count())
                .select_from(prompts)
                .where(prompts.c.run_id == run_id, prompts.c.state == "quarantined")
            )
            live = live_versions(connection, run_id)
        states = {"leased": 0, "scored": 0, "consumed": 0, "dropped": 0} | by_state
        return Progress(
            step=0 if finished is None else finished + 1,
            steps=run.steps,
            groups=states,
            dropped=by_reason,
            outcomes={outcome.value: int(count or 0) for outcome, count in zip(Outcome, answers, strict=True)},
            quarantined_prompts=int(quarantined or 0),
            response_tokens=int(tokens or 0),
            consumed=states["consumed"],
            max_staleness_seen=int(staleness or 0),
            latest_version=live[0] if live else None,
            reward_mean=reward,
        )


def _counts(connection: Connection, column: Column[str], *conditions: ColumnElement[bool]) -> dict[str, int]:
    rows = connection.execute(select(column, func.count()).where(*conditions).group_by(column))
    return {row[0]: row[1] for row in rows}
