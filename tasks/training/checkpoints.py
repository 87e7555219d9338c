"""Checkpoints: all that an exact continuation needs, whole or absent, and nothing that can run.

The checkpoint of step s lets step s be the next one: the model after s steps, the optimiser, and every rank's random
generators. The learning rate is a function of the step, and trajectories are in the ledger, which is found again by
run, lineage and step; so neither is stored. Tensors are safetensors by parameter name, everything else is JSON, and a
manifest with a checksum of every file comes last. Any number of ranks in any ZeRO stage continues from it: as many in
the same stage to the bit, others but for the order of their sums.

A lineage has one trainer, and a checkpoint the name of its lineage: one that a trainer finishes after it was replaced
is beside its successor's, and the ledger does not count it.
"""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planners.errors import UserError
from tasks.config.sections import RunSection
from tasks.exchange.files import discard, disk_errors, is_temporary, publish_directory, target_of, write_json
from tasks.exchange.layout import RunDirectory, checkpoint_of
from tasks.exchange.ledger import Ledger
from tasks.exchange.manifest import Damaged, check_manifest, write_manifest
from tasks.exchange.payloads import found_payloads

if TYPE_CHECKING:  # flows ask for the newest checkpoint without loading torch
    from tasks.training.engine import Engine
    from tasks.training.ranks import Ranks
    from tasks.training.state import StatePart

FORMAT = 1
MANIFEST = "manifest.json"
_DESCRIPTION = "checkpoint.json"
_OF_BEFORE = "state"  # where DeepSpeed put its pickles, in checkpoints before there was a manifest


def found_checkpoints(run: RunDirectory) -> list[tuple[int, int]]:
    """(lineage, step) of every checkpoint on storage, in order; the ledger says which of them count."""
    found = (checkpoint_of(path) for path in run.checkpoints.iterdir() if path.is_dir())
    return sorted(checkpoint for checkpoint in found if checkpoint is not None)


def resume_point(
    run: RunDirectory, ledger: Ledger, run_id: str, settings: RunSection, tell: Callable[[str], object] = print
) -> int:
    """The step to continue from: that of the newest whole checkpoint, or 0 while none was due.

    Args:
        run: the run's directory.
        ledger: says which checkpoints count.
        run_id: the run.
        settings: say when a checkpoint was due.
        tell: is called with a sentence on each checkpoint that is passed over.

    Raises:
        UserError: no checkpoint is whole, but one was due or consumed trajectories are gone. Nothing has changed.
    """
    run.create()  # a directory of it that is gone is as good as an empty one
    damages = []
    for lineage, step in reversed(ledger.proven_checkpoints(run_id, found_checkpoints(run))):
        try:
            check_checkpoint(run, lineage, step)
        except Damaged as damage:
            damages.append(str(damage))
            tell(f"The checkpoint of step {step} cannot be continued: {damage}.")
        else:
            return step
    if damages:
        why = f"none of its checkpoints is whole ({'; '.join(damages)})"
    elif ledger.progress(run_id).step >= min(settings.checkpoint_every, settings.steps):
        why = f"there is no checkpoint of it in {run.checkpoints}"
    elif gone := {row.group_id for row in ledger.groups(run_id) if row.step is not None} - set(found_payloads(run)):
        why = f"there is no checkpoint of it, and of the groups trained on {len(gone)} are gone from {run.trajectories}"
    else:
        return 0
    raise UserError(f"Run {run_id} cannot be continued, for {why}: restore them from a copy, or start a new run.")


def check_checkpoint(run: RunDirectory, lineage: int, step: int) -> None:
    """Check that every file of the checkpoint of `step` is what was written in `lineage`, and for this run.

    Raises:
        Damaged: something is missing, added, altered or unreadable, or it was written by a hexflow that used pickles.
    """
    path = run.checkpoint_path(lineage, step)
    if (path / _OF_BEFORE).exists() and not (path / MANIFEST).exists():
        raise Damaged(
            f"{path} is in DeepSpeed's pickles, which can run code when loaded, and only the hexflow that wrote it can "
            "continue it"
        )
    try:
        check_manifest(path, MANIFEST)
        description = _description(path)
        written, position = description["format"], description["position"]
    except OSError as error:
        raise Damaged(f"{error.filename or path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise Damaged(f"{path / _DESCRIPTION} describes no checkpoint") from None
    if written != FORMAT:
        raise Damaged(f"{path} is of format {written}, and this hexflow reads format {FORMAT}")
    if position != _position(run, lineage, step):
        raise Damaged(f"{path} is not the checkpoint of that name, it was written for {position}")


def save_checkpoint(
    run: RunDirectory, step: int, lineage: int, engine: "Engine", ranks: "Ranks", confirm: Callable[[], None]
) -> None:
    """Write the checkpoint of `step`, with the engine's state of now; every rank calls it. See `write_checkpoint`."""
    write_checkpoint(run, step, lineage, engine.state(), ranks, confirm)


def write_checkpoint(
    run: RunDirectory, step: int, lineage: int, state: "StatePart", ranks: "Ranks", confirm: Callable[[], None]
) -> None:
    """Write the checkpoint of `step` from the parts of all ranks; every rank calls it.

    Args:
        run: the run's directory.
        step: training steps done.
        lineage: the lineage that the trainer works in.
        state: this rank's part.
        ranks: this process's place.
        confirm: called on rank 0 before the checkpoint gets its name; raises if this trainer has been replaced.

    Raises:
        UserError: the disk is full, read-only, or not ours to write.
    """

    def fill(directory: Path) -> None:
        ranks.share_text(str(directory))
        state.write(directory, ranks.rank)
        ranks.barrier()
        description = {
            "format": FORMAT,
            "position": _position(run, lineage, step),
            "optimizer": state.optimizer,
            "parameters": state.shapes,
        }
        write_json(directory / _DESCRIPTION, description)
        write_manifest(directory, MANIFEST)
        confirm()

    if ranks.leads:
        publish_directory(run.checkpoint_path(lineage, step), fill)
    else:
        path = Path(ranks.share_text(""))
        with disk_errors(path):
            state.write(path, ranks.rank)
        ranks.barrier()


def load_checkpoint(run: RunDirectory, lineage: int, step: int, engine: "Engine", ranks: "Ranks") -> None:
    """Continue from the checkpoint of `step` that was written in `lineage`; every rank calls it.

    Raises:
        UserError: there is no such checkpoint, or it is not whole, or of another model.
    """
    path = run.checkpoint_path(lineage, step)
    if not path.exists():
        raise UserError(f"Run {run.root.name} has no checkpoint {path.name}: continue it with `hexflow resume`.")
    if ranks.leads:
        try:
            check_checkpoint(run, lineage, step)
        except Damaged as damage:
            raise UserError(
                f"The checkpoint of step {step} cannot be continued: {damage}. Continue with `hexflow resume "
                f"{run.root.name}`, which takes the newest whole one."
            ) from None
    ranks.barrier()
    engine.restore(path, _description(path))


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


def _position(run: RunDirectory, lineage: int, step: int) -> dict[str, str | int]:
    """What the ledger finds by it: the groups consumed before `step` are in the model, all others are not."""
    return {"run": run.root.name, "lineage": lineage, "step": step}


def _description(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, its tensors and random generators aside."""
    description: dict[str, Any] = json.loads((path / _DESCRIPTION).read_text())
    return description
