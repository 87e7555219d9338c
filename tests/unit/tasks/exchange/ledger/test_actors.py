"""The ledger's actors: who is replaced or declared dead writes nothing, and what it held is given out again."""

import pytest

from tasks.exchange.ledger import Actor, Fenced, Ledger
from tests.support.ledger import RUN, ask, lease, load, score, states


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
        lambda: ask(ledger, replica, 0),
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
        lambda: ledger.retire_versions(trainer, 1, []),
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
        ask(ledger, other, 0)


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
        ask(ledger, replica, 0)
