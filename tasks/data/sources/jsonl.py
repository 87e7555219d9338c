"""Questions of a JSON Lines file: one object a line, with a text for the question and one for the answer."""

import json
from pathlib import Path

from planners.errors import UserError
from tasks.config.data import JsonlSource
from tasks.data.item import Item, plain
from tasks.data.sources.rows import LINE, Rows, read_text


class Jsonl(Rows):
    """The lines of one file; the other fields of a line are its item's metadata.

    Raises:
        UserError: the file cannot be read, has no questions, or a line is no question: it is named.
    """

    def __init__(self, section: JsonlSource) -> None:
        self._section = section
        super().__init__(section.label, section.path, self._read())

    def _read(self) -> list[Item]:
        path, text = read_text(self._section.path, self._example)
        # Not `splitlines`: a line separator of Unicode may stand inside a JSON text.
        lines = [line.removeprefix("\ufeff") for line in text.split("\n")]  # within where files were put together
        rows = [self._parse(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
        if not rows:
            raise UserError(f"The data's path {path} has no questions: it needs lines such as {self._example}.")
        return rows

    def _parse(self, path: Path, number: int, line: str) -> Item:
        question, answer = self._section.question_field, self._section.answer_field
        try:
            row = json.loads(line)
        except RecursionError:
            raise UserError(f"Line {number} of {path} is nested too deeply: leave out what is no question.") from None
        except ValueError:
            raise UserError(f"Line {number} of {path} is not JSON: it must look like {self._example}.") from None
        if not isinstance(row, dict) or not all(_is_text(row.get(name)) for name in (question, answer)):
            raise UserError(
                f"Line {number} of {path} lacks a text for `{question}` or `{answer}`: it must look like "
                f"{self._example}."
            )
        for name in (question, answer):
            if _has_half_a_character(row[name]):
                raise UserError(
                    f"Line {number} of {path} has half of a surrogate pair in `{name}`, which is no character: mend "
                    "or delete it."
                )
        try:
            others = plain({key: value for key, value in row.items() if key not in (question, answer)})
        except ValueError as error:
            raise UserError(f"Line {number} of {path} cannot be used: {error}.") from None
        return Item(row[question], row[answer], {**others, LINE: number}, self._section.label)

    @property
    def _example(self) -> str:
        return json.dumps({self._section.question_field: "2 + 2 =", self._section.answer_field: "4"})


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _has_half_a_character(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)
