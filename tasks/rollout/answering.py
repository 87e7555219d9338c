"""From a question to trajectories: an environment under an engine's sampling, once or for a whole group.

Whatever goes wrong with one question is that question's failure, and nobody else's.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tasks.data.item import Item
from tasks.environments.base import Aborted, Environment
from tasks.exchange.trajectories import Trajectory
from tasks.rewards.pool import ScoringFailed
from tasks.rollout.engine import Answer, Engine, EngineDied, Sampling


class ItemFailed(Exception):
    """A question could not be made or answered; what it was made for goes on. Its cause is what went wrong."""


@contextmanager
def blaming_the_item() -> Iterator[None]:
    """Whatever is raised in here, by sources, tokenizers, engines or scorers, is the failure of the question at hand.

    Except where the engine or the scoring processes are gone, and where the answer was ended on purpose.
    """
    try:
        yield
    except (Aborted, EngineDied, ScoringFailed):
        raise
    except Exception as error:
        raise ItemFailed(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Answerer:
    """Lets the engine's policy act in the environment; `count_work` hears of every trajectory."""

    engine: Engine
    environment: Environment
    sampling: Sampling
    count_work: Callable[[int], object] = lambda amount: None

    async def answer_group(self, name: str, item: Item, group_size: int) -> tuple[Trajectory, ...] | None:
        """`group_size` trajectories of one question, or None if any of them was aborted.

        Args:
            name: unique among the groups in flight; request ids are made from it.
            item: the question.
            group_size: how many.

        Raises:
            ItemFailed: one of them could not be had.
            EngineDied: the engine is gone.
            ScoringFailed: scoring processes are not to be had.
        """
        runs = [self._run(f"{name}-{number}", item, self.sampling) for number in range(group_size)]
        # All are waited for: one that is scored while the group is given up would outlive it.
        results = await asyncio.gather(*runs, return_exceptions=True)
        failures = [r for r in results if isinstance(r, BaseException) and not isinstance(r, Aborted)]
        if failures:
            raise min(failures, key=lambda failure: isinstance(failure, ItemFailed))
        trajectories = tuple(result for result in results if isinstance(result, Trajectory))
        return trajectories if len(trajectories) == group_size else None

    async def answer_once(self, name: str, item: Item, temperature: float) -> Trajectory:
        """One trajectory at `temperature`; raises as `answer_group`, or Aborted."""
        return await self._run(name, item, replace(self.sampling, temperature=temperature))

    async def _run(self, request_id: str, item: Item, sampling: Sampling) -> Trajectory:
        async def generate(token_ids: Sequence[int]) -> Answer:
            answer = await self.engine.generate(request_id, token_ids, sampling)
            if answer.finish_reason == "aborted":
                raise Aborted(request_id)
            return answer

        with blaming_the_item():
            trajectory = await self.environment.run(item, generate)
        self.count_work(1)
        return trajectory
