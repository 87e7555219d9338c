"""The stack's processes and what is remembered of them: one state file; a process is known by what no clock moves."""

import hashlib
import os
import socket
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, ValidationError

from deployments.surroundings import workplace
from planners.errors import UserError
from tasks.config.settings import Settings
from tasks.exchange.files import write_atomic
from tasks.machine.private import OWN_DIRECTORY, OWN_FILE
from tasks.machine.processes import ProcessGroup, is_alive, process_key

HOST = "127.0.0.1"
MARKER = "HEXFLOW_STACK"
"""Set to the home of the stack in every process of it and inherited by all that they start: `down` finds these."""
PREFECT, MLFLOW = "prefect", "mlflow"


class Member(BaseModel):
    """A process of the stack: leader of its own session. `key` tells it from every other, see `process_key`."""

    pid: int
    key: str
    log: Path

    def alive(self) -> bool:
        """Whether this very process runs; another with a recycled pid has another key."""
        return is_alive(self.key)

    def children(self) -> list[psutil.Process]:
        """The processes that it has started and that are still there: of a worker, its flow runs."""
        try:
            return psutil.Process(self.pid).children()
        except psutil.NoSuchProcess:
            return []

    def listens_on(self, port: int) -> bool:
        """Whether this process, or one that it started, accepts connections on a TCP port."""
        try:
            leader = psutil.Process(self.pid)
            connections = [
                c for part in (leader, *leader.children(recursive=True)) for c in part.net_connections("tcp")
            ]
        except psutil.NoSuchProcess:
            return False
        return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)


class StackState(BaseModel):
    """What runs, and for whom."""

    prefect_url: str
    mlflow_url: str
    identity: dict[str, str]
    """What the workers were started with: versions, devices, places. A stack serves one such identity."""
    own_urls: dict[str, str] = {}
    """URLs of the stack's own servers; kept when they end, so that they come back on the same ports."""
    pools: dict[str, str] = {}
    """The queue served here, by pool."""
    deployed: str = ""
    """Fingerprint of the deployments that the server has."""
    members: dict[str, Member] = {}

    @property
    def own(self) -> set[str]:
        """Which servers are the stack's own, PREFECT or MLFLOW."""
        urls = {PREFECT: self.prefect_url, MLFLOW: self.mlflow_url}
        return {name for name, url in urls.items() if url and url == self.own_urls.get(name)}

    def alive(self) -> dict[str, Member]:
        """The members that run, by name."""
        return {name: member for name, member in self.members.items() if member.alive()}


def state_path(settings: Settings) -> Path:
    """The state file."""
    return settings.local.home / "stack.json"


def load_state(settings: Settings) -> StackState | None:
    """The remembered stack, None where there never was one.

    Raises:
        UserError: the state file is damaged.
    """
    path = state_path(settings)
    if not path.exists():
        return None
    try:
        return StackState.model_validate_json(path.read_bytes())
    except ValidationError:
        raise UserError(
            f"{path} is damaged or of another version: delete it and run `hexflow down`, which finds the stack's "
            "processes without it."
        ) from None


def save_state(settings: Settings, state: StackState) -> None:
    """Replace the state file atomically; its owner alone may read it, for URLs of servers may hold passwords."""
    write_atomic(state_path(settings), state.model_dump_json(indent=2).encode(), OWN_FILE)


def start_member(settings: Settings, name: str, argv: list[str], env: dict[str, str]) -> Member:
    """Start one process of the stack; its log is logs/<name>.log, begun anew."""
    log = settings.local.logs / f"{name}.log"
    log.unlink(missing_ok=True)
    place = workplace(settings)
    place.mkdir(mode=OWN_DIRECTORY, parents=True, exist_ok=True)
    group = ProcessGroup.start(argv, env, log, directory=place)
    return Member(pid=group.pid, key=process_key(group.pid), log=log)


def prefect_server_argv(port: int) -> list[str]:
    """Command of the Prefect server, behind its gate; its database lies in PREFECT_HOME."""
    return [
        *(sys.executable, "-m", "uvicorn", "--factory", "deployments.local.gate:prefect_app"),
        *("--host", HOST, "--port", str(port), "--log-level", "warning"),
    ]


