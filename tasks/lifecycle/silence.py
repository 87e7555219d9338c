"""Who is silent: decided by the one who waits, on its own clock, and only over time in which it could look."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

Who = TypeVar("Who", bound=Hashable)


_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # on macOS the monotonic one counts sleep as well


def steady_s() -> float:
    """Seconds on a clock that nobody sets and that goes on while the machine sleeps, which shows as a gap."""
    return time.clock_gettime(_STEADY)


LONGEST_GAP_S = 30.0
"""A longer pause of an actor between two looks, which it means to take every few seconds, is a gap of its own: a call
of the ledger ends within 10 s.
"""


class Silence:
    """How long each of several signs of life has stood still before the eyes of one who looks again and again.

    No clock but the looker's own steady one counts, so a clock that is set or a machine that slept makes nobody silent.
    After a gap of its own (the ledger could not be read, the looker was stopped, the machine slept) it begins anew for
    all: nobody can be blamed for what could not be seen.
    """

    def __init__(self, longest_gap_s: float, clock: Callable[[], float] = steady_s) -> None:
        """`longest_gap_s`: a longer pause between two looks is a gap."""
        self._longest_gap_s = longest_gap_s
        self._clock = clock
        self._looked = clock()
        self._seen: dict[Hashable, tuple[Hashable, float]] = {}

    def look(self, signs: Mapping[Who, Hashable]) -> dict[Who, float]:
        """Seconds for which each sign has stood still; to be called with what was just read."""
        now = self._clock()
        if now - self._looked > self._longest_gap_s:
            self._seen = {}
        self._looked = now
        before = self._seen
        self._seen = {
            who: before[who] if who in before and before[who][0] == sign else (sign, now) for who, sign in signs.items()
        }
        return {who: now - self._seen[who][1] for who in signs}
