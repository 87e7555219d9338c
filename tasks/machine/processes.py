"""Processes that are ended whole: each is started in a session of its own, ended with all that it started, and
verified gone. Nothing is ever found by its name."""

import contextlib
import os
import platform
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from planners.errors import UserError
from tasks.config.passwords import without_password
from tasks.machine.gpus import gpu_environment
from tasks.machine.private import OTHERS, OWN_DIRECTORY, open_own

KILL_DEADLINE_S = 10.0
"""Longest time a process may take to vanish after SIGKILL; beyond it hangs in the kernel."""
CPU_CORES = "HEXFLOW_CPU_CORES"


def die_with_parent() -> None:
    """End this process's group with SIGKILL as soon as the parent process ends, however it ends.

    Exits at once if the parent is gone already. A thread watches the parent's pidfd: PR_SET_PDEATHSIG would fire when
    the parent's *thread* ends, and flows start processes from short-lived threads; it would also spare grandchildren.
    Does nothing off Linux.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        _end_own_group()
        return
    if parent == 1 or os.getppid() != parent:
        _end_own_group()
    threading.Thread(target=_watch_parent, args=(descriptor,), name="die-with-parent", daemon=True).start()


def _watch_parent(descriptor: int) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    poller.poll()
    _end_own_group()


def _end_own_group() -> None:
    """Kill the whole group when this process leads it, else only this process: the others are not ours to end."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def process_key(pid: int | None = None) -> str:
    """Which process this (or `pid`) is: no other ever has the same key, on this boot of the machine or another.

    Raises:
        ProcessLookupError: there is no such process.
    """
    pid = os.getpid() if pid is None else pid
    began = _began(pid)
    if began is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return f"{_kernel()}/{pid}/{began}"


def is_alive(key: str) -> bool:
    """Whether the process of this key runs here; a younger one with its pid is another."""
    kernel, pid, began = key.split("/")
    return kernel == _kernel() and _began(int(pid)) == began


def is_gone(key: str) -> bool:
    """Whether the process of this key is known to be no more; of one elsewhere nothing is known."""
    return key.split("/")[0] == _kernel() and not is_alive(key)


def _kernel() -> str:
    """This boot and the namespace in which pids are counted."""
    if sys.platform != "linux":
        return platform.node()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"


def _began(pid: int) -> str | None:
    """When the process began, in the kernel's ticks since boot, which no clock moves; None: it has ended."""
    if sys.platform != "linux":
        return str(psutil.Process(pid).create_time()) if psutil.pid_exists(pid) else None
    try:
        facts = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, began = facts[0], facts[19]
    return None if state in "ZX" else began


def device_environment(kind: str, devices: Sequence[int]) -> dict[str, str]:
    """Variables that bind a process to `devices` of this machine: numbers of GPUs (`kind` "cuda") or of cores ("cpu").

    Raises:
        UserError: there is no such GPU.
    """
    if kind == "cuda":
        return gpu_environment(devices)
    cores = {CPU_CORES: ",".join(map(str, devices)), "OMP_NUM_THREADS": str(len(devices))}
    return {**cores, "CUDA_VISIBLE_DEVICES": ""}  # the cores of a machine with GPUs may be devices as well


def apply_device_environment() -> None:
    """Pin this process to the cores of `HEXFLOW_CPU_CORES`; every entry point calls it before it starts threads.

    Raises:
        UserError: a core does not exist or is not allowed here.
    """
    listed = os.environ.get(CPU_CORES)
    if not listed:
        return
    try:
        os.sched_setaffinity(0, {int(core) for core in listed.split(",")})
    except (ValueError, OSError):
        raise UserError(
            f"{CPU_CORES}={listed} cannot be applied: this process may run on cores {sorted(os.sched_getaffinity(0))}."
        ) from None


