"""The stack on a Prefect and an MLflow server that somebody else runs: named in the environment, used, left alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deployments.local import servers, stack
from deployments.local.secret import make_secret
from deployments.prefect.api import PrefectApi
from deployments.web import answers
from tasks.config.settings import Settings
from tasks.machine.processes import ProcessGroup
from tests.support.places import settings_of
from tests.support.stack import until

pytestmark = pytest.mark.e2e


@dataclass(frozen=True)
class NamedServers:
    """URLs of servers that are not the stack's."""

    prefect_url: str
    mlflow_url: str

    def answer(self) -> bool:
        return answers(f"{self.prefect_url}/health") and answers(f"{self.mlflow_url}/health")


@pytest.fixture
def named_servers(stack_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NamedServers]:
    """Both servers, outside the stack's home, with a secret of their own, and the variables that name them and it."""
    elsewhere = settings_of(home=tmp_path, runs=tmp_path, ledger_url="")
    prefect_port, mlflow_port = servers.choose_port(0), servers.choose_port(0)
    named = NamedServers(f"http://127.0.0.1:{prefect_port}/api", f"http://127.0.0.1:{mlflow_port}")
    pair = make_secret(elsewhere)
    environment = servers.environment(elsewhere, named.prefect_url, named.mlflow_url)
    environment |= servers.prefect_server_environment(pair, named.prefect_url)
    started = []
    try:
        for name, argv in (
            ("prefect", servers.prefect_server_argv(prefect_port)),
            ("mlflow", servers.mlflow_server_argv(elsewhere, mlflow_port)),
        ):
            started.append(ProcessGroup.start(argv, environment, tmp_path / f"{name}.log"))
        until(named.answer, 240, "servers that answer")
        monkeypatch.setenv("PREFECT_API_URL", named.prefect_url)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", named.mlflow_url)
        for name, value in servers.credentials(pair, (servers.PREFECT, servers.MLFLOW)).items():
            monkeypatch.setenv(name, value)
        yield named
    finally:
        for group in started:
            group.stop()


def test_named_servers_are_set_up_used_and_left_alone(stack_settings: Settings, named_servers: NamedServers) -> None:
    """Under the credentials that the environment has for them, which the stack's own secret is not."""
    up = stack.up(stack_settings)
    assert (up.prefect_url, up.mlflow_url) == (named_servers.prefect_url, named_servers.mlflow_url)
    found = stack.find(stack_settings)
    assert found is not None
    assert set(found.members) == {"worker-control", "worker-fast", "worker-slow"}, "a server of its own was started"

    api = PrefectApi(named_servers.prefect_url)
    assert {pool["name"] for pool in api.call("POST", "/work_pools/filter", {})} >= {"control", "fast", "slow"}
    placed = api.call("GET", "/deployments/name/train/fast")
    assert (placed["work_pool_name"], placed["work_queue_name"]) == ("fast", "tester")

    assert stack.down(stack_settings)
    assert not any(member.alive() for member in found.members.values())
    assert list(servers.marked_processes(stack_settings)) == []
    assert named_servers.answer()
