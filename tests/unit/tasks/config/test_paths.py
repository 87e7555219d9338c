"""A key that names a file is made absolute by its type, whatever it is called and wherever it stands."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from tasks.config.paths import FilePath, FunctionPath, absolute


class Rows(BaseModel):
    kind: Literal["rows"]
    file: FilePath
    note: str = ""


class Notes(BaseModel):
    kind: Literal["notes"]
    file: str


class Whole(BaseModel):
    parts: list[Annotated[Rows | Notes, Field(discriminator="kind")]]
    function: FunctionPath = "f.py:f"


def test_the_type_decides_what_is_a_path() -> None:
    """Of a union, the type of the kind that is given; what has no such type stays, whatever its key is called."""
    tree = {
        "parts": [
            {"kind": "rows", "file": "a.rows", "note": "a.rows"},
            {"kind": "notes", "file": "a.rows"},
            {"kind": "nonesuch", "file": 7},
        ],
        "function": "own.module:score",
        "path": "unknown",
    }
    assert absolute(tree, Path("/start"), [Whole]) == {
        "parts": [
            {"kind": "rows", "file": "/start/a.rows", "note": "a.rows"},
            {"kind": "notes", "file": "a.rows"},
            {"kind": "nonesuch", "file": 7},
        ],
        "function": "/start/own/module.py:score",
        "path": "unknown",
    }
