"""What becomes of groups that are given up: accused, tried alone and acquitted or quarantined; damaged and replaced."""

import pytest

from tasks.exchange.ledger import Actor, Evaluation, Fenced, Lease, Ledger
from tests.support.ledger import (
    RUN,
    B,
    a_process,
    ask,
    fence,
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

# Deaths of engines


def die(ledger: Ledger, replica: Actor) -> Actor:
    """The replica's engine ends by itself, and its next attempt begins."""
    ledger.finish(replica, "died", "SIGSEGV")
    return join(ledger, "replica", replica.slot)


def die_twice_with_two(ledger: Ledger, replica: Actor) -> Actor:
    for _ in range(2):
        assert [lease(ledger, replica).prompt_index for _ in range(2)] == [0, 1]
        replica = die(ledger, replica)
    return replica


def accused(ledger: Ledger) -> tuple[int, int, int]:
    progress = ledger.progress(RUN)
    return progress.accused_prompts, progress.deadly_prompts, progress.engine_deaths


def test_one_death_blames_nobody(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    leases = [lease(ledger, replica) for _ in range(2)]
    replica = die(ledger, replica)
    assert states(ledger) == [(0, "dropped", "engine_died"), (1, "dropped", "engine_died")]
    assert accused(ledger) == (2, 0, 1)
    again = [lease(ledger, replica) for _ in range(3)]
    assert [leased.prompt_index for leased in again] == [leased.prompt_index for leased in leases] + [2]
    for leased in again:
        score(ledger, replica, leased)
    assert accused(ledger) == (0, 0, 1)


def test_who_was_in_flight_at_two_deaths_is_tried_alone(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    replica = die_twice_with_two(ledger, replica)
    suspect = lease(ledger, replica)
    assert suspect.prompt_index == 0
    assert ask(ledger, replica, 0) is None
    score(ledger, replica, suspect)
    other = lease(ledger, replica)
    assert other.prompt_index == 1
    assert ask(ledger, replica, 0) is None
    score(ledger, replica, other)
    assert [lease(ledger, replica).prompt_index for _ in range(2)] == [2, 3]
    assert accused(ledger) == (0, 0, 2)


def test_a_suspect_waits_until_the_replica_holds_nothing(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    busy = join(ledger, "replica", 1)
    assert [lease(ledger, replica).prompt_index for _ in range(2)] == [0, 1]
    theirs = lease(ledger, busy)
    replica = die(ledger, replica)
    assert [lease(ledger, replica).prompt_index for _ in range(2)] == [0, 1]
    replica = die(ledger, replica)
    assert ask(ledger, busy, 0) is None  # nothing new beside what it holds, so that it is free soon
    score(ledger, busy, theirs)
    assert lease(ledger, busy).prompt_index == 0
    assert lease(ledger, replica).prompt_index == 1


def test_only_who_ends_two_engines_alone_is_quarantined(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    replica = die_twice_with_two(ledger, replica)
    for _ in range(2):
        assert lease(ledger, replica).prompt_index == 0
        assert ledger.progress(RUN).quarantined_prompts == 0
        replica = die(ledger, replica)
    assert accused(ledger) == (1, 1, 4)
    innocent = lease(ledger, replica)
    assert innocent.prompt_index == 1
    score(ledger, replica, innocent)
    assert accused(ledger) == (0, 1, 4)
    assert ledger.progress(RUN).quarantined_prompts == 1
    assert lease(ledger, replica).prompt_index == 2


def test_a_question_is_a_suspect_and_skipped_at_every_index(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    for _ in range(2):
        assert ledger.name_question(replica, lease(ledger, replica).group_id, "sums:1")
        replica = die(ledger, replica)
    other = join(ledger, "replica", 1)
    assert ledger.name_question(replica, lease(ledger, replica).group_id, "sums:1")
    again = lease(ledger, other)
    assert again.prompt_index == 1
    assert [ledger.name_question(other, again.group_id, "sums:1") for _ in range(2)] == [False, False]
    alone = lease(ledger, other)
    assert alone.prompt_index == 1
    assert ask(ledger, other, 0) is None
    assert ledger.name_question(other, alone.group_id, "sums:1")
    ledger.drop_group(other, alone.group_id, "aborted")
    replica = die(ledger, replica)
    assert lease(ledger, replica).prompt_index == 0
    replica = die(ledger, replica)
    assert not ledger.name_question(replica, lease(ledger, replica).group_id, "sums:1")
    assert ledger.progress(RUN).quarantined_prompts == 2
    assert accused(ledger) == (0, 1, 4)


@pytest.mark.parametrize("how", ["fenced", "failed", "done", "replaced", "taken over"])
def test_who_leaves_otherwise_accuses_nobody(ledger: Ledger, trainer: Actor, replica: Actor, how: str) -> None:
    lease(ledger, replica)
    match how:
        case "fenced":
            fence(ledger, replica)
            with pytest.raises(Fenced):
                ledger.finish(replica, "died")
        case "replaced":
            join(ledger, "replica")
            with pytest.raises(Fenced):
                ledger.finish(replica, "died")
        case "taken over":
            serial = next(row.serial for row in ledger.actors(RUN) if row.role == "supervisor")
            ledger.take_over(RUN, a_process(), "flow-2", seen=(1, serial))
            with pytest.raises(Fenced):
                ledger.finish(replica, "died")
        case _:
            ledger.finish(replica, how)
            ledger.finish(replica, "died")  # the first word counts
    assert accused(ledger) == (0, 0, 0)
    assert [row[1:] for row in states(ledger)] == [("dropped", "lease_lost")]


def test_what_dies_while_it_starts_has_failed(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    beaten = join(ledger, "replica", 1)
    ledger.heartbeat(beaten)
    for actor in (replica, beaten):
        ledger.finish(actor, "died", "SIGSEGV")
    assert [row.state for row in ledger.actors(RUN) if row.role == "replica"] == ["failed", "died"]


def test_a_death_beside_an_evaluation_accuses_that_and_no_prompt(
    ledger: Ledger, trainer: Actor, replica: Actor
) -> None:
    lease(ledger, replica)
    ledger.request_evaluation(supervisor_of(ledger), "before", 0)
    assert ledger.claim_evaluation(replica, 0)
    ledger.finish(replica, "died", "SIGSEGV")
    assert accused(ledger) == (1, 0, 1)
    assert states(ledger) == [(0, "dropped", "lease_lost")]


def test_a_question_of_an_evaluation_that_ends_two_engines_alone_is_given_up(
    ledger: Ledger, trainer: Actor, replica: Actor
) -> None:
    ledger.request_evaluation(supervisor_of(ledger), "before", 0)
    for is_careful in (False, False, True, True):
        request = ledger.claim_evaluation(replica, 0)
        assert request == Evaluation("before", 0, is_careful)
        if is_careful:
            for key in ("good", "bad"):
                ledger.try_question(replica, "before", key)
        replica = die(ledger, replica)
    assert accused(ledger) == (1, 1, 4)
    assert ledger.claim_evaluation(replica, 0) == Evaluation("before", 0, True, frozenset({"bad"}))
    ledger.record_evaluation(replica, "before", "{}")
    assert accused(ledger) == (0, 1, 4)
    ledger.request_evaluation(supervisor_of(ledger), "after", 0)
    assert ledger.claim_evaluation(replica, 0) == Evaluation("after", 0, False, frozenset({"bad"}))


# Damaged payloads


def test_a_step_with_damaged_groups_is_decided_anew(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    for _ in range(4):
        score(ledger, replica, lease(ledger, replica))
    before = [row.group_id for row in take(ledger, trainer, 0)]
    rows = ledger.drop_damaged(trainer, 0, before[:1])
    assert rows is not None
    after = [row.group_id for row in rows]
    assert len(after) == B
    assert before[0] not in after
    assert ledger.drop_damaged(trainer, 0, before[:1]) == rows
    assert take(ledger, trainer, 0) == rows
    assert states(ledger)[0] == (0, "dropped", "damaged")
    progress = ledger.progress(RUN)
    assert (progress.dropped, progress.consumed, progress.response_tokens) == ({"damaged": 1}, B, 12 * B)
    assert lease(ledger, replica).prompt_index == 0  # its question goes out again
    assert progress.quarantined_prompts == 0


def test_a_step_whose_groups_are_all_damaged_waits_for_others(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    for _ in range(2):
        score(ledger, replica, lease(ledger, replica))
    damaged = [row.group_id for row in take(ledger, trainer, 0)]
    for _ in range(2):
        assert ledger.drop_damaged(trainer, 0, damaged) is None
    assert ledger.take_groups(trainer, 0) is None
    assert ledger.progress(RUN).consumed == 0
    for _ in range(2):
        score(ledger, replica, lease(ledger, replica))
    rows = take(ledger, trainer, 0)
    assert [row.prompt_index for row in rows] == [0, 1]
    assert ledger.drop_damaged(trainer, 0, damaged) == rows


def test_what_a_resume_takes_back_may_be_damaged(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    run_two_steps(ledger, trainer, replica)
    go_back(ledger, 1)
    trainer = join(ledger, "trainer")
    ledger.record_version(trainer, 1, "path")
    rows = take(ledger, trainer, 1)
    assert ledger.drop_damaged(trainer, 1, [rows[0].group_id]) is None
    load(ledger, replica, (1, 1))
    again: Lease = lease(ledger, replica, 1)
    assert again.prompt_index == rows[0].prompt_index
    score(ledger, replica, again)
    assert {row.group_id for row in take(ledger, trainer, 1)} == {rows[1].group_id, again.group_id}


def test_only_the_last_step_is_decided_anew(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    run_two_steps(ledger, trainer, replica)
    first = [row.group_id for row in take(ledger, trainer, 0)]
    with pytest.raises(ValueError, match="step 0 of run run is not the last one"):
        ledger.drop_damaged(trainer, 0, first)
    go_back(ledger, 2)
    with pytest.raises(Fenced):
        ledger.drop_damaged(trainer, 1, [1])
