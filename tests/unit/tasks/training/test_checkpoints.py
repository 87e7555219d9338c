"""A run resumed from a checkpoint is the run that was never interrupted; a checkpoint that is not whole is named."""

import json
import pickle
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from planners.errors import UserError
from tasks.config.files import load_experiment
from tasks.config.sections import RunSection
from tasks.config.settings import Settings
from tasks.exchange.files import is_temporary, target_of, temporary_sibling
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Ledger
from tasks.exchange.manifest import Damaged, write_manifest
from tasks.models.prepare import prepare_model
from tasks.training import export
from tasks.training.checkpoints import (
    MANIFEST,
    check_checkpoint,
    delete_checkpoints,
    found_checkpoints,
    load_checkpoint,
    resume_point,
    save_checkpoint,
)
from tasks.training.engine import load_engine
from tasks.training.ranks import Ranks
from tests.support.checkpoints import damage, make_checkpoint, make_checkpoint_of_before
from tests.support.continuing import LAST, SAVED, STAGES, continued, engine_in, train, write_all
from tests.support.ledger import begin, join, lease, score, take
from tests.support.places import DEPLOYMENTS
from tests.support.training import make_engine, one_rank, parameters_of

RUN = "run"
DUE_AT_1 = RunSection(steps=10, checkpoint_every=1)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / RUN)
    directory.create()
    return directory


def confirm() -> None:
    """This trainer is current."""


