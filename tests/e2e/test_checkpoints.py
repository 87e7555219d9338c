"""Checkpoints of one and of two ranks, in every ZeRO stage, continued by two and by one in every stage."""

import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tasks.training.launch import run_ranks
from tests.support.continuing import SAVED, STAGES, Weights, continued, key, pairs, place, write_all
from tests.support.training import one_rank

pytestmark = pytest.mark.e2e

TOLERANCE = 2e-5
"""Of a weight, where another number of ranks, or another stage, adds the same numbers in another order."""


def assert_close(weights: Weights, expected: Weights, said: str) -> None:
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, atol=TOLERANCE, rtol=0, msg=f"{said}: {name}")


def test_any_ranks_in_any_stage_continue_what_any_others_wrote(tmp_path: Path) -> None:
    """To the bit where ranks and stage are the same, within a tolerance of never having stopped where they are not."""
    alone = write_all(place(tmp_path, 1), one_rank())
    argv = [sys.executable, "-m", "tests.support.continuing", str(tmp_path)]
    run_ranks(argv, {}, [tmp_path / f"rank-{rank}.log" for rank in (0, 1)])
    together: dict[str, Weights] = defaultdict(dict)
    for name, tensor in load_file(tmp_path / "results.safetensors").items():
        of, _, parameter = name.partition("|")
        together[of][parameter] = tensor

    for writers, written, stage in pairs(2):
        said = f"{writers} ranks in stage {written}, then 2 in {stage}"
        assert_close(together[key(writers, written, stage)], alone[0], said)
    for written in STAGES:
        for stage in STAGES:
            here = continued(place(tmp_path, 2), written, stage, one_rank())
            assert_close(here, alone[0], f"2 ranks in stage {written}, then 1 in {stage}")
        uninterrupted = together[f"uninterrupted {written}"]
        same = together[key(2, written, written)]
        assert all(torch.equal(same[name], value) for name, value in uninterrupted.items()), written
        (whole,) = place(tmp_path, 1).checkpoint_path(written, SAVED).glob("part-*")
        shares = [path.stat().st_size for path in place(tmp_path, 2).checkpoint_path(written, SAVED).glob("part-*")]
        assert len(shares) == 2
        assert max(shares) < 0.6 * whole.stat().st_size  # no rank holds, gathers or writes much more than its share
