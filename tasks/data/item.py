"""One question, and what makes it the same question at every index, in every process and after every resume."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEEPEST = 100
"""Levels of lists and mappings in an item's metadata; its way to the scorer is recursive."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question. `metadata` is what a scorer may need besides the answer, plain (see `plain`); `source` is named."""

    question: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def key(self) -> str:
        """The question's stable key: its source and a hash of its text, since generators ask the same at many places.

        Raises:
            UnicodeEncodeError: the question is no text in Unicode.
        """
        return f"{self.source}:{hashlib.sha256(self.question.encode()).hexdigest()[:16]}"

    def facts(self) -> dict[str, Any]:
        """The item as a reward is given it."""
        return {"question": self.question, "answer": self.answer, "metadata": self.metadata, "source": self.source}


def plain(value: Any, levels: int = DEEPEST) -> Any:
    """The value made of what reaches another process unharmed: texts, numbers, truths, None, lists, tuples, mappings.

    Anything else becomes what it prints as; some generators put fractions and numpy's numbers into their items.

    Raises:
        ValueError: it is nested more than `levels` deep.
    """
    if value is None or type(value) in (str, bool, int, float):
        return value
    if levels == 0:
        raise ValueError(f"it is nested more than {DEEPEST} deep")
    if isinstance(value, Mapping):
        return {plain(key, levels - 1): plain(part, levels - 1) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple([plain(part, levels - 1) for part in value])
    if isinstance(value, list):
        return [plain(part, levels - 1) for part in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(part, levels - 1) for part in value), key=repr)
    if hasattr(value, "tolist"):  # numpy's
        return plain(value.tolist(), levels - 1)
    return str(value)
