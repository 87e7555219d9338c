"""The ledger, one transition at a time: admission, consumption, drops, fencing, resume, weights, reports."""

import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import insert, select, update
from sqlalchemy.exc import IntegrityError

from planners.errors import UserError
from tasks.exchange.database import now_s
from tasks.exchange.ledger import Actor, Fenced, GroupRow, Lease, Ledger
from tasks.exchange.schema import groups, runs, schema_info

RUN = "run"
B, ETA, STEPS = 2, 1, 3


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    opened.create_run(RUN, prompts_per_step=B, max_staleness=ETA, steps=STEPS, max_attempts_per_prompt=2)
    yield opened
    opened.close()


@pytest.fixture
def trainer(ledger: Ledger) -> Actor:
    actor = ledger.register(RUN, "trainer", 0, pid=1, machine="here")
    ledger.record_version(actor, 0, "path-0")
    return actor


@pytest.fixture
def replica(ledger: Ledger) -> Actor:
    return ledger.register(RUN, "replica", 0, pid=2, machine="here")


def load(ledger: Ledger, replica: Actor, version: tuple[int, int]) -> None:
    assert ledger.claim_version(replica, *version)
    ledger.set_loaded(replica, *version)


def lease(ledger: Ledger, replica: Actor, version: int = 0) -> Lease:
    leased = ledger.lease_group(replica, version)
    assert leased is not None
    return leased


def score(ledger: Ledger, replica: Actor, leased: Lease, oldest: int | None = None) -> bool:
    version = leased.version if oldest is None else oldest
    return ledger.complete_group(replica, leased.group_id, version, 0.5, {"scored": 3, "timeout": 1}, 12)


def take(ledger: Ledger, trainer: Actor, step: int) -> list[GroupRow]:
    rows = ledger.take_groups(trainer, step)
    assert rows is not None
    return rows


def states(ledger: Ledger) -> list[tuple[int, str, str | None]]:
    return [(row.prompt_index, row.state, row.drop_reason) for row in ledger.groups(RUN)]


# Admission


def test_the_gate_shuts_at_the_bound_and_opens_with_a_newer_version(
    ledger: Ledger, trainer: Actor, replica: Actor
) -> None:
    assert [lease(ledger, replica).prompt_index for _ in range(B * (ETA + 1))] == [0, 1, 2, 3]
    assert ledger.lease_group(replica, 0) is None
    ledger.record_version(trainer, 1, "path-1")
    assert ledger.lease_group(replica, 0) is None  # published, but not loaded here
    load(ledger, replica, (0, 1))
    assert [lease(ledger, replica, 1).version for _ in range(B)] == [1, 1]
    assert ledger.lease_group(replica, 1) is None  # all groups of the run are out
    load(ledger, replica, (0, 1))
    assert ledger.lease_group(replica, 1) is None


