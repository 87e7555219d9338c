"""The ledger's actors: who is replaced or declared dead writes nothing, and what it held is given out again."""

import pytest

from tasks.exchange.ledger import Actor, ActorRow, Fenced, Ledger
from tests.support.ledger import RUN, a_process, ask, assign, fence, join, lease, load, score, states, supervisor_of


def test_a_replaced_replica_can_write_nothing_and_its_prompts_are_leased_again(
    ledger: Ledger, trainer: Actor, replica: Actor
) -> None:
    scored, leased = lease(ledger, replica), lease(ledger, replica)
    score(ledger, replica, scored)
    load(ledger, replica, (0, 0))
    successor = join(ledger, "replica", pid=3)
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
        lambda: ledger.record_span(replica, "busy", "0", 1.0),
    ):
        with pytest.raises(Fenced, match="replaced by attempt 2"):
            write()


def test_a_replica_that_is_to_drain_begins_nothing_and_hands_over_what_it_has(
    ledger: Ledger, trainer: Actor, replica: Actor
) -> None:
    """And the stronger word stands: who is to leave is not told to drain afterwards."""
    begun, supervisor = lease(ledger, replica), supervisor_of(ledger)
    assert ledger.heartbeat(replica).wanted == "run"
    for _ in range(2):
        ledger.want(supervisor, replica, "drain")
    assert ledger.heartbeat(replica).wanted == "drain"
    assert ask(ledger, replica, 0) is None
    ledger.request_evaluation(supervisor, "before", 0)
    assert ledger.claim_evaluation(replica, 0) is None
    assert score(ledger, replica, begun)
    for wanted in ("leave", "drain"):
        ledger.want(supervisor, replica, wanted)
        assert ledger.heartbeat(replica).wanted == "leave"
    ledger.finish(replica, "done")
    ledger.want(supervisor, replica, "leave")
    (row,) = (row for row in ledger.actors(RUN) if row.role == "replica")
    assert (row.state, row.wanted) == ("done", "leave")
    assert ledger.heartbeat(join(ledger, "replica")).wanted == "run", "the next attempt is another matter"


