"""Questions to train on and to evaluate with, and the prompts made of them.

Invariants: `item` is a function of `run.seed` and the prompt index alone, so that every replica and every resumed run
sees the same questions; and it never returns a held-out question.
"""

import difflib
import functools
import importlib.util
import json
import random
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from planners.errors import UserError
from tasks.config.data import DataSection
from tasks.config.experiment import Experiment

Draw = Callable[[int], "Item"]
"""The question at an index of an endless sequence."""

SEED_SPACING = 1_000_000
"""Generators seed item i with seed + i: runs of neighbouring seeds must not share items."""
GENERATOR_BLOCK = 500
"""Items per generator object: the library's own default, which every generator accepts; some build all at once."""
COLLISION_STRIDE = 100_003
MAX_COLLISIONS = 1_000
TOY_CHARACTERS = "abc"
TOY_NUMBERS = 100
LINE = "line"
"""Key in the metadata of a question from a file: the number of its line, from 1."""
_GENERATOR_NAME = re.compile(r'(?:^DATASET_NAME = |^register_dataset\(\s*)"(\w+)"', re.MULTILINE)
"""How a generator of reasoning-gym says its name."""
_EXAMPLE_ROW = '{"question": "2 + 2 =", "answer": "4"}'


@dataclass(frozen=True, slots=True)
class Item:
    """One question. `metadata` is what the scorer needs besides the answer; it survives `to_json` with its tuples."""

    question: str
    answer: str
    metadata: dict[str, Any]

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(_tag_tuples(asdict(self)))

    @staticmethod
    def from_json(line: str | bytes) -> "Item":
        """The item that `to_json` wrote."""
        return Item(**json.loads(line, object_hook=_restore_tuple))


def _tag_tuples(value: Any) -> Any:
    """JSON has no tuples, and some generators' scorers compare them."""
    if isinstance(value, tuple):
        return {"__tuple__": [_tag_tuples(part) for part in value]}
    if isinstance(value, list):
        return [_tag_tuples(part) for part in value]
    if isinstance(value, dict):
        return {key: _tag_tuples(part) for key, part in value.items()}
    return value


def _restore_tuple(node: dict[str, Any]) -> Any:
    return tuple(node["__tuple__"]) if node.keys() == {"__tuple__"} else node


class Tokenizer(Protocol):
    """What prompts need of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of the text; special tokens written in it become single ids."""


class PromptSource:
    """The experiment's questions and prompts.

    Attributes:
        stop_token_ids: the one token that ends an answer.
        epoch: number of training questions in a file, each of which is among this many successive indices; None for
            questions that are generated.

    Raises:
        UserError: the data cannot serve the experiment, or `prompt.stop` is not one token.
    """

    def __init__(self, experiment: Experiment, tokenizer: Tokenizer) -> None:
        self._prompt = experiment.prompt
        self._max_prompt_tokens = experiment.workload.max_prompt_tokens
        self._tokenizer = tokenizer
        self.stop_token_ids = (self._stop_token_id(),)
        self._heldout, self._draw, self.epoch = _open_data(experiment)

    def item(self, prompt_index: int) -> Item:
        """The training question at this index (from 0, endless)."""
        return self._draw(prompt_index)

    def heldout(self) -> list[Item]:
        """The `data.heldout_size` questions kept for evaluation, all different."""
        return list(self._heldout)

    def encode(self, item: Item) -> list[int]:
        """Token ids of the whole prompt: template, question and the start of the answer.

        Raises:
            UserError: it is longer than `workload.max_prompt_tokens`.
        """
        text = self._prompt.template.replace("{question}", item.question) + self._prompt.prefill
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if len(token_ids) > self._max_prompt_tokens:
            where = f" in line {item.metadata[LINE]} of data.path" if LINE in item.metadata else ""
            raise UserError(
                f"The prompt of the question '{_shorten(item.question)}'{where} has {len(token_ids)} tokens, above "
                f"workload.max_prompt_tokens {self._max_prompt_tokens}: raise it (within model.max_context) or "
                "shorten the questions."
            )
        return token_ids

    def _stop_token_id(self) -> int:
        token_ids = self._tokenizer.encode(self._prompt.stop, add_special_tokens=False)
        if len(token_ids) != 1:
            raise UserError(
                f"prompt.stop '{self._prompt.stop}' is {len(token_ids)} tokens of this model's tokenizer: it must be "
                "one, such as the model's end-of-turn token."
            )
        return token_ids[0]