class ProcessGroup:
    """A child process in its own session, with its output in a log file."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self.log = log

    @classmethod
    def start(
        cls,
        argv: list[str],
        env: dict[str, str],
        log: Path,
        pass_fds: Sequence[int] = (),
        directory: Path | None = None,
    ) -> "ProcessGroup":
        """Start `argv` in a new session; what it and its children write nobody but their user can read.

        Args:
            argv: the command.
            env: laid over this process's environment.
            log: gets its output, at the end.
            pass_fds: descriptors that it is given.
            directory: its working directory; None: this process's.
        """
        log.parent.mkdir(mode=OWN_DIRECTORY, parents=True, exist_ok=True)
        with open(log, "ab", opener=open_own) as output:
            process = subprocess.Popen(
                argv,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=OTHERS,
                pass_fds=pass_fds,
                cwd=directory,
            )
        return cls(process, log)

    @property
    def pid(self) -> int:
        """Process, process group and session id."""
        return self._process.pid

    def poll(self) -> int | None:
        """The leader's exit status (negative: the signal that ended it), None while it runs."""
        return self._process.poll()

    def stop(self, grace_s: float = 10.0) -> None:
        """End the leader, its session and its descendants: SIGTERM, after `grace_s` SIGKILL, then verify. Repeatable.

        Raises:
            RuntimeError: something survived SIGKILL.
        """
        try:
            end_sessions([self.pid], grace_s)
        finally:
            self._process.poll()

    def tail(self, lines: int = 20) -> str:
        """The last lines of the log."""
        return tail(self.log, lines)


def tail(log: Path, lines: int = 20) -> str:
    """The last lines of a log file, empty where there is none; reads at most 64 KiB of it.

    They are to be shown, so URLs in them, which libraries log, are without passwords.
    """
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 65536))
        return without_password("\n".join(file.read().decode(errors="replace").splitlines()[-lines:]))


def group_alive(pgid: int) -> bool:
    """Whether any process of this group or session is alive (a zombie is not)."""
    return bool(_members([pgid]))


def end_sessions(leaders: Sequence[int], grace_s: float = 10.0) -> None:
    """End the sessions led by these pids, and all descendants of their members, and verify that they are gone.

    The caller makes sure that the pids are still the processes it means.

    Raises:
        RuntimeError: something survived SIGKILL.
    """
    known = _with_descendants(_members(leaders))
    for process in known:
        _send(process, signal.SIGTERM)
    term_deadline = time.monotonic() + grace_s
    # What a member starts while it shuts down joins its session, so the session is read anew each time.
    while known and time.monotonic() < term_deadline:
        time.sleep(0.05)
        known = _alive(known | _members(leaders))
    kill_processes(known | _members(leaders), leaders)


def ask_to_end(processes: Iterable[psutil.Process], grace_s: float) -> None:
    """SIGTERM these processes alone, and wait up to `grace_s` until they are gone; what they started is theirs to end.

    The caller ends what is left.
    """
    known = _alive(set(processes))
    for process in known:
        _send(process, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while known and time.monotonic() < deadline:
        time.sleep(0.05)
        known = _alive(known)


def kill_processes(processes: set[psutil.Process], leaders: Sequence[int] = ()) -> None:
    """SIGKILL these processes, their descendants and what is left of the sessions `leaders`, and verify.

    Raises:
        RuntimeError: something survived.
    """
    deadline = time.monotonic() + KILL_DEADLINE_S
    remaining = _with_descendants(processes)
    while remaining:
        if time.monotonic() > deadline:
            listed = ", ".join(str(process.pid) for process in remaining)
            raise RuntimeError(f"Processes {listed} are still there {KILL_DEADLINE_S:.0f} s after SIGKILL.")
        for process in remaining:
            _send(process, signal.SIGKILL)
        time.sleep(0.02)
        remaining = _alive(_with_descendants(remaining) | _members(leaders))


def _members(leaders: Sequence[int]) -> set[psutil.Process]:
    wanted = set(leaders)
    found = set()
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            if wanted & {os.getsid(pid), os.getpgid(pid)}:
                found.add(psutil.Process(pid))
    return _alive(found)


def _with_descendants(processes: set[psutil.Process]) -> set[psutil.Process]:
    found = set(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(process.children(recursive=True))
    return found


def _alive(processes: set[psutil.Process]) -> set[psutil.Process]:
    alive = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            # is_running compares start times, so a recycled pid does not count.
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.add(process)
    return alive


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