def test_only_who_gave_an_attempt_out_says_what_it_should_do(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    supervisor = supervisor_of(ledger)
    for actor, wanted in ((replica, "run"), (replica, "stop"), (trainer, "drain"), (supervisor, "leave")):
        with pytest.raises(ValueError, match=r"cannot be told to|was not given out by"):
            ledger.want(supervisor, actor, wanted)
    with pytest.raises(ValueError, match="is no supervisor"):
        ledger.want(trainer, replica, "leave")
    ledger.want(supervisor, trainer, "leave")
    assert ledger.heartbeat(trainer).wanted == "leave"


def test_a_replaced_trainer_can_neither_publish_nor_consume(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    for _ in range(2):
        score(ledger, replica, lease(ledger, replica))
    join(ledger, "trainer", pid=3)
    for write in (
        lambda: ledger.take_groups(trainer, 0),
        lambda: ledger.record_version(trainer, 1, "path-1"),
        lambda: ledger.retire_versions(trainer, 1, []),
        lambda: ledger.record_step(trainer, 0, "{}"),
    ):
        with pytest.raises(Fenced):
            write()
    assert ledger.latest_version(RUN) == (0, 0)
    assert ledger.progress(RUN).consumed == 0


def test_a_replica_declared_dead_is_fenced_at_once(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    lease(ledger, replica)
    fence(ledger, replica)
    fence(ledger, replica)
    assert states(ledger) == [(0, "dropped", "lease_lost")]
    with pytest.raises(Fenced, match="declared dead"):
        ledger.heartbeat(replica)
    assert [(row.role, row.attempt, row.state) for row in ledger.actors(RUN)] == [
        ("replica", 1, "fenced"),
        ("supervisor", 1, "starting"),
        ("trainer", 1, "starting"),
    ]


def test_slots_do_not_fence_each_other(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    leased = lease(ledger, replica)
    other = join(ledger, "replica", 1, machine="there")
    fence(ledger, other)
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
    ledger.record_span(replica, "busy", "0", 1.0)  # the last one is written after the work
    with pytest.raises(Fenced, match="has ended as done"):
        ask(ledger, replica, 0)


def row_of(ledger: Ledger, actor: Actor) -> ActorRow:
    return next(row for row in ledger.actors(RUN) if (row.role, row.slot) == (actor.role, actor.slot))


def test_an_attempt_is_given_out_once_and_registered_once_per_process(ledger: Ledger) -> None:
    """Calls whose answer was lost are repeated; a process that comes late takes nobody's place."""
    supervisor = supervisor_of(ledger)
    for _ in range(2):
        actor = ledger.assign(supervisor, "trainer", 0, after=0, epoch=3, machines=["one", "two"])
        assert actor == Actor(RUN, "trainer", 0, 1)
    row = row_of(ledger, actor)
    assert (row.state, row.epoch, row.machines, row.assigned_by, row.pid) == ("assigned", 3, ("one", "two"), 1, None)
    with pytest.raises(Fenced, match="has not registered"):
        ledger.heartbeat(actor)
    with pytest.raises(Fenced, match="has not registered"):
        ledger.take_groups(actor, 0)
    process = a_process(pid=5, machine="one")
    for _ in range(2):
        ledger.register(actor, process)
    with pytest.raises(Fenced, match="is another process already"):
        ledger.register(actor, a_process())
    row = row_of(ledger, actor)
    assert (row.state, row.pid, row.machine, row.process_key) == ("starting", 5, "one", process.key)
    with pytest.raises(ValueError, match="attempt 1 is the newest"):
        ledger.assign(supervisor, "trainer", 0, after=4, epoch=3, machines=["one"])


def test_a_process_that_was_stopped_before_it_registered_takes_nobodys_place(ledger: Ledger) -> None:
    stopped = assign(ledger, "replica")
    replacement = join(ledger, "replica")
    lease(ledger, replacement)
    with pytest.raises(Fenced, match="replaced by attempt 2"):
        ledger.register(stopped, a_process())
    with pytest.raises(Fenced, match="was never given out"):
        ledger.register(Actor(RUN, "replica", 7, 1), a_process())
    ledger.heartbeat(replacement)
    assert states(ledger) == [(0, "leased", None)]


def test_who_has_beaten_since_is_not_fenced_for_silence(ledger: Ledger, replica: Actor) -> None:
    """Fencing may have waited for a lock while the beat came through."""
    supervisor, seen = supervisor_of(ledger), row_of(ledger, replica).serial
    lease(ledger, replica)
    ledger.heartbeat(replica, work=3)
    assert ledger.fence(supervisor, replica, seen_serial=seen) is None
    row = row_of(ledger, replica)
    assert (row.state, row.serial, row.work) == ("running", seen + 1, 3)
    fenced = ledger.fence(supervisor, replica, seen_serial=row.serial)
    assert fenced is not None
    assert (fenced.state, fenced.pid) == ("fenced", 2)
    assert states(ledger) == [(0, "dropped", "lease_lost")]


def test_who_has_got_on_since_is_not_fenced_for_standing_still(ledger: Ledger, replica: Actor) -> None:
    supervisor = supervisor_of(ledger)
    lease(ledger, replica)
    ledger.heartbeat(replica, work=3, may_rest_s=300.0)
    ledger.heartbeat(replica, work=4, may_rest_s=300.0)
    assert ledger.fence(supervisor, replica, seen_work=3) is None
    ledger.heartbeat(replica, work=4, may_rest_s=None)
    assert ledger.fence(supervisor, replica, seen_work=4) is None, "it has put down what it had in hand"
    ledger.heartbeat(replica, work=4, may_rest_s=300.0)
    fenced = ledger.fence(supervisor, replica, seen_work=4, reason="it stood still")
    assert fenced is not None
    assert (fenced.state, fenced.message) == ("fenced", "it stood still")
    assert states(ledger) == [(0, "dropped", "lease_lost")]


def test_a_lease_that_two_beats_begun_after_it_do_not_name_is_given_out_again(ledger: Ledger, replica: Actor) -> None:
    """Its answer was lost. The first beat that finds it may have been begun before; the same one repeated is one."""
    named, lost = lease(ledger, replica), lease(ledger, replica)
    for number in (2, 2, 2, 3):
        ledger.heartbeat(replica, named=[named.group_id], number=number)
        assert states(ledger) == [(0, "leased", None), (1, "leased", None)]
    ledger.heartbeat(replica, named=[named.group_id], number=4)
    assert states(ledger) == [(0, "leased", None), (1, "dropped", "lease_lost")]
    assert lease(ledger, replica).prompt_index == lost.prompt_index
    assert row_of(ledger, replica).serial == 4


def test_a_supervisor_touches_only_what_it_has_given_out(ledger: Ledger, replica: Actor) -> None:
    with pytest.raises(ValueError, match="replica 0, attempt 1, of run run is no supervisor"):
        ledger.assign(replica, "trainer", 0, 0, 0, ["here"])
    with pytest.raises(ValueError, match="was not given out by attempt 1"):
        ledger.fence(supervisor_of(ledger), supervisor_of(ledger))
    with pytest.raises(ValueError, match="gives out trainer and replica"):
        ledger.assign(supervisor_of(ledger), "supervisor", 0, 1, 0, ["here"])


def test_a_beat_tells_of_the_supervisor(ledger: Ledger, replica: Actor) -> None:
    """Its serial number stands still where nobody supervises, which an actor counts by its own clock."""
    before = ledger.heartbeat(replica).supervisor
    assert ledger.heartbeat(replica).supervisor == before
    ledger.heartbeat(supervisor_of(ledger))
    assert ledger.heartbeat(replica).supervisor == (before[0], before[1] + 1)
