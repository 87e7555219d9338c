"""A run with a past of any length, and its life: every call that actors, pages and followers repeat.

One list serves the test that counts the rows that each call reads and the benchmark that times them.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from sqlalchemy import CTE, ColumnElement, Connection, String, Table, case, cast, insert, literal, select

from tasks.exchange.ledger import Actor, Lease, Ledger
from tasks.exchange.ledger.database import now_s
from tasks.exchange.ledger.schema import actors, consumed_steps, drops, groups, policy_versions, prompts, spans, steps
from tasks.exchange.trajectories import Outcome
from tests.support.ledger import begin, join

Call = Callable[[str, Callable[[], Any]], Any]
"""Makes a call of the ledger, which has a name, and returns what it returns."""

RUN = "history"
B, ETA, REPLICAS = 10, 2, 2
DROPPED_SHARE = 10
"""One past group in so many was dropped, and its prompt is in quarantine."""
UNIT = B * DROPPED_SHARE
"""A past is a multiple of so many groups."""
_KEPT_STEPS, _KEPT_VERSIONS, _SHOWN_STEPS = 3, 2, 11
_AT_ONCE = 20_000
"""Rows in one statement: a database that is silent for long is taken for lost."""
_ANSWERS: dict[str, int] = {Outcome.SCORED: 8}


class History:
    """A run with `past` groups behind it, consumed step by step or dropped, and its actors."""

    def __init__(self, ledger: Ledger, past: int) -> None:
        if past % UNIT:
            raise ValueError(f"{past} groups of the past are no multiple of {UNIT}")
        self.ledger = ledger
        self.step = past * (DROPPED_SHARE - 1) // DROPPED_SHARE // B
        self.lineage = 0
        self.supervisor = begin(ledger, RUN, (B, ETA, 10**9), flow_run_id="flow")
        self.trainer = join(ledger, "trainer", run_id=RUN)
        self.replicas = [join(ledger, "replica", slot, RUN) for slot in range(REPLICAS)]
        if past:
            with ledger.write(RUN) as connection:
                _fill(connection, past, self.step)
        ledger.record_version(self.trainer, self.step, "path")
        self._leases: deque[tuple[Actor, Lease]] = deque()
        self._scored = 0
        self._keys = 0
        self._has_died = False
        self._load(lambda name, call: call())

    def live_a_step(self, call: Call) -> None:
        """One training step and all that goes on meanwhile."""
        self._lease_all(call)
        if not self._scored:
            call("take_groups, none to have", lambda: self.ledger.take_groups(self.trainer, self.step))
        self._work(call)
        self._answer(call)
        self._train(call)
        self._look(call)

    def take_back_a_step(self, call: Call) -> None:
        """Resume from the checkpoint before the last step: its groups are scored again, and all leases are lost.

        Before that one of the groups is found damaged, and the first time an engine dies with what it was answering.
        """
        ledger, last = self.ledger, self.step - 1
        damaged = (ledger.take_groups(self.trainer, last) or [])[:1]
        rows = call("drop_damaged", lambda: ledger.drop_damaged(self.trainer, last, [row.group_id for row in damaged]))
        assert rows is None
        if not self._has_died:  # again and again, and what is asked next would be a suspect, to be tried alone
            self._has_died = True
            call("finish, died", lambda: ledger.finish(self.replicas[1], "died", "SIGSEGV"))
            self.replicas[1] = join(ledger, "replica", 1, RUN)
        back = (self.supervisor, self.step - 1, f"from step {self.step}")
        self.lineage = call("resume_from", lambda: self.ledger.resume_from(*back))
        assert call("resume_from, again", lambda: self.ledger.resume_from(*back)) == self.lineage
        self.trainer = join(self.ledger, "trainer", run_id=RUN)
        self.step -= 1
        self._leases.clear()
        self._scored += B - len(damaged)
        self.ledger.record_version(self.trainer, self.step, "path")
        self._load(call)

    def _load(self, call: Call) -> None:
        for replica in self.replicas:
            lineage, number = call("latest_version", lambda: self.ledger.latest_version(RUN))
            call("claim_version", lambda: self.ledger.claim_version(replica, lineage, number))  # noqa: B023
            call("set_loaded", lambda: self.ledger.set_loaded(replica, lineage, number))  # noqa: B023

    def _lease_all(self, call: Call) -> None:
        """Lease until the gate shuts."""
        for _ in range((ETA + 1) * B - len(self._leases) - self._scored):
            self._leases.append(self._lease(call))
        refused = call("lease_group, none to have", lambda: self.ledger.lease_group(self.replicas[0], self.step, ""))
        assert refused is None

    def _lease(self, call: Call) -> tuple[Actor, Lease]:
        self._keys += 1
        replica, key = self.replicas[self._keys % REPLICAS], f"lease-{self._keys}"
        lease = call("lease_group", lambda: self.ledger.lease_group(replica, self.step, key))
        assert lease is not None
        assert call("lease_group, again", lambda: self.ledger.lease_group(replica, self.step, key)) == lease
        return replica, lease

    def _work(self, call: Call) -> None:
        ledger, step = self.ledger, self.step
        for actor in (self.supervisor, self.trainer, *self.replicas):
            named = [lease.group_id for holder, lease in self._leases if holder == actor]
            beat = partial(ledger.heartbeat, actor, "running", "at work", step, may_rest_s=300.0, named=named)
            call("heartbeat", beat)
            call("record_span", lambda: ledger.record_span(actor, "busy", f"step {step}", 1.0))  # noqa: B023
        call("claim_evaluation, none to have", lambda: ledger.claim_evaluation(self.replicas[0], self.step))
        call("confirm", lambda: ledger.confirm(self.supervisor))
        call("lineage_of", lambda: ledger.lineage_of(self.trainer))

    def _answer(self, call: Call) -> None:
        """Drop a group, whose prompt is leased again, and complete as many as the next step lacks."""
        replica, lost = self._leases.popleft()
        call("drop_group", lambda: self.ledger.drop_group(replica, lost.group_id, "aborted"))
        self._leases.append(self._lease(call))
        for _ in range(B - self._scored):
            replica, lease = self._leases.popleft()
            this = (replica, lease.group_id)
            question = f"question-{lease.prompt_index % 1000}"
            assert call("name_question", lambda: self.ledger.name_question(*this, question))  # noqa: B023
            facts = (*this, lease.version, 0.5, _ANSWERS, 100)
            assert call("complete_group", lambda: self.ledger.complete_group(*facts))  # noqa: B023
            self._scored += 1

    def _train(self, call: Call) -> None:
        ledger, trainer, step = self.ledger, self.trainer, self.step
        rows = call("take_groups", lambda: ledger.take_groups(trainer, step))
        self._scored -= len(rows)
        call("take_groups, again", lambda: ledger.take_groups(trainer, step))
        call("record_step", lambda: ledger.record_step(trainer, step, '{"reward/mean": 0.5}'))
        self.step += 1
        call("has_version", lambda: ledger.has_version(RUN, self.lineage, step + 1))
        call("record_version", lambda: ledger.record_version(trainer, step + 1, "path"))
        found = [(lineage, n) for lineage in {0, self.lineage} for n in range(max(0, step - 2), step + 2)]
        call("retire_versions", lambda: ledger.retire_versions(trainer, _KEPT_VERSIONS, found))
        call("proven_checkpoints", lambda: ledger.proven_checkpoints(RUN, found))
        last = max(row.group_id for row in rows)
        payloads = range(max(1, last - (_KEPT_STEPS + 1) * B), last + 1)
        call("disposable_groups", lambda: ledger.disposable_groups(RUN, payloads, _KEPT_STEPS, step))
        self._load(call)

    def _look(self, call: Call) -> None:
        """What the supervisor, pages and followers ask again and again."""
        ledger = self.ledger
        call("find_run", lambda: ledger.find_run(run_id=RUN))
        call("progress", lambda: ledger.progress(RUN))
        call("actors", lambda: ledger.actors(RUN))
        shown = call("steps, the last", lambda: ledger.steps(RUN, self.step - _SHOWN_STEPS))
        call("spans, the last", lambda: ledger.spans(RUN, shown[0].end_s))
        call("evaluations", lambda: ledger.evaluations(RUN))
        call("machines", lambda: ledger.machines())


def _fill(connection: Connection, past: int, past_steps: int) -> None:
    """Write the past in few statements, for which the database counts up the numbers itself."""
    for first in range(0, past, _AT_ONCE):
        _fill_groups(connection, first, min(first + _AT_ONCE, past))
    counts = {"groups": past // DROPPED_SHARE, "quarantined_prompts": past // DROPPED_SHARE}
    connection.execute(insert(drops).values(run_id=RUN, reason="too_few_scored", **counts))
    for first in range(0, past_steps, _AT_ONCE):
        _fill_steps(connection, first, min(first + _AT_ONCE, past_steps), past_steps)


def _fill_groups(connection: Connection, first: int, end: int) -> None:
    group, rows = _count_up(first, end)
    is_dropped = group % DROPPED_SHARE == DROPPED_SHARE - 1
    rank = group - group // DROPPED_SHARE  # among the groups that were not dropped
    prompt = {"prompt_index": group, "state": case((is_dropped, "quarantined"), else_="held")}
    prompt |= {"failed_attempts": case((is_dropped, 2), else_=0), "deaths": literal(0), "question_key": literal("past")}
    _insert(connection, prompts, rows, prompt)
    facts = {"group_id": group + 1, "prompt_index": group, "lineage": literal(0), **_holder("replica")}
    facts |= {"state": case((is_dropped, "dropped"), else_="consumed"), "lease_key": literal("past")}
    facts |= {"drop_reason": case((is_dropped, "too_few_scored")), "step": case((~is_dropped, rank // B))}
    facts |= {"place": case((~is_dropped, rank % B)), "version": rank // B, "newest_version": rank // B}
    facts |= {"reward_mean": literal(0.5), "response_tokens": literal(100), **_answers(literal(1))}
    _insert(connection, groups, rows, {**facts, "leased_s": now_s(), "completed_s": now_s()})


def _fill_steps(connection: Connection, first: int, end: int, past_steps: int) -> None:
    step, rows = _count_up(first, end)
    consumed = (step + 1) * B
    totals = {"step": step, "reward_mean": literal(0.5), "max_staleness": literal(0), **_answers(consumed)}
    _insert(connection, consumed_steps, rows, {**totals, "response_tokens": consumed * 100})
    end_s = now_s() - (past_steps - step)
    metrics = literal('{"reward/mean": 0.5}')
    _insert(connection, steps, rows, {"step": step, "lineage": literal(0), "end_s": end_s, "metrics_json": metrics})
    version = {"lineage": literal(0), "number": step, "state": literal("retired"), "path": literal("path")}
    _insert(connection, policy_versions, rows, {**version, "created_s": now_s()})
    attempt = {"role": literal("replica"), "slot": step % REPLICAS, "attempt": -1 - step, "is_newest": literal(False)}
    attempt |= {"state": case((step % 2 == 0, "died"), else_="fenced"), "assigned_by": literal(1)}
    attempt |= {"wanted": literal("run"), "message": literal(""), "machines": literal("[]"), "heartbeat_s": end_s}
    _insert(connection, actors, rows, attempt | {"serial": literal(1), "work": literal(1)})
    for role, kind in (("trainer", "busy"), ("replica", "busy"), ("replica", "wait")):
        times = {"kind": literal(kind), "span_key": cast(step, String), "start_s": end_s - 1, "end_s": end_s}
        _insert(connection, spans, rows, {**_holder(role), **times})


def _count_up(first: int, end: int) -> tuple[ColumnElement[int], CTE]:
    """The numbers from `first` to `end` - 1, and the rows they come from."""
    rows = select(literal(first).label("n")).cte("numbers", recursive=True)
    rows = rows.union_all(select(rows.c.n + 1).where(rows.c.n < end - 1))
    return rows.c.n, rows


def _insert(connection: Connection, table: Table, rows: CTE, values: dict[str, Any]) -> None:
    query = select(literal(RUN), *values.values()).select_from(rows)
    connection.execute(insert(table).from_select(["run_id", *values], query))


def _holder(role: str) -> dict[str, Any]:
    return {"role": literal(role), "slot": literal(0), "attempt": literal(1)}


def _answers(groups_behind: ColumnElement[int]) -> dict[str, Any]:
    return {f"{outcome}_answers": groups_behind * _ANSWERS.get(outcome, 0) for outcome in Outcome}
