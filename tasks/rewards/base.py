"""What a reward is, and how an item travels to the process that scores."""

import json
from collections.abc import Callable, Mapping
from typing import Any

Score = Callable[[str, str, Mapping[str, Any]], float]
"""A number for an answer, from the prompt's text, the answer's text without its stop token, and the item.

The item holds `question`, `answer` (the reference), `metadata` and `source`. A score may raise, hang or return nonsense
on hostile text: `tasks.rewards.pool` turns each into an outcome.
"""

_TUPLE = "__tuple__"
_PAIRS = "__pairs__"


def to_line(value: Any) -> str:
    """One line of JSON for a plain value; `from_line` gives back its tuples and its keys that are no texts."""
    return json.dumps(_tag(value))


def from_line(line: str | bytes) -> Any:
    """The value that `to_line` wrote."""
    return json.loads(line, object_hook=_restore)


def _tag(value: Any) -> Any:
    """JSON has neither tuples nor keys of other types, and some generators' scorers compare them."""
    if isinstance(value, tuple):
        return {_TUPLE: [_tag(part) for part in value]}
    if isinstance(value, list):
        return [_tag(part) for part in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _tag(part) for key, part in value.items()}
        return {_PAIRS: [[_tag(key), _tag(part)] for key, part in value.items()]}
    return value


def _restore(node: dict[str, Any]) -> Any:
    if node.keys() == {_TUPLE}:
        return tuple(node[_TUPLE])
    if node.keys() == {_PAIRS}:
        return dict(node[_PAIRS])
    return node
