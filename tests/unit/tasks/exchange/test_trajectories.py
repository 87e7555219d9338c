"""Payloads: what is loaded is what was saved, and a group's version is that of its oldest trained token."""

import math
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.exchange.files import temporary_sibling
from tasks.exchange.layout import RunDirectory
from tasks.exchange.trajectories import (
    Group,
    Outcome,
    Segment,
    Trajectory,
    delete_payloads,
    found_payloads,
    load_group,
    save_group,
)

TOKENS = st.lists(st.tuples(st.integers(0, 200_000), st.floats(-50, 0, width=32)), max_size=5)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    tokens = draw(TOKENS)
    return Segment(
        token_ids=tuple(token for token, _ in tokens),
        logprobs=tuple(logprob for _, logprob in tokens),
        version=draw(st.integers(0, 5)),
        replica=draw(st.sampled_from(["rollout-0", "rollout-1", "größer"])),
        trainable=draw(st.booleans()),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    outcome = draw(st.sampled_from(Outcome))
    masked = outcome in (Outcome.TIMEOUT, Outcome.ERROR)
    reward = math.nan if masked else draw(st.floats(-1e9, 1e9))
    parts = draw(st.tuples(st.floats(-1e9, 1e9), st.just(math.nan)))
    return Trajectory(tuple(draw(st.lists(segments(), max_size=3))), outcome, reward, parts)


GROUPS = st.builds(
    Group,
    group_id=st.integers(1, 10**9),
    prompt_index=st.integers(0, 10**9),
    prompt_ids=st.lists(st.integers(0, 200_000), max_size=5).map(tuple),
    trajectories=st.lists(trajectories(), max_size=4).map(tuple),
    reward_names=st.just(("style", "größe")),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(group=GROUPS)
def test_round_trip(group: Group, tmp_path: Path) -> None:
    path = RunDirectory(tmp_path).group_path(group.group_id)
    save_group(path, group)
    assert repr(load_group(path)) == repr(group)  # repr, because nan equals nothing


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


def test_foreign_format_is_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(1)}, tmp_path / "x", {"format": "something-else"})
    with pytest.raises(ValueError, match="something-else"):
        load_group(tmp_path / "x")


def test_only_disposable_payloads_are_deleted(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    for group_id in (1, 2, 3):
        save_group(run.group_path(group_id), Group(group_id, 0, (), ()))
    (run.trajectories / "not-a-payload").touch()
    assert found_payloads(run) == [1, 2, 3]
    assert delete_payloads(run, {1, 3, 7}) == []
    assert found_payloads(run) == [2]


def test_what_a_killed_writer_left_goes_after_an_hour(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    fresh, old = temporary_sibling(run.group_path(1)), temporary_sibling(run.group_path(2))
    for path in (fresh, old):
        path.touch()
    os.utime(old, (time.time() - 4000, time.time() - 4000))
    assert delete_payloads(run, set()) == []
    assert list(run.trajectories.iterdir()) == [fresh]


def test_every_answer_has_the_parts_that_the_group_names() -> None:
    answer = Trajectory((), Outcome.SCORED, 0.5, (0.5,))
    Group(1, 1, (1,), (answer,), ("style",))
    for names in ((), ("style", "length")):
        with pytest.raises(ValueError, match="group 1 has answers whose rewards do not have the parts"):
            Group(1, 1, (1,), (answer,), names)
