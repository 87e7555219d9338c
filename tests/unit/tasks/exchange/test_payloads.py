"""Payloads: what is loaded is what was saved, and whatever storage does to one is found by who reads it."""

import math
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tasks.exchange.files import temporary_sibling
from tasks.exchange.layout import RunDirectory
from tasks.exchange.payloads import (
    DamagedPayload,
    delete_payloads,
    found_payloads,
    load_group,
    open_group,
    save_group,
)
from tasks.exchange.trajectories import Group, Outcome, Segment, Trajectory

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


SMALL = Group(
    7,
    3,
    (7, 8),
    (
        Trajectory(
            (Segment((1, 2, 3), (-1, -2, -3), 0, "r"), Segment((4,), (-1,), 1, "q")), Outcome.SCORED, 1.0, (1.0,)
        ),
        Trajectory((Segment((77,), (-1,), 1, "q"),), Outcome.SCORED, 0.0, (0.0,)),
    ),
    ("style",),
)


def test_a_flipped_bit_in_any_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "payload"
    save_group(path, SMALL)
    whole = path.read_bytes()
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(DamagedPayload, match=r"damaged|no payload"):
            load_group(path)


def test_every_lost_end_is_found(tmp_path: Path) -> None:
    path = tmp_path / "payload"
    save_group(path, SMALL)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedPayload, match="damaged"):
            load_group(path)


def test_who_reads_some_answers_checks_these(tmp_path: Path) -> None:
    path = tmp_path / "payload"
    save_group(path, SMALL)
    damaged = path.read_bytes().replace(np.array([77], "<i4").tobytes(), np.array([78], "<i4").tobytes())
    path.write_bytes(damaged)
    stored = open_group(path)
    assert stored.with_answers([0]).trajectories == SMALL.trajectories[:1]
    with pytest.raises(DamagedPayload, match="answer 1 differs from its checksum") as caught:
        stored.with_answers([0, 1])
    assert caught.value.path == path


def test_a_payload_that_is_gone_is_as_good_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / "payload"
    with pytest.raises(DamagedPayload, match="is lost"):
        open_group(path, deadline_s=0.0)
    save_group(path, SMALL)
    stored = open_group(path, deadline_s=0.0)
    path.unlink()
    with pytest.raises(DamagedPayload, match="is lost"):
        stored.with_answers([0])


def test_a_payload_is_a_safetensors_file(tmp_path: Path) -> None:
    save_group(tmp_path / "payload", SMALL)
    assert load_file(tmp_path / "payload")["token_ids"].tolist() == [1, 2, 3, 4, 77]


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
