"""Scorers: how good is this answer to this item? Pure functions; they run in the scoring processes.

A scorer may raise, hang or return nonsense on hostile text: `tasks.rewards.pool` turns each into an outcome.
"""

import logging
from collections.abc import Callable

from tasks.config.data import DataSection
from tasks.config.rewards import RewardSection
from tasks.data.prompts import Item, open_generator

Scorer = Callable[[Item, str], float]
"""Reward in [0, 1] of an answer's text, which has no stop token."""


def open_scorer(reward: RewardSection, data: DataSection) -> Scorer:
    """The scorer that the experiment names, with its library imported.

    Raises:
        UserError: the reasoning-gym task or its parameters are wrong.
    """
    match reward.kind:
        case "reasoning_gym":
            return _reasoning_gym_scorer(data)
        case "math_verify":
            # Each answer would log that the library's own time limits are off.
            logging.getLogger("math_verify").setLevel(logging.ERROR)
            score_mathematics(Item("", "1", {}), "1")  # imports sympy now, not within the first answer's time
            return score_mathematics
        case "character_share":
            return score_character_share


def _reasoning_gym_scorer(data: DataSection) -> Scorer:
    generator = open_generator(data, seed=0)

    def score(item: Item, text: str) -> float:
        return float(generator.score_answer(answer=text.strip(), entry=item.metadata["entry"]))

    return score


def score_mathematics(item: Item, text: str) -> float:
    """1 if the last expression in the text equals the answer mathematically, else 0.

    Text is read as prose with expressions in it and, failing that, as one expression: bare LaTeX such as `\\dfrac12`
    is found in neither way alone. A percentage equals its share and its number (50 % = 0.5, and 50).

    Raises:
        ValueError: the item's answer is no mathematical expression.
    """
    from math_verify import parse, verify  # seconds to import

    # The library's own limits work by signal.alarm and are caught by its own handlers: only ours is in force.
    gold = parse(f"${item.answer}$", parsing_timeout=None) or parse(item.answer, parsing_timeout=None)
    if not gold:
        raise ValueError(f"the answer '{item.answer}' is no mathematical expression")
    readings = (parse(form, parsing_timeout=None) for form in (text, f"${text}$"))
    return float(any(verify(gold, reading, timeout_seconds=None) for reading in readings))


def score_character_share(item: Item, text: str) -> float:
    """Share of the text's characters that equal the answer, a single character; 0 for an empty text."""
    return text.count(item.answer) / len(text) if text else 0.0
