"""How a process ended: its own faults are told from the kernel's for memory, and both from what others did to it."""

import signal
from pathlib import Path

import pytest

from tasks.machine.deaths import Watch, how_it_ended


@pytest.mark.parametrize(
    ("status", "is_own"),
    [
        (-signal.SIGSEGV, True),
        (-signal.SIGABRT, True),
        (-signal.SIGBUS, True),
        (1, True),
        (0, False),
        (-signal.SIGTERM, False),
        (-signal.SIGKILL, False),
    ],
)
def test_only_signals_of_its_own_making_and_errors_are_its_own(status: int, is_own: bool) -> None:
    assert Watch().ended_by_itself(status) is is_own


def test_a_kill_is_its_own_where_the_kernel_has_killed_for_memory_since(tmp_path: Path) -> None:
    counts = tmp_path / "vmstat"
    counts.write_text("pgfault 7\noom_kill 3\n")
    watch = Watch(counts)
    assert not watch.ended_by_itself(-signal.SIGKILL)
    counts.write_text("pgfault 9\noom_kill 4\n")
    assert watch.ended_by_itself(-signal.SIGKILL)
    assert not Watch(tmp_path / "not there").ended_by_itself(-signal.SIGKILL)


def test_an_end_is_named() -> None:
    assert how_it_ended(-signal.SIGSEGV) == "was ended by SIGSEGV"
    assert how_it_ended(3) == "ended with status 3"
