"""Who holds which device of this machine: a device serves one actor at a time.

A hold is a lock of the operating system on a file per device, so it ends with its process however that one ends.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import filelock

from planners.errors import UserError
from tasks.settings import Settings

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
        holder: who holds them, for the message that others get.
        settings: where the lock files lie.
        deadline_s: longest wait for each device.

    Raises:
        UserError: another actor holds one of them.
    """
    directory = settings.home / "devices"
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        for device in sorted(devices):
            path = directory / f"{kind}-{device}"
            lock = filelock.FileLock(f"{path}.lock", timeout=deadline_s)
            try:
                held.enter_context(lock)
            except filelock.Timeout:
                name = path.read_text().strip() if path.exists() else "another process"
                raise UserError(
                    f"{'GPU' if kind == 'cuda' else 'Core'} {device} is held by {name}: wait until it has ended, or "
                    "cancel it."
                ) from None
            path.write_text(f"{holder}\n")
        yield
