"""The command as a person calls it, and the processes of a stack."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

from deployments.local import servers
from tasks.config.settings import Settings


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


def hexflow(*arguments: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deployments.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        # As a script starts what it puts into the background; all processes of the stack inherit it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
