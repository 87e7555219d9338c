"""Scores that come with hexflow: how good is this answer to this item, in [0, 1]? They run in the scoring processes."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.config.data import DataSource, ReasoningGymSource
from tasks.generators import open_generator
from tasks.rewards.base import Score


def open_reasoning_gym(sources: Sequence[DataSource]) -> Score:
    """The score of the generator that made the item.

    Raises:
        UserError: a source's task or its parameters are wrong.
    """
    generators = {
        source.label: open_generator(source.task, source.parameters, seed=0)
        for source in sources
        if isinstance(source, ReasoningGymSource)
    }

    def score(prompt: str, text: str, item: Mapping[str, Any]) -> float:
        entry = item["metadata"]["entry"]
        return float(generators[item["source"]].score_answer(answer=text.strip(), entry=entry))

    return score


def open_mathematics() -> Score:
    """`score_mathematics`, with its library imported."""
    # Each answer would log that the library's own time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    score_mathematics("", "1", {"answer": "1"})  # imports sympy now, not within the first answer's time
    return score_mathematics


def score_mathematics(prompt: str, text: str, item: Mapping[str, Any]) -> float:
    """1 if the last expression in the text equals the answer mathematically, else 0.

    Text is read as prose with expressions in it and, failing that, as one expression: bare LaTeX such as `\\dfrac12`
    is found in neither way alone. A percentage equals its share and its number (50 % = 0.5, and 50).

    Raises:
        ValueError: the item's answer is no mathematical expression.
    """
    from math_verify import parse, verify  # seconds to import

    answer = item["answer"]
    # The library's own limits work by signal.alarm and are caught by its own handlers: only ours is in force.
    gold = parse(f"${answer}$", parsing_timeout=None) or parse(answer, parsing_timeout=None)
    if not gold:
        raise ValueError(f"the answer '{answer}' is no mathematical expression")
    readings = (parse(form, parsing_timeout=None) for form in (text, f"${text}$"))
    return float(any(verify(gold, reading, timeout_seconds=None) for reading in readings))


def score_character_share(prompt: str, text: str, item: Mapping[str, Any]) -> float:
    """Share of the text's characters that equal the answer, a single character; 0 for an empty text."""
    return text.count(item["answer"]) / len(text) if text else 0.0
