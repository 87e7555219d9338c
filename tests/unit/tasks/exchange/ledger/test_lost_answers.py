"""Every call whose answer was lost is made again by the ledger, and leaves and answers what it would have otherwise."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from tasks.exchange.ledger import Actor, Ledger, Process
from tasks.exchange.ledger.schema import metadata
from tests.support.cut import COMMITTED, FOUND, CuttingWay, cutting_way
from tests.support.ledger import RUN, B, public_calls, timeless
from tests.support.plan import run_plan
from tests.support.postgres import PostgresServer

Call = Callable[..., Any]
"""Makes a call of the ledger by its name and arguments, and returns what it returns."""

PROCESS, OTHER = Process("elsewhere/1/1", 1, "here"), Process("elsewhere/2/2", 2, "here")
SUPERVISOR, TRAINER, REPLICA = (Actor(RUN, role, 0, 1) for role in ("supervisor", "trainer", "replica"))
SIZES = {"prompts_per_step": B, "max_staleness": 1, "steps": 3, "max_attempts_per_prompt": 2}


def tell(call: Call) -> None:
    """A run in which every call is made that there is."""
    _begin(call)
    _work(call)
    _train(call)
    _look(call)
    _end(call)


def _begin(call: Call) -> None:
    call("announce_machine", "here", "{}")
    call("begin_run", RUN, PROCESS, flow_run_id="flow", **SIZES)
    call("set_mlflow_run", SUPERVISOR, "mlflow")
    call("add_plan_epoch", SUPERVISOR, run_plan("here"))
    call("request_evaluation", SUPERVISOR, "before", 0)
    for actor, process in ((TRAINER, PROCESS), (REPLICA, OTHER)):
        call("assign", SUPERVISOR, actor.role, 0, 0, epoch=0, machines=["here"])
        call("is_wanted", actor)
        call("register", actor, process)
        call("heartbeat", actor, number=2)
        call("confirm", actor)


def _work(call: Call) -> None:
    call("record_version", TRAINER, 0, "path")
    call("latest_version", RUN)
    call("live_versions", RUN)
    call("claim_version", REPLICA, 0, 0)
    call("set_loaded", REPLICA, 0, 0)
    call("claimed_versions", RUN)
    call("claim_evaluation", REPLICA, 0)
    call("try_question", REPLICA, "before", "question")
    call("record_evaluation", REPLICA, "before", "{}")
    call("record_span", REPLICA, "load", "first", 1.0)
    first = call("lease_group", REPLICA, 0, "first")
    call("name_question", REPLICA, first.group_id, "question")
    call("drop_group", REPLICA, first.group_id, "too_few_scored")
    for key in ("second", "third", "fourth", "fifth"):
        lease = call("lease_group", REPLICA, 0, key)
        if key != "fourth":
            call("complete_group", REPLICA, lease.group_id, 0, 0.5, {"scored": 2}, 9)


def _train(call: Call) -> None:
    call("lineage_of", TRAINER)
    first, _ = call("take_groups", TRAINER, 0)
    call("drop_damaged", TRAINER, 0, [first.group_id])
    call("record_step", TRAINER, 0, "{}")
    for number in (1, 2):
        call("record_version", TRAINER, number, "path")
    call("has_version", RUN, 0, 2)
    call("retire_versions", TRAINER, 1, [(0, 1)])
    call("proven_checkpoints", RUN, [(0, 1)])
    call("disposable_groups", RUN, [1, 2, 3], 0, 1)
    call("resume_from", SUPERVISOR, 1, "back")


def _look(call: Call) -> None:
    call("find_run", run_id=RUN)
    call("list_runs")
    call("mlflow_run", RUN)
    call("plan", RUN, 0)
    for rows in ("plan_epochs", "actors", "groups", "evaluations", "spans", "steps", "progress", "quarantined_prompts"):
        call(rows, RUN)
    call("machines")


def _end(call: Call) -> None:
    call("want", SUPERVISOR, REPLICA, "drain")
    call("finish", REPLICA, "done")
    call("fence", SUPERVISOR, TRAINER)
    call("ask_to_cancel", "flow")
    second = call("take_over", RUN, OTHER, "flow")
    call("close_run", second, "cancelled")
    call("settle_run", second, 1, "cancelled")


def told(ledger: Ledger, before: Callable[[str], None], after: Callable[[str], None]) -> list[Any]:
    """What the calls answered, and what they left in the tables, but for times."""
    said = []

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        before(name)
        answer = getattr(ledger, name)(*args, **kwargs)
        after(name)
        said.append((name, timeless(answer)))
        return answer

    tell(call)
    with ledger.read() as connection:
        for table in metadata.sorted_tables:
            columns = [column for column in table.c if not column.name.endswith(("_s", "span_id"))]
            said.append((table.name, [tuple(row) for row in connection.execute(select(*columns).order_by(*columns))]))
    return said


@pytest.fixture
def way(postgres: PostgresServer) -> Iterator[CuttingWay]:
    with tempfile.TemporaryDirectory() as directory, cutting_way(postgres.directory, Path(directory)) as opened:
        yield opened


def test_every_call_is_told_of() -> None:
    made = set()

    class Answer:
        group_id = 0

        def __iter__(self) -> Iterator["Answer"]:
            return iter((self, self))

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        made.add(name)
        return Answer()

    tell(call)
    assert made == public_calls()


@pytest.mark.parametrize("lost", [COMMITTED, FOUND], ids=["commit", "query"])
def test_a_lost_answer_changes_nothing(postgres: PostgresServer, way: CuttingWay, lost: bytes) -> None:
    """The connection is cut when the server has answered a commit, or a query, of every call."""
    with closing(Ledger(postgres.empty_ledger())) as ledger:
        expected = told(ledger, lambda name: None, lambda name: None)
    cut = set()

    def arm(name: str) -> None:
        way.cut_next(lost)

    def note(name: str) -> None:
        if way.has_cut:
            cut.add(name)
        way.cut_next(None)

    url = postgres.empty_ledger().replace(str(postgres.directory), str(way.directory))
    with closing(Ledger(url)) as ledger:
        found = told(ledger, arm, note)
    assert found == expected
    only_read = public_calls() - cut
    assert only_read == (READING if lost is COMMITTED else set())


READING = {
    *("actors", "claimed_versions", "confirm", "disposable_groups", "evaluations", "find_run", "groups", "has_version"),
    *(
        "is_wanted",
        "latest_version",
        "lineage_of",
        "list_runs",
        "live_versions",
        "machines",
        "mlflow_run",
        "plan",
        "plan_epochs",
    ),
    *("progress", "proven_checkpoints", "quarantined_prompts", "spans", "steps"),
}
"""Calls that commit nothing."""
