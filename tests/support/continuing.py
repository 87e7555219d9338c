"""Trainers that write checkpoints in every ZeRO stage and continue those of others: what one process does of it.

`python -m tests.support.continuing DIRECTORY`, as each of several ranks, writes and continues in DIRECTORY what
`one_rank` writes and continues in the test's process.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from tasks.config.training import OptimizerSection
from tasks.exchange.layout import RunDirectory
from tasks.training.algorithms import DecoupledPpo
from tasks.training.checkpoints import load_checkpoint, save_checkpoint
from tasks.training.engine import Engine
from tasks.training.groups import with_advantages
from tasks.training.ranks import Ranks, join_ranks
from tests.support.training import make_engine, parameters_of, random_groups

STAGES = (0, 1, 2, 3)
SAVED, LAST = 3, 5
"""Steps behind the checkpoint, and in all."""
Weights = dict[str, torch.Tensor]


def train(engine: Engine, first: int, last: int) -> None:
    for step in range(first, last):
        engine.train_step(with_advantages(random_groups(4, seed=step), DecoupledPpo()), step)


def engine_in(stage: int, ranks: Ranks, seed: int = 0, dtype: torch.dtype = torch.float32) -> Engine:
    optimizer = OptimizerSection(lr=1e-2, schedule="cosine", warmup_steps=2, minibatches=2)
    return make_engine(optimizer=optimizer, zero_stage=stage, ranks=ranks, seed=seed, dtype=dtype)


def write_all(run: RunDirectory, ranks: Ranks) -> dict[int, Weights]:
    """Write a checkpoint in each stage, as that stage's lineage; the weights of who went on without stopping."""
    run.create()
    uninterrupted = {}
    for stage in STAGES:
        engine = engine_in(stage, ranks)
        train(engine, 0, SAVED)
        save_checkpoint(run, SAVED, stage, engine, ranks, lambda: None)
        train(engine, SAVED, LAST)
        uninterrupted[stage] = parameters_of(engine)
    return uninterrupted


def continued(run: RunDirectory, written: int, stage: int, ranks: Ranks) -> Weights:
    """The weights of who goes on in `stage` from the checkpoint that was written in stage `written`."""
    engine = engine_in(stage, ranks, seed=9)
    load_checkpoint(run, written, SAVED, engine, ranks)
    train(engine, SAVED, LAST)
    return parameters_of(engine)


def place(directory: Path, ranks: int) -> RunDirectory:
    """Where so many ranks write."""
    return RunDirectory(directory / f"ranks-{ranks}")


def key(ranks: int, written: int, stage: int) -> str:
    """Of what goes on in `stage` from what `ranks` ranks wrote in stage `written`."""
    return f"{ranks} {written} {stage}"


def pairs(ranks: int) -> list[tuple[int, int, int]]:
    """(writers, stage written in, stage gone on in): all that the same ranks wrote, and half of what one did."""
    same = [(ranks, written, stage) for written in STAGES for stage in STAGES]
    return same + [(1, written, (written + k) % len(STAGES)) for written in STAGES for k in (0, 1)]


def main() -> None:
    directory, ranks = Path(sys.argv[1]), join_ranks(rendezvous_s=60, wait_s=60)
    results = {f"uninterrupted {k}": weights for k, weights in write_all(place(directory, ranks.size), ranks).items()}
    for writers, written, stage in pairs(ranks.size):
        results[key(writers, written, stage)] = continued(place(directory, writers), written, stage, ranks)
    if ranks.leads:
        tensors = {f"{run}|{name}": tensor for run, weights in results.items() for name, tensor in weights.items()}
        save_file(tensors, directory / "results.safetensors")


if __name__ == "__main__":
    main()
