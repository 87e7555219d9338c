"""Questions that a file holds, whatever its format: all are known, and an epoch has each of them once."""

import functools
import random
from collections.abc import Container, Sequence
from pathlib import Path

from planners.errors import UserError
from tasks.data.item import Item
from tasks.data.sources.base import Training

LINE = "line_number"
"""Key in an item's metadata: the number of its line, from 1; a field of this name in the file gives way to it."""


class Rows:
    """A source (see `base.Source`) of the items of one file, in the order of the file; there is one at least."""

    def __init__(self, name: str, path: str, items: Sequence[Item]) -> None:
        """`path` names the file in messages."""
        self.name = name
        self._path = path
        self._items = items

    def held_out(self, size: int, seed: int, taken: Container[str]) -> list[Item]:
        """See `Source.held_out`."""
        unique = [item for item in {item.question: item for item in self._items}.values() if item.question not in taken]
        return random.Random(seed).sample(unique, min(size, len(unique)))

    def training(self, seed: int, kept: Container[str]) -> Training:
        """See `Source.training`: the file's order is a new permutation in each epoch."""
        items = [item for item in self._items if item.question not in kept]
        if not items:
            raise UserError(
                f"{self._path} has {len(self._items)} questions, all of them kept for evaluation: add questions "
                "or lower the evaluations' size."
            )

        def draw(index: int) -> Item:
            epoch, place = divmod(index, len(items))
            return items[_epoch_order(len(items), seed, epoch)[place]]

        return Training(draw, len(items))


def read_text(path: str, example: str) -> tuple[Path, str]:
    """The file that a source's path names, and its text.

    Raises:
        UserError: it cannot be read, or the path is relative; `example` is what a line of it looks like.
    """
    named = Path(path).expanduser()
    found = named.resolve()
    if not named.is_absolute() and not found.exists():  # from a file or the command line it comes absolute
        raise UserError(f"The data's path {named} is relative and there is no {found} here: give the absolute path.")
    try:
        return found, found.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(
            f"There is no file {found}, which the data's path names: it needs lines such as {example}."
        ) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(
            f"Line {line} of {found} is no text in UTF-8 ({error.reason}): save the file as such."
        ) from None
    except OSError as error:
        raise UserError(f"The data's path {found} cannot be read: {error.strerror}.") from None


@functools.lru_cache(maxsize=4)
def _epoch_order(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Each epoch is a new permutation."""
    return tuple(random.Random(f"{seed}/{epoch}").sample(range(count), count))
