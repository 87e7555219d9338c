"""What the flows `rollout` and `train` share: a process on the placement's devices that ends with its flow."""

import time
from pathlib import Path

from planners.plan import Placement
from tasks.processes import ProcessGroup, device_environment


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
