"""Statistics of a run: the interval of a difference, and the algebra of busy times."""

import math
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.tracking.statistics import intersection, length_s, overlap_share, paired_difference, union, wait_share

# Whole seconds, so that a set of moments can be compared one by one.
intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def moments(spans: Sequence[tuple[float, float]]) -> set[int]:
    """The unit steps of time that the intervals cover."""
    return {moment for start, end in spans for moment in range(int(start), int(end))}


@given(intervals)
def test_union_covers_the_same_moments_once(spans: list[tuple[int, int]]) -> None:
    merged = union(spans)
    assert moments(merged) == moments(spans)
    assert all(before[1] < after[0] for before, after in pairwise(merged))
    assert length_s(spans) == len(moments(spans))


@given(intervals, intervals)
def test_intersection_holds_the_common_moments(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    assert moments(intersection(left, right)) == moments(left) & moments(right)


@given(intervals, intervals)
def test_overlap_is_a_share_of_the_slower_side(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    share = overlap_share(left, right)
    slower = max(len(moments(left)), len(moments(right)))
    assert share == (len(moments(left) & moments(right)) / slower if slower else 0.0)
    assert share == overlap_share(right, left)


def test_overlap_of_sides_that_take_turns_is_zero() -> None:
    assert overlap_share([(0, 1), (2, 3)], [(1, 2), (3, 4)]) == 0.0


def test_waits_are_shared_over_all_actors() -> None:
    assert wait_share([[(0, 1)], []], [[(0, 1), (1, 4)], [(0, 4)]]) == 1 / 8
    assert wait_share([[]], [[]]) == 0.0


def test_paired_difference_by_hand() -> None:
    difference = paired_difference([0.0, 0.5, 0.0, 1.0], [1.0, 0.5, 0.5, 1.0])
    assert difference.mean == 0.375
    half = 1.959964 * math.sqrt(0.6875 / 3) / 2  # Σ(d − 0.375)² = 0.6875, n = 4
    assert difference.low == pytest.approx(0.375 - half)
    assert difference.high == pytest.approx(0.375 + half)


def test_the_interval_holds_the_true_difference_about_95_times_in_100() -> None:
    random = Random(0)
    hits = 0
    for _ in range(1000):
        before = [random.random() for _ in range(60)]
        after = [value + random.gauss(0.1, 0.3) for value in before]
        difference = paired_difference(before, after)
        hits += difference.low <= 0.1 <= difference.high
        assert difference.mean == pytest.approx(fmean(after) - fmean(before))
    assert 930 <= hits <= 970


@pytest.mark.parametrize(("before", "after"), [([], []), ([1.0], [1.0]), ([1.0, 2.0], [1.0])])
def test_too_few_or_unpaired_items_are_refused(before: list[float], after: list[float]) -> None:
    with pytest.raises(ValueError, match=r"two items|shorter"):
        paired_difference(before, after)
