"""The trainer's processes against the real ledger, with a replica made of this test's thread."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from planners.workload.step import Workload
from tasks.config.experiment import Experiment
from tasks.config.sections import ModelSection, RunSection
from tasks.config.settings import Settings
from tasks.config.training import OptimizerSection
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Ledger
from tasks.exchange.payloads import load_group, save_group
from tasks.exchange.weights import verify_weights
from tasks.machine.processes import ProcessGroup
from tasks.training.checkpoints import found_checkpoints
from tasks.training.groups import with_advantages
from tasks.training.launch import run_ranks, run_trainer
from tasks.training.meeting import meet_here
from tests.support.ledger import assign, go_back, join
from tests.support.plan import run_plan
from tests.support.trainer import RUN, make_run
from tests.support.training import make_engine, parameters_of, random_groups, save_tiny_model

pytestmark = pytest.mark.e2e


class FakeReplica(threading.Thread):
    """Delivers random groups under the newest version for as long as it lives, `limit` at most.

    In the payloads of the groups `damaged` a bit of the last answer is flipped.
    """

    def __init__(self, ledger: Ledger, run: RunDirectory, limit: int, damaged: Collection[int] = ()) -> None:
        super().__init__(daemon=True)
        self._ledger, self._run, self._limit, self._damaged = ledger, run, limit, damaged
        self._stopped = threading.Event()

    def run(self) -> None:
        actor = join(self._ledger, "replica", run_id=RUN)
        loaded = None
        while not self._stopped.wait(0.02):
            latest = self._ledger.latest_version(RUN)
            if latest is not None and latest != loaded and self._ledger.claim_version(actor, *latest):
                self._ledger.set_loaded(actor, *latest)
                loaded = latest
            if loaded is None or not self._limit:
                continue
            lease = self._ledger.lease_group(actor, loaded[1], f"lease-{self._limit}")
            if lease is None:
                continue
            self._limit -= 1
            (group,) = random_groups(1, seed=lease.prompt_index, version=lease.version)
            path = self._run.group_path(lease.group_id)
            save_group(path, replace(group, group_id=lease.group_id))
            if lease.group_id in self._damaged:
                flip_a_bit(path)
            tokens = sum(len(t.token_ids) for t in group.trajectories)
            self._ledger.complete_group(actor, lease.group_id, lease.version, 0.5, {"scored": 4}, tokens)

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def flip_a_bit(path: Path) -> None:
    """In the last log-probability, which only the rank reads that trains on the last answer."""
    payload = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(payload[:8], "little")
    payload[start + json.loads(payload[8:start])["logprobs"]["data_offsets"][1] - 1] ^= 1
    path.write_bytes(payload)


def make_experiment(model_path: Path, steps: int) -> Experiment:
    return Experiment(
        model=ModelSection(source=str(model_path)),
        optimizer=OptimizerSection(lr=1e-3),
        workload=Workload(prompts_per_step=3, group_size=4),
        run=RunSection(steps=steps, checkpoint_every=2, start_deadline_s=120, step_deadline_s=120),
    )


def replayed(run: RunDirectory, ledger: Ledger, experiment: Experiment) -> dict[str, torch.Tensor]:
    """The weights after training in this process, without interruption, on the groups that the ledger names."""
    engine = make_engine(experiment.algorithm, experiment.optimizer, steps=experiment.run.steps, micro_batch_tokens=40)
    for step in range(experiment.run.steps):
        ids = [row.group_id for row in ledger.groups(RUN) if row.step == step]
        groups = [load_group(run.group_path(group_id)) for group_id in ids]
        engine.train_step(with_advantages(groups, experiment.algorithm), step)
    return parameters_of(engine)


def assert_published(run: RunDirectory, version: tuple[int, int], expected: dict[str, torch.Tensor]) -> None:
    path = run.weights_path(*version)
    verify_weights(path)
    published = load_file(path / "model.safetensors")
    assert published.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(published[name], value, atol=2e-5, rtol=0, msg=name)


def test_two_ranks_train_like_one_and_without_what_either_finds_damaged(settings: Settings, tmp_path: Path) -> None:
    experiment = make_experiment(save_tiny_model(tmp_path / "model"), steps=3)
    run, ledger = make_run(settings, experiment, run_plan(ranks=2, zero_stage=2, micro_batch_tokens=40))
    replica = FakeReplica(ledger, run, limit=100, damaged={1, 2, 3})
    replica.start()
    argv = [sys.executable, "-m", "tasks.training.trainer", "--run", RUN, "--epoch", "0"]
    argv += ["--attempt", str(assign(ledger, "trainer", run_id=RUN).attempt)]
    run_ranks(argv, {}, [run.log_path("trainer", 0, rank) for rank in (0, 1)])
    replica.stop()

    assert_published(run, (0, 3), replayed(run, ledger, experiment))
    assert found_checkpoints(run) == [(0, 2), (0, 3)]
    for rank in (0, 1):
        assert "is damaged: answer 3 differs" in run.log_path("trainer", 0, rank).read_text()
    progress = ledger.progress(RUN)
    assert progress.dropped == {"damaged": 3}
    assert (progress.step, progress.consumed, progress.latest_version) == (3, 9, (0, 3))
    assert progress.max_staleness_seen <= experiment.workload.max_staleness
    metrics = ledger.steps(RUN)[-1].metrics
    assert {"reward/mean", "loss", "grad_norm", "lr", "mismatch_kl", "staleness/max", "train_s"} <= metrics.keys()
    assert metrics["response_tokens"] == metrics["trained_tokens"]
    assert {span.kind for span in ledger.spans(RUN)} == {"busy", "wait", "publish"}
    assert {actor.state for actor in ledger.actors(RUN) if actor.role == "trainer"} == {"done"}


def test_a_trainer_that_is_ended_and_resumed_trains_like_one_that_was_not(settings: Settings, tmp_path: Path) -> None:
    experiment = make_experiment(save_tiny_model(tmp_path / "model"), steps=4)
    run, ledger = make_run(settings, experiment)
    replica = FakeReplica(ledger, run, limit=8)  # two steps of three groups, and two groups that are too few
    replica.start()
    argv = [sys.executable, "-m", "tasks.training.trainer", "--run", RUN, "--epoch", "0"]
    argv += ["--attempt", str(assign(ledger, "trainer", run_id=RUN).attempt)]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **meet_here(tmp_path)}
    process = ProcessGroup.start(argv, alone, run.log_path("trainer", 0))
    try:
        wait_until(lambda: trainer_says(ledger)[1] == "waiting for the groups of step 2", process)
        os.kill(process.pid, signal.SIGTERM)
        wait_until(lambda: process.poll() is not None, process)
        assert process.poll() == 128 + signal.SIGTERM
    finally:
        process.stop()
        replica.stop()
    assert trainer_says(ledger) == ("failed", "ended by SIGTERM")
    assert found_checkpoints(run) == [(0, 2)]

    assert go_back(ledger, 2, RUN) == 1
    replica = FakeReplica(ledger, run, limit=100)
    replica.start()
    run_trainer(RUN, 0, "here", assign(ledger, "trainer", run_id=RUN).attempt)
    replica.stop()
    assert_published(run, (1, 4), replayed(run, ledger, experiment))
    assert [row.step for row in ledger.steps(RUN)] == [0, 1, 2, 3]
    assert ledger.progress(RUN).dropped.get("stale", 0) == 0


MEET = """
import psutil, torch, torch.distributed as dist
from tasks.training.ranks import join_ranks
ranks = join_ranks(60.0, 60.0)
total = torch.ones(1)
dist.all_reduce(total)
ranks.barrier()
listening = {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
print("I met:", ranks.rank, int(total), sorted(listening))
ranks.barrier()
"""
"""Says with how many ranks it has met, and on which addresses this one can be reached."""


@pytest.mark.parametrize("master", [None, "127.0.0.1:"])
def test_ranks_that_meet_can_be_reached_where_they_meet_alone(master: str | None, tmp_path: Path) -> None:
    """On one machine, and as the two parts of a trainer on two, which are told of one address."""
    logs = [tmp_path / f"rank-{rank}.log" for rank in (0, 1)]
    argv = [sys.executable, "-c", MEET]
    if master is None:
        run_ranks(argv, {}, logs)
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            master += str(free.getsockname()[1])
        with ThreadPoolExecutor() as machines:
            parts = [machines.submit(run_ranks, argv, {}, logs[r : r + 1], r, 2, master) for r in (0, 1)]
            for part in parts:
                part.result()
    said = [log.read_text().split("I met: ")[1].splitlines()[0] for log in logs]
    assert said == ["0 2 ['127.0.0.1']", "1 2 ['127.0.0.1']"]


def trainer_says(ledger: Ledger) -> tuple[str, str]:
    """State and message of the trainer's newest attempt."""
    return next(((a.state, a.message) for a in ledger.actors(RUN) if a.role == "trainer"), ("absent", ""))


def wait_until(condition: Callable[[], bool], process: ProcessGroup) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, process.tail()
        time.sleep(0.05)
