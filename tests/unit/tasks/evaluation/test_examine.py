"""Accuracy on the held-out questions: what cannot be scored is counted, and what is not there is told."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.evaluate import accuracy
from tasks.data.item import Item
from tasks.data.split import Examination
from tasks.environments.single_turn import SingleTurn
from tasks.evaluation.examine import as_json
from tasks.evaluation.examine import evaluate as examine
from tasks.exchange.trajectories import Outcome, Segment
from tasks.rewards.pool import Verdict
from tasks.rollout.answering import Answerer
from tasks.rollout.engine import Answer, InFlight, Sampling

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
    """A tokenizer, prompts, and a scorer that goes by the question."""

    names = ("right",)
    fault = ""

    def text(self, item: Item) -> str:
        return item.question

    def encode(self, item: Item) -> list[int]:
        return [1]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))

    async def score(self, prompt: str, answer_text: str, item: Mapping[str, Any]) -> Verdict:
        assert prompt == item["question"]
        outcome, reward = OUTCOMES[item["question"]]
        return Verdict(outcome, reward, (reward,))


def test_a_question_that_cannot_be_answered_counts_zero_and_ends_no_evaluation() -> None:
    text = FakeText()
    answerer = Answerer(FakeEngine(), SingleTurn(text, text, text), Sampling(1.0, 4, (6,)))
    exams = [Examination("held-out", (Item("unheard of", "", {}), ITEMS[0]), 1)]
    result = asyncio.run(examine(answerer, exams, concurrency=3))["held-out"]
    assert (result.greedy, result.sampled, result.unscored) == ([0.0, 1.0], [[0.0], [1.0]], {"error": 2})


def test_each_question_is_named_before_it_is_asked_and_what_was_given_up_is_not() -> None:
    text, named = FakeText(), []
    answerer = Answerer(FakeEngine(), SingleTurn(text, text, text), Sampling(1.0, 4, (6,)))
    items = (Item("right", "", {}), Item("slow", "", {}))

    async def name(key: str) -> None:
        named.append(key)

    exams = [Examination("held-out", items, 1)]
    result = asyncio.run(examine(answerer, exams, 1, {items[1].key}, name))["held-out"]
    assert named == [items[0].key] * 2
    assert (result.sampled, result.unscored) == ([[1.0], [0.0]], {"error": 2})


def test_an_answer_that_cannot_be_scored_counts_zero_and_is_counted() -> None:
    text = FakeText()
    answerer = Answerer(FakeEngine(), SingleTurn(text, text, text), Sampling(1.0, 4, (6,)))
    exams = [Examination("held-out", tuple(ITEMS), 2), Examination("other", tuple(ITEMS[:1]), 3)]
    results = asyncio.run(examine(answerer, exams, concurrency=3))
    result = results["held-out"]
    assert result.greedy == [1.0, 0.0, 0.0, 1.0]
    assert result.sampled == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    assert result.unscored == {"error": 3, "timeout": 3}
    stored = json.loads(as_json(results))
    assert stored["others"] == {"other": {"greedy": [1.0], "sampled": [[1.0, 1.0, 1.0]], "unscored": {}}}
    assert accuracy("tiny", "held-out", stored) == {
        "weights": "tiny",
        "evaluation": "held-out",
        "greedy": 0.5,
        "sampled": 0.5,
        "questions": 4,
        "answers without a score": 6,
    }
