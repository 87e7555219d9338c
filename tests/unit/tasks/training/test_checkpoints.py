"""A run that is resumed from a checkpoint is the run that was never interrupted, bit for bit."""

import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from planners.errors import UserError
from tasks.config.training import OptimizerSection
from tasks.exchange.files import is_temporary, target_of, temporary_sibling
from tasks.exchange.layout import RunDirectory
from tasks.training.algorithms import DecoupledPpo
from tasks.training.checkpoints import (
    delete_checkpoints,
    found_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from tasks.training.engine import Engine
from tasks.training.groups import with_advantages
from tests.support.training import make_engine, one_rank, parameters_of, random_groups


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def confirm() -> None:
    """This trainer is current."""


def train(engine: Engine, first: int, last: int) -> None:
    for step in range(first, last):
        engine.train_step(with_advantages(random_groups(4, seed=step), DecoupledPpo()), step)


def draws() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(1))]


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_resuming_equals_never_stopping(run: RunDirectory, zero_stage: int) -> None:
    optimizer = OptimizerSection(lr=1e-2, schedule="cosine", warmup_steps=2, minibatches=2)
    engine = make_engine(optimizer=optimizer, zero_stage=zero_stage)
    train(engine, 0, 3)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draws()
    save_checkpoint(run, 3, 0, engine, one_rank(), confirm)
    expected_draws = draws()
    train(engine, 3, 6)
    expected = parameters_of(engine)

    resumed = make_engine(optimizer=optimizer, seed=9, zero_stage=zero_stage)
    load_checkpoint(run, 0, 3, resumed, one_rank())
    assert draws() == expected_draws
    train(resumed, 3, 6)
    continued = parameters_of(resumed)
    assert all(torch.equal(continued[name], expected[name]) for name in expected)


def test_a_replaced_trainer_leaves_no_checkpoint(run: RunDirectory) -> None:
    def replaced() -> None:
        raise RuntimeError("replaced")

    with pytest.raises(RuntimeError, match="replaced"):
        save_checkpoint(run, 1, 0, make_engine(), one_rank(), replaced)
    assert list(run.checkpoints.iterdir()) == []


@pytest.mark.parametrize(("free_bytes", "error"), [(4096, UserError), (1 << 40, RuntimeError)])
def test_a_full_disk_is_told_apart_from_other_failures(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, free_bytes: int, error: type[Exception]
) -> None:
    engine = make_engine()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")

    monkeypatch.setattr(engine.deepspeed, "save_checkpoint", fail)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free_bytes))
    with pytest.raises(error, match="No space left on device" if error is UserError else "enforce fail"):
        save_checkpoint(run, 1, 0, engine, one_rank(), confirm)
    assert list(run.checkpoints.iterdir()) == []


def test_only_what_a_trainer_knew_of_and_what_killed_ones_left_goes(run: RunDirectory) -> None:
    for lineage, step in ((0, 2), (0, 4), (0, 6), (1, 6)):
        run.checkpoint_path(lineage, step).mkdir()
    for lineage in (0, 1, 2):
        temporary_sibling(run.checkpoint_path(lineage, 8)).mkdir()
    found = found_checkpoints(run)
    successors = run.checkpoint_path(2, 8)
    successors.mkdir()
    delete_checkpoints(run, 1, keep=[(0, 4), (1, 6)], among=found)
    assert found_checkpoints(run) == [(0, 4), (1, 6), (2, 8)]
    assert [target_of(path) for path in run.checkpoints.iterdir() if is_temporary(path)] == [successors]


def test_a_checkpoint_that_cannot_be_continued_is_named(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    with pytest.raises(UserError, match=r"no checkpoint lineage-000-step-000004: .*resume"):
        load_checkpoint(run, 0, 4, engine, one_rank())
    save_checkpoint(run, 4, 0, engine, one_rank(), confirm)
    with monkeypatch.context() as patch:
        patch.setattr(engine.deepspeed, "load_checkpoint", lambda *_, **__: (None, None))
        with pytest.raises(UserError, match="has no state to continue from"):
            load_checkpoint(run, 0, 4, engine, one_rank())
    description = run.checkpoint_path(0, 4) / "checkpoint.json"
    whole = description.read_text()
    for here, written, said in (
        ('"ranks": 1', '"ranks": 2', "by 2 ranks in ZeRO stage 0 and cannot be continued by 1 in stage 0"),
        ('"zero_stage": 0', '"zero_stage": 3', "by 1 ranks in ZeRO stage 3 and cannot be continued by 1 in stage 0"),
    ):
        description.write_text(whole.replace(here, written))
        with pytest.raises(UserError, match=said):
            load_checkpoint(run, 0, 4, engine, one_rank())
