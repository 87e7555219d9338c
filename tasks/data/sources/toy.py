"""Questions that need no language: to say one character."""

import random
from collections.abc import Container

from tasks.config.data import ToySource
from tasks.data.item import Item
from tasks.data.sources.base import SEED_SPACING, Draw, Training, endless, first_unique

CHARACTERS = "abc"
NUMBERS = 100


class Toy:
    """Asks for one character, which is the answer; the number only makes questions differ."""

    def __init__(self, section: ToySource) -> None:
        self.name = section.label

    def held_out(self, size: int, seed: int, taken: Container[str]) -> list[Item]:
        """See `Source.held_out`."""
        return first_unique(self._sequence(seed), size, taken, f"the source {self.name}", "")

    def training(self, seed: int, kept: Container[str]) -> Training:
        """See `Source.training`."""
        return endless(self._sequence(SEED_SPACING * (seed + 1)), kept, f"the source {self.name}", "")

    def _sequence(self, seed: int) -> Draw:
        def draw(index: int) -> Item:
            chance = random.Random(seed + index)
            number = chance.randrange(NUMBERS)
            character = chance.choice(CHARACTERS)
            return Item(f"{number:02d} say {character}", character, {}, self.name)

        return draw
