"""The ledger under random interleavings of lagging, dying replicas and a trainer that crashes and resumes.

Whatever happens in `tests.support.world`, and whichever answers are lost, no group and no prompt is consumed twice in
the surviving lineage, no consumed token is older than η or of an abandoned version, no file under a reader is deleted,
the dead write nothing, who is told to drain begins nothing new and loses nothing, no damaged payload is consumed, no
question is blamed for deaths of engines unless it has ended two of them alone, what was leased to one who never heard
of it is given out again and nothing else is, who beats and gets on is not fenced for silence or standing still, and
from every state a fair schedule ends the run.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.exchange.ledger import Ledger
from tasks.exchange.ledger.drops import GUILTY_FROM
from tests.support.forgetful import ForgetfulLedger
from tests.support.world import SIZES, Replica, World


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    path: Path = tmp_path_factory.mktemp("interleavings")
    opened = ForgetfulLedger(f"sqlite:///{path / 'ledger.db'}")
    yield opened
    opened.close()


@settings(max_examples=15)
@given(
    sizes=SIZES, replicas=st.integers(1, 3), seed=st.integers(0, 2**32), actions=st.integers(0, 120), fail=st.booleans()
)
def test_every_interleaving_keeps_the_rules(
    ledger: Ledger, sizes: tuple[int, int, int], replicas: int, seed: int, actions: int, fail: bool
) -> None:
    world = World(ledger, f"run-{len(ledger.list_runs())}", sizes, replicas, random.Random(seed))
    for _ in range(actions):
        world.random_action(fail)
    while not world.finished:
        assert world.fair_round(), f"deadlock: {ledger.progress(world.run_id)}"
    assert world.blamed_alone_twice()
    progress = ledger.progress(world.run_id)
    assert progress.consumed == world.prompts_per_step * world.steps
    assert progress.max_staleness_seen <= world.max_staleness
    if not fail:
        assert progress.dropped == {}
        assert [row.prompt_index for row in ledger.groups(world.run_id)] == list(range(progress.consumed))


@pytest.mark.parametrize(("replicas", "concurrency"), [(1, 1), (1, 4), (2, 3)])
def test_a_question_that_ends_engines_is_found_and_no_other_is_blamed(
    ledger: Ledger, replicas: int, concurrency: int
) -> None:
    """It is asked at every seventh index, and ends whatever engine answers it, with all that is in flight there."""
    sizes, deadly = (4, 2, 12), 3
    world = World(ledger, f"run-{len(ledger.list_runs())}", sizes, replicas, random.Random(1), questions=7)

    def answer(replica: Replica) -> None:
        world.upgrade(replica)
        while len(replica.in_flight) < concurrency and world.lease(replica):
            world.name(replica, max(replica.in_flight))
        if deadly in map(world.question, replica.in_flight):
            world.engine_dies(replica)
        while world.complete(replica):
            pass

    for _ in range(200):
        for replica in world.replicas:
            answer(replica)
        world.take()
        world.train()
    assert world.finished
    rows = ledger.groups(world.run_id)
    assert deadly not in {world.question(row.group_id) for row in rows if row.state == "consumed"}
    assert {world.question(row.group_id) for row in rows if row.drop_reason == "quarantined"} == {deadly}
    progress = ledger.progress(world.run_id)
    assert (progress.accused_prompts, progress.engine_deaths) == (0, world.deaths)
    assert progress.quarantined_prompts == 1 + sum(row.drop_reason == "quarantined" for row in rows)
    assert world.blamed_alone_twice()
    assert world.deaths <= GUILTY_FROM * replicas


def test_an_hour_of_random_kills_and_deaths_quarantines_nothing(ledger: Ledger) -> None:
    """In ticks of a minute, as answers take 2 in the mean; every 3 minutes each replica is killed, every 12 it dies."""
    dice = random.Random(0)
    world = World(ledger, f"run-{len(ledger.list_runs())}", (4, 2, 1000), 2, dice, questions=1000)
    kills = 0
    for _ in range(60):
        for replica in world.replicas:
            world.upgrade(replica)
            while len(replica.in_flight) < 3 and world.lease(replica):
                world.name(replica, max(replica.in_flight))
            if dice.random() < 1 / 3:
                kills += world.die_and_return(replica)
            if dice.random() < 1 / 12:
                world.engine_dies(replica)
            for _ in range(sum(dice.random() < 1 / 2 for _ in replica.in_flight)):
                world.complete(replica)
        world.take()
        world.train()
    progress = ledger.progress(world.run_id)
    assert kills > 20
    assert progress.engine_deaths == world.deaths > 5
    assert progress.consumed > 40
    assert progress.quarantined_prompts == 0