def draws() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(1))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero_stage", STAGES)
def test_resuming_equals_never_stopping(
    run: RunDirectory, zero_stage: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, random generators too, and without unpickling anything."""
    engine = engine_in(zero_stage, one_rank(), dtype=dtype)
    train(engine, 0, SAVED)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draws()
    save_checkpoint(run, SAVED, 0, engine, one_rank(), confirm)
    expected_draws = draws()
    train(engine, SAVED, LAST)
    expected = parameters_of(engine)

    resumed = engine_in(zero_stage, one_rank(), seed=9, dtype=dtype)
    with monkeypatch.context() as patch:
        for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
            patch.delattr(module, name)
        load_checkpoint(run, 0, SAVED, resumed, one_rank())
    assert draws() == expected_draws
    train(resumed, SAVED, LAST)
    weights = parameters_of(resumed)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_every_stage_continues_what_every_other_wrote(run: RunDirectory) -> None:
    expected = write_all(run, one_rank())[0]
    for written in STAGES:
        for stage in STAGES:
            weights = continued(run, written, stage, one_rank())
            for name, value in expected.items():
                torch.testing.assert_close(weights[name], value, atol=2e-5, rtol=0, msg=f"{written} {stage} {name}")


def test_a_checkpoint_before_the_first_update_is_continued_like_any(run: RunDirectory) -> None:
    """Adam's moments are not there yet; in another stage they are then not there either."""
    save_checkpoint(run, 0, 0, engine_in(0, one_rank()), one_rank(), confirm)
    expected = engine_in(0, one_rank())
    train(expected, 0, SAVED)
    resumed = engine_in(2, one_rank(), seed=9)
    load_checkpoint(run, 0, 0, resumed, one_rank())
    train(resumed, 0, SAVED)
    weights = parameters_of(resumed)
    for name, value in parameters_of(expected).items():
        torch.testing.assert_close(weights[name], value, atol=2e-5, rtol=0, msg=name)


def test_every_bit_and_every_byte_of_a_checkpoint_counts(run: RunDirectory, settings: Settings) -> None:
    """Of the model of tiny.yaml: 19 bits turned, its files cut off, missing and added to, are all found and named."""
    experiment = load_experiment(DEPLOYMENTS / "experiments" / "tiny.yaml")
    model_path = prepare_model(experiment.model, settings)
    engine = load_engine(model_path, experiment, one_rank(), zero_stage=0, micro_batch_tokens=256)
    train(engine, 0, 1)
    save_checkpoint(run, 1, 0, engine, one_rank(), confirm)
    check_checkpoint(run, 0, 1)
    path = run.checkpoint_path(0, 1)
    files = {file: file.read_bytes() for file in sorted(path.iterdir())}
    assert {file.suffix for file in files} == {".json", ".safetensors"}

    def assert_damaged(file: Path, what: str) -> None:
        with pytest.raises(Damaged) as raised:
            check_checkpoint(run, 0, 1)
        assert str(path) in str(raised.value), what
        file.write_bytes(files[file])
        check_checkpoint(run, 0, 1)

    chosen = random.Random(0)
    for number in range(19):
        file = list(files)[number % len(files)]
        content = bytearray(files[file])
        bit = chosen.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        assert_damaged(file, f"bit {bit} of {file.name}")
    for file, whole in files.items():
        for size in (0, 1, len(whole) // 2, len(whole.rstrip()) - 1):
            file.write_bytes(whole[:size])
            assert_damaged(file, f"{file.name} cut off at {size}")
        file.unlink()
        assert_damaged(file, f"{file.name} missing")
        file.write_bytes(whole + b"\0")
        assert_damaged(file, f"{file.name} longer")
    (path / "model.pt").write_bytes(b"pickle")
    with pytest.raises(Damaged, match=r"model\.pt is not in the manifest"):
        check_checkpoint(run, 0, 1)


def test_a_checkpoint_under_another_name_or_of_another_run_is_foreign(run: RunDirectory, tmp_path: Path) -> None:
    path = make_checkpoint(run, 0, 4)
    check_checkpoint(run, 0, 4)
    other = RunDirectory(tmp_path / "other")
    for target in (run.checkpoint_path(0, 5), run.checkpoint_path(1, 4), other.checkpoint_path(0, 4)):
        shutil.copytree(path, target)
    for of, lineage, step in ((run, 0, 5), (run, 1, 4), (other, 0, 4)):
        with pytest.raises(
            Damaged, match=r"is not the checkpoint of that name, it was written for .*'run'.* 'step': 4"
        ):
            check_checkpoint(of, lineage, step)


def test_a_manifest_around_something_else_makes_no_checkpoint(run: RunDirectory) -> None:
    path = run.checkpoint_path(0, 4)
    for content, said in (
        ("{}", "describes no checkpoint"),
        ("[]", "describes no checkpoint"),
        ("{", "describes no checkpoint"),
        ('{"format": 2, "position": {}}', "is of format 2, and this hexflow reads format 1"),
        (None, "cannot be read: No such file or directory"),
    ):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        if content is not None:
            (path / "checkpoint.json").write_text(content)
        write_manifest(path, MANIFEST)
        with pytest.raises(Damaged, match=said):
            check_checkpoint(run, 0, 4)


def test_a_file_that_is_replaced_by_a_directory_or_a_pipe_is_damage(run: RunDirectory) -> None:
    part = damage(make_checkpoint(run, 0, 4))
    part.unlink()
    part.mkdir()
    with pytest.raises(Damaged, match="part-00000"):
        check_checkpoint(run, 0, 4)
    run.checkpoint_path(0, 5).write_text("a file under a checkpoint's name is none")
    assert found_checkpoints(run) == [(0, 4)]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Of a run of one group a step, whose first 3 steps are finished."""
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    begin(ledger, RUN, (1, 4, 10))
    trainer, replica = (join(ledger, role, run_id=RUN) for role in ("trainer", "replica"))
    for step in range(3):
        score(ledger, replica, lease(ledger, replica))
        take(ledger, trainer, step)
        ledger.record_step(trainer, step, json.dumps({}))
    return ledger


def test_the_newest_whole_checkpoint_is_taken_and_each_damaged_one_named(run: RunDirectory, ledger: Ledger) -> None:
    paths = [make_checkpoint(run, 0, step) for step in (1, 2, 3)]
    make_checkpoint(run, 1, 4)  # of no history of the ledger's
    told: list[str] = []
    assert resume_point(run, ledger, RUN, DUE_AT_1, told.append) == 3
    assert told == []
    part = damage(paths[2])
    (paths[1] / MANIFEST).unlink()
    assert resume_point(run, ledger, RUN, DUE_AT_1, told.append) == 1
    assert told == [
        f"The checkpoint of step 3 cannot be continued: {part} differs in size or checksum from the manifest.",
        f"The checkpoint of step 2 cannot be continued: {paths[1] / MANIFEST} is missing, so its directory was never "
        "finished or has been deleted.",
    ]


def test_a_run_without_a_whole_checkpoint_does_not_begin_again(run: RunDirectory, ledger: Ledger) -> None:
    """Neither where all are damaged, nor where they are gone, nor where what was trained on is; else it may."""
    path = make_checkpoint(run, 0, 3)
    part = damage(path)
    why = f"Run run cannot be continued, for none of its checkpoints is whole .*{part.name} differs.*: restore them"
    with pytest.raises(UserError, match=why):
        resume_point(run, ledger, RUN, DUE_AT_1)
    shutil.rmtree(path)
    make_checkpoint_of_before(run, 0, 3)
    with pytest.raises(
        UserError, match="DeepSpeed's pickles, which can run code when loaded, and only the hexflow that"
    ):
        resume_point(run, ledger, RUN, DUE_AT_1)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(UserError, match=r"for there is no checkpoint of it in .*checkpoints: restore them from a copy"):
        resume_point(run, ledger, RUN, RunSection(steps=10, checkpoint_every=3))
    not_due = RunSection(steps=10, checkpoint_every=4)
    with pytest.raises(UserError, match=r"of the groups trained on 3 are gone from .*trajectories: restore them"):
        resume_point(run, ledger, RUN, not_due)
    for row in ledger.groups(RUN):
        run.group_path(row.group_id).write_bytes(b"payload")
    assert resume_point(run, ledger, RUN, not_due) == 0


def test_a_replaced_trainer_leaves_no_checkpoint(run: RunDirectory) -> None:
    def replaced() -> None:
        raise RuntimeError("replaced")

    with pytest.raises(RuntimeError, match="replaced"):
        save_checkpoint(run, 1, 0, make_engine(), one_rank(), replaced)
    assert list(run.checkpoints.iterdir()) == []


@pytest.mark.parametrize(
    ("cause", "error", "said"),
    [
        ("I/O error: No space left on device (os error 28)", UserError, "No space left on device"),
        ("InvalidHeader", SafetensorError, "InvalidHeader"),
    ],
)
def test_a_full_disk_is_told_apart_from_other_failures(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, cause: str, error: type[Exception], said: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SafetensorError(f"Error while serializing: {cause}")

    monkeypatch.setattr(export, "save_file", fail)
    with pytest.raises(error, match=said):
        save_checkpoint(run, 1, 0, make_engine(), one_rank(), confirm)
    assert list(run.checkpoints.iterdir()) == []
    another = SimpleNamespace(leads=False, rank=1, size=2, share_text=lambda text: str(run.checkpoints))
    with pytest.raises(error, match=said):
        save_checkpoint(run, 1, 0, make_engine(), cast(Ranks, another), confirm)


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


def test_a_checkpoint_that_cannot_be_continued_is_named(run: RunDirectory) -> None:
    with pytest.raises(UserError, match=r"no checkpoint lineage-000-step-000004: .*resume"):
        load_checkpoint(run, 0, 4, make_engine(), one_rank())
    save_checkpoint(run, 4, 0, make_engine(), one_rank(), confirm)
    path = run.checkpoint_path(0, 4)
    description = json.loads((path / "checkpoint.json").read_text())
    description["parameters"].popitem()
    (path / "checkpoint.json").write_text(json.dumps(description))
    (path / MANIFEST).unlink()
    write_manifest(path, MANIFEST)
    with pytest.raises(UserError, match=r"is of another model than the run's: .* start a new run"):
        load_checkpoint(run, 0, 4, make_engine(), one_rank())
    damage(path)
    with pytest.raises(
        UserError, match=r"differs in size or checksum from the manifest.* Continue with `hexflow resume r"
    ):
        load_checkpoint(run, 0, 4, make_engine(), one_rank())
