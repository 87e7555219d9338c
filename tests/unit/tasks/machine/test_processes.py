"""Real small processes, ended whole."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from planners.errors import UserError
from tasks.machine.processes import (
    ProcessGroup,
    apply_device_environment,
    ask_to_end,
    device_environment,
    end_sessions,
    group_alive,
    tail,
)

WAIT_S = 30.0
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)
SLEEPER = "import time; print('ready', flush=True); time.sleep(600)"


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {WAIT_S:.0f} s for {what}"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], ProcessGroup]]:
    """Start Python code as a group; whatever a failing test leaves is ended."""
    groups: list[ProcessGroup] = []

    def start_code(code: str) -> ProcessGroup:
        group = ProcessGroup.start([sys.executable, "-c", code], {}, tmp_path / f"{len(groups)}.log")
        groups.append(group)
        return group

    yield start_code
    for group in groups:
        group.stop(grace_s=0.0)


def parent_of(child_code: str, session: bool = False) -> str:
    """Code that starts `child_code` as a child, prints its pid, and sleeps."""
    return (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child_code!r}], start_new_session={session}, "
        "stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )


def printed_pid(group: ProcessGroup) -> int:
    wait_for(lambda: group.tail().strip().isdecimal(), "the child's pid")
    return int(group.tail())


def test_output_and_exit_status(start: Callable[[str], ProcessGroup]) -> None:
    group = start("import sys; print('one'); print('two'); sys.exit(3)")
    wait_for(lambda: group.poll() is not None, "the exit")
    assert group.poll() == 3
    assert group.tail() == "one\ntwo"
    assert group.tail(lines=1) == "two"


def test_environment_is_laid_over_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "kept")
    monkeypatch.setenv("CHANGED", "old")
    code = "import os; print(os.environ['KEPT'], os.environ['CHANGED'])"
    group = ProcessGroup.start([sys.executable, "-c", code], {"CHANGED": "new"}, tmp_path / "log")
    wait_for(lambda: group.poll() is not None, "the exit")
    assert group.tail() == "kept new"


def test_stop_lets_a_process_clean_up(start: Callable[[str], ProcessGroup]) -> None:
    group = start(
        "import signal, sys, time\n"
        "def leave(*_): print('cleaned up'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    wait_for(lambda: "ready" in group.tail(), "the process")
    assert group_alive(group.pid)
    group.stop(grace_s=WAIT_S)
    assert group.poll() == 0
    assert "cleaned up" in group.tail()
    assert not group_alive(group.pid)
    group.stop()


def test_stop_kills_what_ignores_sigterm(start: Callable[[str], ProcessGroup]) -> None:
    group = start(STUBBORN)
    wait_for(lambda: "ready" in group.tail(), "the process")
    group.stop(grace_s=0.2)
    assert group.poll() == -9


@pytest.mark.parametrize("session", [False, True], ids=["same session", "own session"])
def test_stop_ends_a_stubborn_grandchild(start: Callable[[str], ProcessGroup], session: bool) -> None:
    group = start(parent_of(STUBBORN, session))
    grandchild = printed_pid(group)
    group.stop(grace_s=0.2)
    assert gone(grandchild)


def test_stop_ends_orphans_of_a_dead_leader(start: Callable[[str], ProcessGroup]) -> None:
    group = start(parent_of(STUBBORN))
    orphan = printed_pid(group)
    os.kill(group.pid, 9)
    wait_for(lambda: group.poll() is not None, "the leader's end")
    assert group_alive(group.pid)
    group.stop(grace_s=0.2)
    assert gone(orphan)


def test_end_sessions_spares_other_sessions(start: Callable[[str], ProcessGroup]) -> None:
    ended, spared = start(SLEEPER), start(SLEEPER)
    end_sessions([ended.pid])
    assert not group_alive(ended.pid)
    assert group_alive(spared.pid)


def test_ask_to_end_waits_and_spares_what_was_started(start: Callable[[str], ProcessGroup]) -> None:
    group = start(parent_of(SLEEPER))
    child = printed_pid(group)
    ask_to_end([psutil.Process(group.pid)], WAIT_S)
    assert gone(group.pid)
    assert not gone(child)
    stubborn = start(STUBBORN)
    wait_for(lambda: "ready" in stubborn.tail(), "the process")
    ask_to_end([psutil.Process(stubborn.pid)], 0.2)
    assert stubborn.poll() is None, "who asked ends what is left"


def test_child_dies_with_its_killed_parent(start: Callable[[str], ProcessGroup]) -> None:
    dependent = "from tasks.machine.processes import die_with_parent; die_with_parent();" + SLEEPER
    group = start(parent_of(dependent, session=True))
    child = printed_pid(group)
    os.kill(group.pid, 9)
    wait_for(lambda: gone(child), "the child's end")


def test_dependent_child_takes_its_own_children_along(start: Callable[[str], ProcessGroup], tmp_path: Path) -> None:
    log = tmp_path / "grandchild.pid"
    dependent = (
        "import pathlib, subprocess, sys, time\n"
        "from tasks.machine.processes import die_with_parent\n"
        "die_with_parent()\n"
        f"child = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        f"pathlib.Path({str(log)!r}).write_text(str(child.pid))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    group = start(parent_of(dependent, session=True))
    printed_pid(group)
    os.kill(group.pid, 9)
    wait_for(lambda: gone(int(log.read_text())), "the grandchild's end")


def test_child_outlives_the_thread_that_started_it(start: Callable[[str], ProcessGroup]) -> None:
    dependent = "from tasks.machine.processes import die_with_parent; die_with_parent();" + SLEEPER
    group = start(
        "import subprocess, sys, threading, time\n"
        "def start():\n"
        "    global child\n"
        f"    child = subprocess.Popen([sys.executable, '-c', {dependent!r}], stdout=subprocess.PIPE)\n"
        "    child.stdout.readline()\n"
        "thread = threading.Thread(target=start); thread.start(); thread.join()\n"
        "time.sleep(0.5)\n"
        "print('running' if child.poll() is None else 'dead', flush=True)\n"
        "time.sleep(600)\n"
    )
    wait_for(lambda: bool(group.tail()), "the report")
    assert group.tail() == "running"


def test_device_environment() -> None:
    """Who is bound to cores sees no GPU: what a machine with GPUs measures on its cores is no GPU's rate."""
    cores = {"HEXFLOW_CPU_CORES": "0,1", "OMP_NUM_THREADS": "2"}
    assert device_environment("cpu", [0, 1]) == {**cores, "CUDA_VISIBLE_DEVICES": ""}


def test_cores_are_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    core = min(os.sched_getaffinity(0))
    code = (
        "import os; from tasks.machine.processes import apply_device_environment; apply_device_environment(); "
        "print(os.sched_getaffinity(0))"
    )
    environment = {**os.environ, **device_environment("cpu", [core])}
    done = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True, timeout=WAIT_S)
    assert done.strip() == str({core})
    monkeypatch.setenv("HEXFLOW_CPU_CORES", "99999")
    with pytest.raises(UserError, match="99999"):
        apply_device_environment()


def test_a_tail_shows_no_password(tmp_path: Path) -> None:
    """It goes into errors, which pages and the ledger show; libraries log the URL that they did not reach."""
    (tmp_path / "log").write_text("started\nno answer from http://me:hush@host:4200/api\n")
    assert tail(tmp_path / "log") == "started\nno answer from http://…@host:4200/api"


def test_tail_of_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert tail(tmp_path / "none.log") == ""
