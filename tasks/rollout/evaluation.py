"""Accuracy on the held-out questions, greedy and sampled."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tasks.rollout.answering import Answerer
from tasks.rollout.prompts import Item


@dataclass(frozen=True)
class EvaluationResult:
    """Rewards per held-out item, in the order of the held-out set."""

    greedy: list[float]
    sampled: list[list[float]]

    def as_json(self) -> str:
        """The form kept in the ledger: `{"greedy": [reward], "sampled": [[reward]]}`."""
        return json.dumps(asdict(self))


async def evaluate(
    answerer: Answerer, items: Sequence[Item], prompts: Sequence[Sequence[int]], samples: int, concurrency: int
) -> EvaluationResult:
    """Answer every item once greedily and `samples` times at the training temperature.

    Args:
        prompts: token ids of each item's prompt, in the order of `items`.
        concurrency: answers in flight at once.
    """
    free = asyncio.Semaphore(concurrency)

    async def reward(name: str, index: int, temperature: float) -> float:
        async with free:
            return await answerer.answer_once(name, items[index], prompts[index], temperature)

    temperature = answerer.sampling.temperature
    greedy = [reward(f"evaluate-greedy-{index}", index, 0.0) for index in range(len(items))]
    sampled = [
        reward(f"evaluate-sampled-{index}-{sample}", index, temperature)
        for index in range(len(items))
        for sample in range(samples)
    ]
    rewards = await asyncio.gather(*greedy, *sampled)
    flat = rewards[len(items) :]
    return EvaluationResult(
        greedy=list(rewards[: len(items)]),
        sampled=[list(flat[index * samples : (index + 1) * samples]) for index in range(len(items))],
    )
