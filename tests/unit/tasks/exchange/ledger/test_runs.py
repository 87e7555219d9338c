"""The ledger's runs, machines and the database itself."""

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import update

from planners.errors import UserError
from tasks.exchange.ledger import Actor, Fenced, Ledger
from tasks.exchange.ledger.schema import runs, schema_info
from tests.support.ledger import RUN, a_process, assign, begin, join, lease, states, supervisor_of
from tests.support.plan import run_plan


def serial_of(ledger: Ledger, supervisor: Actor) -> int:
    return next(row.serial for row in ledger.actors(supervisor.run_id) if row.role == "supervisor")


def test_a_run_is_begun_once_with_its_supervisor(ledger: Ledger) -> None:
    """Asked again by the same process, whose answer was lost, it is the same run and attempt."""
    process, sizes = a_process(pid=7), {"prompts_per_step": 1, "max_staleness": 0, "steps": 1}
    for _ in range(2):
        supervisor = ledger.begin_run("other", process, **sizes, max_attempts_per_prompt=1, flow_run_id="flow")
        assert supervisor == Actor("other", "supervisor", 0, 1)
    with pytest.raises(UserError, match="exists already"):
        begin(ledger, "other")
    ledger.set_mlflow_run(supervisor, "tracked")
    assert [run.run_id for run in ledger.list_runs()] == [RUN, "other"]
    run = ledger.find_run(flow_run_id="flow")
    assert run is not None
    assert (run.run_id, run.mlflow_run_id, run.lineage) == ("other", "tracked", 0)
    (row,) = ledger.actors("other")
    assert (row.state, row.pid, row.process_key, row.assigned_by) == ("starting", 7, process.key, None)
    assert ledger.find_run(run_id="missing") is None


def test_a_cancellation_reaches_who_supervises_for_that_flow_run(ledger: Ledger) -> None:
    """It is repeatable, is to be asked again until the run is there, and is nothing to the flow run that resumes it."""
    assert not ledger.ask_to_cancel("flow-1")
    first = begin(ledger, "other", flow_run_id="flow-1")
    assert ledger.heartbeat(first).wanted == "run"
    assert [ledger.ask_to_cancel("flow-1") for _ in range(2)] == [True, True]
    assert ledger.heartbeat(first).wanted == "leave"
    ledger.finish(first, "done")
    second = ledger.take_over("other", a_process(), "flow-2")
    assert not ledger.ask_to_cancel("flow-1")
    assert ledger.heartbeat(second).wanted == "run"
    ledger.ask_to_cancel("flow-2")
    assert ledger.heartbeat(second).wanted == "leave"
    assert ledger.heartbeat(supervisor_of(ledger)).wanted == "run", "another run was asked to end"


def test_a_retry_of_a_cancelled_flow_run_is_not_cancelled_again(ledger: Ledger) -> None:
    first = begin(ledger, "other", flow_run_id="flow-1")
    ledger.ask_to_cancel("flow-1")
    ledger.close_run(first, "cancelled")
    retry = ledger.take_over("other", a_process(), "flow-1")
    assert ledger.heartbeat(retry).wanted == "run"
    with pytest.raises(UserError, match="knows no run missing"):
        ledger.take_over("missing", a_process(), None)


