"""Who holds which device of this machine: a device serves one actor at a time.

A hold is a lock of the operating system on a file per device, so it ends with its process however that one ends.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import filelock

from planners.errors import UserError
from tasks.config.settings import Settings

HOLD_DEADLINE_S = 60.0
"""How long to wait for a device: a dead actor's processes take seconds to end."""


@contextmanager
def hold_devices(
    kind: str, devices: Sequence[int], holder: str, settings: Settings, deadline_s: float = HOLD_DEADLINE_S
) -> Iterator[None]:
    """Hold devices while the context is open.

    Args:
        kind: "cuda" or "cpu".
        devices: CUDA ordinals or core numbers.
        holder: who holds them, for the message that others get; an actor's is `RUN_ID (what it does)`.
        settings: where the lock files lie.
        deadline_s: longest wait for each device.

    Raises:
        UserError: another actor holds one of them.
    """
    with ExitStack() as held:
        for device in sorted(devices):
            path = _path(kind, device, settings)
            try:
                held.enter_context(_lock(path, deadline_s))
            except filelock.Timeout:
                raise UserError(_describe(kind, device, path)) from None
            path.write_text(f"{holder}\n")
        yield


def describe_holder(kind: str, device: int, settings: Settings, own_run: str | None = None) -> str | None:
    """A sentence on who holds a device at this moment, with the remedy; None if it is free or an actor of `own_run`."""
    path = _path(kind, device, settings)
    try:
        with _lock(path, deadline_s=0.0):
            return None
    except filelock.Timeout:
        return None if own_run and _holder(path).startswith(f"{own_run} (") else _describe(kind, device, path)


def _path(kind: str, device: int, settings: Settings) -> Path:
    """The file that names a device's last holder; its lock lies beside it."""
    directory = settings.local.devices
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{kind}-{device}"


def _lock(path: Path, deadline_s: float) -> filelock.FileLock:
    return filelock.FileLock(f"{path}.lock", timeout=deadline_s)


def _holder(path: Path) -> str:
    return path.read_text().strip() if path.exists() else "another process"


def _describe(kind: str, device: int, path: Path) -> str:
    where = f"{'GPU' if kind == 'cuda' else 'Core'} {device}"
    return f"{where} is held by {_holder(path)}: wait until it has ended, or cancel it."
