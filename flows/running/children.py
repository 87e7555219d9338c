"""What the flows that run a process share: it is on its own devices, for a run that goes on, and ends with its flow."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from planners.errors import UserError
from planners.plan.run import MachineShare
from tasks.config.settings import load_settings
from tasks.exchange.ledger import Actor, Ledger
from tasks.machine.deaths import Watch, how_it_ended
from tasks.machine.devices import hold_devices
from tasks.machine.processes import ProcessGroup, device_environment

_POLL_S = 0.5


def is_too_late(actor: Actor) -> bool:
    """Whether nobody waits for this flow run any more, which may have been in its queue for long.

    The run has ended, or goes on with another attempt of this actor, or under another supervisor.

    Raises:
        UserError: the ledger of this worker does not know the run.
    """
    ledger = Ledger(load_settings().shared.ledger_url)
    if ledger.find_run(run_id=actor.run_id) is None:
        raise UserError(
            f"The ledger of this worker does not know run {actor.run_id}: start its stack with the HEXFLOW_LEDGER_URL "
            "and HEXFLOW_RUNS of the one that the run was started with."
        )
    return not ledger.is_wanted(actor)


@contextmanager
def on_devices(share: MachineShare, holder: str) -> Iterator[None]:
    """Hold these devices; `holder` names the run and its actor for others who want them.

    Raises:
        UserError: somebody else holds or uses one of them.
    """
    with hold_devices(share.machine, share.kind, share.devices, holder, load_settings()):
        yield


class ProcessFailed(RuntimeError):
    """The process failed or took too long; the message has the end of its log.

    Attributes:
        how: in words how it ended, where it was ended by a signal of its own making; None for all other ends.
    """

    def __init__(self, message: str, how: str | None) -> None:
        super().__init__(message)
        self.how = how


def run_until_it_ends(
    argv: list[str],
    share: MachineShare,
    what: str,
    log: Path,
    deadline_s: float = math.inf,
    work: Callable[[], object] = lambda: None,
) -> None:
    """Run `argv` on the devices of `share` and wait; whatever ends this flow ends the whole process group.

    Args:
        argv: command to run.
        share: its devices.
        what: names it in errors.
        log: file for its output.
        deadline_s: longest time in which it does no work. An actor has none: the supervisor watches its heartbeat and
            cancels its flow.
        work: what it has done so far; each other answer is work.

    Raises:
        ProcessFailed: the process failed or took too long.
    """
    done, give_up = work(), time.monotonic() + deadline_s
    watch = Watch()
    process = ProcessGroup.start(argv, device_environment(share.kind, share.devices), log)
    try:
        while (status := process.poll()) is None and time.monotonic() < give_up:
            time.sleep(_POLL_S)
            if (now_done := work()) != done:
                done, give_up = now_done, time.monotonic() + deadline_s
    finally:
        process.stop()
    if status != 0:
        end = f"did nothing for {deadline_s:.0f} s" if status is None else how_it_ended(status)
        is_own = status is not None and status < 0 and watch.ended_by_itself(status)
        message = f"The process of {what} {end}; the end of {log}:\n{process.tail()}"
        raise ProcessFailed(message, f"its process {end}" if is_own else None)
