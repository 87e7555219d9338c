"""Experiment files: reading one with its overrides, and the one that was stored with a run."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_origin

from planners.errors import UserError
from planners.sections import parse_section, parse_yaml
from tasks.config.experiment import Experiment
from tasks.config.paths import absolute
from tasks.config.trees import read_tree

_SHOWN_CHARACTERS = 100


def load_experiment(path: Path, overrides: list[str] | None = None) -> Experiment:
    """Read an experiment file and apply dotted overrides such as `optimizer.lr=1e-6` or `data.0.path=rows.jsonl`.

    Relative paths (of data and functions, a directory in `model.source`) are made absolute, since workers run in other
    directories: those of the file start at the file, those of overrides at the working directory.

    Raises:
        UserError: the file is missing, empty or not YAML, a key is unknown (the nearest is named) or there twice, or a
            value does not fit.
    """
    tree = read_tree(path, "experiment")
    tree = absolute(tree, path.absolute().parent, [Experiment])
    for override in overrides or []:
        _apply_override(tree, override)
    return parse_experiment(tree, str(path))


def read_resolved_experiment(path: Path) -> Experiment:
    """The experiment that was stored with a run.

    Raises:
        UserError: the file is damaged, or of a hexflow that knew other keys or values.
    """
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}, the experiment of the run, cannot be read ({error}): start a new run.") from None
    return parse_experiment(tree, str(path))


def parse_experiment(tree: dict[str, Any], origin: str) -> Experiment:
    """Validate a tree of values; `origin` names it in errors.

    Raises:
        UserError: one phrase per fault, with the nearest known key for a misspelt one.
    """
    return parse_section(Experiment, tree, origin)


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.split(".")
    if not separator or len(parts) < 2 or not all(parts):
        raise UserError(f"The override '{override}' is not of the form {_form(key)}.")
    try:
        value = parse_yaml(text)
    except ValueError as error:
        shown = override if len(override) <= _SHOWN_CHARACTERS else f"{override[: _SHOWN_CHARACTERS - 1]}…"
        raise UserError(f"The value of the override '{shown}' is not valid YAML ({error}): quote it.") from None
    node: Any = tree
    for part, following in pairwise(parts):
        inner = _get(node, part, override)
        if inner is None:
            inner = [] if following.isdecimal() else {}
            _set(node, part, inner, override)
        elif not isinstance(inner, dict | list):
            raise UserError(f"The override '{override}' goes below '{part}', which holds a plain value.")
        node = inner
    _set(node, parts[-1], _from_here(parts, value), override)


def _form(key: str) -> str:
    """How an override looks; for one that names a whole list, how its entries are reached."""
    field = Experiment.model_fields.get(key)
    if field is None or get_origin(field.annotation) is not list:
        return "section.key=value, as in optimizer.lr=1e-6"
    example = next(iter(field.default)).kind
    return f"section.key=value: {key} is a list, whose entries are changed one by one, as in {key}.0.kind={example}"


def _from_here(parts: Sequence[str], value: Any) -> Any:
    """The value that stands at these keys, with the paths in it made absolute from the working directory on."""
    for part in reversed(parts):
        value = [value] if part.isdecimal() else {part: value}
    value = absolute(value, Path.cwd(), [Experiment])
    for part in parts:
        value = value[0] if part.isdecimal() else value[part]
    return value


def _get(node: dict[str, Any] | list[Any], part: str, override: str) -> Any:
    if isinstance(node, dict):
        return node.get(part)
    number = _number(node, part, override)
    return node[number] if number < len(node) else None


def _set(node: dict[str, Any] | list[Any], part: str, value: Any, override: str) -> None:
    if isinstance(node, dict):
        node[part] = value
    elif (number := _number(node, part, override)) < len(node):
        node[number] = value
    else:
        node.append(value)


def _number(node: list[Any], part: str, override: str) -> int:
    """The place in a list that a part of an override names: one that is there, or the next."""
    if not part.isdecimal() or int(part) > len(node):
        raise UserError(
            f"The override '{override}' has '{part}' where a list of {len(node)} stands: name one by its number "
            f"from 0, as in data.0.weight=2, or the next by {len(node)}."
        )
    return int(part)
