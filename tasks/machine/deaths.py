"""How a process has ended: by itself, or by the hand of somebody else.

The exit status tells most of it: a segmentation fault is the process's own, SIGTERM is somebody's. SIGKILL may be both:
the kernel's, for a process that takes the machine's memory, and anybody's. The kernel counts the processes that it
killed for memory, so where that count stood still SIGKILL came from outside.
"""

import signal
from pathlib import Path

_VMSTAT = Path("/proc/vmstat")
_OWN = {
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGSYS,
    signal.SIGTRAP,
}
"""Signals of a process's own making."""


class Watch:
    """To be made before the process that is watched."""

    def __init__(self, vmstat: Path = _VMSTAT) -> None:
        """`vmstat`: the kernel's counts; a file that is not there counts nothing."""
        self._vmstat = vmstat
        self._before = self._kills_for_memory()

    def ended_by_itself(self, status: int) -> bool:
        """Whether an exit status (negative: the signal that ended it) is of a process that failed on its own."""
        if status == -signal.SIGKILL:
            return self._kills_for_memory() > self._before
        return status > 0 or -status in _OWN

    def _kills_for_memory(self) -> int:
        text = self._vmstat.read_text() if self._vmstat.exists() else ""
        counts = dict(line.split() for line in text.splitlines())
        return int(counts.get("oom_kill", 0))


def how_it_ended(status: int) -> str:
    """An exit status in words: `ended with status 1`, `was ended by SIGSEGV`."""
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
