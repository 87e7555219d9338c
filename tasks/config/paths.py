"""Keys of the experiment that name a file, by their types: a relative one starts where it is written.

Workers run in other directories, so what a person wrote is made absolute as soon as it is read.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from planners.sections import kinds_of, models_in

FUNCTION = re.compile(r"(?P<file>.+):(?P<name>[A-Za-z_]\w*)")
"""`file.py:function` or `module:function`."""


@dataclass(frozen=True)
class Relative:
    """Marks the type of a text; `absolute` makes it absolute from a directory on, and leaves what is no path."""

    absolute: Callable[[str, Path], str]


def _file(text: str, start: Path) -> str:
    return str((start / os.path.expanduser(text)).resolve())


def _directory(text: str, start: Path) -> str:
    path = start / os.path.expanduser(text)
    return str(path.resolve()) if path.is_dir() else text


def _function(text: str, start: Path) -> str:
    """`/…/file.py:function` for a function in a file, or in a module by its dotted name."""
    match = FUNCTION.fullmatch(text)
    if match is None:
        return text  # refused with the rest of the experiment
    file = match["file"] if match["file"].endswith(".py") else match["file"].replace(".", "/") + ".py"
    return f"{_file(file, start)}:{match['name']}"


FilePath = Annotated[str, Field(min_length=1), Relative(_file)]
"""A file."""
DirectoryOrName = Annotated[str, Relative(_directory)]
"""A directory where there is one of this name, else something else's name."""
FunctionPath = Annotated[str, Relative(_function)]
"""A function in a file."""


def absolute(value: Any, start: Path, models: Sequence[type[BaseModel]]) -> Any:
    """The value with the paths in it made absolute, from `start` on.

    Args:
        value: a tree of values, not checked yet.
        start: an absolute directory.
        models: what may stand there: a section, or those of a union.
    """
    if isinstance(value, list):
        return [absolute(part, start, models) for part in value]
    if not isinstance(value, dict):
        return value
    fitting = [model for model in models if value.get("kind") in kinds_of(model)] or models
    return {key: _absolute_key(key, part, start, fitting) for key, part in value.items()}


def _absolute_key(key: str, value: Any, start: Path, models: Sequence[type[BaseModel]]) -> Any:
    fields = [model.model_fields[key] for model in models if key in model.model_fields]
    marks = [mark for field in fields for mark in field.metadata if isinstance(mark, Relative)]
    if marks and isinstance(value, str) and value:
        return marks[0].absolute(value, start)
    return absolute(value, start, [model for field in fields for model in models_in(field.annotation)])
