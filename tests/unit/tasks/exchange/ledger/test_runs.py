"""The ledger's runs, machines and the database itself."""

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import update

from planners.errors import UserError
from tasks.exchange.ledger import Ledger
from tasks.exchange.ledger.schema import runs, schema_info
from tests.support.ledger import ETA, RUN, STEPS, B
from tests.support.plan import run_plan


def test_a_run_is_created_once(ledger: Ledger) -> None:
    ledger.create_run(RUN, B, ETA, STEPS, 2)
    with pytest.raises(UserError, match="begun with max_staleness 1, not 4"):
        ledger.create_run(RUN, B, 4, STEPS, 2)
    ledger.create_run("other", 1, 0, 1, 1, flow_run_id="flow")
    ledger.set_mlflow_run("other", "tracked")
    assert [run.run_id for run in ledger.list_runs()] == [RUN, "other"]
    run = ledger.find_run(flow_run_id="flow")
    assert run is not None
    assert (run.run_id, run.mlflow_run_id, run.lineage) == ("other", "tracked", 0)
    assert ledger.find_run(run_id="missing") is None


def test_a_cancellation_belongs_to_a_flow_run(ledger: Ledger) -> None:
    """It is repeatable, may come before the run, and is nothing to the flow run that resumes the run."""
    assert not ledger.is_to_cancel("flow-1")
    for _ in range(2):
        ledger.ask_to_cancel("flow-1")
    ledger.create_run("other", 1, 0, 1, 1, flow_run_id="flow-1")
    assert ledger.is_to_cancel("flow-1")
    ledger.reopen_run("other", "flow-2")
    ledger.ask_to_cancel("flow-1")
    assert not ledger.is_to_cancel("flow-2")


def test_a_retry_of_a_cancelled_flow_run_is_not_cancelled_again(ledger: Ledger) -> None:
    """But one that takes up a run for the first time may have been asked to end before it did so."""
    ledger.create_run("other", 1, 0, 1, 1, flow_run_id="flow-1")
    for flow_run_id in ("flow-1", "flow-2"):
        ledger.ask_to_cancel(flow_run_id)
    ledger.set_run_state("other", "cancelled")
    ledger.reopen_run("other", "flow-1")
    assert not ledger.is_to_cancel("flow-1")
    ledger.reopen_run("other", "flow-2")
    assert ledger.is_to_cancel("flow-2")
    with pytest.raises(UserError, match="knows no run missing"):
        ledger.reopen_run("missing", None)


def test_an_unknown_run_is_a_clear_error(ledger: Ledger) -> None:
    with pytest.raises(UserError, match="knows no run missing"):
        ledger.register("missing", "trainer", 0, pid=1, machine="here")


def test_plan_epochs_and_machines(ledger: Ledger) -> None:
    a, b = run_plan("a"), run_plan("b")
    assert [ledger.add_plan_epoch(RUN, plan) for plan in (a, a, b, a)] == [0, 0, 1, 2]
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
