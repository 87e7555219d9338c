"""Questions that a generator of reasoning-gym makes."""

import functools
from collections.abc import Container
from typing import Any

from planners.errors import UserError
from tasks.config.data import ReasoningGymSource
from tasks.data.item import Item, plain
from tasks.data.sources.base import SEED_SPACING, Draw, Training, endless, first_unique
from tasks.generators import BLOCK, open_generator

_OR_WIDEN = ", or widen the generator's parameters"


class ReasoningGym:
    """The items of one generator; each carries its `entry`, which the generator's scorer wants back."""

    def __init__(self, section: ReasoningGymSource) -> None:
        self.name = section.label
        self._task, self._parameters = section.task, section.parameters

    def held_out(self, size: int, seed: int, taken: Container[str]) -> list[Item]:
        """See `Source.held_out`."""
        return first_unique(self._sequence(seed), size, taken, self._description, _OR_WIDEN)

    def training(self, seed: int, kept: Container[str]) -> Training:
        """See `Source.training`."""
        return endless(self._sequence(SEED_SPACING * (seed + 1)), kept, self._description, _OR_WIDEN)

    @property
    def _description(self) -> str:
        return f"reasoning-gym's {self._task} with these parameters"

    def _sequence(self, seed: int) -> Draw:
        @functools.lru_cache(maxsize=8)
        def block(number: int) -> Any:
            # Generators seed item i with seed + i, so that blocks join to one sequence.
            return open_generator(self._task, self._parameters, seed + number * BLOCK)

        def draw(index: int) -> Item:
            number, offset = divmod(index, BLOCK)
            entry = block(number)[offset]
            try:
                facts = plain(entry)
            except ValueError as error:
                raise UserError(f"{self._description} made an item that cannot be used: {error}.") from None
            return Item(str(entry["question"]), str(entry["answer"]), {"entry": facts}, self.name)

        return draw
