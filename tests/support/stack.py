"""The command as a person calls it, and the processes of a stack."""

import atexit
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from deployments.local import servers
from tasks.config.settings import Settings
from tests.support.places import REPOSITORY


def until(condition: Callable[[], bool], deadline_s: float, what: str) -> None:
    """Wait for a condition; fails after `deadline_s` seconds with what was waited for."""
    give_up = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up, f"did not happen within {deadline_s:.0f} s: {what}"
        time.sleep(0.05)


def flow_runs(settings: Settings) -> list[psutil.Process]:
    """The stack's processes that carry out flow runs."""
    return [process for process, _ in servers.marked_processes(settings) if "prefect.engine" in process.cmdline()]


def runs(process: psutil.Process) -> bool:
    """Whether the process is more than an entry that init has yet to reap."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


FOREIGN = {
    "PREFECT_SERVER_DATABASE_CONNECTION_URL": "sqlite+aiosqlite:////nonexistent/theirs.db",
    "PREFECT_PROFILE": "theirs",
    "MLFLOW_BACKEND_STORE_URI": "sqlite:////nonexistent/theirs.db",
    "PGHOST": "nonexistent.invalid",
    "http_proxy": "http://127.0.0.1:1",
    "ALL_PROXY": "socks5://127.0.0.1:1",
    "no_proxy": "intranet",
}
"""What a person may have set for other servers of theirs."""


_LONG = "t" * 120
"""A name too long for the path of a socket."""


@functools.cache
def foreign_directory() -> Path:
    """A working directory with a person's own settings of Prefect, and modules that are called like ours."""
    place = Path(tempfile.mkdtemp(prefix="hexflow-foreign-"))
    atexit.register(shutil.rmtree, place)
    (place / ".env").write_text("PREFECT_SERVER_DATABASE_CONNECTION_URL=sqlite+aiosqlite:////nonexistent/theirs.db\n")
    (place / "pyproject.toml").write_text("[tool.prefect]\napi.url = 'http://nonexistent.invalid/api'\n")
    for name in ("tasks", "flows", "planners", "prefect"):
        (place / f"{name}.py").write_text("raise ImportError('a module of the person that asked')\n")
    (place / _LONG).mkdir()
    return place


def hexflow(*arguments: str, timeout_s: float = 240, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command as installed, in a world that is a person's own; in its directory unless another is given."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "deployments.cli.main", *arguments],  # as the installed command, not from here
        env={**os.environ, **FOREIGN, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(foreign_directory() / _LONG)},
        cwd=directory or foreign_directory(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        # As a script starts what it puts into the background; all processes of the stack inherit it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
