"""A run that is resumed from a checkpoint is the run that was never interrupted, bit for bit."""

import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from planners.errors import UserError
from tasks.exchange.layout import RunDirectory
from tasks.experiment import AlgorithmSection
from tasks.training.checkpoints import (
    checkpoint_steps,
    delete_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from tasks.training.engine import Engine
from tasks.training.losses import with_advantages
from tests.training_support import make_engine, one_rank, parameters_of, random_groups


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def confirm() -> None:
    """This trainer is current."""


def train(engine: Engine, first: int, last: int) -> None:
    for step in range(first, last):
        engine.train_step(with_advantages(random_groups(4, seed=step)), step)


def draws() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(1))]


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_resuming_equals_never_stopping(run: RunDirectory, zero_stage: int) -> None:
    algorithm = AlgorithmSection(lr=1e-2, lr_schedule="cosine", warmup_steps=2, zero_stage=zero_stage, minibatches=2)
    engine = make_engine(algorithm)
    train(engine, 0, 3)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draws()
    save_checkpoint(run, 3, 0, engine, one_rank(), confirm)
    expected_draws = draws()
    train(engine, 3, 6)
    expected = parameters_of(engine)

    resumed = make_engine(algorithm, seed=9)
    load_checkpoint(run, 3, resumed, one_rank())
    assert draws() == expected_draws
    train(resumed, 3, 6)
    continued = parameters_of(resumed)
    assert all(torch.equal(continued[name], expected[name]) for name in expected)


def test_a_replaced_trainer_leaves_no_checkpoint(run: RunDirectory) -> None:
    def replaced() -> None:
        raise RuntimeError("replaced")

    with pytest.raises(RuntimeError, match="replaced"):
        save_checkpoint(run, 1, 0, make_engine(AlgorithmSection()), one_rank(), replaced)
    assert list(run.checkpoints.iterdir()) == []
    assert latest_checkpoint(run) is None


@pytest.mark.parametrize(("free_bytes", "error"), [(4096, UserError), (1 << 40, RuntimeError)])
def test_a_full_disk_is_told_apart_from_other_failures(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, free_bytes: int, error: type[Exception]
) -> None:
    engine = make_engine(AlgorithmSection())

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")

    monkeypatch.setattr(engine.deepspeed, "save_checkpoint", fail)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free_bytes))
    with pytest.raises(error, match="No space left on device" if error is UserError else "enforce fail"):
        save_checkpoint(run, 1, 0, engine, one_rank(), confirm)
    assert list(run.checkpoints.iterdir()) == []


def test_old_abandoned_and_unfinished_checkpoints_go(run: RunDirectory) -> None:
    for step in (2, 4, 6, 8):
        run.checkpoint_path(step).mkdir()
    unfinished = run.checkpoints / ".step-000010.0123.tmp"
    unfinished.mkdir()
    assert latest_checkpoint(run) == 8
    delete_checkpoints(run, keep_newest=2, newest=6)
    assert checkpoint_steps(run) == [4, 6]
    assert not unfinished.exists()


def test_a_checkpoint_that_cannot_be_continued_is_named(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(AlgorithmSection())
    with pytest.raises(UserError, match=r"no checkpoint of step 4; it has \[\]"):
        load_checkpoint(run, 4, engine, one_rank())
    save_checkpoint(run, 4, 0, engine, one_rank(), confirm)
    with monkeypatch.context() as patch:
        patch.setattr(engine.deepspeed, "load_checkpoint", lambda *_, **__: (None, None))
        with pytest.raises(UserError, match="has no state to continue from"):
            load_checkpoint(run, 4, engine, one_rank())
    description = run.checkpoint_path(4) / "checkpoint.json"
    description.write_text(description.read_text().replace('"ranks": 1', '"ranks": 2'))
    with pytest.raises(UserError, match="written by 2 ranks and cannot be continued with 1"):
        load_checkpoint(run, 4, engine, one_rank())
