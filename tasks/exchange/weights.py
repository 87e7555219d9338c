"""Weight versions on shared storage: immutable numbered directories with a checksummed manifest.

A version directory is in Hugging Face layout, safetensors only. The manifest is written last and the directory gets its
name after everything in it is on the disk, so a version that can be seen is whole. A (lineage, number) is never used
twice. The ledger says which versions exist; a directory that it does not know is left over from a publisher that was
killed before it could record it, in a lineage that is over.
"""

import os
from collections.abc import Callable, Collection
from pathlib import Path

from tasks.exchange.files import discard, is_temporary, publish_directory, target_of
from tasks.exchange.layout import RunDirectory, version_of
from tasks.exchange.manifest import Damaged, check_manifest, write_manifest

MANIFEST = "manifest.json"
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl"})


class WeightsCorrupt(Exception):
    """A version's files are not what its publisher wrote; the message names the file."""


def publish_weights(run: RunDirectory, lineage: int, number: int, fill: Callable[[Path], None]) -> Path:
    """Publish policy version (lineage, number); record it in the ledger afterwards.

    Args:
        run: the run's directory.
        lineage: the lineage that the trainer works in.
        number: training steps behind these weights.
        fill: writes the files in Hugging Face layout, flat, into the directory it is given.

    Returns:
        The version's directory.

    Raises:
        FileExistsError: the version is published already.
        WeightsCorrupt: `fill` wrote a pickle, or left out the weights or config.json.
        UserError: the disk is full, read-only, or not ours to write.
    """

    def fill_and_describe(directory: Path) -> None:
        fill(directory)
        _refuse_pickles(directory)
        for pattern in ("config.json", "*.safetensors"):
            if not any(directory.glob(pattern)):
                raise WeightsCorrupt(f"{directory} lacks {pattern}, so it cannot be published as weights")
        write_manifest(directory, MANIFEST, {"lineage": lineage, "number": number})

    final = run.weights_path(lineage, number)
    publish_directory(final, fill_and_describe)
    return final


def verify_weights(path: Path) -> None:
    """Check every file of a published version against its manifest.

    Raises:
        WeightsCorrupt: a file is missing, added, altered or a pickle, or the manifest itself is missing or broken.
    """
    _refuse_pickles(path)
    try:
        check_manifest(path, MANIFEST)
    except Damaged as error:
        raise WeightsCorrupt(str(error)) from None


def keep_by_links(version: Path, directory: Path) -> None:
    """Give a version's files names in `directory` too, on the same storage, so that they outlive the version.

    For readers that are no actors of the run and so can claim nothing.

    Raises:
        FileNotFoundError: the version has been deleted meanwhile.
    """
    for path in version.iterdir():
        os.link(path, directory / path.name)


def found_versions(run: RunDirectory) -> list[tuple[int, int]]:
    """(lineage, number) of every version on storage, in order; the ledger says which of them count."""
    found = (version_of(path) for path in run.weights.iterdir())
    return sorted(version for version in found if version is not None)


def delete_unused(run: RunDirectory, lineage: int, unused: Collection[tuple[int, int]]) -> list[Path]:
    """Delete the directories of the versions `unused`, and what killed publishers left behind.

    Only the trainer calls this, between publications. If it is replaced meanwhile, nothing of its successor goes.

    Args:
        run: the run's directory.
        lineage: the trainer's lineage; unfinished directories of this one and earlier ones go.
        unused: what `Ledger.retire_versions` returned.

    Returns:
        What storage did not let go.
    """
    doomed = []
    for path in sorted(run.weights.iterdir()):
        if is_temporary(path):
            unfinished = version_of(target_of(path))
            if unfinished is not None and unfinished[0] <= lineage:
                doomed.append(path)
        elif version_of(path) in unused:
            doomed.append(path)
    return [path for path in doomed if not discard(path)]


def _refuse_pickles(directory: Path) -> None:
    for path in sorted(directory.iterdir()):
        if path.suffix in PICKLE_SUFFIXES:
            raise WeightsCorrupt(f"{path} may hold a pickle, which can run code when loaded: use safetensors only")
