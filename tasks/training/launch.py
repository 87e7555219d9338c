"""Starts the trainer's ranks and ends all of them when one fails. Nothing of torch is loaded here."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tasks.config.settings import load_settings
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Ledger
from tasks.machine.processes import ProcessGroup, device_environment, end_sessions
from tasks.training.meeting import SOCKET, open_meeting

_POLL_S = 0.2
LAST_RANKS_S = 30.0  # how long the other ranks may run on after one has ended well


class RankFailed(RuntimeError):
    """A rank of the trainer ended badly; the message has the end of its log."""


def run_trainer(run_id: str, epoch: int, machine: str, attempt: int, master: str | None = None) -> None:
    """Train on a machine's share of a plan epoch's trainer, until the run's last step; no rank stays on any way out.

    There is no deadline on the whole: meeting, waiting for data and collectives have theirs inside the ranks, and the
    supervisor watches the heartbeat.

    Args:
        run_id: the run, known to the ledger.
        epoch: the plan epoch, which names the devices.
        machine: this machine, as the plan calls it.
        attempt: the trainer's attempt, as it was given out.
        master: HOST:PORT where the ranks of all machines meet; None: on this machine, which has them all.

    Raises:
        RankFailed: a rank ended badly.
    """
    settings = load_settings()
    run, trainer = (
        RunDirectory(settings.shared.runs / run_id),
        Ledger(settings.shared.ledger_url).plan(run_id, epoch).trainer,
    )
    share, first = trainer.share_of(machine)
    argv = [sys.executable, "-m", "tasks.training.trainer", "--run", run_id, "--epoch", str(epoch)]
    argv += ["--attempt", str(attempt)]
    env = settings.environment() | device_environment(share.kind, share.devices)
    numbers = range(first, first + share.ranks)
    logs = [run.log_path("trainer", 0, rank) for rank in numbers]
    run_ranks(argv, env, logs, first, trainer.ranks, master)


def run_ranks(
    argv: list[str],
    env: dict[str, str],
    logs: Sequence[Path],
    first: int = 0,
    world_size: int | None = None,
    master: str | None = None,
) -> None:
    """Run `argv` once per log file as ranks that can meet, and wait for all.

    The first rank that fails ends the others; so does a rank that has ended well for longer than the rest may need.

    Args:
        argv: command of every rank.
        env: further variables of all.
        logs: a file for each rank of this machine.
        first: number of the first of them.
        world_size: ranks on all machines; None: those of this one.
        master: HOST:PORT where all meet; None: on this machine, which has them all.

    Raises:
        RankFailed: a rank ended with another status than 0, or did not end with the others.
        UserError: they cannot meet at `master`.
    """
    if master is None and world_size not in (None, len(logs)):
        raise ValueError(f"{world_size} ranks, of which {len(logs)} are here, have nowhere to meet")
    ranks: list[ProcessGroup] = []
    with open_meeting(first, master) as meeting:
        try:
            for local, log in enumerate(logs):
                place = {"RANK": str(first + local), "LOCAL_RANK": str(local)}
                place["WORLD_SIZE"] = str(world_size or len(logs))
                passed: list[int] = []
                if meeting.listener and first + local == 0:
                    passed.append(meeting.listener.fileno())
                    place[SOCKET] = str(passed[0])
                ranks.append(ProcessGroup.start(argv, {**env, **meeting.environment, **place}, log, passed))
            _wait_for_all(ranks, first)
        finally:
            _end_all(ranks)


def _end_all(ranks: Sequence[ProcessGroup]) -> None:
    """End all ranks at once: they share one grace, and those that wait for each other can still leave in order."""
    try:
        end_sessions([process.pid for process in ranks])
    finally:
        for process in ranks:
            process.poll()


def _wait_for_all(ranks: Sequence[ProcessGroup], first: int) -> None:
    first_end: float | None = None
    while True:
        states = [process.poll() for process in ranks]
        for rank, (process, status) in enumerate(zip(ranks, states, strict=True), first):
            if status not in (None, 0):
                raise RankFailed(f"rank {rank} of the trainer ended with status {status}; its log:\n{process.tail()}")
        if all(status == 0 for status in states):
            return
        if any(status == 0 for status in states):
            first_end = first_end or time.monotonic()
            if time.monotonic() - first_end > LAST_RANKS_S:
                late = [rank for rank, status in enumerate(states, first) if status is None]
                raise RankFailed(
                    f"ranks {late} of the trainer were still there {LAST_RANKS_S:.0f} s after another ended"
                )
        time.sleep(_POLL_S)
