"""Going back to a checkpoint: what came after it is taken back, and nothing else."""

import pytest

from planners.errors import UserError
from tasks.exchange.ledger import Actor, Fenced, Ledger
from tests.support.ledger import (
    RUN,
    B,
    a_process,
    ask,
    go_back,
    join,
    lease,
    load,
    run_two_steps,
    score,
    states,
    supervisor_of,
    take,
)


def test_resume_takes_back_what_came_after_the_checkpoint(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    run_two_steps(ledger, trainer, replica)
    assert go_back(ledger, 1) == 1
    trainer = join(ledger, "trainer")
    assert states(ledger) == [
        (0, "consumed", None),
        (1, "consumed", None),
        (2, "scored", None),
        (3, "scored", None),
        (4, "dropped", "abandoned"),
        (5, "dropped", "abandoned"),
    ]
    assert ledger.latest_version(RUN) == (0, 1)
    assert [row.step for row in ledger.steps(RUN)] == [0]
    assert ask(ledger, replica, 2) is None  # its policy is no more
    ledger.record_version(trainer, 1, "path")
    assert ledger.latest_version(RUN) == (1, 1)
    load(ledger, replica, (1, 1))
    assert [lease(ledger, replica, 1).prompt_index for _ in range(2)] == [4, 5]
    assert {row.group_id for row in take(ledger, trainer, 1)} == {3, 4}


def test_resume_from_the_newest_checkpoint_loses_nothing(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    run_two_steps(ledger, trainer, replica)
    before = states(ledger)
    go_back(ledger, 2)
    assert states(ledger) == before


def test_a_step_whose_trainer_died_before_reporting_it_is_finished_by_the_resume(
    ledger: Ledger, trainer: Actor, replica: Actor
) -> None:
    for leased in [lease(ledger, replica) for _ in range(B)]:
        score(ledger, replica, leased)
    take(ledger, trainer, 0)
    ledger.record_version(trainer, 1, "path-1")  # the checkpoint of step 1 is on the disk too
    go_back(ledger, 1)
    assert [(row.step, row.metrics) for row in ledger.steps(RUN)] == [(0, {})]
    assert ledger.progress(RUN).step == 1
    go_back(ledger, 0)
    assert ledger.steps(RUN) == []


def test_a_leased_group_that_may_have_tokens_of_an_abandoned_version_is_dropped(
    ledger: Ledger, trainer: Actor, replica: Actor
) -> None:
    leases = [lease(ledger, replica) for _ in range(3)]
    for leased in leases[:2]:
        score(ledger, replica, leased)
    take(ledger, trainer, 0)
    ledger.record_version(trainer, 1, "path-1")
    assert ledger.claim_version(replica, 0, 1)  # the engine may have gone on under version 1 since
    go_back(ledger, 0)
    assert states(ledger)[2] == (2, "dropped", "abandoned")
    assert score(ledger, replica, leases[2]) is False


def test_a_scored_group_is_abandoned_by_its_newest_token(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    pure, mixed = lease(ledger, replica), lease(ledger, replica)
    for leased in (lease(ledger, replica), lease(ledger, replica)):
        score(ledger, replica, leased)
    take(ledger, trainer, 0)
    ledger.record_version(trainer, 1, "path-1")
    load(ledger, replica, (0, 1))
    ledger.complete_group(replica, pure.group_id, 0, 0.5, {}, 1, newest_version=0)
    ledger.complete_group(replica, mixed.group_id, 0, 0.5, {}, 1, newest_version=1)
    go_back(ledger, 0)
    assert states(ledger)[:2] == [(0, "scored", None), (1, "dropped", "abandoned")]


def test_a_resume_fences_the_trainer_of_the_old_lineage(ledger: Ledger, trainer: Actor) -> None:
    supervisor = supervisor_of(ledger)
    assert ledger.lineage_of(trainer) == 0
    go_back(ledger, 0)
    for write in (
        lambda: ledger.lineage_of(trainer),
        lambda: ledger.record_version(trainer, 0, "path"),
        lambda: ledger.record_step(trainer, 0, "{}"),
    ):
        with pytest.raises(Fenced, match="declared dead"):
            write()
    ledger.heartbeat(supervisor)
    assert ledger.lineage_of(join(ledger, "trainer")) == 1


def test_going_back_is_repeatable_by_its_key(ledger: Ledger, trainer: Actor) -> None:
    """An answer that was lost is given again; the same key from another supervisor is another word."""
    supervisor = supervisor_of(ledger)
    assert [ledger.resume_from(supervisor, 0, "once") for _ in range(2)] == [1, 1]
    current = join(ledger, "trainer")
    assert ledger.resume_from(supervisor, 0, "once") == 1
    assert ledger.lineage_of(current) == 1
    assert ledger.resume_from(supervisor, 0, "twice") == 2
    seen = next((row.attempt, row.serial) for row in ledger.actors(RUN) if row.role == "supervisor")
    successor = ledger.take_over(RUN, a_process(), "flow-2", seen)
    assert ledger.resume_from(successor, 0, "twice") == 3
    with pytest.raises(Fenced):
        ledger.resume_from(supervisor, 0, "twice")
    with pytest.raises(ValueError, match="decides nothing"):
        ledger.resume_from(join(ledger, "trainer"), 0, "mine")


def test_a_checkpoint_of_another_run_is_refused(ledger: Ledger, trainer: Actor) -> None:
    with pytest.raises(UserError, match="checkpoint is of step 5, but the ledger of run run knows 0 steps"):
        go_back(ledger, 5)
    run = ledger.find_run(run_id=RUN)
    assert run is not None
    assert run.lineage == 0


def test_a_checkpoint_counts_only_in_the_history_that_survives(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    found = [(0, 1), (0, 2), (1, 2)]
    run_two_steps(ledger, trainer, replica)
    assert ledger.proven_checkpoints(RUN, found) == [(0, 1), (0, 2)]
    go_back(ledger, 1)
    assert ledger.proven_checkpoints(RUN, found) == [(0, 1)]
    trainer = join(ledger, "trainer")
    take(ledger, trainer, 1)
    assert ledger.proven_checkpoints(RUN, found) == [(0, 1), (1, 2)]  # written, and its step not reported yet
    ledger.record_step(trainer, 1, "{}")
    assert ledger.proven_checkpoints(RUN, found) == [(0, 1), (1, 2)]
    go_back(ledger, 2)
    assert ledger.proven_checkpoints(RUN, found) == [(0, 1), (1, 2)]
    go_back(ledger, 0)
    assert ledger.proven_checkpoints(RUN, found) == []
