"""The ledger under random interleavings of lagging, dying replicas and a trainer that crashes and resumes.

Whatever happens in `tests.support.world`, and whichever answers are lost, no group and no prompt is consumed twice in
the surviving lineage, no consumed token is older than η or of an abandoned version, no file under a reader is deleted,
the dead write nothing, who is told to drain begins nothing new and loses nothing, and from every state a fair schedule
ends the run.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.exchange.ledger import Ledger
from tests.support.forgetful import ForgetfulLedger
from tests.support.world import SIZES, World


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
    progress = ledger.progress(world.run_id)
    assert progress.consumed == world.prompts_per_step * world.steps
    assert progress.max_staleness_seen <= world.max_staleness
    if not fail:
        assert progress.dropped == {}
        assert [row.prompt_index for row in ledger.groups(world.run_id)] == list(range(progress.consumed))
