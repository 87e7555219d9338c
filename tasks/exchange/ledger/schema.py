"""Tables of the ledger. Their keys make the worst faults impossible:

- a group is one row with at most one `step`, so it is consumed at most once in the surviving lineage;
- a prompt has at most one group that is not dropped (`one_group_per_prompt`), so no prompt is trained on twice;
- a place in a step's batch holds one group (`one_group_per_place`);
- an attempt has at most one open lease under a key of its own (`open_groups`), so a lease asked for again is the same;
- a slot has at most one attempt that has not ended (`one_actor_per_slot`);
- an attempt has one span of a kind under a key of its own (`one_span_per_key`), so one said again is the same;
- a policy version is (lineage, number) for ever.

And their indexes make every transition search only what is open, live or new, however much the run has behind it.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    and_,
    literal_column,
)

metadata = MetaData()

schema_info = Table("schema_info", metadata, Column("version", Integer, primary_key=True))


def _run_key() -> Column[str]:
    return Column("run_id", String, ForeignKey("runs.run_id"), primary_key=True)


def in_states(column: Column[str], *states: str) -> ColumnElement[bool]:
    """Whether a row is in one of these states, with the states spelled out in the statement.

    A partial index is used only by a statement that shows the index's own condition; bound parameters hide it.
    """
    return column.in_([literal_column(f"'{state}'") for state in states])


def _partial_index(name: str, *columns: Column[Any], where: ColumnElement[bool], unique: bool = False) -> None:
    Index(name, *columns, unique=unique, sqlite_where=where, postgresql_where=where)


def _actor_keys(primary: bool) -> list[Column[str] | Column[int]]:
    return [
        Column("role", String, primary_key=primary, nullable=not primary),
        Column("slot", Integer, primary_key=primary, nullable=not primary),
        Column("attempt", Integer, primary_key=primary, nullable=not primary),
    ]


runs = Table(
    "runs",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("flow_run_id", String, unique=True),
    Column("mlflow_run_id", String),
    Column("state", String, nullable=False),
    Column("lineage", Integer, nullable=False),
    Column("resumed_by", String),
    Column("prompts_per_step", Integer, nullable=False),
    Column("max_staleness", Integer, nullable=False),
    Column("steps", Integer, nullable=False),
    Column("max_attempts_per_prompt", Integer, nullable=False),
    Column("engine_deaths", Integer, nullable=False, default=0),
    Column("created_s", Float, nullable=False),
)

plan_epochs = Table(
    "plan_epochs",
    metadata,
    _run_key(),
    Column("epoch", Integer, primary_key=True),
    Column("plan_json", Text, nullable=False),
    Column("created_s", Float, nullable=False),
)

machines = Table(
    "machines",
    metadata,
    Column("name", String, primary_key=True),
    Column("description_json", Text, nullable=False),
    Column("seen_s", Float, nullable=False),
)

actors = Table(
    "actors",
    metadata,
    _run_key(),
    *_actor_keys(primary=True),
    Column("state", String, nullable=False),
    Column("is_newest", Boolean, nullable=False),
    Column("assigned_by", Integer),
    Column("epoch", Integer),
    Column("machines", Text, nullable=False),
    Column("process_key", String),
    Column("pid", Integer),
    Column("machine", String),
    Column("message", Text, nullable=False),
    Column("wanted", String, nullable=False),
    Column("serial", BigInteger, nullable=False),
    Column("work", BigInteger, nullable=False),
    Column("may_rest_s", Float),
    Column("loaded_lineage", Integer),
    Column("loaded_number", Integer),
    Column("heartbeat_s", Float, nullable=False),
    CheckConstraint(
        "state IN ('assigned', 'starting', 'running', 'done', 'failed', 'died', 'fenced')",
        name="actor_state",
    ),
    CheckConstraint("(role = 'supervisor') = (assigned_by IS NULL)", name="supervisors_assign"),
    CheckConstraint("wanted IN ('run', 'drain', 'leave')", name="actor_wanted"),
)
is_newest = actors.c.is_newest.is_(True)
"""The last attempt of its slot, so that nobody reads past those before to find it."""
Index(
    "newest_of_slot",
    actors.c.run_id,
    actors.c.role,
    actors.c.slot,
    unique=True,
    sqlite_where=is_newest,
    postgresql_where=is_newest,
)
_open = actors.c.state.in_(("assigned", "starting", "running"))
Index(
    "one_actor_per_slot",
    actors.c.run_id,
    actors.c.role,
    actors.c.slot,
    unique=True,
    sqlite_where=_open,
    postgresql_where=_open,
)

policy_versions = Table(
    "policy_versions",
    metadata,
    _run_key(),
    Column("lineage", Integer, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("state", String, nullable=False),
    Column("path", Text, nullable=False),
    Column("created_s", Float, nullable=False),
    CheckConstraint("state IN ('live', 'retired', 'abandoned')", name="version_state"),
)
is_live = in_states(policy_versions.c.state, "live")
survives = in_states(policy_versions.c.state, "live", "retired")
_version_order = (policy_versions.c.run_id, policy_versions.c.number, policy_versions.c.lineage)
_partial_index("live_versions", *_version_order, where=is_live)
_partial_index("surviving_versions", *_version_order, where=survives)

weight_claims = Table(
    "weight_claims",
    metadata,
    Column("run_id", String, primary_key=True),
    *_actor_keys(primary=True),
    Column("lineage", Integer, primary_key=True),
    Column("number", Integer, primary_key=True),
    ForeignKeyConstraint(
        ["run_id", "lineage", "number"], ["policy_versions.run_id", "policy_versions.lineage", "policy_versions.number"]
    ),
)

prompts = Table(
    "prompts",
    metadata,
    _run_key(),
    Column("prompt_index", Integer, primary_key=True),
    Column("state", String, nullable=False),
    Column("failed_attempts", Integer, nullable=False),
    Column("deaths", Integer, nullable=False),
    Column("question_key", String),
    CheckConstraint("state IN ('waiting', 'held', 'quarantined')", name="prompt_state"),
    Index("prompts_by_question", "run_id", "question_key", "state"),
)
is_waiting = in_states(prompts.c.state, "waiting")
_partial_index("waiting_prompts", prompts.c.run_id, prompts.c.prompt_index, where=is_waiting)
is_accused = and_(in_states(prompts.c.state, "waiting", "held"), prompts.c.deaths > literal_column("0"))
# With what the statements compare: between indexes of equal worth SQLite chooses by their age, which no order decides.
_partial_index("accused_prompts", prompts.c.run_id, prompts.c.deaths, where=is_accused)

groups = Table(
    "groups",
    metadata,
    _run_key(),
    Column("group_id", Integer, primary_key=True),
    Column("prompt_index", Integer, nullable=False),
    Column("lineage", Integer, nullable=False),
    Column("state", String, nullable=False),
    *_actor_keys(primary=False),
    Column("lease_key", String, nullable=False),
    Column("unnamed_beats", Integer, nullable=False, default=0),
    Column("version", Integer, nullable=False),
    Column("newest_version", Integer),
    Column("step", Integer),
    Column("place", Integer),
    Column("drop_reason", String),
    Column("reward_mean", Float),
    Column("scored_answers", Integer),
    Column("truncated_answers", Integer),
    Column("timeout_answers", Integer),
    Column("error_answers", Integer),
    Column("response_tokens", BigInteger),
    Column("leased_s", Float, nullable=False),
    Column("completed_s", Float),
    ForeignKeyConstraint(["run_id", "prompt_index"], ["prompts.run_id", "prompts.prompt_index"]),
    CheckConstraint("state IN ('leased', 'scored', 'consumed', 'dropped')", name="group_state"),
    CheckConstraint("(state = 'consumed') = (step IS NOT NULL)", name="consumed_has_step"),
    CheckConstraint("(step IS NULL) = (place IS NULL)", name="step_has_place"),
    CheckConstraint("(state = 'dropped') = (drop_reason IS NOT NULL)", name="dropped_has_reason"),
    CheckConstraint("step IS NULL OR version <= step", name="version_not_after_step"),
)
is_open = in_states(groups.c.state, "leased", "scored")
_partial_index(
    "open_groups",
    *(groups.c.run_id, groups.c.role, groups.c.slot, groups.c.attempt, groups.c.lease_key),
    where=is_open,
    unique=True,
)
_partial_index(
    "one_group_per_place",
    *(groups.c.run_id, groups.c.step, groups.c.place),
    where=groups.c.step.is_not(None),
    unique=True,
)
_partial_index(
    "one_group_per_prompt", groups.c.run_id, groups.c.prompt_index, where=groups.c.state != "dropped", unique=True
)

consumed_steps = Table(
    "consumed_steps",
    metadata,
    _run_key(),
    Column("step", Integer, primary_key=True),
    Column("reward_mean", Float),
    Column("max_staleness", Integer, nullable=False),
    Column("response_tokens", BigInteger, nullable=False),
    Column("scored_answers", BigInteger, nullable=False),
    Column("truncated_answers", BigInteger, nullable=False),
    Column("timeout_answers", BigInteger, nullable=False),
    Column("error_answers", BigInteger, nullable=False),
)
"""The steps that have consumed their groups; the last one says which is next. `reward_mean` is over the groups of the
step, all else over those of all steps up to and with it, so that a resume takes the totals back with the rows."""

drops = Table(
    "drops",
    metadata,
    _run_key(),
    Column("reason", String, primary_key=True),
    Column("groups", Integer, nullable=False),
    Column("quarantined_prompts", Integer, nullable=False),
)
"""How many groups were dropped for a reason, and how many prompts that brought into quarantine: what no resume takes
back, and so the only counts that stand beside the rows they count."""

evaluations = Table(
    "evaluations",
    metadata,
    _run_key(),
    Column("purpose", String, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("state", String, nullable=False),
    *_actor_keys(primary=False),
    Column("deaths", Integer, nullable=False, default=0),
    Column("trying", String),
    Column("result_json", Text),
    CheckConstraint("state IN ('requested', 'claimed', 'done')", name="evaluation_state"),
    CheckConstraint("(state = 'done') = (result_json IS NOT NULL)", name="done_has_result"),
    Index("evaluations_by_version", "run_id", "version", "purpose"),
)

deadly_questions = Table(
    "deadly_questions",
    metadata,
    _run_key(),
    Column("question_key", String, primary_key=True),
    Column("deaths", Integer, nullable=False),
)
"""How often a question of an evaluation was being asked alone when an engine died; prompts count for themselves."""

spans = Table(
    "spans",
    metadata,
    Column("span_id", Integer, primary_key=True, autoincrement=True),
    Column("run_id", String, ForeignKey("runs.run_id"), nullable=False),
    Column("role", String, nullable=False),
    Column("slot", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("kind", String, nullable=False),
    Column("span_key", String, nullable=False),
    Column("start_s", Float, nullable=False),
    Column("end_s", Float, nullable=False),
    Index("spans_by_end", "run_id", "end_s"),
    UniqueConstraint("run_id", "role", "slot", "attempt", "kind", "span_key", name="one_span_per_key"),
)

steps = Table(
    "steps",
    metadata,
    _run_key(),
    Column("step", Integer, primary_key=True),
    Column("lineage", Integer, nullable=False),
    Column("end_s", Float, nullable=False),
    Column("metrics_json", Text, nullable=False),
)
