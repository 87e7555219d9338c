"""What the ledger records of weights, evaluations, times and progress."""

import math

import pytest
from sqlalchemy import select

from tasks.exchange.ledger import Actor, Ledger
from tasks.exchange.ledger.database import now_s
from tests.support.ledger import (
    RUN,
    STEPS,
    B,
    fence,
    go_back,
    join,
    lease,
    load,
    run_two_steps,
    score,
    supervisor_of,
    take,
)

VERSIONS = [(0, number) for number in range(4)]
"""Those whose files are on storage."""

# Weights


def test_a_claimed_version_is_not_retired_and_a_retired_one_not_claimed(
    ledger: Ledger, trainer: Actor, replica: Actor
) -> None:
    assert ledger.claim_version(replica, 0, 0)
    for number in (1, 2, 3):
        ledger.record_version(trainer, number, f"path-{number}")
    assert ledger.retire_versions(trainer, 1, VERSIONS) == {(0, 1), (0, 2)}
    assert not ledger.claim_version(replica, 0, 2)
    load(ledger, replica, (0, 3))
    assert ledger.claimed_versions(RUN) == {(0, 3)}
    assert ledger.retire_versions(trainer, 1, VERSIONS) == {(0, 0), (0, 1), (0, 2)}
    assert [row.loaded_version for row in ledger.actors(RUN)] == [(0, 3), None, None]


def test_an_abandoned_version_goes_when_its_last_reader_has_left_and_one_never_recorded_at_once(
    ledger: Ledger, trainer: Actor, replica: Actor
) -> None:
    """Version 3 is on storage only: its publisher was killed before it could record it."""
    run_two_steps(ledger, trainer, replica)
    assert ledger.retire_versions(trainer, 3, VERSIONS) == set(), "in its own lineage it may still be recorded"
    go_back(ledger, 1)
    trainer = join(ledger, "trainer")
    assert ledger.retire_versions(trainer, 2, VERSIONS) == {(0, 3)}
    fence(ledger, replica)
    assert ledger.retire_versions(trainer, 2, VERSIONS) == {(0, 2), (0, 3)}


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


def test_the_largest_staleness_is_over_all_steps(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    for leased in [lease(ledger, replica) for _ in range(2 * B)]:
        score(ledger, replica, leased)
    seen = []
    for step in range(STEPS):
        ledger.record_version(trainer, step, "path")
        load(ledger, replica, (0, step))
        if step == 2:
            for leased in [lease(ledger, replica, 2) for _ in range(B)]:
                score(ledger, replica, leased)
        seen.append(max(step - row.version for row in take(ledger, trainer, step)))
        assert ledger.progress(RUN).max_staleness_seen == max(seen)
    assert seen == [0, 1, 0]


def test_an_evaluation_is_claimed_by_who_has_the_version(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    ledger.request_evaluation(supervisor_of(ledger), "before", 0)
    ledger.request_evaluation(supervisor_of(ledger), "after", 1)
    assert ledger.claim_evaluation(replica, 1) is None
    claimed = ledger.claim_evaluation(replica, 0)
    assert claimed is not None
    assert claimed.purpose == "before"
    other = join(ledger, "replica", 1)
    assert ledger.claim_evaluation(other, 0) is None
    fence(ledger, replica)
    assert ledger.claim_evaluation(other, 0) == claimed
    ledger.record_evaluation(other, "before", '{"accuracy": 0.5}')
    ledger.record_evaluation(other, "before", '{"accuracy": 0.9}')
    ledger.request_evaluation(supervisor_of(ledger), "before", 0)
    rows = ledger.evaluations(RUN)
    assert (rows["before"].state, rows["before"].result) == ("done", {"accuracy": 0.5})
    assert (rows["after"].state, rows["after"].result) == ("requested", None)
    ledger.request_evaluation(supervisor_of(ledger), "before", 2)
    assert ledger.evaluations(RUN)["before"].result is None


def test_spans_and_steps_are_on_the_ledgers_clock(ledger: Ledger, trainer: Actor) -> None:
    for seconds in (2.0, 3.0):
        ledger.record_span(trainer, "busy", "step 0", seconds, end_ago_s=5.0)
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
    assert ledger.disposable_groups(RUN, range(1, 9), keep_steps=1, checkpoint_step=0) == {6}
    assert ledger.disposable_groups(RUN, range(1, 9), keep_steps=1, checkpoint_step=2) == {1, 2, 6}
    assert ledger.disposable_groups(RUN, range(1, 9), keep_steps=2, checkpoint_step=2) == {6}
