"""One question, one answer, one score."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tasks.data.item import Item
from tasks.environments.base import Generate
from tasks.exchange.trajectories import Outcome, Trajectory
from tasks.rewards.pool import Verdict
from tasks.rollout.engine import Answer


class Prompts(Protocol):
    """What an environment needs of the experiment's prompts."""

    def text(self, item: Item) -> str:
        """The whole prompt."""

    def encode(self, item: Item) -> list[int]:
        """Its token ids. Raises UserError where they are too many."""


class Decoder(Protocol):
    """What an environment needs of a tokenizer."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of these tokens."""


class Scorer(Protocol):
    """What an environment needs of a scoring pool."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parts of a verdict."""

    @property
    def fault(self) -> str:
        """Why an answer could not be scored, the last time; empty if all could."""

    async def score(self, prompt: str, answer_text: str, item: Mapping[str, Any]) -> Verdict:
        """What an answer is worth."""


@dataclass(frozen=True)
class SingleTurn:
    """The trivial environment."""

    prompts: Prompts
    decoder: Decoder
    scorer: Scorer

    @property
    def reward_names(self) -> tuple[str, ...]:
        """See `Environment.reward_names`."""
        return self.scorer.names

    @property
    def fault(self) -> str:
        """See `Environment.fault`."""
        return self.scorer.fault

    def prompt(self, item: Item) -> list[int]:
        """See `Environment.prompt`."""
        return self.prompts.encode(item)

    async def run(self, item: Item, generate: Generate) -> Trajectory:
        """See `Environment.run`."""
        answer = await generate(self.prompt(item))
        verdict = await self.scorer.score(self.prompts.text(item), self._text(answer), item.facts())
        outcome = verdict.outcome
        if outcome is Outcome.SCORED and answer.finish_reason == "length":
            outcome = Outcome.TRUNCATED
        return Trajectory(answer.segments, outcome, verdict.reward, verdict.parts)

    def _text(self, answer: Answer) -> str:
        """The answer as text, without the stop token that ended it."""
        token_ids = answer.token_ids[:-1] if answer.finish_reason == "stop" else answer.token_ids
        return self.decoder.decode(token_ids.tolist(), skip_special_tokens=True)
