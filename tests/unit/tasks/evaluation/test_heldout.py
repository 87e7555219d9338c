"""Accuracy on the held-out questions: what cannot be scored is counted, and what is not there is told."""

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from flows.evaluate import accuracy, evaluate, newest_weights
from planners.errors import UserError
from tasks.config.settings import Settings
from tasks.data.prompts import Item
from tasks.evaluation.heldout import evaluate as answer_heldout
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Actor, Ledger
from tasks.exchange.trajectories import Outcome, Segment
from tasks.rollout.answering import Answerer
from tasks.rollout.engine import Answer, InFlight, Sampling
from tests.support.ledger import RUN

OUTCOMES = {"right": (Outcome.SCORED, 1.0), "slow": (Outcome.TIMEOUT, math.nan), "broken": (Outcome.ERROR, math.nan)}
ITEMS = [Item(name, "", {}) for name in ("right", "slow", "broken", "right")]


class FakeEngine:
    """Answers with one token and the stop token."""

    replica = "fake"
    loaded = (0, 0)

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> Answer:
        return Answer((Segment((5, 6), (-0.5, -0.5), 0, self.replica),), "stop")

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Nothing waits here."""

    async def load(self, lineage: int, number: int, path: Path, in_flight: InFlight) -> None:
        """The weights do not matter."""

    async def shutdown(self) -> None:
        """It holds nothing."""


class FakeText:
    """A tokenizer, and a scorer that goes by the question."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))

    async def score(self, item: Item, answer_text: str) -> tuple[Outcome, float]:
        return OUTCOMES[item.question]


def test_an_answer_that_cannot_be_scored_counts_zero_and_is_counted() -> None:
    text = FakeText()
    answerer = Answerer(FakeEngine(), text, text, Sampling(1.0, 4, (6,)))
    result = asyncio.run(answer_heldout(answerer, ITEMS, [[1]] * len(ITEMS), samples=2, concurrency=3))
    assert result.greedy == [1.0, 0.0, 0.0, 1.0]
    assert result.sampled == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    assert result.unscored == {"error": 3, "timeout": 3}
    assert accuracy("tiny", json.loads(result.as_json())) == {
        "weights": "tiny",
        "greedy": 0.5,
        "sampled": 0.5,
        "questions": 4,
        "answers without a score": 6,
    }


def test_a_run_that_is_not_there_is_told_before_anything_starts(settings: Settings) -> None:
    with pytest.raises(UserError, match=r"^There is no run none-1 in .*runs: `hexflow runs` lists them\.$"):
        evaluate.fn(run="none-1")


def test_a_run_without_weights_is_told(settings: Settings, ledger: Ledger, trainer: Actor) -> None:
    """Version 0 is recorded, but its files are gone."""
    with pytest.raises(UserError, match=f"Run {RUN} has no weights to evaluate"):
        newest_weights(ledger, RUN)
    assert not RunDirectory(settings.shared.runs / RUN).weights.exists()
