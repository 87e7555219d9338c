"""What the flows that run a process share: it is on its own devices, and ends with its flow."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from planners.plan import Placement
from tasks.devices import hold_devices
from tasks.processes import ProcessGroup, device_environment
from tasks.settings import load_settings


@contextmanager
def on_devices(placement: Placement, holder: str) -> Iterator[None]:
    """Hold the placement's devices; `holder` names the run for others who want them.

    Raises:
        UserError: somebody else holds one of them.
    """
    holder = f"{holder} ({placement.role} {placement.slot})"
    with hold_devices(placement.kind, placement.devices, holder, load_settings()):
        yield


def run_until_it_ends(argv: list[str], placement: Placement, log: Path) -> None:
    """Run `argv` on the devices of `placement` and wait; whatever ends this flow ends the whole process group.

    There is no deadline here on purpose: the supervisor watches the actor's heartbeat and cancels this flow.

    Raises:
        RuntimeError: the process failed; the message has the end of its log.
    """
    process = ProcessGroup.start(argv, device_environment(placement.kind, placement.devices), log)
    try:
        while (status := process.poll()) is None:
            time.sleep(0.5)
    finally:
        process.stop()
    if status != 0:
        raise RuntimeError(
            f"The {placement.role} process of slot {placement.slot} ended with status {status}; the end of {log}:\n"
            f"{process.tail()}"
        )
