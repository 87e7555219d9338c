"""From a prompt to scored answers: generation, decoding and scoring of one answer or one whole group."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tasks.data.prompts import Item
from tasks.exchange.trajectories import Outcome, Trajectory
from tasks.rollout.engine import Answer, Engine, Sampling


class Decoder(Protocol):
    """What answering needs of a tokenizer."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of these tokens."""


class Scorer(Protocol):
    """What answering needs of a scoring pool."""

    async def score(self, item: Item, answer_text: str) -> tuple[Outcome, float]:
        """Outcome and reward of one answer; the reward is NaN unless it was scored."""


@dataclass(frozen=True)
class Answerer:
    """Generates answers and has them scored."""

    engine: Engine
    decoder: Decoder
    scorer: Scorer
    sampling: Sampling

    async def answer_group(
        self, name: str, item: Item, prompt_ids: Sequence[int], group_size: int
    ) -> tuple[Trajectory, ...] | None:
        """`group_size` scored answers to one prompt, or None if any of them was aborted.

        Args:
            name: unique among the groups in flight; request ids are made from it.
        """
        request_ids = [f"{name}-{number}" for number in range(group_size)]
        answers = await asyncio.gather(
            *(self.engine.generate(request_id, prompt_ids, self.sampling) for request_id in request_ids)
        )
        if any(answer.finish_reason == "aborted" for answer in answers):
            return None
        return tuple(await asyncio.gather(*(self._score(item, answer) for answer in answers)))

    async def answer_once(
        self, name: str, item: Item, prompt_ids: Sequence[int], temperature: float
    ) -> tuple[Outcome, float]:
        """Outcome and reward of one answer at `temperature`; the reward is NaN unless it was scored."""
        answer = await self.engine.generate(name, prompt_ids, replace(self.sampling, temperature=temperature))
        return await self.scorer.score(item, self._text(answer))

    async def _score(self, item: Item, answer: Answer) -> Trajectory:
        outcome, reward = await self.scorer.score(item, self._text(answer))
        if outcome is Outcome.SCORED and answer.finish_reason == "length":
            outcome = Outcome.TRUNCATED
        return Trajectory(answer.segments, outcome, reward)

    def _text(self, answer: Answer) -> str:
        """The answer as text, without the stop token that ended it."""
        token_ids = answer.token_ids[:-1] if answer.finish_reason == "stop" else answer.token_ids
        return self.decoder.decode(token_ids.tolist(), skip_special_tokens=True)