def test_a_run_is_taken_over_whole(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    """In one transaction its former supervisor and actors are fenced; a lost answer is given again."""
    lease(ledger, replica)
    former, waiting = supervisor_of(ledger), assign(ledger, "replica", 1)
    process, seen = a_process(), (1, serial_of(ledger, former))
    ledger.close_run(former, "failed")
    for _ in range(2):
        supervisor = ledger.take_over(RUN, process, "flow-2", seen)
        assert supervisor.attempt == 2
    assert states(ledger) == [(0, "dropped", "lease_lost")]
    for actor in (trainer, replica, former):
        with pytest.raises(Fenced):
            ledger.heartbeat(actor)
    with pytest.raises(Fenced, match="declared dead"):
        ledger.register(waiting, a_process())
    run = ledger.find_run(run_id=RUN)
    assert run is not None
    assert (run.state, run.flow_run_id) == ("running", "flow-2")


def test_a_supervisor_that_has_beaten_since_is_not_taken_over(ledger: Ledger) -> None:
    supervisor = supervisor_of(ledger)
    seen = (1, serial_of(ledger, supervisor))
    ledger.heartbeat(supervisor)
    for silent in (None, seen):
        with pytest.raises(UserError, match="being worked on"):
            ledger.take_over(RUN, a_process(), "flow-2", silent)
    ledger.heartbeat(supervisor)
    assert ledger.take_over(RUN, a_process(), "flow-2", (1, seen[1] + 2)).attempt == 2


def test_a_replaced_supervisor_decides_nothing(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    """Stopped, replaced and woken, it would close the run that another one has taken over."""
    zombie = supervisor_of(ledger)
    seen = (1, serial_of(ledger, zombie))
    successor = ledger.take_over(RUN, a_process(), "flow-2", seen)
    current = join(ledger, "replica")
    for write in (
        lambda: ledger.close_run(zombie, "failed"),
        lambda: ledger.set_mlflow_run(zombie, "tracked"),
        lambda: ledger.add_plan_epoch(zombie, run_plan("a")),
        lambda: ledger.request_evaluation(zombie, "after", 3),
        lambda: ledger.resume_from(zombie, 0, "again"),
        lambda: ledger.assign(zombie, "replica", 0, 2, 0, ["here"]),
        lambda: ledger.fence(zombie, current),
        lambda: ledger.fence(zombie, replica),
        lambda: ledger.heartbeat(zombie),
        lambda: ledger.confirm(zombie),
        lambda: ledger.finish(zombie, "done"),
    ):
        with pytest.raises(Fenced, match="replaced by attempt 2"):
            write()
    ledger.heartbeat(current)
    ledger.confirm(successor)
    run = ledger.find_run(run_id=RUN)
    assert run is not None
    assert (run.state, run.lineage, run.mlflow_run_id) == ("running", 0, None)


def test_the_first_word_about_a_run_counts_and_its_actors_leave(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    supervisor, waiting = supervisor_of(ledger), assign(ledger, "replica", 1)
    assert ledger.heartbeat(replica).wanted == "run"
    assert [ledger.close_run(supervisor, state) for state in ("completed", "cancelled")] == ["completed"] * 2
    assert ledger.heartbeat(replica).wanted == ledger.heartbeat(trainer).wanted == "leave"
    assert ledger.heartbeat(supervisor).wanted == "run"
    with pytest.raises(Fenced):
        ledger.register(waiting, a_process())
    with pytest.raises(UserError, match="is complete"):
        ledger.take_over(RUN, a_process(), None)


def test_only_the_run_that_is_meant_is_settled(ledger: Ledger) -> None:
    """A beat, a retry, or a resume under another flow run may have come between the look and the settling."""
    first = begin(ledger, "other", flow_run_id="flow-1")
    seen = serial_of(ledger, first)
    ledger.heartbeat(first)
    assert not ledger.settle_run(first, seen, "failed")
    assert [ledger.settle_run(first, seen + 1, "failed") for _ in range(2)] == [True, True]
    assert not ledger.settle_run(first, seen + 1, "cancelled")
    with pytest.raises(Fenced):
        ledger.heartbeat(first)
    for flow_run_id in ("flow-1", "flow-2"):
        current = ledger.take_over("other", a_process(), flow_run_id)
        assert not ledger.settle_run(first, seen + 1, "failed")
        assert ledger.heartbeat(current).wanted == "run"
        ledger.finish(current, "done")


def test_plan_epochs_and_machines(ledger: Ledger) -> None:
    a, b = run_plan("a"), run_plan("b")
    assert [ledger.add_plan_epoch(supervisor_of(ledger), plan) for plan in (a, a, b, a)] == [0, 0, 1, 2]
    assert [row.epoch for row in ledger.plan_epochs(RUN)] == [0, 1, 2]
    assert [ledger.plan(RUN, epoch) for epoch in range(3)] == [a, b, a]
    with pytest.raises(UserError, match="no plan epoch 3"):
        ledger.plan(RUN, 3)
    ledger.announce_machine("one", "{}")
    ledger.announce_machine("one", '{"cores": 2}')
    assert [(row.name, row.description_json) for row in ledger.machines()] == [("one", '{"cores": 2}')]


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://host/x", "nonsense"])
def test_other_databases_are_refused(url: str) -> None:
    with pytest.raises(UserError, match="HEXFLOW_LEDGER_URL"):
        Ledger(url)


def test_a_file_that_is_no_database_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").write_bytes(b"not a database" * 100)
    with pytest.raises(UserError, match="file is not a database"):
        Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")


def test_tables_of_another_version_are_refused(ledger: Ledger, url: str) -> None:
    with ledger.write(RUN) as connection:
        connection.execute(update(schema_info).values(version=99))
    with pytest.raises(UserError, match="tables of version 99"):
        Ledger(url)


def test_commits_survive_a_power_cut(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    with ledger.write(RUN) as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL
    with sqlite3.connect(tmp_path / "ledger.db") as plain:
        assert plain.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    plain.close()
    ledger.close()


def test_a_failed_transaction_leaves_nothing(ledger: Ledger) -> None:
    def write_and_fail() -> None:
        with ledger.write(RUN) as connection:
            connection.execute(update(runs).values(state="failed"))
            assert ledger.list_runs()[0].state == "running"  # readers do not wait for the writer
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_and_fail()
    assert ledger.list_runs()[0].state == "running"
