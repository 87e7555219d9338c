"""What a person writes in YAML: read without losing a key, checked without surprises, and its faults in words.

Experiment and cluster files are both checked by it.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from planners.errors import UserError

NAME_PATTERN = r"^[a-z0-9][a-z0-9-]{0,99}$"
"""The only pattern that texts in a section have to match: what file names and metrics can be made of."""
_SHOWN_CHARACTERS = 60
_SHOWN_FAULTS = 4
_TRUTH = "truth"
_DEEPEST = 500
"""Brackets within brackets in a file; the time that YAML takes grows with their square."""
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HALF = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_Model = TypeVar("_Model", bound=BaseModel)


def as_choices(schema: dict[str, Any]) -> None:
    """Say `anyOf` for a union told apart by its `kind`: the form of the Prefect UI knows no `oneOf`.

    To be given to `Field` as `json_schema_extra`, beside the discriminator.
    """
    schema["anyOf"] = schema.pop("oneOf")
    schema.pop("discriminator")


class Section(BaseModel):
    """A part of a file: immutable; an unknown key, a number that is not finite and a truth for a number are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _truth_is_no_number(cls, values: Any) -> Any:
        """Pydantic takes `true` for 1."""
        for key, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(key)
            given = value if isinstance(value, list) else [value]
            if any(isinstance(item, bool) for item in given) and field is not None and field.annotation is not bool:
                raise PydanticCustomError(_TRUTH, "{key}", {"key": key})
        return values


def parse_yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        ValueError: it is no YAML, is nested deeply, has half of a character, or a key occurs twice in one section, so
            that one of its values would be lost without a word; the message says where, without a full stop.
    """
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        if depth > _DEEPEST:
            raise ValueError("it is nested too deeply")
    try:
        return _whole(YAML(typ="safe", pure=True).load(text))  # the one in C ends the process where nesting is deep
    except DuplicateKeyError as error:
        twice = re.search(r'duplicate key "(.*?)"', str(error.problem))
        mark = error.problem_mark
        raise ValueError(f"line {mark.line + 1}: the key '{twice[1] if twice else '?'}' is there twice") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(where + ", ".join(filter(None, (error.context, error.problem)))) from None
    except YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        lines = [number for number, line in enumerate(text.split("\n"), start=1) if _HALF.search(_PAIR.sub("", line))]
        where = f"line {lines[0]}: " if lines else ""
        raise ValueError(f"{where}half of a surrogate pair, which is no character") from None


def _whole(value: Any) -> Any:
    """The value with the characters whole that were written as surrogate pairs, as JSON writes them.

    Raises:
        UnicodeDecodeError: there is half of one.
    """
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16")
    if isinstance(value, dict):
        return {_whole(key): _whole(part) for key, part in value.items()}
    return [_whole(part) for part in value] if isinstance(value, list) else value


def parse_section(kind: type[_Model], tree: Any, origin: str) -> _Model:
    """Check a tree of values; `origin` names it in errors.

    Raises:
        UserError: one phrase for each of the first faults, with the nearest known key for a misspelt one.
    """
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        faults = list(dict.fromkeys(_describe(kind, fault) for fault in error.errors()))
        more = [f"and {len(faults) - _SHOWN_FAULTS} more"] if len(faults) > _SHOWN_FAULTS else []
        raise UserError(f"{origin}: {'; '.join(faults[:_SHOWN_FAULTS] + more)}.") from None


def _describe(kind: type[BaseModel], fault: Any) -> str:
    """One phrase on a fault: where, what was given, what is wanted."""
    where, owners, others = _follow(kind, fault["loc"])
    place, given, problem = f"'{where}'", fault["input"], fault["type"]
    if problem == "extra_forbidden":
        name = where.rpartition(".")[2]
        if kinds := [tag for model in others if name in model.model_fields for tag in kinds_of(model)]:
            given_kind = " or ".join(str(tag) for model in owners for tag in kinds_of(model))
            return (
                f"{place} is a key of kind {' or '.join(kinds)}, but the kind is {given_kind}: leave it out or change "
                "the kind"
            )
        known = [key for owner in owners for key in owner.model_fields]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"
        return f"unknown key {place} ({hint})"
    if problem == _TRUTH:
        key = ".".join(filter(None, (where, fault["ctx"]["key"])))
        return f"'{key}' is {str(given[fault['ctx']['key']]).lower()}: input should not be true or false"
    if problem == "missing":
        return f"{place} is missing"
    if problem == "value_error":
        return f"{place}: {fault['ctx']['error']}" if where else str(fault["ctx"]["error"])
    if problem in ("union_tag_not_found", "union_tag_invalid"):
        return _describe_kind(kind, fault)
    message = fault["msg"][0].lower() + fault["msg"][1:]
    if problem in ("model_type", "model_attributes_type", "dict_type"):
        message = "it must hold keys and values"
    elif problem == "string_pattern_mismatch":
        message = "use up to 100 lower-case letters, digits and hyphens, no hyphen first"
    message = message.replace("valid tuple", "valid list").replace("tuple", "list")
    return f"{place} is empty: {message}" if given is None else f"{place} is {_shorten(repr(given))}: {message}"


def _describe_kind(kind: type[BaseModel], fault: Any) -> str:
    """One phrase on a section of a union that says no kind, or none that there is."""
    where, models, _ = _follow(kind, (*fault["loc"], "kind"))
    kinds = [str(known) for model in models for known in kinds_of(model)]
    choice = f"the kinds are {', '.join(kinds)}"
    if fault["type"] == "union_tag_not_found":
        return f"'{where.removesuffix('.kind')}' lacks the key 'kind': {choice}"
    tag = str(fault["ctx"]["tag"])
    near = difflib.get_close_matches(tag, kinds, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"'{where}' is {_shorten(repr(tag))}, which is none: {hint}{choice}"


def _follow(
    kind: type[BaseModel], location: Sequence[str | int]
) -> tuple[str, list[type[BaseModel]], list[type[BaseModel]]]:
    """A fault's location as a person wrote it, in dotted keys, and who could own the last of them.

    These are the sections there, and those of other kinds that could stand in their place. Pydantic puts the tag of a
    union between the keys; a person has not written it there.
    """
    owners, inner, path = [kind], [kind], []
    others: list[type[BaseModel]] = []
    siblings: list[type[BaseModel]] = []
    for part in location:
        tagged = [model for model in inner if part in kinds_of(model)]
        if len(inner) > 1 and tagged:
            inner, siblings = tagged, [model for model in inner if model not in tagged]
            continue
        path.append(str(part))
        owners, others = inner, siblings
        if isinstance(part, str):
            fields = [model.model_fields[part].annotation for model in inner if part in model.model_fields]
            inner, siblings = [model for annotation in fields for model in models_in(annotation)], []
    return ".".join(path), owners, others


def kinds_of(model: type[BaseModel]) -> tuple[Any, ...]:
    """The kinds that a section stands for in a union; none where it is in no union."""
    return get_args(model.model_fields["kind"].annotation) if "kind" in model.model_fields else ()


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that an annotation such as `list[Link]` or `A | B | None` is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"
