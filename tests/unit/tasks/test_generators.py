"""reasoning-gym's generators: faults in words, and what some of them make of their items."""

import subprocess
import sys
from typing import Any

import pytest

from planners.errors import UserError
from tasks.config.data import ReasoningGymSource
from tasks.data.sources.reasoning_gym import ReasoningGym
from tasks.generators import generator_names, open_generator
from tasks.rewards.base import from_line, to_line
from tasks.rewards.builtin import open_reasoning_gym
from tests.support.places import REPOSITORY


@pytest.mark.parametrize(
    ("task", "parameters", "message"),
    [
        ("chain_sums", {}, "did you mean 'chain_sum'"),
        ("zzz", {}, "'zzz' is not a reasoning-gym generator"),
        ("chain_sum", {"min_term": 2}, r"have 'min_term', which chain_sum does not take \(it takes min_terms"),
        ("chain_sum", {"min_terms": 3, "max_terms": 2}, "do not fit chain_sum: max_terms must be >= min_terms"),
        ("chain_sum", {"min_terms": "x"}, "do not fit chain_sum"),
        ("chain_sum", {"seed": 1}, "have 'seed'"),
        ("composite", {"datasets": [{"name": "nope"}]}, "do not fit composite"),
        ("composite", {"datasets": [{"nam": "nope"}]}, "do not fit composite"),
    ],
)
def test_a_generator_that_cannot_serve_is_refused(task: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_generator(task, parameters, 0)


def test_the_generators_are_known_without_importing_them() -> None:
    """Importing all of them takes ten seconds, too long to be told of a misspelt name."""
    code = (
        "import sys\nfrom planners.errors import UserError\nfrom tasks.generators import open_generator\n"
        "try: open_generator('chain_sums', {}, 0)\n"
        "except UserError as error: print(error, 'reasoning_gym' in sys.modules)"
    )
    said = subprocess.check_output([sys.executable, "-c", code], cwd=REPOSITORY, text=True, timeout=60)
    assert said == "The task 'chain_sums' is not a reasoning-gym generator (did you mean 'chain_sum'?). False\n"

    from reasoning_gym.factory import DATASETS

    assert generator_names() == sorted(DATASETS)


@pytest.mark.parametrize("task", ["gsm_symbolic", "composite"])
def test_every_item_of_an_odd_generator_reaches_its_scorer_and_is_scored(task: str) -> None:
    """gsm_symbolic puts fractions into some items; composite wants its parts as objects, and has none by default."""
    section = ReasoningGymSource(task=task)
    draw = ReasoningGym(section).training(0, ()).draw
    score = open_reasoning_gym([section])
    for index in range(200):
        item = from_line(to_line(draw(index).facts()))
        assert score("", item["answer"], item) == 1, index


def test_composite_takes_its_parts_as_a_file_writes_them() -> None:
    parts = [{"name": "chain_sum", "config": {"min_terms": 2, "max_terms": 2}}, {"name": "leg_counting", "weight": 2}]
    draw = ReasoningGym(ReasoningGymSource(task="composite", parameters={"datasets": parts})).training(0, ()).draw
    assert {draw(index).metadata["entry"]["metadata"]["source_dataset"] for index in range(40)} == {
        "chain_sum",
        "leg_counting",
    }
