"""Accuracy on the questions of an experiment's evaluations, greedy and sampled.

An answer that cannot be had or scored counts 0, as a wrong one, so that every item counts alike; such answers are
counted.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass

from tasks.data.item import Item
from tasks.data.split import Examination
from tasks.exchange.trajectories import Outcome, Trajectory
from tasks.rollout.answering import Answerer, ItemFailed

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationResult:
    """Rewards per item, in the order of the examination's items.

    `unscored` is the number of answers without a reward, by outcome (timeout, error); each counts 0.
    """

    greedy: list[float]
    sampled: list[list[float]]
    unscored: dict[str, int]


def as_json(results: Mapping[str, EvaluationResult]) -> str:
    """The form kept in the ledger, the first evaluation's result and within it those of the others by name.

    `{"greedy": [reward], "sampled": [[reward]], "unscored": {outcome: count}, "others": {name: {"greedy": …}}}`.
    """
    (_, first), *others = results.items()
    return json.dumps({**asdict(first), "others": {name: asdict(result) for name, result in others}})


async def evaluate(
    answerer: Answerer,
    examinations: Sequence[Examination],
    concurrency: int,
    given_up: Container[str] = (),
    before_each: Callable[[str], Awaitable[None]] | None = None,
) -> dict[str, EvaluationResult]:
    """Answer every item of every examination once greedily and several times at the training temperature.

    Args:
        answerer: answers.
        examinations: what is asked, and how often.
        concurrency: answers in flight at once.
        given_up: keys of questions that are not asked, and so count 0.
        before_each: hears the key of a question before each of its answers.
    """

    async def ask(name: str, item: Item, temperature: float) -> Trajectory:
        if item.key in given_up:
            raise ItemFailed("it has ended engines")
        if before_each is not None:
            await before_each(item.key)
        return await answerer.answer_once(name, item, temperature)

    free = asyncio.Semaphore(concurrency)
    return {
        examination.name: await _examine(ask, examination, f"evaluate-{number}", free, answerer.sampling.temperature)
        for number, examination in enumerate(examinations)
    }


async def _examine(
    ask: Callable[[str, Item, float], Awaitable[Trajectory]],
    examination: Examination,
    prefix: str,
    free: asyncio.Semaphore,
    temperature: float,
) -> EvaluationResult:
    items, samples = examination.items, examination.samples
    unscored: Counter[Outcome] = Counter()

    async def reward(name: str, index: int, temperature: float) -> float:
        async with free:
            try:
                trajectory = await ask(f"{prefix}-{name}", items[index], temperature)
            except ItemFailed as error:
                _log.warning("the question '%.80s' could not be answered: %s", items[index].question, error)
                unscored[Outcome.ERROR] += 1
                return 0.0
        if trajectory.masked:
            unscored[trajectory.outcome] += 1
            return 0.0
        return trajectory.reward

    greedy = [reward(f"greedy-{index}", index, 0.0) for index in range(len(items))]
    sampled = [
        reward(f"sampled-{index}-{sample}", index, temperature)
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
