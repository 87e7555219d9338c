"""Experiment files: reading one with its overrides, and the one that was stored with a run."""

import json
import os
from pathlib import Path
from typing import Any

from planners.errors import UserError
from planners.sections import parse_section, parse_yaml, read_tree
from tasks.config.experiment import Experiment

_PATHS = ("data.path", "model.source")


def load_experiment(path: Path, overrides: list[str] | None = None) -> Experiment:
    """Read an experiment file and apply dotted overrides such as `optimizer.lr=1e-6`.

    Relative paths (`data.path`, a directory in `model.source`) are made absolute, since workers run in other
    directories: those of the file start at the file, those of overrides at the working directory.

    Raises:
        UserError: the file is missing, empty or not YAML, a key is unknown (the nearest is named) or there twice, or a
            value does not fit.
    """
    tree = read_tree(path, "experiment")
    for key in _PATHS:
        section, _, name = key.partition(".")
        if isinstance(tree.get(section), dict) and name in tree[section]:
            tree[section][name] = _absolute(key, tree[section][name], path.absolute().parent)
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


def _absolute(key: str, value: Any, start: Path) -> Any:
    """The path that a value names, from `start` on; what is none, such as a shipped model's name, stays."""
    if not isinstance(value, str) or not value:
        return value
    path = start / os.path.expanduser(value)
    return str(path.resolve()) if key == "data.path" or path.is_dir() else value


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.split(".")
    if not separator or len(parts) < 2 or not all(parts):
        raise UserError(f"The override '{override}' is not of the form section.key=value, as in optimizer.lr=1e-6.")
    node = tree
    for part in parts[:-1]:
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            raise UserError(f"The override '{override}' goes below '{part}', which holds a plain value.")
    try:
        value = parse_yaml(text)
    except ValueError:
        raise UserError(f"The value of the override '{override}' is not valid YAML: quote it.") from None
    node[parts[-1]] = _absolute(key, value, Path.cwd()) if key in _PATHS else value
