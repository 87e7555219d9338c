"""Who is silent: decided by the one who waits, on its own clock, and only over time in which it could look."""

import time
from collections.abc import Callable, Hashable, Mapping


class Silence:
    """How long each of several serial numbers has stood still before the eyes of one who looks again and again.

    No clock but the looker's monotonic one counts, so a clock that is set or a machine that slept makes nobody silent.
    After a gap of its own (the ledger could not be read, or the looker was stopped) it begins anew for all: nobody can
    be blamed for beats that could not be seen.
    """

    def __init__(self, longest_gap_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`longest_gap_s`: a longer pause between two looks is a gap."""
        self._longest_gap_s = longest_gap_s
        self._clock = clock
        self._looked = clock()
        self._seen: dict[Hashable, tuple[int, float]] = {}

    def look(self, serials: Mapping[Hashable, int]) -> dict[Hashable, float]:
        """Seconds for which each serial number has stood still; to be called with what was just read."""
        now = self._clock()
        if now - self._looked > self._longest_gap_s:
            self._seen = {}
        self._looked = now
        before = self._seen
        self._seen = {
            who: before[who] if who in before and before[who][0] == serial else (serial, now)
            for who, serial in serials.items()
        }
        return {who: now - since for who, (_, since) in self._seen.items()}
