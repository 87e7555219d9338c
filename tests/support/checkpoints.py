"""Checkpoints without a model: whole to everybody who does not train, and made in no time."""

from pathlib import Path
from typing import Any, cast

from tasks.exchange.layout import RunDirectory
from tasks.training.checkpoints import write_checkpoint


class _Part:
    """What stands for the state of one rank."""

    shapes: dict[str, list[int]] = {}
    optimizer: dict[str, float] = {}

    def write(self, directory: Path, rank: int) -> None:
        (directory / "part-00000.safetensors").write_bytes(b"weights and moments")


class _Alone:
    """The only rank."""

    rank, leads = 0, True

    def share_text(self, text: str) -> str:
        return text

    def barrier(self) -> None:
        """Nobody to wait for."""


def make_checkpoint(run: RunDirectory, lineage: int, step: int) -> Path:
    """A whole checkpoint of `step`, written in `lineage`."""
    write_checkpoint(run, step, lineage, cast(Any, _Part()), cast(Any, _Alone()), lambda: None)
    return run.checkpoint_path(lineage, step)


def damage(path: Path) -> Path:
    """Turn one bit of a checkpoint's tensors; returns the file."""
    part = next(path.glob("part-*"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    return part


def make_checkpoint_of_before(run: RunDirectory, lineage: int, step: int) -> Path:
    """A checkpoint as DeepSpeed wrote it: pickles in a directory, and no manifest."""
    path = run.checkpoint_path(lineage, step)
    (path / "state").mkdir(parents=True)
    (path / "state" / "mp_rank_00_model_states.pt").write_bytes(b"pickle")
    (path / "random-0.json").write_text("{}")
    (path / "checkpoint.json").write_text(f'{{"step": {step}, "lineage": {lineage}, "ranks": 1, "zero_stage": 0}}')
    return path
