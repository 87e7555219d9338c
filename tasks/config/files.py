"""Experiment files: reading one with its overrides, and the one that was stored with a run."""

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

from planners.errors import UserError
from planners.sections import parse_section, parse_yaml
from tasks.config.experiment import Experiment
from tasks.config.rewards import FUNCTION
from tasks.config.trees import read_tree

Location = tuple[str | int, ...]
"""Keys and numbers in lists that lead to a value of a tree."""
_EACH = -1
"""Stands for any number in a list."""
_PATHS: tuple[Location, ...] = (
    ("model", "source"),
    ("data", _EACH, "path"),
    ("evaluations", _EACH, "source", "path"),
    ("rewards", _EACH, "function"),
)


def load_experiment(path: Path, overrides: list[str] | None = None) -> Experiment:
    """Read an experiment file and apply dotted overrides such as `optimizer.lr=1e-6` or `data.0.path=rows.jsonl`.

    Relative paths (of data and functions, a directory in `model.source`) are made absolute, since workers run in other
    directories: those of the file start at the file, those of overrides at the working directory.

    Raises:
        UserError: the file is missing, empty or not YAML, a key is unknown (the nearest is named) or there twice, or a
            value does not fit.
    """
    tree = read_tree(path, "experiment")
    tree = _absolute((), tree, path.absolute().parent)
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
    except (OSError, ValueError) as error:
        raise UserError(f"{path}, the experiment of the run, cannot be read ({error}): start a new run.") from None
    return parse_experiment(tree, str(path))


def parse_experiment(tree: dict[str, Any], origin: str) -> Experiment:
    """Validate a tree of values; `origin` names it in errors.

    Raises:
        UserError: one phrase per fault, with the nearest known key for a misspelt one.
    """
    return parse_section(Experiment, tree, origin)


def _absolute(location: Location, value: Any, start: Path) -> Any:
    """The value with the paths in it made absolute, from `start` on; `location` is where it stands in the experiment.

    What is no path, such as a shipped model's name, stays.
    """
    if isinstance(value, dict):
        return {key: _absolute((*location, key), part, start) for key, part in value.items()}
    if isinstance(value, list):
        return [_absolute((*location, _EACH), part, start) for part in value]
    if location not in _PATHS or not isinstance(value, str) or not value:
        return value
    if location[-1] == "function":
        return _absolute_function(value, start)
    path = start / os.path.expanduser(value)
    return str(path.resolve()) if location[-1] == "path" or path.is_dir() else value


def _absolute_function(function: str, start: Path) -> str:
    """`/…/file.py:function` for a function in a file, or in a module by its dotted name, from `start` on."""
    match = FUNCTION.fullmatch(function)
    if match is None:
        return function  # refused with the rest of the experiment
    file = match["file"]
    relative = os.path.expanduser(file) if file.endswith(".py") else f"{file.replace('.', '/')}.py"
    return f"{(start / relative).resolve()}:{match['name']}"


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.split(".")
    if not separator or len(parts) < 2 or not all(parts):
        raise UserError(f"The override '{override}' is not of the form section.key=value, as in optimizer.lr=1e-6.")
    try:
        value = parse_yaml(text)
    except ValueError:
        raise UserError(f"The value of the override '{override}' is not valid YAML: quote it.") from None
    location = tuple(_EACH if part.isdecimal() else part for part in parts)
    node: Any = tree
    for part, following in pairwise(parts):
        inner = _get(node, part, override)
        if inner is None:
            inner = [] if following.isdecimal() else {}
            _set(node, part, inner, override)
        elif not isinstance(inner, dict | list):
            raise UserError(f"The override '{override}' goes below '{part}', which holds a plain value.")
        node = inner
    _set(node, parts[-1], _absolute(location, value, Path.cwd()), override)


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