def test_a_version_that_was_not_reported_opens_nothing(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    for _ in range(B * (ETA + 1)):
        lease(ledger, replica)
    assert ledger.lease_group(replica, 5) is None


def test_nothing_is_leased_unless_the_run_is_running(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    ledger.set_run_state(RUN, "cancelled")
    assert ledger.lease_group(replica, 0) is None
    ledger.reopen_run(RUN, "flow-2")
    assert ledger.lease_group(replica, 0) is not None
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


# Fencing


def test_a_replaced_replica_can_write_nothing_and_its_prompts_are_leased_again(
    ledger: Ledger, trainer: Actor, replica: Actor
) -> None:
    scored, leased = lease(ledger, replica), lease(ledger, replica)
    score(ledger, replica, scored)
    load(ledger, replica, (0, 0))
    successor = ledger.register(RUN, "replica", 0, pid=3, machine="here")
    assert successor.attempt == 2
    assert states(ledger) == [(0, "scored", None), (1, "dropped", "lease_lost")]
    assert ledger.claimed_versions(RUN) == set()
    assert lease(ledger, successor).prompt_index == leased.prompt_index
    for write in (
        lambda: ledger.heartbeat(replica),
        lambda: ledger.finish(replica, "done"),
        lambda: ledger.lease_group(replica, 0),
        lambda: score(ledger, replica, leased),
        lambda: ledger.drop_group(replica, leased.group_id, "aborted"),
        lambda: ledger.claim_version(replica, 0, 0),
        lambda: ledger.set_loaded(replica, 0, 0),
        lambda: ledger.claim_evaluation(replica, 0),
        lambda: ledger.record_evaluation(replica, "before", "{}"),
        lambda: ledger.record_span(replica, "busy", 1.0),
    ):
        with pytest.raises(Fenced, match="replaced by attempt 2"):
            write()


def test_a_replaced_trainer_can_neither_publish_nor_consume(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    for _ in range(2):
        score(ledger, replica, lease(ledger, replica))
    ledger.register(RUN, "trainer", 0, pid=3, machine="here")
    for write in (
        lambda: ledger.take_groups(trainer, 0),
        lambda: ledger.record_version(trainer, 1, "path-1"),
        lambda: ledger.retire_versions(trainer, 1),
        lambda: ledger.record_step(trainer, 0, "{}"),
        lambda: ledger.resume_from(RUN, 0, trainer),
    ):
        with pytest.raises(Fenced):
            write()
    assert ledger.latest_version(RUN) == (0, 0)
    assert ledger.progress(RUN).consumed == 0


def test_a_replica_declared_dead_is_fenced_at_once(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    lease(ledger, replica)
    ledger.fence(RUN, "replica", 0)
    ledger.fence(RUN, "replica", 0)
    assert states(ledger) == [(0, "dropped", "lease_lost")]
    with pytest.raises(Fenced, match="declared dead"):
        ledger.heartbeat(replica)
    assert [(row.role, row.attempt, row.state) for row in ledger.actors(RUN)] == [
        ("replica", 1, "fenced"),
        ("trainer", 1, "starting"),
    ]


def test_slots_do_not_fence_each_other(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    leased = lease(ledger, replica)
    other = ledger.register(RUN, "replica", 1, pid=3, machine="there")
    ledger.fence(RUN, "replica", 1)
    assert score(ledger, replica, leased)
    with pytest.raises(Fenced):
        ledger.lease_group(other, 0)


def test_a_heartbeat_renews_and_the_end_is_final(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    lease(ledger, replica)
    ledger.heartbeat(replica, "running", "generating")
    row = ledger.actors(RUN)[0]
    assert (row.state, row.message, row.pid, row.machine) == ("running", "generating", 2, "here")
    assert 0 <= row.silent_s < 60
    ledger.finish(replica, "done", "left")
    ledger.finish(replica, "failed", "too late")
    ledger.heartbeat(replica, "running", "too late")
    row = ledger.actors(RUN)[0]
    assert (row.state, row.message) == ("done", "left")
    assert states(ledger) == [(0, "dropped", "lease_lost")]
    ledger.record_span(replica, "busy", 1.0)  # the last one is written after the work
    with pytest.raises(Fenced, match="has ended as done"):
        ledger.lease_group(replica, 0)


# Resume


def run_two_steps(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    """Consume groups 1, 2 at step 0 and 3, 4 at step 1; the replica holds versions up to 2, with 5, 6 out."""
    for step in (0, 1):
        for leased in [lease(ledger, replica, step) for _ in range(2)]:
            score(ledger, replica, leased)
        take(ledger, trainer, step)
        ledger.record_step(trainer, step, "{}")
        ledger.record_version(trainer, step + 1, f"path-{step + 1}")
        load(ledger, replica, (0, step + 1))
    score(ledger, replica, lease(ledger, replica, 2))
    lease(ledger, replica, 2)


def test_resume_takes_back_what_came_after_the_checkpoint(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    run_two_steps(ledger, trainer, replica)
    assert ledger.resume_from(RUN, 1, trainer) == 1
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
    assert ledger.lease_group(replica, 2) is None  # its policy is no more
    ledger.record_version(trainer, 1, "path")
    assert ledger.latest_version(RUN) == (1, 1)
    load(ledger, replica, (1, 1))
    assert [lease(ledger, replica, 1).prompt_index for _ in range(2)] == [4, 5]
    assert {row.group_id for row in take(ledger, trainer, 1)} == {3, 4}


def test_resume_from_the_newest_checkpoint_loses_nothing(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    run_two_steps(ledger, trainer, replica)
    before = states(ledger)
    ledger.resume_from(RUN, 2)
    assert states(ledger) == before


def test_a_step_whose_trainer_died_before_reporting_it_is_finished_by_the_resume(
    ledger: Ledger, trainer: Actor, replica: Actor
) -> None:
    for leased in [lease(ledger, replica) for _ in range(B)]:
        score(ledger, replica, leased)
    take(ledger, trainer, 0)
    ledger.record_version(trainer, 1, "path-1")  # the checkpoint of step 1 is on the disk too
    ledger.resume_from(RUN, 1)
    assert [(row.step, row.metrics) for row in ledger.steps(RUN)] == [(0, {})]
    assert ledger.progress(RUN).step == 1
    ledger.resume_from(RUN, 0)
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
    ledger.resume_from(RUN, 0)
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
    ledger.resume_from(RUN, 0)
    assert states(ledger)[:2] == [(0, "scored", None), (1, "dropped", "abandoned")]


def test_a_resume_fences_the_trainer_of_the_old_lineage(ledger: Ledger, trainer: Actor) -> None:
    supervisor = ledger.register(RUN, "supervisor", 0, pid=3, machine="here")
    assert ledger.lineage_of(trainer) == 0
    ledger.resume_from(RUN, 0, supervisor)
    for write in (
        lambda: ledger.lineage_of(trainer),
        lambda: ledger.record_version(trainer, 0, "path"),
        lambda: ledger.record_step(trainer, 0, "{}"),
    ):
        with pytest.raises(Fenced, match="declared dead"):
            write()
    ledger.heartbeat(supervisor)
    assert ledger.lineage_of(ledger.register(RUN, "trainer", 0, pid=4, machine="here")) == 1


def test_a_checkpoint_of_another_run_is_refused(ledger: Ledger, trainer: Actor) -> None:
    with pytest.raises(UserError, match="checkpoint is of step 5, but the ledger of run run knows 0 steps"):
        ledger.resume_from(RUN, 5)
    run = ledger.find_run(run_id=RUN)
    assert run is not None
    assert run.lineage == 0


# Weights


def test_a_claimed_version_is_not_retired_and_a_retired_one_not_claimed(
    ledger: Ledger, trainer: Actor, replica: Actor
) -> None:
    assert ledger.claim_version(replica, 0, 0)
    for number in (1, 2, 3):
        ledger.record_version(trainer, number, f"path-{number}")
    assert ledger.retire_versions(trainer, keep_newest=1) == {(0, 1), (0, 2)}
    assert not ledger.claim_version(replica, 0, 2)
    load(ledger, replica, (0, 3))
    assert ledger.claimed_versions(RUN) == {(0, 3)}
    assert ledger.retire_versions(trainer, keep_newest=1) == {(0, 0), (0, 1), (0, 2)}
    assert [row.loaded_version for row in ledger.actors(RUN)] == [(0, 3), None]


def test_an_abandoned_version_goes_when_its_last_reader_has_left(
    ledger: Ledger, trainer: Actor, replica: Actor
) -> None:
    run_two_steps(ledger, trainer, replica)
    ledger.resume_from(RUN, 1, trainer)
    assert ledger.retire_versions(trainer, keep_newest=2) == set()
    ledger.fence(RUN, "replica", 0)
    assert ledger.retire_versions(trainer, keep_newest=2) == {(0, 2)}


def test_versions_are_recorded_once(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    ledger.record_version(trainer, 0, "another path")
    assert ledger.latest_version(RUN) == (0, 0)
    assert not ledger.claim_version(replica, 0, 1)
    with pytest.raises(ValueError, match="never recorded"):
        ledger.set_loaded(replica, 0, 1)


# Reports


def test_progress_is_derived_from_the_rows(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    empty = ledger.progress(RUN)
    assert (empty.step, empty.consumed, empty.max_staleness_seen, empty.reward_mean) == (0, 0, 0, None)
    run_two_steps(ledger, trainer, replica)
    progress = ledger.progress(RUN)
    assert (progress.step, progress.steps, progress.consumed) == (2, STEPS, 4)
    assert progress.groups == {"leased": 1, "scored": 1, "consumed": 4, "dropped": 0}
    assert progress.outcomes == {"scored": 15, "timeout": 5, "error": 0, "truncated": 0}
    assert (progress.response_tokens, progress.latest_version) == (48, (0, 2))
    assert progress.reward_mean == pytest.approx(0.5)


def test_an_evaluation_is_claimed_by_who_has_the_version(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    ledger.request_evaluation(RUN, "before", 0)
    ledger.request_evaluation(RUN, "after", 1)
    assert ledger.claim_evaluation(replica, 1) is None
    claimed = ledger.claim_evaluation(replica, 0)
    assert claimed is not None
    assert claimed.purpose == "before"
    other = ledger.register(RUN, "replica", 1, pid=3, machine="here")
    assert ledger.claim_evaluation(other, 0) is None
    ledger.fence(RUN, "replica", 0)
    assert ledger.claim_evaluation(other, 0) == claimed
    ledger.record_evaluation(other, "before", '{"accuracy": 0.5}')
    ledger.record_evaluation(other, "before", '{"accuracy": 0.9}')
    ledger.request_evaluation(RUN, "before", 0)
    rows = ledger.evaluations(RUN)
    assert (rows["before"].state, rows["before"].result) == ("done", {"accuracy": 0.5})
    assert (rows["after"].state, rows["after"].result) == ("requested", None)
    ledger.request_evaluation(RUN, "before", 2)
    assert ledger.evaluations(RUN)["before"].result is None


def test_spans_and_steps_are_on_the_ledgers_clock(ledger: Ledger, trainer: Actor) -> None:
    ledger.record_span(trainer, "busy", 2.0, end_ago_s=5.0)
    ledger.record_step(trainer, 0, '{"reward": 0.25}')
    ledger.record_step(trainer, 0, '{"reward": 0.75}')
    (span,) = ledger.spans(RUN)
    (step,) = ledger.steps(RUN)
    assert span.end_s - span.start_s == pytest.approx(2.0, abs=1e-3)
    assert step.end_s - span.end_s >= 5.0 - 1e-3
    assert step.metrics == {"reward": 0.25}
    with ledger.read() as connection:
        now = connection.scalar(select(now_s()))
    assert math.isclose(now or 0, step.end_s, abs_tol=60)


def test_disposable_payloads_wait_for_a_checkpoint(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    run_two_steps(ledger, trainer, replica)
    ledger.drop_group(replica, 6, "aborted")
    assert ledger.disposable_groups(RUN, keep_steps=1, checkpoint_step=0) == {6}
    assert ledger.disposable_groups(RUN, keep_steps=1, checkpoint_step=2) == {1, 2, 6}
    assert ledger.disposable_groups(RUN, keep_steps=2, checkpoint_step=2) == {6}


# Runs, machines and the database itself


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


def test_an_unknown_run_is_a_clear_error(ledger: Ledger) -> None:
    with pytest.raises(UserError, match="knows no run missing"):
        ledger.register("missing", "trainer", 0, pid=1, machine="here")


def test_plan_epochs_and_machines(ledger: Ledger) -> None:
    assert [ledger.add_plan_epoch(RUN, plan) for plan in ("a", "a", "b", "a")] == [0, 0, 1, 2]
    assert [(row.epoch, row.plan_json) for row in ledger.plan_epochs(RUN)] == [(0, "a"), (1, "b"), (2, "a")]
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


def test_tables_of_another_version_are_refused(ledger: Ledger, tmp_path: Path) -> None:
    with ledger.write(RUN) as connection:
        connection.execute(update(schema_info).values(version=99))
    with pytest.raises(UserError, match="tables of version 99"):
        Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")


def test_commits_survive_a_power_cut(ledger: Ledger, tmp_path: Path) -> None:
    with ledger.write(RUN) as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL
    with sqlite3.connect(tmp_path / "ledger.db") as plain:
        assert plain.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    plain.close()


def test_a_failed_transaction_leaves_nothing(ledger: Ledger) -> None:
    def write_and_fail() -> None:
        with ledger.write(RUN) as connection:
            connection.execute(update(runs).values(state="failed"))
            assert ledger.list_runs()[0].state == "running"  # readers do not wait for the writer
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_and_fail()
    assert ledger.list_runs()[0].state == "running"
