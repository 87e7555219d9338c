"""Who is in charge, under random orders of supervisors and actors that are stopped, replaced, woken, late and repeated.

Whatever happens: what a supervisor that was replaced decides has no effect, an attempt is begun by one process and only
while it is wanted, who has beaten is not fenced for silence, a request to end reaches the flow run that it was meant
for, the first word about a run and an actor counts, and what the dead hold is given out again.
"""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.exchange.ledger import Ledger
from tests.support.attempts import Attempts


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    opened = Ledger(f"sqlite:///{tmp_path_factory.mktemp('attempts') / 'ledger.db'}")
    yield opened
    opened.close()


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), actions=st.integers(1, 100))
def test_only_who_is_in_charge_has_an_effect(ledger: Ledger, seed: int, actions: int) -> None:
    world = Attempts(ledger, f"run-{len(ledger.list_runs())}", random.Random(seed))
    for _ in range(actions):
        world.random_action()
        world.compare()