def prefect_server_environment(pair: str, prefect_url: str) -> dict[str, str]:
    """Variables of the Prefect server alone, over those of `environment`; `pair` is what it asks its clients for."""
    return {
        "PREFECT_SERVER_API_AUTH_STRING": pair,
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        # Left to its default it tells every page that it may read.
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": prefect_url.removesuffix("/api"),
        # On SQLite the server's task runner loses the race for a write now and then, tries again, and logs 120 lines
        # each time: 60 MB an hour of nothing. Prefect's own loggers have levels of their own and keep them.
        "PREFECT_LOGGING_ROOT_LEVEL": "CRITICAL",
    }


def mlflow_server_argv(settings: Settings, port: int) -> list[str]:
    """Command of the MLflow server, behind its gate; one worker: each takes 250 MB, and would know other tickets."""
    return [
        *(sys.executable, "-m", "mlflow", "server", "--app-name", "hexflow"),
        *("--host", HOST, "--port", str(port), "--workers", "1"),
        *("--backend-store-uri", f"sqlite:///{settings.local.home / 'mlflow.db'}"),
        *("--artifacts-destination", str(settings.local.home / "artifacts")),
    ]


def stack_code() -> str:
    """Changes with what members run and the variables they are given; flow runs import their code anew each time."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]


def worker_argv(pool: str, queue: str) -> list[str]:
    """Command of the worker that serves one queue of one pool."""
    return [sys.executable, "-m", "deployments.local.worker", pool, queue]


def setup_argv(is_ours: bool) -> list[str]:
    """Command that makes the server, the stack's own or another's, match prefect.yaml."""
    return [sys.executable, "-m", "deployments.prefect.setup", "ours" if is_ours else "shared"]


def credentials(pair: str, own: Collection[str]) -> dict[str, str]:
    """Variables that sign in at those servers which are the stack's own; at others a person's own variables do."""
    user, _, secret = pair.partition(":")
    prefect = {"PREFECT_API_AUTH_STRING": pair}
    mlflow = {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": secret}
    return (prefect if PREFECT in own else {}) | (mlflow if MLFLOW in own else {})


def environment(settings: Settings, prefect_url: str, mlflow_url: str) -> dict[str, str]:
    """Variables of every process of the stack, beside `credentials`; flow runs inherit them from their worker."""
    home = settings.local.home / "prefect"
    return {
        **settings.environment(),
        MARKER: str(settings.local.home),
        "PREFECT_API_URL": prefect_url,
        "PREFECT_HOME": str(home),
        # Left to its default it is looked for in ~/.prefect, and each server start registers all blocks anew.
        "PREFECT_SERVER_MEMO_STORE_PATH": str(home / "memo_store.toml"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # Prefect keeps the exception of a failed flow: by default as a pickle in ~/.prefect, where nobody clears up.
        "PREFECT_LOCAL_STORAGE_PATH": str(home / "storage"),
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "MLFLOW_TRACKING_URI": mlflow_url,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
    }


def choose_port(preferred: int) -> int:
    """`preferred` if it is free on loopback, else any free port."""
    for port in (preferred, 0):
        if (free := _bind(port)) is not None:
            return free
    raise UserError(f"No port is free on {HOST}: end what holds them.")


def is_taken(port: int) -> bool:
    """Whether somebody listens on a loopback port."""
    return _bind(port) is None


def _bind(port: int) -> int | None:
    """The loopback port that could be bound for a moment, any free one for 0; None if it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return None
        return int(probe.getsockname()[1])


def marked_processes(settings: Settings) -> Iterator[tuple[psutil.Process, dict[str, Any]]]:
    """Every living process that belongs to this stack, with its environment; never this one or its ancestors."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        if process.pid in own:
            continue
        try:
            variables = process.environ()
            if variables.get(MARKER) == str(settings.local.home) and process.status() != psutil.STATUS_ZOMBIE:
                yield process, variables
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
