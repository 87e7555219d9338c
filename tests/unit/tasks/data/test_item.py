"""Items: made plain where a generator puts other things into them, and whole on their way to the scorer."""

from datetime import date
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.data.item import DEEPEST, Item, plain
from tasks.rewards.base import from_line, to_line

plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.tuples(st.integers(), st.text()), inner)
    ),
    max_leaves=10,
)


@given(st.text(), st.text(), st.dictionaries(st.text(), plain_values))
def test_an_item_survives_the_way_to_its_scorer(question: str, answer: str, metadata: dict[str, Any]) -> None:
    facts = Item(question, answer, metadata, "mine").facts()
    line = to_line(facts)
    assert "\n" not in line
    assert from_line(line) == facts
    assert plain(facts) == facts


def test_what_is_not_plain_is_made_so() -> None:
    odd = {
        "f": Fraction(1, 3),
        "n": np.int64(3),
        "a": np.array([[1, 2]]),
        "s": {2, 1},
        "d": date(2026, 1, 2),
        5: (1.5,),
    }
    made = plain(odd)
    assert made == {"f": "1/3", "n": 3, "a": [[1, 2]], "s": [1, 2], "d": "2026-01-02", 5: (1.5,)}
    assert from_line(to_line(made)) == made
    assert type(made["n"]) is int


def test_an_item_nested_beyond_all_measure_is_refused() -> None:
    def nested(levels: int) -> Any:
        value: Any = 1
        for _ in range(levels):
            value = [value]
        return value

    assert from_line(to_line(plain(nested(DEEPEST)))) == nested(DEEPEST)
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        plain(nested(DEEPEST + 1))
