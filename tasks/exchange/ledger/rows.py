"""What the ledger hands out: immutable copies of rows, true at the moment of their transaction."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import Column, Table


class Fenced(Exception):
    """This attempt is no longer current: another one has its place, or it was declared dead. The process must exit."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Who writes: an attempt that a supervisor has given out, or the supervisor's own.

    `role` is "trainer", "replica" or "supervisor"; only the newest attempt of a slot may write.
    """

    run_id: str
    role: str
    slot: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Process:
    """Who registers: `key` tells this process from every other, see `machine.processes.process_key`."""

    key: str
    pid: int
    machine: str


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run. `state` is running, completed, failed or cancelled."""

    run_id: str
    flow_run_id: str | None
    mlflow_run_id: str | None
    state: str
    lineage: int
    prompts_per_step: int
    max_staleness: int
    steps: int
    max_attempts_per_prompt: int
    created_s: float


@dataclass(frozen=True, slots=True)
class PlanEpochRow:
    """A plan of the run; the highest epoch is in force."""

    epoch: int
    plan_json: str
    created_s: float


@dataclass(frozen=True, slots=True)
class MachineRow:
    """A machine that has announced itself; `silent_s` is the time since it last did."""

    name: str
    description_json: str
    silent_s: float


@dataclass(frozen=True, slots=True)
class ActorRow:
    """An actor. `state` is assigned, starting, running, done, failed, died or fenced.

    Attributes:
        pid: process that has registered; None before, as `machine` and `process_key`.
        loaded_version: the (lineage, number) that it said it has loaded.
        silent_s: seconds since its last beat on the database's clock: to be shown, not to decide by.
        serial: grows with every beat; who waits for a beat looks whether it stands still.
        work: work done, as the actor counts it (tokens, answers, loads, micro-batches).
        may_rest_s: seconds for which `work` may stand still in what it does now; None: it has nothing in hand.
        process_key: which process has registered, see `machine.processes.process_key`.
        machines: those it was given to, the leading one first.
        epoch: plan epoch that it works for; None for supervisors.
        assigned_by: attempt of the supervisor that gave it out; None for supervisors.
        wanted: what its supervisor wants of it, see `Actors.want`, or who cancels of the supervisor; what becomes of
            the run comes on top.
    """

    role: str
    slot: int
    attempt: int
    state: str
    pid: int | None
    machine: str | None
    loaded_version: tuple[int, int] | None
    silent_s: float
    message: str
    serial: int = 0
    work: int = 0
    may_rest_s: float | None = None
    process_key: str | None = None
    machines: tuple[str, ...] = ()
    epoch: int | None = None
    assigned_by: int | None = None
    wanted: str = "run"


def newest_attempts(rows: Iterable[ActorRow]) -> dict[tuple[str, int], int]:
    """The newest attempt of every role and slot, of rows that have one for each."""
    return {(row.role, row.slot): row.attempt for row in rows}


@dataclass(frozen=True, slots=True)
class Beat:
    """What the ledger answers to a beat.

    Attributes:
        wanted: "run"; "drain": take on nothing new, end what is begun, and leave; or "leave": at once. A supervisor is
            to leave where its run is to be cancelled, any other where its run is over or its supervisor wants it to.
        supervisor: (attempt, serial) of the run's newest supervisor, which stands still where nobody supervises.
    """

    wanted: str
    supervisor: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Lease:
    """Permission to answer a prompt; `version` is the replica's loaded version."""

    group_id: int
    prompt_index: int
    version: int


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group. `state` is leased, scored, consumed or dropped.

    `version` is the replica's loaded version while leased, afterwards that of the oldest trained token; `step` the step
    that consumed it.
    """

    group_id: int
    prompt_index: int
    state: str
    version: int
    step: int | None
    reward_mean: float | None
    response_tokens: int | None
    drop_reason: str | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation that the actor has claimed.

    Attributes:
        purpose: what it is for.
        version: number of the version that is examined.
        is_careful: engines have died of it, so each question is to be asked alone, and named before by `try_question`.
        given_up: keys of the questions that are not asked any more, for each has ended two engines alone.
    """

    purpose: str
    version: int
    is_careful: bool = False
    given_up: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """An evaluation. `state` is requested, claimed or done; `result` is what was recorded."""

    purpose: str
    version: int
    state: str
    result: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class SpanRow:
    """A stretch of an actor's time, on the database's clock. `kind` is busy, wait, publish or load."""

    role: str
    slot: int
    attempt: int
    kind: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StepRow:
    """A finished training step of the surviving lineage; `end_s` is on the database's clock.

    `metrics` is empty for a step whose trainer died before it could report.
    """

    step: int
    end_s: float
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class QuarantinedPrompt:
    """A prompt that is not asked any more.

    Attributes:
        prompt_index: the prompt.
        question_key: its question's key; None where it had none yet.
        ended_engines: whether that is for the engines that it ended; else it failed too often, or its question is in
            quarantine.
    """

    prompt_index: int
    question_key: str | None
    ended_engines: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is, all of it derived from its rows.

    Attributes:
        step: finished training steps.
        steps: the run's target.
        groups: groups by state; every state is there.
        dropped: dropped groups by reason.
        outcomes: answers by outcome (scored, timeout, error, truncated), over completed groups that were not dropped.
        quarantined_prompts: prompts given up: for too many failed attempts, for the engines that they ended, or because
            their question was given up at another index.
        accused_prompts: prompts that were being answered when an engine died, and were neither answered nor given up
            since; and evaluations in which one died, until they are done.
        deadly_prompts: those of `quarantined_prompts` that ended engines, and the questions of evaluations that did.
        engine_deaths: attempts that have died, see `Actors.finish`.
        response_tokens: tokens in the answers of consumed groups.
        consumed: groups consumed.
        max_staleness_seen: largest step − version over consumed groups; 0 before there are any.
        latest_version: (lineage, number) of the newest live version.
        reward_mean: mean reward of the groups of the last consumed step.
    """

    step: int
    steps: int
    groups: dict[str, int]
    dropped: dict[str, int]
    outcomes: dict[str, int]
    quarantined_prompts: int
    response_tokens: int
    consumed: int
    max_staleness_seen: int
    latest_version: tuple[int, int] | None
    reward_mean: float | None
    accused_prompts: int = 0
    deadly_prompts: int = 0
    engine_deaths: int = 0

    @property
    def answered(self) -> int:
        """Groups whose answers were scored and not dropped since."""
        return self.groups["scored"] + self.groups["consumed"]


def columns_of(row_type: type, table: Table) -> list[Column[Any]]:
    """The columns of `table` whose names are the fields of the dataclass `row_type`, in its order."""
    return [table.c[field.name] for field in fields(row_type)]
