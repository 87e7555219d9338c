"""Checkpoints: all that an exact continuation needs, whole or absent.

The checkpoint of step s lets step s be the next one: the model after s steps, the optimiser, and every rank's random
generators. The learning rate is a function of the step, and trajectories are in the ledger, so neither is stored.
It is resumed by as many ranks as wrote it, in the same ZeRO stage. A lineage has one trainer, and a checkpoint the name
of its lineage: one that a trainer finishes after it was replaced is beside its successor's, and the ledger does not
count it.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from planners.errors import UserError
from tasks.exchange.files import discard, is_temporary, publish_directory, target_of, write_json
from tasks.exchange.layout import RunDirectory, checkpoint_of
from tasks.exchange.ledger import Ledger

if TYPE_CHECKING:  # flows ask for the latest checkpoint without loading torch
    from tasks.training.engine import Engine
    from tasks.training.ranks import Ranks

_DESCRIPTION = "checkpoint.json"


def found_checkpoints(run: RunDirectory) -> list[tuple[int, int]]:
    """(lineage, step) of every checkpoint on storage, in order; the ledger says which of them count."""
    found = (checkpoint_of(path) for path in run.checkpoints.iterdir())
    return sorted(checkpoint for checkpoint in found if checkpoint is not None)


def latest_checkpoint(run: RunDirectory, ledger: Ledger, run_id: str) -> int | None:
    """Step of the newest checkpoint that a resume may use, or None before there is one."""
    proven = ledger.proven_checkpoints(run_id, found_checkpoints(run))
    return proven[-1][1] if proven else None


@dataclass(frozen=True)
class WrittenBy:
    """The trainer that wrote a checkpoint: only as many ranks in the same ZeRO stage can continue it."""

    ranks: int
    zero_stage: int


def latest_written_by(run: RunDirectory, ledger: Ledger, run_id: str) -> WrittenBy | None:
    """Who wrote the newest checkpoint that a resume may use; None before there is one."""
    proven = ledger.proven_checkpoints(run_id, found_checkpoints(run))
    if not proven:
        return None
    description = _description(run.checkpoint_path(*proven[-1]))
    return WrittenBy(description["ranks"], description["zero_stage"])


def save_checkpoint(
    run: RunDirectory, step: int, lineage: int, engine: "Engine", ranks: "Ranks", confirm: Callable[[], None]
) -> None:
    """Write the checkpoint of `step`; every rank calls it.

    Args:
        run: the run's directory.
        step: training steps done.
        lineage: the lineage that the trainer works in.
        engine: what is stored.
        ranks: this process's place.
        confirm: called on rank 0 before the checkpoint gets its name; raises if this trainer has been replaced.

    Raises:
        UserError: the disk is full, read-only, or not ours to write.
    """

    def fill(directory: Path) -> None:
        ranks.share_text(str(directory))
        _write_part(directory, engine, ranks)
        write_json(
            directory / _DESCRIPTION,
            {"step": step, "lineage": lineage, "ranks": ranks.size, "zero_stage": engine.zero_stage},
        )
        confirm()

    if ranks.leads:
        publish_directory(run.checkpoint_path(lineage, step), fill)
    else:
        _write_part(Path(ranks.share_text("")), engine, ranks)


def load_checkpoint(run: RunDirectory, lineage: int, step: int, engine: "Engine", ranks: "Ranks") -> None:
    """Continue from the checkpoint of `step` that was written in `lineage`; every rank calls it.

    Raises:
        UserError: there is no such checkpoint, or another number of ranks, or another ZeRO stage, wrote it.
    """
    path = run.checkpoint_path(lineage, step)
    if not (path / _DESCRIPTION).exists():
        raise UserError(f"Run {run.root.name} has no checkpoint {path.name}: continue it with `hexflow resume`.")
    description = _description(path)
    written, here = WrittenBy(description["ranks"], description["zero_stage"]), WrittenBy(ranks.size, engine.zero_stage)
    if written != here:
        raise UserError(
            f"The checkpoint {path} was written by {written.ranks} ranks in ZeRO stage {written.zero_stage} and cannot "
            f"be continued by {here.ranks} in stage {here.zero_stage}: continue with `hexflow resume`, which plans for "
            "what it needs."
        )
    engine.load(path, _random_state_path(path, ranks))


def delete_checkpoints(
    run: RunDirectory, lineage: int, keep: Collection[tuple[int, int]], among: Collection[tuple[int, int]]
) -> list[Path]:
    """Delete the checkpoints `among` which are not to be kept, and what killed trainers left unfinished.

    A trainer decides what to keep while it is current. If it is replaced meanwhile, nothing of its successor goes.

    Args:
        run: the run's directory.
        lineage: the trainer's lineage; unfinished directories of this one and earlier ones go.
        keep: (lineage, step) of those to keep.
        among: what the decision was made on; anything else on storage came later.

    Returns:
        What storage did not let go.
    """
    doomed = []
    for path in sorted(run.checkpoints.iterdir()):
        checkpoint = checkpoint_of(path)
        if is_temporary(path):
            unfinished = checkpoint_of(target_of(path))
            if unfinished is not None and unfinished[0] <= lineage:
                doomed.append(path)
        elif checkpoint in among and checkpoint not in keep:
            doomed.append(path)
    return [path for path in doomed if not discard(path)]


def _description(path: Path) -> dict[str, int]:
    """Step, lineage, ranks and ZeRO stage of a checkpoint."""
    description: dict[str, int] = json.loads((path / _DESCRIPTION).read_text())
    return description


def _write_part(directory: Path, engine: "Engine", ranks: "Ranks") -> None:
    engine.save(directory, _random_state_path(directory, ranks))
    ranks.barrier()


def _random_state_path(directory: Path, ranks: "Ranks") -> Path:
    return directory / f"random-{ranks.rank}.json"
