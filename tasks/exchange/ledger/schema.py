"""Tables of the ledger. Their keys make the worst faults impossible:

- a group is one row with at most one `step`, so it is consumed at most once in the surviving lineage;
- a prompt has at most one group that is not dropped (`one_group_per_prompt`), so no prompt is trained on twice;
- a place in a step's batch holds one group (`one_group_per_place`);
- a policy version is (lineage, number) for ever.
"""

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

SCHEMA_VERSION = 4
"""Raise it with every change of a table, of what a column holds, and of the run directories that go with the rows: a
ledger with another version is refused."""

metadata = MetaData()

schema_info = Table("schema_info", metadata, Column("version", Integer, primary_key=True))


def _run_key() -> Column[str]:
    return Column("run_id", String, ForeignKey("runs.run_id"), primary_key=True)


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
    Column("prompts_per_step", Integer, nullable=False),
    Column("max_staleness", Integer, nullable=False),
    Column("steps", Integer, nullable=False),
    Column("max_attempts_per_prompt", Integer, nullable=False),
    Column("created_s", Float, nullable=False),
)

cancellations = Table(
    "cancellations",
    metadata,
    Column("flow_run_id", String, primary_key=True),
    Column("asked_s", Float, nullable=False),
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
    Column("pid", Integer, nullable=False),
    Column("machine", String, nullable=False),
    Column("message", Text, nullable=False),
    Column("loaded_lineage", Integer),
    Column("loaded_number", Integer),
    Column("registered_s", Float, nullable=False),
    Column("heartbeat_s", Float, nullable=False),
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
    Column("question_key", String),
    CheckConstraint("state IN ('waiting', 'held', 'quarantined')", name="prompt_state"),
    Index("prompts_by_state", "run_id", "state", "prompt_index"),
    Index("prompts_by_question", "run_id", "question_key", "state"),
)

groups = Table(
    "groups",
    metadata,
    _run_key(),
    Column("group_id", Integer, primary_key=True),
    Column("prompt_index", Integer, nullable=False),
    Column("lineage", Integer, nullable=False),
    Column("state", String, nullable=False),
    *_actor_keys(primary=False),
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
    Index("groups_by_state", "run_id", "state"),
    Index("one_group_per_place", "run_id", "step", "place", unique=True),
)
_not_dropped = groups.c.state != "dropped"
Index(
    "one_group_per_prompt",
    groups.c.run_id,
    groups.c.prompt_index,
    unique=True,
    sqlite_where=_not_dropped,
    postgresql_where=_not_dropped,
)

evaluations = Table(
    "evaluations",
    metadata,
    _run_key(),
    Column("purpose", String, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("state", String, nullable=False),
    *_actor_keys(primary=False),
    Column("result_json", Text),
    CheckConstraint("state IN ('requested', 'claimed', 'done')", name="evaluation_state"),
    CheckConstraint("(state = 'done') = (result_json IS NOT NULL)", name="done_has_result"),
)

spans = Table(
    "spans",
    metadata,
    Column("span_id", Integer, primary_key=True, autoincrement=True),
    Column("run_id", String, ForeignKey("runs.run_id"), nullable=False, index=True),
    Column("role", String, nullable=False),
    Column("slot", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("kind", String, nullable=False),
    Column("start_s", Float, nullable=False),
    Column("end_s", Float, nullable=False),
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
