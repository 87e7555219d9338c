"""What of a person's world reaches the command and, by it, every process of the stack.

Prefect and MLflow take settings from the environment, from `.env` and pyproject.toml of the working directory, and from
a home directory. Those that a person has for other servers would be used as if they were the stack's: a database, a
profile, a proxy. So what is ours is set where members are started, what is theirs for these programs is removed here,
and everything else stays: PATH, HOME, CUDA_*, NCCL_*, proxies and certificates for other hosts, credentials of clouds.
"""

import os
from collections.abc import Iterable, MutableMapping
from pathlib import Path

from tasks.config.settings import Settings

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SERVERS = {"PREFECT_": "PREFECT_API_URL", "MLFLOW_": "MLFLOW_TRACKING_URI"}
"""Prefixes of variables, and the one that names a server to use in place of the stack's own."""
_CLIENTS = frozenset(
    {
        *("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "PREFECT_CLIENT_CUSTOM_HEADERS"),
        *("PREFECT_API_SSL_CERT_FILE", "PREFECT_API_TLS_INSECURE_SKIP_VERIFY", "PREFECT_API_REQUEST_TIMEOUT"),
        *("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
        *("MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_INSECURE_TLS", "MLFLOW_TRACKING_SERVER_CERT_PATH"),
        *("MLFLOW_TRACKING_CLIENT_CERT_PATH", "MLFLOW_TRACKING_AWS_SIGV4", "MLFLOW_S3_ENDPOINT_URL"),
        *("MLFLOW_S3_IGNORE_TLS", "MLFLOW_HTTP_REQUEST_TIMEOUT"),
    }
)
"""How to reach and sign in at a server that a person names, and no more."""


def clean(variables: MutableMapping[str, str]) -> None:
    """Remove from an environment what a person has for programs that the stack runs for itself.

    Kept are the servers that they name for hexflow with the credentials for these, and PG* where they name a ledger on
    PostgreSQL. Connections to this machine go through no proxy, however the exceptions are spelt.
    """
    for prefix, names_server in _SERVERS.items():
        kept = _CLIENTS if variables.get(names_server) else frozenset()
        _remove(variables, (name for name in variables if name.startswith(prefix) and name not in kept))
    if not variables.get("HEXFLOW_LEDGER_URL", "").startswith("postgresql"):
        _remove(variables, (name for name in variables if name.startswith("PG") and name.isupper()))
    listed = [variables.get(name, "") for name in ("NO_PROXY", "no_proxy")]
    direct = {host.strip() for hosts in listed for host in hosts.split(",") if host.strip()}
    variables["NO_PROXY"] = variables["no_proxy"] = ",".join(sorted(direct.union(LOOPBACK)))


def workplace(settings: Settings) -> Path:
    """The working directory of the stack's processes: empty, so that nothing of a person's is found in it."""
    return settings.local.home / "empty"


def _remove(variables: MutableMapping[str, str], names: Iterable[str]) -> None:
    for name in list(names):
        del variables[name]


def clean_own() -> None:
    """`clean` for this process, and so for what it starts."""
    clean(os.environ)
