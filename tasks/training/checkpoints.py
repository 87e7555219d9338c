"""Checkpoints: all that an exact continuation needs, whole or absent.

The checkpoint of step s lets step s be the next one: the model after s steps, the optimiser, and every rank's random
generators. The learning rate is a function of the step, and trajectories are in the ledger, so neither is stored.
It is resumed with as many ranks as wrote it.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from planners.errors import UserError
from tasks.exchange.files import is_temporary, publish_directory, remove_directory, write_json
from tasks.exchange.layout import RunDirectory, checkpoint_of

if TYPE_CHECKING:  # flows ask for the latest checkpoint without loading torch
    from tasks.training.engine import Engine
    from tasks.training.ranks import Ranks

_DESCRIPTION = "checkpoint.json"


def checkpoint_steps(run: RunDirectory) -> list[int]:
    """Steps of the run's checkpoints, ascending."""
    found = (checkpoint_of(path) for path in run.checkpoints.iterdir())
    return sorted(step for step in found if step is not None)


def latest_checkpoint(run: RunDirectory) -> int | None:
    """Step of the newest checkpoint, or None before there is one."""
    return max(checkpoint_steps(run), default=None)


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
        write_json(directory / _DESCRIPTION, {"step": step, "lineage": lineage, "ranks": ranks.size})
        confirm()

    if ranks.leads:
        publish_directory(run.checkpoint_path(step), fill)
    else:
        _write_part(Path(ranks.share_text("")), engine, ranks)


def load_checkpoint(run: RunDirectory, step: int, engine: "Engine", ranks: "Ranks") -> None:
    """Continue from the checkpoint of `step`; every rank calls it.

    Raises:
        UserError: there is no such checkpoint, or another number of ranks wrote it.
    """
    path = run.checkpoint_path(step)
    if not (path / _DESCRIPTION).exists():
        raise UserError(f"Run {run.root.name} has no checkpoint of step {step}; it has {checkpoint_steps(run)}.")
    written_by = json.loads((path / _DESCRIPTION).read_text())["ranks"]
    if written_by != ranks.size:
        raise UserError(
            f"The checkpoint {path} was written by {written_by} ranks and cannot be continued with {ranks.size}: "
            f"train on {written_by} devices."
        )
    engine.load(path, _random_state_path(path, ranks))


def delete_checkpoints(run: RunDirectory, keep_newest: int, newest: int) -> None:
    """Delete all but the `keep_newest` newest checkpoints, those above step `newest`, and unfinished ones.

    Checkpoints above the step that a trainer resumed from belong to a future that was abandoned.
    """
    keep = [step for step in checkpoint_steps(run) if step <= newest][-keep_newest:]
    for path in run.checkpoints.iterdir():
        if is_temporary(path):
            shutil.rmtree(path)
        elif checkpoint_of(path) is not None and checkpoint_of(path) not in keep:
            remove_directory(path)


def _write_part(directory: Path, engine: "Engine", ranks: "Ranks") -> None:
    engine.save(directory, _random_state_path(directory, ranks))
    ranks.barrier()


def _random_state_path(directory: Path, ranks: "Ranks") -> Path:
    return directory / f"random-{ranks.rank}.json"
