"""Weight versions: whole when seen, never changed, checked before use, deleted only when nobody needs them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.exchange.files import temporary_sibling
from tasks.exchange.layout import RunDirectory
from tasks.exchange.weights import (
    MANIFEST,
    WeightsCorrupt,
    delete_unused,
    found_versions,
    publish_weights,
    verify_weights,
)


def fill(path: Path) -> None:
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights" * 1000)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    directory.create()
    return directory


def test_published_version_verifies(run: RunDirectory) -> None:
    path = publish_weights(run, 1, 7, fill)
    verify_weights(path)
    assert path == run.weights_path(1, 7)
    manifest = json.loads((path / MANIFEST).read_text())
    assert (manifest["lineage"], manifest["number"]) == (1, 7)
    assert manifest["files"]["model.safetensors"]["size_bytes"] == 7000


def test_version_is_never_reused(run: RunDirectory) -> None:
    publish_weights(run, 0, 1, fill)
    with pytest.raises(FileExistsError):
        publish_weights(run, 0, 1, fill)


def flip_byte(path: Path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[3] ^= 1
    (path / "model.safetensors").write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "model.safetensors": flip_byte,
    "config.json": lambda path: (path / "config.json").unlink(),
    "stray.txt": lambda path: (path / "stray.txt").write_text("x"),
    "pytorch_model.bin": lambda path: (path / "pytorch_model.bin").write_bytes(b"\x80"),
    MANIFEST: lambda path: (path / MANIFEST).write_text('{"files"'),
    "manifest.json is missing": lambda path: (path / MANIFEST).unlink(),
}


@pytest.mark.parametrize("named", DAMAGE)
def test_damage_is_found_and_the_file_named(run: RunDirectory, named: str) -> None:
    path = publish_weights(run, 0, 1, fill)
    DAMAGE[named](path)
    with pytest.raises(WeightsCorrupt, match=named):
        verify_weights(path)


@pytest.mark.parametrize("name", ["a.bin", "a.pt", "a.pth", "a.pkl"])
def test_pickles_are_not_published(run: RunDirectory, name: str) -> None:
    def fill_with_pickle(path: Path) -> None:
        fill(path)
        (path / name).write_bytes(b"\x80")

    with pytest.raises(WeightsCorrupt, match=name):
        publish_weights(run, 0, 1, fill_with_pickle)
    assert not list(run.weights.iterdir())


def test_directory_without_weights_is_not_published(run: RunDirectory) -> None:
    def write_config(path: Path) -> None:
        (path / "config.json").write_text("{}")

    with pytest.raises(WeightsCorrupt, match="safetensors"):
        publish_weights(run, 0, 1, write_config)
    assert not list(run.weights.iterdir())


def test_unused_versions_and_left_overs_are_deleted(run: RunDirectory) -> None:
    paths = [publish_weights(run, 0, number, fill) for number in range(4)]
    (run.weights / ".lineage-000-version-000004.abc.tmp").mkdir()
    assert found_versions(run) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert delete_unused(run, 0, {(0, 0), (0, 2), (0, 9)}) == []
    assert sorted(run.weights.iterdir()) == [paths[1], paths[3]]


def test_nothing_of_a_successor_is_deleted(run: RunDirectory) -> None:
    published = publish_weights(run, 1, 0, fill)
    unfinished = temporary_sibling(run.weights_path(1, 1))
    unfinished.mkdir()
    assert delete_unused(run, 0, {(0, 0)}) == []
    assert set(run.weights.iterdir()) == {published, unfinished}