def _open_data(experiment: Experiment) -> tuple[list[Item], Draw, int | None]:
    """The held-out questions, the endless training sequence, and after how many it starts again, if it does."""
    data, seed = experiment.data, experiment.run.seed
    if data.kind == "jsonl":
        return _split_rows(experiment, _read_rows(data))
    if data.kind == "toy":
        heldout_draw, draw = _toy(data.heldout_seed), _toy(SEED_SPACING * (seed + 1))
    else:
        heldout_draw = _reasoning_gym(data, data.heldout_seed)
        draw = _reasoning_gym(data, SEED_SPACING * (seed + 1))
    heldout = _first_unique(heldout_draw, data)
    kept = frozenset(item.question for item in heldout)
    train_draw = functools.partial(_draw_unless_kept, draw, kept, data)
    train_draw(0)  # fails here, before any work, if nothing is left to train on
    return heldout, train_draw, None


def _first_unique(draw: Draw, data: DataSection) -> list[Item]:
    found: dict[str, Item] = {}
    repeats = 0
    index = 0
    while len(found) < data.heldout_size:
        item = draw(index)
        repeats = repeats + 1 if item.question in found else 0
        if repeats == MAX_COLLISIONS:
            raise UserError(
                f"data.heldout_size is {data.heldout_size}, but {_name(data)} has only about {len(found)} different "
                f"questions: lower it{_or_widen(data)}."
            )
        found.setdefault(item.question, item)
        index += 1
    return list(found.values())


def _draw_unless_kept(draw: Draw, kept: frozenset[str], data: DataSection, prompt_index: int) -> Item:
    """The question at `prompt_index`, or at the first of a fixed series of other places that is not held out."""
    for attempt in range(MAX_COLLISIONS):
        item = draw(prompt_index + attempt * COLLISION_STRIDE)
        if item.question not in kept:
            return item
    raise UserError(
        f"The questions of {_name(data)} are practically all held out: lower data.heldout_size "
        f"({data.heldout_size}){_or_widen(data)}."
    )


def _or_widen(data: DataSection) -> str:
    return "" if data.kind == "toy" else ", or widen data.parameters"


def _name(data: DataSection) -> str:
    return "data.kind toy" if data.kind == "toy" else f"reasoning-gym's {data.task} with these parameters"


# --- toy ---


def _toy(seed: int) -> Draw:
    """Asks for one character, which is the answer; the number only makes questions differ."""

    def draw(index: int) -> Item:
        chance = random.Random(seed + index)
        number = chance.randrange(TOY_NUMBERS)
        character = chance.choice(TOY_CHARACTERS)
        return Item(f"{number:02d} say {character}", character, {})

    return draw


# --- reasoning-gym ---


def _reasoning_gym(data: DataSection, seed: int) -> Draw:
    @functools.lru_cache(maxsize=8)
    def block(number: int) -> Any:
        # Generators seed item i with seed + i, so that blocks join to one sequence.
        return open_generator(data, seed + number * GENERATOR_BLOCK)

    def draw(index: int) -> Item:
        number, offset = divmod(index, GENERATOR_BLOCK)
        entry = block(number)[offset]
        return Item(str(entry["question"]), str(entry["answer"]), {"entry": entry})

    return draw


