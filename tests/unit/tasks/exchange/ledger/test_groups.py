"""The ledger's groups: admission, drops, consumption."""

import pytest
from sqlalchemy import insert, update
from sqlalchemy.exc import IntegrityError

from tasks.exchange.ledger import Actor, Fenced, Ledger
from tasks.exchange.ledger.schema import groups
from tests.support.ledger import (
    ETA,
    RUN,
    B,
    a_process,
    ask,
    fence,
    join,
    lease,
    load,
    score,
    states,
    supervisor_of,
    take,
)

# Admission


def test_the_gate_shuts_at_the_bound_and_opens_with_a_newer_version(
    ledger: Ledger, trainer: Actor, replica: Actor
) -> None:
    assert [lease(ledger, replica).prompt_index for _ in range(B * (ETA + 1))] == [0, 1, 2, 3]
    assert ask(ledger, replica, 0) is None
    ledger.record_version(trainer, 1, "path-1")
    assert ask(ledger, replica, 0) is None  # published, but not loaded here
    load(ledger, replica, (0, 1))
    assert [lease(ledger, replica, 1).version for _ in range(B)] == [1, 1]
    assert ask(ledger, replica, 1) is None  # all groups of the run are out
    load(ledger, replica, (0, 1))
    assert ask(ledger, replica, 1) is None


