"""Deaths of engines before the supervisor: a guilty question costs no restart, and an engine's own deaths all do."""

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.running import supervisor as supervising
from flows.running.supervisor import RunFailed, Supervisor
from tasks.exchange.ledger import Actor
from tests.support.ledger import RUN
from tests.support.supervising import PLAN, FakeLauncher, finish_run, make


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "POLL_S", 0.0)


def newest_replica(launcher: FakeLauncher) -> Actor:
    return max((a for a in launcher.actors.values() if a.role == "replica"), key=lambda actor: actor.attempt)


def die(launcher: FakeLauncher, key: str) -> None:
    """The newest replica's engine dies of what it answers."""
    replica = newest_replica(launcher)
    assert launcher.ledger.lease_group(replica, 0, key)
    launcher.ledger.finish(replica, "died", "its process was ended by SIGSEGV")


def looks(*acts: Callable[[FakeLauncher], None], launcher: FakeLauncher) -> Callable[[object], None]:
    """Do one of these at each look of the supervisor, the last one again and again."""
    left = list(acts)
    return lambda progress: (left.pop(0) if len(left) > 1 else left[0])(launcher)


def test_a_question_that_ends_engines_costs_no_restart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, launcher = make(tmp_path, restarts=0)
    acts = [lambda of, key=key: die(of, key) for key in ("a", "b", "c", "d")]
    Supervisor(run, 0, PLAN, launcher, looks(*acts, finish_run, launcher=launcher)).run()
    assert launcher.started == ["train"] + ["rollout"] * 5
    assert run.ledger.progress(RUN).deadly_prompts == 1
    assert "is skipped from now on" in capsys.readouterr().out


def test_deaths_that_no_question_is_to_blame_for_are_paid_after_the_verdict(tmp_path: Path) -> None:
    run, launcher = make(tmp_path, restarts=1)

    def answer(of: FakeLauncher) -> None:
        replica = newest_replica(of)
        lease = of.ledger.lease_group(replica, 0, "answered")
        assert lease is not None
        of.ledger.complete_group(replica, lease.group_id, 0, 1.0, {"scored": 2}, 4)

    acts = [lambda of: die(of, "a"), lambda of: die(of, "b"), answer, lambda of: None]
    with pytest.raises(RunFailed, match=r"no question is to blame\. The budget run\.restarts is spent"):
        Supervisor(run, 0, PLAN, launcher, looks(*acts, launcher=launcher)).run()
    assert launcher.started == ["train"] + ["rollout"] * 3
