"""Files that a person writes, from the disk to a tree of values, and the cluster that such a file describes."""

import difflib
from pathlib import Path
from typing import Any

from planners.errors import UserError
from planners.hardware.topology import ClusterFile, Topology, parse_cluster
from planners.sections import parse_section, parse_yaml

SHIPPED = Path(__file__).resolve().parents[2] / "deployments"
"""Where the shipped files lie, whatever the working directory is."""


def read_tree(path: Path, what: str) -> dict[str, Any]:
    """The keys and values of a YAML file.

    Args:
        path: the file.
        what: "experiment" or "cluster".

    Raises:
        UserError: the file is missing (a shipped one is named), unreadable, not YAML, empty, or not made of keys.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"There is no {what} file {path}{_hint(path, what)}") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a directory: name one {what} file in it.") from None
    except UnicodeDecodeError:
        raise UserError(f"The {what} file {path} cannot be read: it is no text in UTF-8.") from None
    except OSError as error:
        raise UserError(f"The {what} file {path} cannot be read: {error.strerror}.") from None
    try:
        tree = parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{path} is not valid YAML: {error}.") from None
    if tree is None:
        raise UserError(f"The {what} file {path} is empty; shipped ones lie in {SHIPPED / f'{what}s'}.")
    if not isinstance(tree, dict):
        raise UserError(f"The {what} file {path} must hold keys and values, not a {type(tree).__name__}.")
    return tree


def read_cluster(path: Path) -> Topology:
    """Read and check a cluster file.

    Raises:
        UserError: the file is missing, empty or not YAML, a key is unknown (the nearest is named) or there twice, a
            value does not fit, or as `parse_cluster`.
    """
    return parse_cluster(parse_section(ClusterFile, read_tree(path, "cluster"), str(path)))


def _hint(path: Path, what: str) -> str:
    """The end of the sentence that a file is not there: the shipped one of a similar name, or the place of all."""
    files = {file.stem: file for file in sorted((SHIPPED / f"{what}s").glob("*.yaml"))}
    near = difflib.get_close_matches(path.stem, files, n=1)
    return f": did you mean {files[near[0]]}?" if near else f"; shipped ones lie in {SHIPPED / f'{what}s'}."
