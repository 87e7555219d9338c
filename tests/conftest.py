"""What holds for every test: no network, no telemetry, no state of the user's, the same examples in every run."""

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from deployments.local import stack
from tasks.config.settings import Settings
from tasks.exchange.ledger import Actor, Ledger
from tests.support.ledger import begin, join
from tests.support.places import REPOSITORY, settings_of
from tests.support.postgres import PostgresServer, private_postgres

E2E_TIMEOUT_S = 600
"""Limit of a test marked e2e: the first start of vLLM alone takes up to 150 s on two cold cores."""

# Before anything imports torch, transformers, Prefect or vLLM; child processes inherit them.
os.environ.update(
    {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "MPLBACKEND": "Agg",
    }
)
# No server, device label or state of the user's reaches a test.
for variable in [name for name in os.environ if name.startswith(("HEXFLOW_", "PREFECT_API_", "MLFLOW_TRACKING_"))]:
    del os.environ[variable]

hypothesis.settings.register_profile("hexflow", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("hexflow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give e2e tests their own time limit and run them last: cheap tests find faults sooner."""
    for item in items:
        if item.get_closest_marker("e2e") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(E2E_TIMEOUT_S))
    items.sort(key=lambda item: item.get_closest_marker("e2e") is not None)


def _private_settings(place: Path) -> Settings:
    """Settings of a private place.

    Prepared models are shared with the repository's own home: they are checksummed, immutable, and take a minute to
    make.
    """
    home = place / ".hexflow"
    home.mkdir()
    models = REPOSITORY / ".hexflow" / "models"
    models.mkdir(parents=True, exist_ok=True)
    (home / "models").symlink_to(models)
    return settings_of(home=home, runs=place / "runs", ledger_url=f"sqlite:///{home / 'ledger.db'}")


def _apply(settings: Settings, patch: pytest.MonkeyPatch) -> None:
    """Child processes resolve to these settings as well."""
    for name, value in settings.environment().items():
        patch.setenv(name, value)


@pytest.fixture(scope="session", autouse=True)
def _own_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests hold on this machine is held among them alone: they run beside a run of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEXFLOW_LOCAL", str(tmp_path_factory.mktemp("local")))
        yield


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of a place of the test's own."""
    private = _private_settings(tmp_path)
    _apply(private, monkeypatch)
    return private


@pytest.fixture(scope="session")
def _shared_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """The place of the one stack that tests share; it is an error if anything of it survives its end."""
    shared = _private_settings(tmp_path_factory.mktemp("stack"))
    yield shared
    stack.down(shared)


@pytest.fixture
def stack_settings(_shared_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings under which all tests that need one share a local stack; the first of them brings it up.

    The machine's first two cores are devices of two types, `fast` and `slow`. What was measured of them for one test is
    known to the next.
    """
    first, second, *_ = sorted(os.sched_getaffinity(0))
    _apply(_shared_settings, monkeypatch)
    monkeypatch.setenv("HEXFLOW_MACHINE", "tester")
    monkeypatch.setenv("HEXFLOW_DEVICES", f"fast={first};slow={second}")
    return _shared_settings


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server for all tests that need one."""
    with private_postgres(durable=False) as server:
        yield server


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """A ledger with one small run; see `ledger_support`."""
    opened = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    begin(opened)
    yield opened
    opened.close()


@pytest.fixture
def trainer(ledger: Ledger) -> Actor:
    """The run's trainer, which has published version 0."""
    actor = join(ledger, "trainer")
    ledger.record_version(actor, 0, "path-0")
    return actor


@pytest.fixture
def replica(ledger: Ledger) -> Actor:
    """The run's replica."""
    return join(ledger, "replica", pid=2)
