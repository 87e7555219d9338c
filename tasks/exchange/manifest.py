"""Manifests: the last file of a directory that is written once, with size and checksum of every other one."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.exchange.files import write_json


class Damaged(Exception):
    """A directory is not what its manifest says, or has none; the message names the file."""


def write_manifest(directory: Path, name: str, facts: Mapping[str, Any] | None = None) -> None:
    """Write `name`, with all files of the directory, which is flat, and the `facts` before them."""
    files = {path.name: _describe(path) for path in sorted(directory.iterdir())}
    write_json(directory / name, {**(facts or {}), "files": files})


def check_manifest(directory: Path, name: str) -> None:
    """Compare every file of a directory with its manifest `name`.

    Raises:
        Damaged: a file is missing, added or altered, or the manifest itself is missing or broken.
    """
    manifest = directory / name
    try:
        expected: dict[str, Any] = dict(json.loads(manifest.read_bytes())["files"])
    except FileNotFoundError:
        raise Damaged(f"{manifest} is missing, so its directory was never finished or has been deleted") from None
    except (ValueError, KeyError, TypeError):
        raise Damaged(f"{manifest} is no manifest") from None
    found = {file.name for file in directory.iterdir()} - {name}
    for file in sorted(found.symmetric_difference(expected)):
        raise Damaged(f"{directory / file} is {'not in the manifest' if file in found else 'missing'}")
    for file, description in expected.items():
        if not (directory / file).is_file() or _describe(directory / file) != description:
            raise Damaged(f"{directory / file} differs in size or checksum from the manifest")


def _describe(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"sha256": digest, "size_bytes": path.stat().st_size}
