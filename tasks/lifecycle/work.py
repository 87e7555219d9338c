"""What an actor has in hand and how far it has got, as its beats tell: so that one that hangs but beats is noticed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Told:
    """What a beat says of the work.

    Attributes:
        count: work done, of whatever unit shows that the actor gets on.
        may_rest_s: seconds for which the count may stand still in what the actor does now; None: nothing is in hand.
        groups: those that it works on.
    """

    count: int
    may_rest_s: float | None
    groups: frozenset[int]


class Work:
    """The work of one actor: its tasks and threads say, its beats read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._limits_s: list[float] = []
        self._groups: set[int] = set()

    def add(self, amount: int = 1) -> None:
        """Count work done."""
        with self._lock:
            self._count += amount

    @contextmanager
    def in_hand(self, may_rest_s: float, group_id: int | None = None) -> Iterator[None]:
        """While entered there is work in hand, during which the count may stand still for `may_rest_s`.

        Of several things in hand the most patient decides: weights that are being loaded hold up all answers.
        `group_id` is a group that is worked on.
        """
        groups = set() if group_id is None else {group_id}
        with self._lock:
            self._limits_s.append(may_rest_s)
            self._groups |= groups
        try:
            yield
        finally:
            with self._lock:
                self._limits_s.remove(may_rest_s)
                self._groups -= groups

    def told(self) -> Told:
        """As it is now."""
        with self._lock:
            return Told(self._count, max(self._limits_s, default=None), frozenset(self._groups))
