"""pyproject.toml declares what the code imports and nothing besides, and the locks keep to it."""

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.places import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OWN = {"planners", "tasks", "flows", "deployments", "benchmarks", "tests"}
LOADED_BY_OTHERS = {"gguf", "accelerate", "socksio"}
"""Declared, and imported by a library of ours when it is asked for something."""


def named(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


RUNNING = named(PROJECT["dependencies"])
ENGINE = named(EXTRAS["cpu"] + EXTRAS["cuda"])


def imported(directory: str) -> dict[str, str]:
    """Third-party modules that a directory's files import anywhere, with one of the files."""
    found: dict[str, str] = {}
    for path in sorted((REPOSITORY / directory).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules.append(node.module)
            found.update({module.split(".")[0]: str(path.relative_to(REPOSITORY)) for module in modules})
    return {name: path for name, path in found.items() if name not in OWN | sys.stdlib_module_names}


PROVIDERS = packages_distributions()
"""Distributions by module."""


def distributions(module: str) -> set[str]:
    return {canonicalize_name(name) for name in PROVIDERS.get(module, [module])}


def pins(lock: Path) -> list[Requirement]:
    lines = [line.split("#")[0].strip() for line in lock.read_text().splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("-")]


@pytest.mark.parametrize(
    ("directory", "declared"),
    [
        ("planners", RUNNING),
        ("tasks", RUNNING | ENGINE | named(EXTRAS["postgres"])),
        ("flows", RUNNING),
        ("deployments", RUNNING),
        ("benchmarks", RUNNING | ENGINE | named(EXTRAS["bench"] + EXTRAS["postgres"])),
        ("tests", RUNNING | ENGINE | named(EXTRAS["dev"] + EXTRAS["postgres"])),
    ],
)
def test_every_import_is_declared(directory: str, declared: set[str]) -> None:
    """Else it is there only as long as another package happens to want it."""
    undeclared = {name: path for name, path in imported(directory).items() if not distributions(name) & declared}
    assert undeclared == {}


def test_everything_declared_is_imported() -> None:
    used = set().union(*(distributions(name) for room in OWN - {"tests", "benchmarks"} for name in imported(room)))
    assert RUNNING - used - LOADED_BY_OTHERS == set()


@pytest.mark.parametrize("lock", ["cpu.txt", "cuda.txt"])
def test_the_locks_keep_to_the_ranges(lock: str) -> None:
    """Also those that `make` installs without resolving."""
    locked = {canonicalize_name(pin.name): pin for pin in pins(REPOSITORY / "requirements" / lock)}
    extras = EXTRAS["dev"] + EXTRAS["bench"] + EXTRAS[lock.removesuffix(".txt")]
    for requirement in map(Requirement, PROJECT["dependencies"] + extras):
        assert canonicalize_name(requirement.name) in locked, f"{requirement.name} is not in {lock}"
        (pin,) = locked[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(pin.version), f"{lock} has {pin}, pyproject.toml wants {requirement}"
