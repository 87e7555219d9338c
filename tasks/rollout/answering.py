"""From a question to trajectories: an environment under an engine's sampling, once or for a whole group."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tasks.data.item import Item
from tasks.environments.base import Aborted, Environment
from tasks.exchange.trajectories import Trajectory
from tasks.rollout.engine import Answer, Engine, Sampling


@dataclass(frozen=True)
class Answerer:
    """Lets the engine's policy act in the environment."""

    engine: Engine
    environment: Environment
    sampling: Sampling

    async def answer_group(self, name: str, item: Item, group_size: int) -> tuple[Trajectory, ...] | None:
        """`group_size` trajectories of one question, or None if any of them was aborted.

        Args:
            name: unique among the groups in flight; request ids are made from it.
        """
        runs = [self._run(f"{name}-{number}", item, self.sampling) for number in range(group_size)]
        # All are waited for: one that is scored while the group is given up would outlive it.
        results = await asyncio.gather(*runs, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, Aborted):
                raise result
        trajectories = tuple(result for result in results if isinstance(result, Trajectory))
        return trajectories if len(trajectories) == group_size else None

    async def answer_once(self, name: str, item: Item, temperature: float) -> Trajectory:
        """One trajectory at `temperature`."""
        return await self._run(name, item, replace(self.sampling, temperature=temperature))

    async def _run(self, request_id: str, item: Item, sampling: Sampling) -> Trajectory:
        async def generate(token_ids: Sequence[int]) -> Answer:
            answer = await self.engine.generate(request_id, token_ids, sampling)
            if answer.finish_reason == "aborted":
                raise Aborted(request_id)
            return answer

        return await self.environment.run(item, generate)
