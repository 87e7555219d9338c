"""The ledger's own tests hold on both databases."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.exchange.ledger import Ledger
from tests.support.ledger import begin
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
    begin(opened)
    yield opened
    opened.close()
