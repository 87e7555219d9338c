"""Which source a prompt index belongs to, and which of its questions it is.

The places of source s fall due at (k + u_s) / w_s for k = 0, 1, …, with its share w_s of the weights and an offset u_s
in (0, 1) from the seed; prompt indices are the places of all sources in the order in which they fall due. So over every
run of indices from 0 a source has its share to within the number of sources, and a place is found in a few steps,
however large its index.
"""

import math
import random
from collections.abc import Sequence
from fractions import Fraction

_OFFSETS = 2**16


class Mix:
    """Sources in the shares of their weights: a function of the weights, the seed and the index alone."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """`weights` are above 0, one per source."""
        exact = [Fraction(weight) for weight in weights]
        self.shares = [weight / sum(exact) for weight in exact]
        chance = random.Random(f"mix/{seed}")
        self._offsets = [Fraction(chance.randrange(1, _OFFSETS), _OFFSETS) for _ in weights]

    def place(self, index: int) -> tuple[int, int]:
        """The source at a prompt index from 0, and the index within that source."""
        start = max(0, index - len(self.shares))
        # Places due before `start`; they are fewer than `index`, and more than `index` less twice the sources.
        counts = [max(0, math.ceil(w * start - u)) for w, u in zip(self.shares, self._offsets, strict=True)]
        for _ in range(index - sum(counts)):
            counts[self._next(counts)] += 1
        source = self._next(counts)
        return source, counts[source]

    def _next(self, counts: Sequence[int]) -> int:
        """The source whose next place falls due first."""
        due = [(k + u) / w for k, u, w in zip(counts, self._offsets, self.shares, strict=True)]
        return due.index(min(due))


def divide(count: int, shares: Sequence[Fraction]) -> list[int]:
    """Whole numbers in these shares whose sum is `count`, by the largest remainders."""
    whole = [math.floor(count * share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda n: whole[n] - count * shares[n])
    for number in by_remainder[: count - sum(whole)]:
        whole[number] += 1
    return whole