def test_who_asks_again_and_again_does_not_wait_for_writers(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    while ask(ledger, replica, 0):
        pass
    with ledger.write(RUN):
        assert ask(ledger, replica, 0) is None
        assert ledger.take_groups(trainer, 0) is None
        assert ledger.claim_evaluation(replica, 0) is None
        assert ledger.latest_version(RUN) == (0, 0)
    load(ledger, replica, (0, 0))
    assert ask(ledger, replica, 0) is None
    ledger.record_version(trainer, 1, "path-1")
    load(ledger, replica, (0, 1))
    assert ask(ledger, replica, 1) is not None


def test_a_version_that_was_not_reported_opens_nothing(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    for _ in range(B * (ETA + 1)):
        lease(ledger, replica)
    assert ask(ledger, replica, 5) is None


def test_nothing_is_leased_unless_the_run_is_running(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    ledger.close_run(supervisor_of(ledger), "cancelled")
    assert ask(ledger, replica, 0) is None
    serial = next(row.serial for row in ledger.actors(RUN) if row.role == "supervisor")
    ledger.take_over(RUN, a_process(), "flow-2", seen=(1, serial))
    assert ask(ledger, join(ledger, "replica"), 0) is not None
    run = ledger.find_run(flow_run_id="flow-2")
    assert run is not None
    assert run.state == "running"


# Drops and quarantine


def test_a_dropped_prompt_is_leased_again_before_new_ones(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    first, second = lease(ledger, replica), lease(ledger, replica)
    ledger.drop_group(replica, second.group_id, "too_few_scored")
    ledger.drop_group(replica, first.group_id, "aborted")
    again = [lease(ledger, replica) for _ in range(3)]
    assert [leased.prompt_index for leased in again] == [0, 1, 2]
    assert len({leased.group_id for leased in [first, second, *again]}) == 5


def test_a_quarantined_question_is_skipped_at_every_index(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    for _ in range(2):
        failing = lease(ledger, replica)
        assert ledger.name_question(replica, failing.group_id, "sums:1")
        ledger.drop_group(replica, failing.group_id, "too_few_scored")
    again, other = lease(ledger, replica), lease(ledger, replica)
    assert [ledger.name_question(replica, again.group_id, "sums:1") for _ in range(2)] == [False, False]
    assert [ledger.name_question(replica, other.group_id, "sums:2") for _ in range(2)] == [True, True]
    assert ledger.progress(RUN).dropped == {"too_few_scored": 2, "quarantined": 1}
    assert ledger.progress(RUN).quarantined_prompts == 2
    assert lease(ledger, replica).prompt_index == 3  # its place is given out again, to another prompt


def test_only_the_holder_of_a_lease_names_its_question(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    leased = lease(ledger, replica)
    other = join(ledger, "replica", 1)
    with pytest.raises(ValueError, match="was never leased to replica 1"):
        ledger.name_question(other, leased.group_id, "sums:1")
    fence(ledger, replica)
    with pytest.raises(Fenced):
        ledger.name_question(replica, leased.group_id, "sums:1")


def test_a_prompt_that_keeps_failing_is_quarantined(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    for _ in range(2):
        ledger.drop_group(replica, lease(ledger, replica).group_id, "too_few_scored")
    assert lease(ledger, replica).prompt_index == 1
    progress = ledger.progress(RUN)
    assert (progress.quarantined_prompts, progress.dropped) == (1, {"too_few_scored": 2})


@pytest.mark.parametrize("reason", ["aborted", "stale", "abandoned", "lease_lost"])
def test_a_prompt_is_not_blamed_for_failures_around_it(
    ledger: Ledger, trainer: Actor, replica: Actor, reason: str
) -> None:
    for _ in range(5):
        leased = lease(ledger, replica)
        assert leased.prompt_index == 0
        ledger.drop_group(replica, leased.group_id, reason)
    assert ledger.progress(RUN).quarantined_prompts == 0


def test_a_dropped_group_stays_dropped(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    leased = lease(ledger, replica)
    ledger.drop_group(replica, leased.group_id, "aborted")
    assert score(ledger, replica, leased) is False
    ledger.drop_group(replica, leased.group_id, "too_few_scored")
    assert states(ledger) == [(0, "dropped", "aborted")]


def test_a_scored_group_is_not_dropped_by_its_replica(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    leased = lease(ledger, replica)
    assert score(ledger, replica, leased)
    assert score(ledger, replica, leased)
    ledger.drop_group(replica, leased.group_id, "aborted")
    assert states(ledger) == [(0, "scored", None)]


def test_impossible_claims_about_a_group_are_refused(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    leased = lease(ledger, replica)
    with pytest.raises(ValueError, match="versions 1 to 0"):
        score(ledger, replica, leased, oldest=1)
    with pytest.raises(ValueError, match="versions 0 to 7, not up to 0"):
        ledger.complete_group(replica, leased.group_id, 0, 0.5, {}, 1, newest_version=7)
    with pytest.raises(ValueError, match="never leased to replica 0"):
        ledger.complete_group(replica, 99, 0, 0.5, {}, 1)
    with pytest.raises(ValueError, match="outcome 'lost'"):
        ledger.complete_group(replica, leased.group_id, 0, 0.5, {"lost": 1}, 1)
    assert states(ledger) == [(0, "leased", None)]


# Consumption


def test_a_step_takes_a_full_batch_and_decides_once(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    leases = [lease(ledger, replica) for _ in range(4)]
    score(ledger, replica, leases[2])
    assert ledger.take_groups(trainer, 0) is None
    score(ledger, replica, leases[0])
    taken = take(ledger, trainer, 0)
    assert [(row.group_id, row.state, row.step) for row in taken] == [(1, "consumed", 0), (3, "consumed", 0)]
    score(ledger, replica, leases[1])
    score(ledger, replica, leases[3])
    assert take(ledger, trainer, 0) == taken
    assert {row.group_id for row in take(ledger, trainer, 1)} == {2, 4}


def test_a_step_waits_for_the_groups_that_must_come_first(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    leases = [lease(ledger, replica) for _ in range(4)]
    for leased in leases[:2]:
        score(ledger, replica, leased)
    take(ledger, trainer, 0)
    ledger.record_version(trainer, 1, "path-1")
    load(ledger, replica, (0, 1))
    for _ in range(2):
        score(ledger, replica, lease(ledger, replica, 1))
    assert ledger.take_groups(trainer, 1) is None  # two finished ones are there, but groups 3 and 4 would go stale
    for leased in leases[2:]:
        score(ledger, replica, leased)
    assert {row.group_id for row in take(ledger, trainer, 1)} == {3, 4}


def test_stale_groups_are_dropped_whole_and_their_prompts_leased_again(
    ledger: Ledger, trainer: Actor, replica: Actor
) -> None:
    for step in (0, 1):
        for leased in [lease(ledger, replica, step) for _ in range(2)]:
            score(ledger, replica, leased)
        take(ledger, trainer, step)
        ledger.record_version(trainer, step + 1, "path")
        load(ledger, replica, (0, step + 1))
    old, fresh = lease(ledger, replica, 2), lease(ledger, replica, 2)
    score(ledger, replica, fresh)
    score(ledger, replica, old, oldest=0)  # as an answer continued from a saved prefix would be
    assert ledger.take_groups(trainer, 2) is None
    assert ledger.progress(RUN).dropped == {"stale": 1}
    again = lease(ledger, replica, 2)
    assert again.prompt_index == old.prompt_index
    score(ledger, replica, again)
    assert {row.group_id for row in take(ledger, trainer, 2)} == {fresh.group_id, again.group_id}
    assert ledger.progress(RUN).max_staleness_seen == 0


def test_steps_are_taken_in_order(ledger: Ledger, trainer: Actor) -> None:
    with pytest.raises(ValueError, match="the next step is 0"):
        ledger.take_groups(trainer, 1)


def test_the_keys_forbid_a_second_use(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    leases = [lease(ledger, replica) for _ in range(3)]
    for leased in leases:
        score(ledger, replica, leased)
    take(ledger, trainer, 0)
    row = {"run_id": RUN, "lineage": 0, "role": "replica", "slot": 0, "attempt": 1, "version": 0, "leased_s": 0.0}
    with pytest.raises(IntegrityError), ledger.write(RUN) as connection:  # a second group of a prompt
        connection.execute(insert(groups).values(**row, group_id=50, prompt_index=0, state="leased"))
    third = update(groups).where(groups.c.group_id == leases[2].group_id)
    with pytest.raises(IntegrityError), ledger.write(RUN) as connection:  # a second group in a place of a batch
        connection.execute(third.values(state="consumed", step=0, place=0))
    with pytest.raises(IntegrityError), ledger.write(RUN) as connection:  # consumed, yet free to be taken again
        connection.execute(update(groups).where(groups.c.group_id == leases[0].group_id).values(state="scored"))
