"""Whole file or none: atomic writes, published directories, patient reads."""

import errno
import shutil
import threading
from pathlib import Path

import pytest

from planners.errors import UserError
from tasks.exchange.files import (
    discard,
    is_temporary,
    publish_directory,
    read_when_there,
    remove_directory,
    temporary_sibling,
    write_atomic,
    write_json,
)
from tasks.exchange.layout import RunDirectory, checkpoint_of, group_of, version_of


def test_atomic_write_replaces_the_whole_content(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    write_atomic(path, b"first, long")
    write_atomic(path, b"second")
    assert path.read_bytes() == b"second"
    assert list(path.parent.iterdir()) == [path]


def test_readers_never_see_a_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = {bytes([letter]) * 200_000 for letter in b"ab"}
    write_atomic(path, b"a" * 200_000)
    seen: set[bytes] = set()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(10):
        for content in contents:
            write_atomic(path, content)
    stop.set()
    reader.join()
    assert seen
    assert seen <= contents


def test_json_refuses_numbers_that_are_not_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "summary.json", {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


def test_published_directory_is_never_overwritten(tmp_path: Path) -> None:
    final = tmp_path / "version"
    publish_directory(final, lambda path: write_atomic(path / "a" / "b", b"1"))
    with pytest.raises(FileExistsError, match="never overwritten"):
        publish_directory(final, lambda path: write_atomic(path / "a" / "b", b"2"))
    assert (final / "a" / "b").read_bytes() == b"1"
    assert list(tmp_path.iterdir()) == [final]


def test_failed_fill_publishes_nothing(tmp_path: Path) -> None:
    def fill(path: Path) -> None:
        (path / "half").write_bytes(b"1")
        raise RuntimeError("the export failed")

    with pytest.raises(RuntimeError, match="the export failed"):
        publish_directory(tmp_path / "version", fill)
    assert not list(tmp_path.iterdir())


def test_final_name_appears_only_after_filling(tmp_path: Path) -> None:
    final = tmp_path / "version"
    seen: list[bool] = []
    publish_directory(final, lambda path: seen.append(final.exists() or not is_temporary(path)))
    assert seen == [False]
    assert final.is_dir()
    remove_directory(final)
    assert not list(tmp_path.iterdir())


def test_what_storage_does_not_let_go_ends_nobody_and_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS keeps a file that somebody has open, and its directory with it."""
    version = tmp_path / "version"
    publish_directory(version, lambda path: (path / "file").touch())

    def busy(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", busy)
        assert not discard(version)
        (left,) = tmp_path.iterdir()
        assert is_temporary(left)
        assert not discard(left)
    assert discard(left)
    assert not list(tmp_path.iterdir())
    assert discard(version), "what is gone already is no fault"


def test_full_disk_is_one_clear_sentence(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")

    def fill(path: Path) -> None:
        with full.open("wb") as file:
            file.write(b"1")

    with pytest.raises(UserError, match="cannot be written: No space left"):
        publish_directory(tmp_path / "version", fill)
    assert not list(tmp_path.iterdir())


def test_reader_waits_for_a_file_that_comes_late(tmp_path: Path) -> None:
    path = tmp_path / "late"
    writer = threading.Timer(0.1, write_atomic, (path, b"here"))
    writer.start()
    assert read_when_there(path, 30.0, Path.read_bytes) == b"here"
    writer.join()


def test_reader_gives_up_and_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="never-there"):
        read_when_there(tmp_path / "never-there", 0.0, Path.read_bytes)


def test_names_are_read_back(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert version_of(run.weights_path(3, 1_234_567)) == (3, 1_234_567)
    assert group_of(run.group_path(42)) == 42
    assert checkpoint_of(run.checkpoint_path(3, 20)) == (3, 20)
    for path in (run.weights_path(0, 1), run.group_path(1), run.checkpoint_path(0, 1)):
        hidden = temporary_sibling(path)
        assert is_temporary(hidden)
        assert (version_of(hidden), group_of(hidden), checkpoint_of(hidden)) == (None, None, None)
