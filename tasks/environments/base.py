"""What an environment is: it turns one question into one trajectory, with as many turns of the model as it needs.

What the policy did not choose, such as the words of a tool, stands in segments that are not trainable.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from tasks.data.item import Item
from tasks.exchange.trajectories import Trajectory
from tasks.rollout.engine import Answer

Generate = Callable[[Sequence[int]], Awaitable[Answer]]
"""The policy's continuation of these token ids. Raises Aborted where it was ended early."""


class Aborted(Exception):
    """The engine was told to end the answer: there is no trajectory."""


class Environment(Protocol):
    """Where the policy acts."""

    @property
    def reward_names(self) -> tuple[str, ...]:
        """What the parts of a trajectory's reward are called."""

    @property
    def fault(self) -> str:
        """Why an answer could not be scored, the last time; empty if all could."""

    def prompt(self, item: Item) -> list[int]:
        """Token ids that every trajectory of an item begins with; they are no part of it.

        Raises:
            UserError: they are too many.
        """

    async def run(self, item: Item, generate: Generate) -> Trajectory:
        """One trajectory from the prompt to its reward.

        Raises:
            Aborted: a turn was ended early.
        """
