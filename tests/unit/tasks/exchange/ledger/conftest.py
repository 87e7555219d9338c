"""The ledger's own tests hold on both databases."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.exchange.ledger import Ledger
from tests.support.ledger import ETA, RUN, STEPS, B
from tests.support.postgres import PostgresServer


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty ledger of the test's own."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.empty_ledger()


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    """A ledger with one small run; see `tests.support.ledger`."""
    opened = Ledger(url)
    opened.create_run(RUN, prompts_per_step=B, max_staleness=ETA, steps=STEPS, max_attempts_per_prompt=2)
    yield opened
    opened.close()
