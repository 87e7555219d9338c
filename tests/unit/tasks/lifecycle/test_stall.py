"""When a run stands still: not while actors start, nor while an evaluation gets on, however long that takes."""

import pytest

from tasks.exchange.ledger import Actor, Ledger
from tasks.lifecycle.stall import Stall
from tests.support.ledger import RUN, join, supervisor_of


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stall(ledger: Ledger, clock: Clock) -> Stall:
    return Stall(ledger, RUN, clock)


@pytest.fixture
def replica_at_work(ledger: Ledger) -> Actor:
    """A replica, with a trainer, both past their start."""
    trainer, replica = join(ledger, "trainer"), join(ledger, "replica")
    for actor in (trainer, replica):
        ledger.heartbeat(actor)
    return replica


def pass_s(stall: Stall, clock: Clock, seconds: int, step: int = 0) -> float:
    """Let so many seconds pass, with a look every two; returns what the last one says."""
    for _ in range(seconds // 2):
        clock.now_s += 2.0
        stall.look(step)
    return stall.look(step)


def test_a_run_stands_still_until_a_step_is_finished(stall: Stall, clock: Clock, replica_at_work: Actor) -> None:
    stall.look()
    assert pass_s(stall, clock, 100) == 100.0
    assert stall.look(step=1) == 100.0, "it reads again only after a while"
    assert pass_s(stall, clock, 2, step=1) == 0.0
    assert pass_s(stall, clock, 10, step=1) == 10.0


def test_work_without_a_step_is_no_move(stall: Stall, clock: Clock, ledger: Ledger, replica_at_work: Actor) -> None:
    """Groups that are answered and dropped, again and again."""
    stall.look()
    for answers in range(50):
        ledger.heartbeat(replica_at_work, work=answers)
        pass_s(stall, clock, 2)
    assert pass_s(stall, clock, 2) == 102.0


def test_an_evaluation_moves_the_run_for_as_long_as_it_gets_on(
    stall: Stall, clock: Clock, ledger: Ledger, replica_at_work: Actor
) -> None:
    ledger.request_evaluation(supervisor_of(ledger), "before", 0)
    for answers in range(1, 50):
        ledger.heartbeat(replica_at_work, work=answers)
        assert pass_s(stall, clock, 2) == 0.0
    assert pass_s(stall, clock, 30) == 30.0, "one that hangs is no move"
    assert ledger.claim_evaluation(replica_at_work, 0) is not None
    ledger.record_evaluation(replica_at_work, "before", "{}")
    assert pass_s(stall, clock, 2) == 0.0, "its end begins a full deadline"
    assert pass_s(stall, clock, 30) == 30.0


def test_who_starts_has_a_deadline_of_his_own(
    stall: Stall, clock: Clock, ledger: Ledger, replica_at_work: Actor
) -> None:
    """Also one that is started again, or in a run that is resumed."""
    stall.look()
    ledger.finish(replica_at_work, "failed")
    again = join(ledger, "replica")
    assert pass_s(stall, clock, 100) == 0.0
    ledger.heartbeat(again)
    assert pass_s(stall, clock, 10) == 10.0


def test_a_run_without_replicas_yet_is_starting(stall: Stall, clock: Clock, ledger: Ledger) -> None:
    ledger.heartbeat(join(ledger, "trainer"))
    assert pass_s(stall, clock, 100) == 0.0


def test_a_gap_of_the_lookers_own_begins_a_full_deadline(stall: Stall, clock: Clock, replica_at_work: Actor) -> None:
    """It was stopped, or the ledger was away."""
    stall.look()
    pass_s(stall, clock, 50)
    clock.now_s += 1000.0
    assert stall.look() == 0.0
