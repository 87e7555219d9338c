"""Statistics of a run's summary: an interval for a difference, and how far two sides really worked at once."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

Interval = tuple[float, float]
"""Start and end in seconds on one clock."""

_NORMAL_QUANTILE = 1.959964
"""97.5 % quantile of the standard normal distribution."""


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences with its 95 % interval."""

    mean: float
    low: float
    high: float


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Difference:
    """Mean of after − before over items, with a 95 % interval by the normal approximation: mean ± 1.96·s/√n.

    Give one value per item (the mean of its samples): samples of one item are not independent, items are. Items that
    never change narrow the interval as they should; below about 30 items it is somewhat too narrow.

    Raises:
        ValueError: the sides differ in length or hold fewer than two items.
    """
    differences = [b - a for a, b in zip(before, after, strict=True)]
    if len(differences) < 2:
        raise ValueError(f"an interval needs at least two items, got {len(differences)}")
    middle = fmean(differences)
    half = _NORMAL_QUANTILE * stdev(differences) / math.sqrt(len(differences))
    return Difference(middle, middle - half, middle + half)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in time as disjoint intervals in order; empty and reversed ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length_s(intervals: Iterable[Interval]) -> float:
    """Seconds covered by the intervals, each moment counted once."""
    return sum(end - start for start, end in union(intervals))


def intersection(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """Moments that lie in both sets, as disjoint intervals in order."""
    a, b = union(left), union(right)
    common: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return common


def overlap_share(one_side: Sequence[Interval], other_side: Sequence[Interval]) -> float:
    """Share of the slower side's busy time during which both sides are busy; 0 if neither was ever busy.

    A side is the union of its actors' busy intervals; the slower side is the one that is busy for longer.
    """
    slower_s = max(length_s(one_side), length_s(other_side))
    return length_s(intersection(one_side, other_side)) / slower_s if slower_s > 0 else 0.0


def wait_share(waits: Sequence[Sequence[Interval]], presence: Sequence[Sequence[Interval]]) -> float:
    """Share of a side's time that it spent waiting, over all its actors; 0 if it was never there.

    Args:
        waits: the intervals of each actor during which it waited.
        presence: all recorded intervals of the same actors, waits included.
    """
    present_s = sum(length_s(intervals) for intervals in presence)
    return sum(length_s(intervals) for intervals in waits) / present_s if present_s > 0 else 0.0
