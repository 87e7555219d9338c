"""Files of questions: read as editors and scripts leave them, and what cannot be read is named by its line."""

import json
from pathlib import Path
from typing import Any

import pytest

from planners.errors import UserError
from tasks.config.data import JsonlSource
from tasks.data.item import Item
from tasks.data.sources.jsonl import Jsonl


def read(path: Path, **fields: Any) -> list[Item]:
    source = Jsonl(JsonlSource(path=str(path), **fields))
    return sorted(source.held_out(10**6, 0, ()), key=lambda item: item.metadata["line_number"])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"question": "q", "answer": "a"}\n\n{"question": "q"', r"Line 3 of .*rows\.jsonl is not JSON"),
        ('{"question": "q", "answer": "a"}\n["q", "a"]', r"Line 2 of .* lacks a text"),
        ('{"question": "q"}', r"Line 1 of .* lacks a text for `question` or `answer`"),
        ('{"question": "q", "answer": 4}', r"Line 1 of .* lacks a text"),
        ('{"question": " ", "answer": "4"}', r"Line 1 of .* lacks a text"),
        ("\n", "has no questions"),
        ("\ufeff\n", "has no questions"),
        (
            '{"question": "q", "answer": "a"}\n{"question": "1 + \\ud800 1", "answer": "2"}',
            "Line 2 of .* has half of a surrogate pair in `question`",
        ),
        ('{"question": "q", "answer": "\\udfff"}', "Line 1 of .* has half of a surrogate pair in `answer`"),
        ("\n" + "[" * 100_000 + "]" * 100_000, "Line 2 of .* is nested too deeply"),
        ('{"question": ' + '{"a": ' * 100_000 + "1" + "}" * 100_001, "Line 1 of .* is nested too deeply"),
        (
            '{"question": "q", "answer": "a", "m": ' + "[" * 300 + "]" * 300 + "}",
            "Line 1 of .* cannot be used: it is nested more than 100 deep",
        ),
    ],
)
def test_bad_rows_are_refused_by_line(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(lines)
    with pytest.raises(UserError, match=message):
        read(path)


def test_byte_order_marks_line_separators_and_surrogate_pairs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    odd = "one\u2028two\u2029three\x85four"
    lines = [
        json.dumps({"question": odd, "answer": "a"}, ensure_ascii=False),
        '{"question": "\\ud83d\\ude00", "answer": "b"}',
    ]
    for end in ("\n", "\r\n"):
        path.write_bytes(b"\xef\xbb\xbf" + f"{end}\ufeff".join(lines).encode())
        assert [item.question for item in read(path)] == [odd, "\U0001f600"]


def test_other_fields_of_a_line_are_its_items_metadata(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"prompt": "q", "solution": "a", "answer": 7, "tags": ["x"]}')
    (item,) = read(path, question_field="prompt", answer_field="solution", name="mine")
    assert item == Item("q", "a", {"answer": 7, "tags": ["x"], "line_number": 2}, "mine")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no file .*missing\.jsonl, which the data's path names"):
        read(tmp_path / "missing.jsonl")
    with pytest.raises(UserError, match=r"path missing\.jsonl is relative .* give the absolute path"):
        read(Path("missing.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes(b"\n\xe9")
    with pytest.raises(UserError, match=r"Line 2 of .*latin\.jsonl is no text in UTF-8"):
        read(tmp_path / "latin.jsonl")
