"""What of a person's environment reaches the stack, and what does not."""

from pathlib import Path

import pytest

from deployments.surroundings import clean, workplace
from tasks.config.settings import Settings

PASSES = {
    "PATH": "/bin",
    "HOME": "/home/person",
    "LD_LIBRARY_PATH": "/opt/lib",
    "CUDA_VISIBLE_DEVICES": "1",
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NCCL_SOCKET_IFNAME": "eth1",
    "GLOO_SOCKET_IFNAME": "eth1",
    "HF_HOME": "/data/hf",
    "HTTPS_PROXY": "http://proxy.example:3128",
    "ALL_PROXY": "socks5://proxy.example:1080",
    "SSL_CERT_FILE": "/etc/own.pem",
    "REQUESTS_CA_BUNDLE": "/etc/own.pem",
    "AWS_ACCESS_KEY_ID": "key",
    "SLURM_JOB_ID": "17",
    "HEXFLOW_RUNS": "/data/runs",
    "PAGER": "less",
}
PREFECT = {"PREFECT_API_KEY": "key", "PREFECT_API_AUTH_STRING": "a:b", "PREFECT_API_SSL_CERT_FILE": "/etc/own.pem"}
MLFLOW = {"MLFLOW_TRACKING_TOKEN": "token", "MLFLOW_TRACKING_SERVER_CERT_PATH": "/etc/own.pem"}
PG = {"PGHOST": "db", "PGPASSFILE": "/home/person/.pgpass"}
NEVER = {
    "PREFECT_SERVER_DATABASE_CONNECTION_URL": "postgresql://prod",
    "PREFECT_API_DATABASE_CONNECTION_URL": "postgresql://prod",
    "PREFECT_PROFILE": "prod",
    "PREFECT_HOME": "/home/person/.prefect",
    "PREFECT_LOGGING_LEVEL": "DEBUG",
    "MLFLOW_REGISTRY_URI": "databricks",
    "MLFLOW_BACKEND_STORE_URI": "postgresql://prod",
}


def cleaned(**variables: str) -> dict[str, str]:
    clean(variables)
    return variables


def test_all_else_stays_and_nothing_of_other_servers() -> None:
    left = cleaned(**PASSES, **PREFECT, **MLFLOW, **PG, **NEVER)
    assert {name: left[name] for name in PASSES} == PASSES
    assert left.keys() - PASSES.keys() == {"NO_PROXY", "no_proxy"}


def test_a_server_that_is_named_keeps_its_credentials_and_nothing_else() -> None:
    named = {"PREFECT_API_URL": "https://prefect.example/api", "MLFLOW_TRACKING_URI": "https://mlflow.example"}
    left = cleaned(**named, **PREFECT, **MLFLOW, **NEVER)
    assert left.keys() - {"NO_PROXY", "no_proxy"} == named.keys() | PREFECT.keys() | MLFLOW.keys()


@pytest.mark.parametrize(("url", "kept"), [("postgresql+psycopg://db/hexflow", PG), ("sqlite:////data/ledger.db", {})])
def test_postgresql_is_told_only_of_a_ledger_that_is_named(url: str, kept: dict[str, str]) -> None:
    left = cleaned(HEXFLOW_LEDGER_URL=url, **PG)
    assert {name: value for name, value in left.items() if name.startswith("PG")} == kept


@pytest.mark.parametrize("spelling", ["NO_PROXY", "no_proxy"])
def test_this_machine_is_reached_without_a_proxy_however_that_is_spelt(spelling: str) -> None:
    left = cleaned(**{spelling: "intranet, .example"})
    assert left["NO_PROXY"] == left["no_proxy"]
    assert set(left["no_proxy"].split(",")) == {"intranet", ".example", "127.0.0.1", "localhost", "::1"}


def test_members_work_where_nothing_of_a_person_lies(settings: Settings) -> None:
    assert workplace(settings).parent == settings.local.home
    assert workplace(settings) != Path.cwd()
