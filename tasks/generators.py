"""reasoning-gym's generators, which make questions and score answers to them: opened, and their faults in words."""

import difflib
import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planners.errors import UserError

BLOCK = 500
"""Items per generator object: the library's own default, which every generator accepts; some build all at once."""
_NAME = re.compile(r'(?:^DATASET_NAME = |^register_dataset\(\s*)"(\w+)"', re.MULTILINE)
"""How a generator of reasoning-gym says its name."""
_COMPOSITE = "composite"
_PARTS = "datasets"
_DEFAULT_PARTS = ("chain_sum", "basic_arithmetic")
"""What `composite` is made of where nobody says it: it has no default of its own."""


def open_generator(task: str, parameters: Mapping[str, Any], seed: int) -> Any:
    """The reasoning-gym dataset of `BLOCK` items at this seed.

    Raises:
        UserError: the task is unknown (the nearest is named) or its parameters do not fit.
    """
    check_task(task)
    from reasoning_gym.factory import DATASETS, create_dataset  # imports all generators, which takes 5 to 15 s

    known = [name for name in DATASETS[task][1].__dataclass_fields__ if name not in ("seed", "size")]
    unknown = sorted(parameters.keys() - set(known))
    if unknown:
        raise UserError(
            f"The parameters have '{unknown[0]}', which {task} does not take (it takes {', '.join(known)})."
        )
    try:
        given = _composed(parameters) if task == _COMPOSITE else dict(parameters)
        return create_dataset(task, **given, seed=seed, size=BLOCK)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"The parameters {dict(parameters)} do not fit {task}: {error}.") from None


def _composed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """`composite` wants objects where a file has mappings. Raises TypeError where one does not fit."""
    from reasoning_gym.composite import DatasetSpec

    parts = parameters.get(_PARTS) or [{"name": name} for name in _DEFAULT_PARTS]
    return {**parameters, _PARTS: [DatasetSpec(**{"weight": 1.0, "config": {}, **part}) for part in parts]}


def check_task(task: str) -> None:
    """Refuse an unknown generator; takes no time.

    Raises:
        UserError: `task` is no generator of reasoning-gym (the nearest is named).
    """
    names = generator_names()
    if task not in names:
        near = difflib.get_close_matches(task, names, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"for example: {', '.join(names[:8])}"
        raise UserError(f"The task '{task}' is not a reasoning-gym generator ({hint}).")


@functools.cache
def generator_names() -> list[str]:
    """All generators of reasoning-gym, sorted; read from its sources, since importing them would take too long."""
    package = importlib.util.find_spec("reasoning_gym")
    assert package is not None
    assert package.submodule_search_locations is not None
    sources = Path(package.submodule_search_locations[0]).rglob("*.py")
    return sorted(name for source in sources for name in _NAME.findall(source.read_text(encoding="utf-8")))
