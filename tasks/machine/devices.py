"""Who holds which device of this machine: a device serves one actor at a time, from whichever home of a user.

A hold is a lock of the operating system on a file per device, so it ends with its process however that one ends. The
files lie in a directory of the user's on this machine, which two machines on one home do not share. A GPU goes by its
UUID, a core by its number and the name that the machine is given. Other users' holds are not seen; what they compute on
a GPU the driver tells.
"""

import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import filelock
import psutil

from planners.errors import UserError
from planners.hardware.machine import Device, Machine
from tasks.config.settings import Settings, machine_directory
from tasks.machine.gpus import gpu_processes, gpu_uuids
from tasks.machine.private import OWN_DIRECTORY, OWN_FILE, make_private

HOLD_DEADLINE_S = 60.0
"""How long to wait for a device: a dead actor's processes take seconds to end."""
_POLL_S = 0.2


@contextmanager
def hold_devices(
    machine: str,
    kind: str,
    devices: Sequence[int],
    holder: str,
    settings: Settings,
    deadline_s: float = HOLD_DEADLINE_S,
) -> Iterator[None]:
    """Hold devices while the context is open.

    Args:
        machine: this machine, as the plan calls it.
        kind: "cuda" or "cpu".
        devices: numbers of GPUs or of cores.
        holder: who holds them, for the message that others get; an actor's is `RUN_ID (what it does)`.
        settings: whose home it is, for that message as well.
        deadline_s: longest wait for each device, and for its processes.

    Raises:
        UserError: another actor holds one of them, or somebody computes on one; or there is no such GPU.
    """
    uuids = gpu_uuids(devices) if kind == "cuda" else {}
    with ExitStack() as held:
        for device in sorted(devices):
            path = _path(machine, kind, device, uuids.get(device, ""))
            try:
                held.enter_context(_lock(path, deadline_s))
            except filelock.Timeout:
                raise UserError(_describe_hold(kind, device, path)) from None
            held.enter_context(_kept(path.parent))
            path.write_text(f"{holder} since {time.strftime('%Y-%m-%d %H:%M:%S')} from {settings.local.home}\n")
        _wait_until_unused(uuids, deadline_s)
        yield


def describe_holders(machine: Machine, own_run: str | None = None) -> list[str]:
    """Sentences on who has devices of this machine at this moment, with the remedy; actors of `own_run` are left out.

    Raises:
        UserError: the NVIDIA driver fails or gives no answer.
    """
    uses = gpu_processes() if any(device.kind == "cuda" for device in machine.devices) else {}
    said = (_describe(machine.name, device, uses.get(device.uuid, ()), own_run) for device in machine.devices)
    return [sentence for sentence in said if sentence]


def _describe(machine: str, device: Device, uses: Sequence[int], own_run: str | None) -> str | None:
    path = _path(machine, device.kind, device.index, device.uuid)
    try:
        with _lock(path, deadline_s=0.0):
            return _describe_use(device.index, uses) if uses else None
    except filelock.Timeout:
        is_own = own_run is not None and _holder(path).startswith(f"{own_run} (")
        return None if is_own else _describe_hold(device.kind, device.index, path)


def _wait_until_unused(uuids: Mapping[int, str], deadline_s: float) -> None:
    """Wait until nobody computes on the GPUs, by UUID under their numbers: those of a dead holder are about to end."""
    give_up = time.monotonic() + deadline_s
    while uuids:
        uses = gpu_processes()
        used = [(number, uses[uuid]) for number, uuid in uuids.items() if uses.get(uuid)]
        if not used:
            return
        if time.monotonic() > give_up:
            raise UserError(_describe_use(*used[0]))
        time.sleep(_POLL_S)


def _path(machine: str, kind: str, device: int, uuid: str) -> Path:
    """The file that names a device's last holder; its lock lies beside it."""
    directory = make_private(machine_directory(), "HEXFLOW_LOCAL") / "devices"
    directory.mkdir(mode=OWN_DIRECTORY, exist_ok=True)
    name = f"gpu-{uuid}" if kind == "cuda" else f"core-{device}-{machine}"
    return directory / re.sub(r"[^\w.-]", "-", name)


def _lock(path: Path, deadline_s: float) -> filelock.FileLock:
    return filelock.FileLock(f"{path}.lock", timeout=deadline_s, mode=OWN_FILE)


@contextmanager
def _kept(directory: Path) -> Iterator[None]:
    """systemd clears out of /tmp what nobody has written for days, but nothing below a directory with a lock on it."""
    descriptors = [os.open(place, os.O_RDONLY) for place in (directory.parent, directory)]
    try:
        for descriptor in descriptors:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _holder(path: Path) -> str:
    return path.read_text().strip() if path.exists() else "another process"


def _describe_hold(kind: str, device: int, path: Path) -> str:
    where = f"{'GPU' if kind == 'cuda' else 'Core'} {device}"
    return f"{where} is held by {_holder(path)}: wait until it has ended, or cancel it."


def _describe_use(number: int, pids: Sequence[int]) -> str:
    return (
        f"GPU {number} is in use by {' and '.join(map(_process, pids))}: wait until that has ended, or leave the GPU "
        "out with CUDA_VISIBLE_DEVICES."
    )


def _process(pid: int) -> str:
    """A process and whose it is; of one in another container only the number is known."""
    try:
        process = psutil.Process(pid)
        return f"process {pid} ({process.name()}) of {process.username()}"
    except psutil.NoSuchProcess:
        return f"process {pid} of another container"
