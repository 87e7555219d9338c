"""Trajectories: a group's version is that of its oldest trained token, and what cannot be is refused."""

import math
from pathlib import Path

import numpy as np
import pytest

from tasks.exchange.payloads import load_group, save_group
from tasks.exchange.trajectories import Group, Outcome, Segment, Trajectory


def test_version_is_that_of_the_oldest_trained_token() -> None:
    fixed = Segment((1,), (0.0,), version=0, replica="r", trainable=False)
    empty = Segment((), (), version=1, replica="r")
    old = Segment((2, 3), (-1.0, -1.0), version=4, replica="r")
    new = Segment((4,), (-1.0,), version=6, replica="r")
    answer = Trajectory((fixed, empty, old, new), Outcome.SCORED, 1.0)
    masked = Trajectory((Segment((5,), (-1.0,), version=2, replica="r"),), Outcome.TIMEOUT, math.nan)
    later = Trajectory((new,), Outcome.TRUNCATED, 0.0)
    assert answer.token_ids.tolist() == [1, 2, 3, 4]
    assert answer.tokens == 4
    assert answer.oldest_version == 4
    group = Group(1, 0, (9,), (answer, masked, later))
    assert (group.oldest_version, group.newest_version) == (4, 6)
    assert group.usable
    assert not Group(1, 0, (9,), (answer, masked)).usable


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_masked_answer_has_no_reward(reward: float) -> None:
    with pytest.raises(ValueError, match="masked"):
        Trajectory((), Outcome.ERROR, reward)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_scored_answer_has_a_finite_reward(reward: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Trajectory((), Outcome.TRUNCATED, reward)


def test_every_token_has_a_logprob() -> None:
    with pytest.raises(ValueError, match="2 tokens but 1"):
        Segment((1, 2), (0.0,), 0, "r")


def test_tokens_cannot_be_changed_and_are_compared_by_value(tmp_path: Path) -> None:
    sampled = np.array([1, 2], np.int32)
    segment = Segment(sampled, [-0.5, -1.5], 3, "r")
    save_group(tmp_path / "x", Group(1, 2, [7], (Trajectory((segment, segment), Outcome.SCORED, 1.0),)))
    loaded = load_group(tmp_path / "x")
    assert loaded == load_group(tmp_path / "x")
    (answer,) = loaded.trajectories
    assert answer.segments == (segment, segment)
    assert segment != Segment([1, 3], [-0.5, -1.5], 3, "r")
    assert segment != Segment([1, 2], [-0.5, -1.25], 3, "r")
    assert loaded != Group(1, 2, [8], loaded.trajectories)
    for array in (segment.token_ids, loaded.prompt_ids, answer.segments[1].logprobs):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9
    assert np.shares_memory(segment.token_ids, sampled)
    assert answer.segments[0].token_ids.base is answer.segments[1].token_ids.base


def test_every_answer_has_the_parts_that_the_group_names() -> None:
    answer = Trajectory((), Outcome.SCORED, 0.5, (0.5,))
    Group(1, 1, (1,), (answer,), ("style",))
    for names in ((), ("style", "length")):
        with pytest.raises(ValueError, match="group 1 has answers whose rewards do not have the parts"):
            Group(1, 1, (1,), (answer,), names)
