"""What an answer is worth by the scores that come with hexflow."""

import pytest

from tasks.config.data import ReasoningGymSource
from tasks.generators import open_generator
from tasks.rewards.base import from_line, to_line
from tasks.rewards.builtin import open_reasoning_gym, score_character_share, score_mathematics
from tests.support.data import SUMS
from tests.support.scoring import SOURCE, item_of


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        # signs
        ("-7", "-7", 1),
        ("-7", "\u22127", 1),
        ("7", "+7", 1),
        ("-7", "7", 0),
        ("7", "-7", 0),
        ("7", "$-7$", 0),
        # thousands and decimals
        ("1234567", "1,234,567", 1),
        ("1,234", "1234", 1),
        ("-1,234", "-1234", 1),
        ("1000", "1000.00", 1),
        ("1,234.5", "1234.5", 1),
        ("12", "12,000", 0),
        ("1234", "1.234", 0),
        ("007", "7", 1),
        # units and money
        ("12", "12 cm", 1),
        ("12 cm", "12", 1),
        ("12", "12\\text{ cm}", 1),
        ("12", "12 dollars", 1),
        ("12", "\\$12.00", 1),
        # fractions
        ("1/2", "\\frac{1}{2}", 1),
        ("\\frac{1}{2}", "1/2", 1),
        ("\\frac{1}{2}", "0.5", 1),
        ("1/2", "\\dfrac12", 1),
        ("-3/4", "$-\\frac{3}{4}$", 1),
        ("\\frac{1}{2}", "\\frac{1}{3}", 0),
        ("1/2", "2", 0),
        # percent
        ("50%", "0.5", 1),
        ("0.5", "50%", 1),
        ("50", "50%", 1),
        ("50%", "5", 0),
        # expressions
        ("2\\sqrt{3}", "\\sqrt{12}", 1),
        ("x^2+2x+1", "(x+1)^2", 1),
        ("(1,2)", "(1,2)", 1),
        # in prose, and no answer at all
        ("42", "The answer is 42.", 1),
        ("12", "so \\boxed{12} apples", 1),
        ("12", "12, no: 13", 0),
        ("12", "twelve", 0),
        ("12", "", 0),
    ],
)
def test_mathematics_reads_the_forms_of_numbers(answer: str, text: str, reward: float) -> None:
    assert score_mathematics("", text, item_of("", answer)) == reward


def test_mathematics_refuses_an_answer_that_is_none() -> None:
    with pytest.raises(ValueError, match="'' is no mathematical expression"):
        score_mathematics("", "12", item_of("", ""))


@pytest.mark.parametrize(("text", "reward"), [("aaaa", 1), ("aabb", 0.5), ("bbbb", 0), ("", 0), ("a\ufffda ", 0.5)])
def test_character_share(text: str, reward: float) -> None:
    assert score_character_share("", text, item_of("", "a")) == reward


@pytest.mark.parametrize(
    ("text", "reward"), [("{}", 1), (" {}\n", 1), ("{}.0", 1), (" {} 1\n", 1 / 3), ("", 0), ("x", 0)]
)
def test_reasoning_gym_scores_the_stripped_answer(text: str, reward: float) -> None:
    source = ReasoningGymSource.model_validate(SUMS)
    entry = open_generator("chain_sum", source.parameters, 5)[3]
    score = open_reasoning_gym([SOURCE, source])
    assert score("", text.format(entry["answer"]), item_of("", "", "chain_sum", entry=entry)) == reward


def test_reasoning_gym_scores_entries_with_tuples_after_the_wire() -> None:
    entry = open_generator("rearc", {}, 5)[0]
    item = from_line(to_line(item_of("", "", "rearc", entry=entry)))
    assert open_reasoning_gym([ReasoningGymSource(task="rearc")])("", entry["answer"], item) == 1


def test_every_item_is_scored_by_the_generator_that_made_it() -> None:
    easy, other = ReasoningGymSource(name="easy"), ReasoningGymSource(task="leg_counting")
    score = open_reasoning_gym([easy, other])
    for source in (easy, other):
        entry = open_generator(source.task, {}, 0)[0]
        assert score("", entry["answer"], item_of("", "", source.label, entry=entry)) == 1
