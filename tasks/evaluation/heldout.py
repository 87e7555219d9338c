"""Accuracy on the held-out questions, greedy and sampled.

An answer that cannot be scored counts 0, as a wrong one, so that every item counts alike; such answers are counted.
"""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tasks.data.prompts import Item
from tasks.exchange.trajectories import Outcome
from tasks.rollout.answering import Answerer


@dataclass(frozen=True)
class EvaluationResult:
    """Rewards per held-out item, in the order of the held-out set.

    `unscored` is the number of answers without a reward, by outcome (timeout, error); each counts 0.
    """

    greedy: list[float]
    sampled: list[list[float]]
    unscored: dict[str, int]

    def as_json(self) -> str:
        """The form kept in the ledger: `{"greedy": [reward], "sampled": [[reward]], "unscored": {outcome: count}}`."""
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
    unscored: Counter[Outcome] = Counter()

    async def reward(name: str, index: int, temperature: float) -> float:
        async with free:
            outcome, value = await answerer.answer_once(name, items[index], prompts[index], temperature)
        if math.isnan(value):
            unscored[outcome] += 1
            return 0.0
        return value

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
        unscored={outcome.value: count for outcome, count in sorted(unscored.items())},
    )