def open_generator(data: DataSection, seed: int) -> Any:
    """The reasoning-gym dataset of `GENERATOR_BLOCK` items at this seed.

    Raises:
        UserError: the task is unknown (the nearest is named) or its parameters do not fit.
    """
    check_task(data)
    from reasoning_gym.factory import DATASETS, create_dataset  # imports all generators, which takes 5 to 15 s

    known = [name for name in DATASETS[data.task][1].__dataclass_fields__ if name not in ("seed", "size")]
    unknown = sorted(data.parameters.keys() - set(known))
    if unknown:
        raise UserError(
            f"data.parameters has '{unknown[0]}', which {data.task} does not take (it takes {', '.join(known)})."
        )
    try:
        return create_dataset(data.task, **data.parameters, seed=seed, size=GENERATOR_BLOCK)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"data.parameters {data.parameters} do not fit {data.task}: {error}.") from None


def check_task(data: DataSection) -> None:
    """Refuse questions of an unknown kind; takes no time.

    Raises:
        UserError: `data.task` is no generator of reasoning-gym (the nearest is named), though `data.kind` asks for one.
    """
    names = generator_names()
    if data.kind == "reasoning_gym" and data.task not in names:
        near = difflib.get_close_matches(data.task, names, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"for example: {', '.join(names[:8])}"
        raise UserError(f"data.task '{data.task}' is not a reasoning-gym generator ({hint}).")


@functools.cache
def generator_names() -> list[str]:
    """All generators of reasoning-gym, sorted; read from its sources, since importing them would take too long."""
    package = importlib.util.find_spec("reasoning_gym")
    assert package is not None
    assert package.submodule_search_locations is not None
    sources = Path(package.submodule_search_locations[0]).rglob("*.py")
    return sorted(name for source in sources for name in _GENERATOR_NAME.findall(source.read_text(encoding="utf-8")))


# --- JSON Lines ---


def _read_rows(data: DataSection) -> list[Item]:
    named = Path(str(data.path)).expanduser()
    path = named.resolve()
    if not named.is_absolute() and not path.exists():  # from a file or the command line it comes absolute
        raise UserError(f"data.path {data.path} is relative and there is no {path} here: give the absolute path.")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(
            f"There is no file {path}, which data.path names: it needs lines such as {_EXAMPLE_ROW}."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.path {path} cannot be read as UTF-8 text: {error}.") from None
    rows = [_parse_row(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise UserError(f"data.path {path} has no questions: it needs lines such as {_EXAMPLE_ROW}.")
    return rows


def _parse_row(path: Path, number: int, line: str) -> Item:
    try:
        row = json.loads(line)
    except ValueError:
        raise UserError(f"Line {number} of {path} is not JSON: it must look like {_EXAMPLE_ROW}.") from None
    if not isinstance(row, dict) or not all(_is_text(row.get(name)) for name in ("question", "answer")):
        raise UserError(
            f"Line {number} of {path} lacks a text for `question` or `answer`: it must look like {_EXAMPLE_ROW}."
        )
    return Item(row["question"], row["answer"], {LINE: number})


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _split_rows(experiment: Experiment, rows: list[Item]) -> tuple[list[Item], Draw, int]:
    data, prompts_per_step = experiment.data, experiment.workload.prompts_per_step
    unique = list({row.question: row for row in rows}.values())
    chosen = random.Random(data.heldout_seed).sample(unique, min(data.heldout_size, len(unique)))
    kept = {item.question for item in chosen}
    train = [row for row in rows if row.question not in kept]
    if len(train) < prompts_per_step:
        raise UserError(
            f"{data.path} has {len(rows)} questions; with data.heldout_size {data.heldout_size} there remain "
            f"{len(train)} to train on, fewer than workload.prompts_per_step {prompts_per_step}: add questions or "
            "lower either."
        )

    def draw(index: int) -> Item:
        epoch, place = divmod(index, len(train))
        return train[_epoch_order(len(train), experiment.run.seed, epoch)[place]]

    return chosen, draw, len(train)


@functools.lru_cache(maxsize=4)
def _epoch_order(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Each epoch is a new permutation."""
    return tuple(random.Random(f"{seed}/{epoch}").sample(range(count), count))


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
