"""Questions of a JSON Lines file: one object a line, with a text for the question and one for the answer."""

import functools
import json
import random
from collections.abc import Container
from pathlib import Path

from planners.errors import UserError
from tasks.config.data import JsonlSource
from tasks.data.item import Item, plain
from tasks.data.sources.base import Training

LINE = "line_number"
"""Key in an item's metadata: the number of its line, from 1; a field of this name in the file gives way to it."""


class Jsonl:
    """The lines of one file; the other fields of a line are its item's metadata.

    Raises:
        UserError: the file cannot be read, has no questions, or a line is no question: it is named.
    """

    def __init__(self, section: JsonlSource) -> None:
        self.name = section.label
        self._section = section
        self._rows = self._read()

    def held_out(self, size: int, seed: int, taken: Container[str]) -> list[Item]:
        """See `Source.held_out`."""
        unique = [row for row in {row.question: row for row in self._rows}.values() if row.question not in taken]
        return random.Random(seed).sample(unique, min(size, len(unique)))

    def training(self, seed: int, kept: Container[str]) -> Training:
        """See `Source.training`: the file's order is a new permutation in each epoch."""
        rows = [row for row in self._rows if row.question not in kept]
        if not rows:
            raise UserError(
                f"{self._section.path} has {len(self._rows)} questions, all of them kept for evaluation: add questions "
                "or lower the evaluations' size."
            )

        def draw(index: int) -> Item:
            epoch, place = divmod(index, len(rows))
            return rows[_epoch_order(len(rows), seed, epoch)[place]]

        return Training(draw, len(rows))

    def _read(self) -> list[Item]:
        named = Path(self._section.path).expanduser()
        path = named.resolve()
        if not named.is_absolute() and not path.exists():  # from a file or the command line it comes absolute
            raise UserError(f"The data's path {named} is relative and there is no {path} here: give the absolute path.")
        try:
            text = path.read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            raise UserError(
                f"There is no file {path}, which the data's path names: it needs lines such as {self._example}."
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"The data's path {path} cannot be read as UTF-8 text: {error}.") from None
        # Not `splitlines`: a line separator of Unicode may stand inside a JSON text.
        lines = text.split("\n")
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
        return Item(row[question], row[answer], {**others, LINE: number}, self.name)

    @property
    def _example(self) -> str:
        return json.dumps({self._section.question_field: "2 + 2 =", self._section.answer_field: "4"})


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _has_half_a_character(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


@functools.lru_cache(maxsize=4)
def _epoch_order(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Each epoch is a new permutation."""
    return tuple(random.Random(f"{seed}/{epoch}").sample(range(count), count))
