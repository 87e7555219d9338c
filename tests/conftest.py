"""What holds for every test: no network, no telemetry, no state of the user's, the same examples in every run."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from tasks.settings import Settings

E2E_TIMEOUT_S = 600
"""Limit of a test marked e2e: the first start of vLLM alone takes up to 150 s on two cold cores."""
REPOSITORY = Path(__file__).parent.parent

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


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of a private place, which child processes resolve to as well.

    Prepared models are shared with the repository's own home: they are checksummed, immutable, and take a minute to
    make.
    """
    home = tmp_path / ".hexflow"
    home.mkdir()
    models = REPOSITORY / ".hexflow" / "models"
    models.mkdir(parents=True, exist_ok=True)
    (home / "models").symlink_to(models)
    private = Settings(home=home, runs=tmp_path / "runs", ledger_url=f"sqlite:///{home / 'ledger.db'}")
    for name, value in private.environment().items():
        monkeypatch.setenv(name, value)
    return private


@pytest.fixture
def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def no_process_left(settings: Settings) -> Iterator[None]:
    """Fail a test that leaves a process behind, and end that process: every child carries its HEXFLOW_HOME."""
    yield
    left = [process for process in psutil.process_iter() if _home_of(process) == str(settings.home)]
    named = [" ".join(process.cmdline()) for process in left]
    for process in left:
        process.kill()
    assert not left, f"processes left behind: {named}"


def _home_of(process: psutil.Process) -> str | None:
    if process.pid == os.getpid():
        return None
    try:
        return process.environ().get("HEXFLOW_HOME")
    except psutil.Error:
        return None
