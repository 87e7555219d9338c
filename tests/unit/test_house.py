"""The house rules that a machine can check; CONTRIBUTING.md says why they are."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from planners.errors import UserError
from tasks.config.experiment import LAPTOP, Experiment
from tasks.config.files import load_experiment
from tests.support.places import REPOSITORY

ROOMS = ("planners", "tasks", "flows", "deployments")
"""Each room may import from itself and from those before it."""
HEAVY = ("prefect", "torch", "mlflow", "vllm", "deepspeed", "transformers")
LONGEST_FILE = 500
LONGEST_FUNCTION = 60

SOURCES = sorted(path for room in ROOMS for path in (REPOSITORY / room).rglob("*.py"))
TESTS = sorted((REPOSITORY / "tests").rglob("*.py"))
EXPERIMENTS = sorted((REPOSITORY / "deployments" / "experiments").glob("*.yaml"))


def imported_modules(source: str) -> set[str]:
    """Every module that the source imports anywhere, inside functions and `if TYPE_CHECKING` too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def upward_imports(room: str, source: str) -> set[str]:
    """Modules that the source imports from rooms that `room` may not know."""
    above = ROOMS[ROOMS.index(room) + 1 :]
    return {module for module in imported_modules(source) if module.split(".")[0] in above}


def long_functions(source: str) -> Iterator[tuple[str, int]]:
    """Functions above the limit with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > LONGEST_FUNCTION:
                yield node.name, lines


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def room_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).parts[0]


def modules_of(room: str) -> list[str]:
    return [name_of(path).removesuffix(".py").replace("/", ".") for path in SOURCES if room_of(path) == room]


def test_the_checks_see_faults() -> None:
    assert upward_imports("tasks", "def f():\n    from flows.rl import rl\n    import planners.plan") == {"flows.rl"}
    assert upward_imports("planners", "import tasks.config.settings as s") == {"tasks.config.settings"}
    assert upward_imports("deployments", "import flows, tasks, planners") == set()
    body = "    pass\n"
    assert list(long_functions("def f():\n" + body * LONGEST_FUNCTION)) == [("f", LONGEST_FUNCTION + 1)]
    assert list(long_functions("def f():\n" + body * (LONGEST_FUNCTION - 1))) == []


def test_imports_run_one_way() -> None:
    faults = {name_of(path): upward_imports(room_of(path), path.read_text()) for path in SOURCES}
    assert {name: modules for name, modules in faults.items() if modules} == {}


def test_planners_know_no_runtime() -> None:
    imports = {name_of(path): imported_modules(path.read_text()) for path in SOURCES if room_of(path) == "planners"}
    assert {
        name: sorted(found) for name, found in imports.items() if {m.split(".")[0] for m in found} & set(HEAVY)
    } == {}


def texts(source: str) -> Iterator[str]:
    """Strings of the source, docstrings too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def keys_of(section: type[BaseModel]) -> set[str]:
    """Keys of an experiment that stand in a section, such as `planner.train_type`."""
    return {
        f"{name}.{key}"
        for name, field in section.model_fields.items()
        for kind in (field.annotation, *get_args(field.annotation))  # itself, or those of a union
        if isinstance(kind, type) and issubclass(kind, BaseModel)
        for key in kind.model_fields
    }


def test_planners_call_nothing_by_the_names_of_rooms_above() -> None:
    """Neither a flag, nor a command, nor a variable, nor a key of the experiment: see planners/errors.py."""
    above = [
        r"(?<![\w-])--[a-z]",
        r"`hexflow\b",
        r"\bHEXFLOW_",
        *(rf"\b{re.escape(key)}\b" for key in keys_of(Experiment)),
    ]
    found = [
        f"{name_of(path)}: {text}"
        for path in SOURCES
        if room_of(path) == "planners"
        for text in texts(path.read_text())
        if any(re.search(name, text) for name in above)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        (modules_of("planners"), HEAVY),
        (["tasks.config.files", "tasks.config.settings"], HEAVY),
        (["deployments.cli.main"], ("torch", "mlflow", "vllm", "deepspeed", "transformers")),
        (["deployments.doctor"], (*HEAVY, "pydantic", "psutil", "typer", "rich", "yaml")),
    ],
    ids=["planners", "experiment", "cli", "doctor"],
)
def test_import_stays_light(modules: list[str], forbidden: tuple[str, ...]) -> None:
    """In a fresh interpreter: the command answers at once, and the doctor works where nothing is installed."""
    code = (
        "import importlib, sys\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
        f"print(*sorted(set({forbidden!r}) & set(sys.modules)))"
    )
    child = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == []


@pytest.mark.parametrize("path", EXPERIMENTS, ids=name_of)
def test_shipped_experiments_load(path: Path) -> None:
    assert isinstance(load_experiment(path), Experiment)


def test_laptop_experiment_is_the_default() -> None:
    """An empty form in the Prefect UI is the laptop run, as the experiment model says."""
    assert load_experiment(REPOSITORY / "deployments" / "experiments" / "laptop.yaml") == LAPTOP


def test_a_misspelt_key_of_a_shipped_experiment_is_named() -> None:
    with pytest.raises(UserError, match=r"unknown key 'optimizer\.lrr' \(did you mean 'lr'\?\)"):
        load_experiment(EXPERIMENTS[0], ["optimizer.lrr=1"])


def test_files_and_functions_stay_short() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in [*SOURCES, *TESTS]}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE} == {}
    functions = {name_of(path): list(long_functions(path.read_text())) for path in SOURCES}
    assert {name: found for name, found in functions.items() if found} == {}


PRIVATE_NAMES = 22
"""How often tests take a name of ours that starts with an underscore; lower it when it falls."""


def private_names(source: str) -> Iterator[str]:
    """Private names of other modules that a test imports, reads or patches, once for each place."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ROOMS:
            yield from (alias.name for alias in node.names if alias.name.startswith("_"))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            names = [part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            yield from (name for name in names if is_private(name.rpartition(".")[2]))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_test_imports_another() -> None:
    """What they share is in tests/support, which needs no test."""
    among = ("tests.unit", "tests.property", "tests.e2e", "tests.conftest")
    imports = {name_of(path): {m for m in imported_modules(path.read_text()) if m.startswith(among)} for path in TESTS}
    assert {name: sorted(modules) for name, modules in imports.items() if modules} == {}


def test_unit_tests_lie_in_the_rooms_they_test() -> None:
    unit = REPOSITORY / "tests" / "unit"
    folders = {path.parent.relative_to(unit) for path in TESTS if path.is_relative_to(unit)}
    assert [str(folder) for folder in sorted(folders) if not (REPOSITORY / folder).is_dir()] == []


def test_tests_take_no_more_private_names_than_they_did() -> None:
    assert sorted(private_names("from tasks.x import _a\nimport m\nm._b\nself._c\npatch.setattr(m, '_d', 1)")) == [
        "_a",
        "_b",
        "_d",
    ]
    taken = {name_of(path): names for path in TESTS if (names := list(private_names(path.read_text())))}
    assert sum(map(len, taken.values())) <= PRIVATE_NAMES, taken
