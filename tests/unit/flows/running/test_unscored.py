"""A run whose answers nobody can score ends after three steps' worth of groups in a row."""

from pathlib import Path

import pytest

from flows.running import supervisor as supervising
from flows.running.supervisor import RunFailed, Supervisor
from tasks.exchange.ledger import Ledger, Progress
from tests.support.ledger import join, lease
from tests.support.supervising import PLAN, make


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "POLL_S", 0.0)


def drop(ledger: Ledger, slot: int) -> None:
    """Drop one more group of a replica of its own, none of whose answers could be scored."""
    replica = join(ledger, "replica", slot)
    ledger.drop_group(replica, lease(ledger, replica).group_id, "too_few_scored")


def test_a_run_that_nobody_can_score_ends_and_says_why(tmp_path: Path) -> None:
    run, launcher = make(tmp_path)
    most = 3 * run.experiment.workload.prompts_per_step
    seen: list[int] = []

    def on_progress(progress: Progress) -> None:
        seen.append(progress.dropped.get("too_few_scored", 0))
        drop(run.ledger, 10 + len(seen))

    with pytest.raises(RunFailed, match=rf"In the last {most} groups no two answers could be scored.*replica 0"):
        Supervisor(run, 0, PLAN, launcher, on_progress).run()
    assert seen[-1] == most
