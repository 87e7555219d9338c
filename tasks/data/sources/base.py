"""What a source of questions is: a fixed set to judge by, and an endless sequence to train on, never overlapping."""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Protocol

from planners.errors import UserError
from tasks.data.item import Item

Draw = Callable[[int], Item]
"""The question at an index of an endless sequence."""

SEED_SPACING = 1_000_000
"""Generators seed item i with seed + i: runs of neighbouring seeds must not share items."""
COLLISION_STRIDE = 100_003
MAX_COLLISIONS = 1_000


@dataclass(frozen=True)
class Training:
    """An endless sequence of training questions.

    `draw` gives the one at an index from 0; `epoch` is the number of questions of a file, each of which is among this
    many successive indices; None for questions that are generated.
    """

    draw: Draw
    epoch: int | None


class Source(Protocol):
    """One source of the experiment's data."""

    name: str

    def held_out(self, size: int, seed: int, taken: Container[str]) -> list[Item]:
        """`size` different questions whose texts are not in `taken`; fewer where a file has no more.

        Raises:
            UserError: a generator has fewer.
        """

    def training(self, seed: int, kept: Container[str]) -> Training:
        """The questions of a run of this seed, without those whose texts are in `kept`.

        Raises:
            UserError: none is left.
        """


def first_unique(draw: Draw, size: int, taken: Container[str], name: str, or_widen: str) -> list[Item]:
    """The first `size` different questions of a sequence that are not in `taken`.

    Raises:
        UserError: after so many there was nothing new for long.
    """
    found: dict[str, Item] = {}
    repeats = index = 0
    while len(found) < size:
        item = draw(index)
        new = item.question not in found and item.question not in taken
        repeats = 0 if new else repeats + 1
        if repeats == MAX_COLLISIONS:
            raise UserError(
                f"An evaluation's size is {size} for {name}, which has only about {len(found)} different questions: "
                f"lower it{or_widen}."
            )
        if new:
            found[item.question] = item
        index += 1
    return list(found.values())


def endless(draw: Draw, kept: Container[str], name: str, or_widen: str) -> Training:
    """The sequence without the questions in `kept`.

    In place of one of these stands the first of a fixed series of other places that is none.

    Raises:
        UserError: practically all are in `kept`.
    """

    def draw_unless_kept(index: int) -> Item:
        for attempt in range(MAX_COLLISIONS):
            item = draw(index + attempt * COLLISION_STRIDE)
            if item.question not in kept:
                return item
        raise UserError(f"The questions of {name} are practically all held out: lower the evaluations' size{or_widen}.")

    draw_unless_kept(0)  # fails here, before any work, if nothing is left to train on
    return Training(draw_unless_kept, None)
