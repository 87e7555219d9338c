"""Training means what it meant before the rooms: recorded answers in, the recorded numbers out."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tasks.config.sections import ModelSection
from tasks.config.settings import Settings
from tasks.models.prepare import prepare_model
from tests.support.golden import GOLDEN, RECORDED, digest, recorded_groups, replay

EXACTNESS = 1e-6
PEAK_EXACTNESS = 3e-6
"""Of the largest ratio and weight, which are those of one token: no mean evens out how a kernel rounds."""
FLOOR = 1e-7


def assert_same_metrics(found: dict[str, float], recorded: dict[str, float]) -> None:
    """All that was recorded; new metrics may stand beside it."""
    for name, value in recorded.items():
        rel = PEAK_EXACTNESS if name.endswith("/max") else EXACTNESS
        assert found[name] == pytest.approx(value, rel=rel, abs=FLOOR), name


def assert_same_digests(weights: dict[str, torch.Tensor], recorded: dict[str, list[float]]) -> None:
    assert weights.keys() == recorded.keys()
    for name, (norm, mean, projection) in recorded.items():
        found_norm, found_mean, found_projection = digest(weights[name])
        assert found_norm == pytest.approx(norm, rel=EXACTNESS), name
        assert found_mean == pytest.approx(mean, rel=EXACTNESS, abs=FLOOR), name
        # The terms of the projection all but cancel, so its rounding is as large as the norm's.
        assert found_projection == pytest.approx(projection, rel=EXACTNESS, abs=EXACTNESS * norm), name


@pytest.mark.parametrize("recording", RECORDED["recordings"], ids=lambda r: f"{r['model']}-{r['name']}")
def test_training_gives_the_numbers_recorded_before_the_rooms(recording: dict[str, Any], settings: Settings) -> None:
    """Losses, gradient norms and all other metrics of every step, and the weights after the last."""
    trained = replay(recording, prepare_model(ModelSection(source="tiny-random", dtype="float32"), settings))
    assert_same_digests(trained.start, RECORDED["start"][recording["model"]])
    for result, step in zip(trained.steps, recording["steps"], strict=True):
        assert (result.updates, result.skipped) == (step["updates"], step["skipped"])
        assert_same_metrics(result.metrics, step["metrics"])
    assert_same_digests(trained.end, recording["end"])
    whole = GOLDEN / f"{recording['model']}-{recording['name']}.safetensors"
    if whole.exists():
        for name, weight in load_file(whole).items():
            torch.testing.assert_close(trained.end[name], weight, rtol=0, atol=EXACTNESS, msg=name)


@pytest.mark.parametrize("model", ["small", "tiny-random"])
def test_the_recorded_answers_hold_every_case(model: str) -> None:
    """Several versions in one answer, tokens the policy did not choose, one token, masked answers, equal rewards."""
    groups = [group for step in recorded_groups(model) for group in step]
    answers = [answer for group in groups for answer in group.trajectories]
    assert any(len({segment.version for segment in answer.segments}) == 3 for answer in answers)
    assert any(not segment.trainable for answer in answers for segment in answer.segments)
    assert any(len(answer.token_ids) == 1 for answer in answers)
    assert sum(answer.masked for answer in answers) == 2
    assert any(len({answer.reward for answer in group.trajectories}) == 1 for group in groups)
