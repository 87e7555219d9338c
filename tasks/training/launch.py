"""Starts the trainer's ranks and ends all of them when one fails. Nothing of torch is loaded here."""

import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from planners.plan.actors import Placement
from tasks.config.settings import load_settings
from tasks.exchange.layout import RunDirectory
from tasks.machine.processes import ProcessGroup, device_environment, end_sessions

_POLL_S = 0.2
_LAST_RANKS_S = 30.0  # how long the other ranks may run on after one has ended well


class RankFailed(RuntimeError):
    """A rank of the trainer ended badly; the message has the end of its log."""


def run_trainer(run_id: str, model_path: str, placement: Placement, resume_step: int | None = None) -> None:
    """Train a run on the devices of `placement`, until its last step; no rank is left behind on any way out.

    There is no deadline on the whole: meeting, waiting for data and collectives have theirs inside the ranks, and the
    supervisor watches the heartbeat.

    Args:
        run_id: the run, known to the ledger.
        model_path: prepared model directory.
        placement: where to train.
        resume_step: step of the checkpoint to continue from; 0 begins again in a new lineage, None is a new run.

    Raises:
        RankFailed: a rank ended badly.
    """
    settings = load_settings()
    run = RunDirectory(settings.runs / run_id)
    argv = [sys.executable, "-m", "tasks.training.trainer", "--run", run_id, "--run-dir", str(run.root)]
    argv += ["--model-path", str(Path(model_path)), "--ledger-url", settings.ledger_url]
    argv += ["--machine", placement.machine]
    if resume_step is not None:
        argv += ["--resume-step", str(resume_step)]
    env = settings.environment() | device_environment(placement.kind, placement.devices)
    if placement.kind == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""  # a machine with GPUs may also train on its cores
    logs = [run.logs / f"trainer-{placement.slot}.log"]
    logs += [run.logs / f"trainer-{placement.slot}-rank-{rank}.log" for rank in range(1, placement.ranks)]
    run_ranks(argv, env, logs)


def run_ranks(argv: list[str], env: dict[str, str], logs: Sequence[Path]) -> None:
    """Run `argv` once per log file as ranks that can meet, and wait for all.

    The first rank that fails ends the others; so does a rank that has ended well for longer than the rest may need.

    Raises:
        RankFailed: a rank ended with another status than 0, or did not end with the others.
    """
    meeting = {"WORLD_SIZE": str(len(logs)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    ranks: list[ProcessGroup] = []
    try:
        for rank, log in enumerate(logs):
            ranks.append(ProcessGroup.start(argv, {**env, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}, log))
        _wait_for_all(ranks)
    finally:
        _end_all(ranks)


def _end_all(ranks: Sequence[ProcessGroup]) -> None:
    """End all ranks at once: they share one grace, and those that wait for each other can still leave in order."""
    try:
        end_sessions([process.pid for process in ranks])
    finally:
        for process in ranks:
            process.poll()


def _wait_for_all(ranks: Sequence[ProcessGroup]) -> None:
    first_end: float | None = None
    while True:
        states = [process.poll() for process in ranks]
        for rank, (process, status) in enumerate(zip(ranks, states, strict=True)):
            if status not in (None, 0):
                raise RankFailed(f"rank {rank} of the trainer ended with status {status}; its log:\n{process.tail()}")
        if all(status == 0 for status in states):
            return
        if any(status == 0 for status in states):
            first_end = first_end or time.monotonic()
            if time.monotonic() - first_end > _LAST_RANKS_S:
                late = [rank for rank, status in enumerate(states) if status is None]
                raise RankFailed(
                    f"ranks {late} of the trainer were still there {_LAST_RANKS_S:.0f} s after another ended"
                )
        time.sleep(_POLL_S)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
