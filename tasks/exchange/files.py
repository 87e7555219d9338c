"""Files on shared storage: a reader sees a whole file or none, whatever is killed and whenever.

Everything is written under a temporary name in the same directory, synced, and renamed. Storage must be a POSIX
directory with close-to-open consistency, so that a reader who opens the final name sees the synced content.
"""

import errno
import json
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from planners.errors import UserError

_RETRY_S = 0.05
_log = logging.getLogger(__name__)
_Read = TypeVar("_Read")
_DISK_REFUSES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


def write_atomic(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write `data` so that `path` holds either the old or the whole new content, also after a power cut.

    Args:
        path: the file.
        data: its new content.
        mode: of the file, less what the umask takes away.

    Raises:
        UserError: the disk is full, read-only, or not ours to write.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_sibling(path)
        try:
            with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)


def require_writable(path: Path) -> None:
    """Refuse, before the work whose result it shall hold, a path that `write_atomic` could not replace.

    Raises:
        UserError: it is a directory or a device, or its place cannot be written.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is {'a directory' if path.is_dir() else 'no regular file'}: name a file.")
    place = path.absolute().parent
    if not place.is_dir():  # `write_atomic` would make it, also where the name is a slip
        raise UserError(f"{path} cannot be written: {place} is no directory. Make it first, or name another.")
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): name a file in a writable directory.") from None


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. Not-finite numbers are refused with ValueError: they are not JSON."""
    write_atomic(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def publish_directory(final: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write files into a temporary directory, sync it, and give it the name `final`.

    Raises:
        FileExistsError: `final` is there already; what is published never changes.
        UserError: the disk is full, read-only, or not ours to write.
    """
    if final.exists():
        raise FileExistsError(f"{final} is published already and is never overwritten")
    with disk_errors(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_sibling(final)
        temporary.mkdir()
        try:
            fill(temporary)
            _sync_tree(temporary)
            temporary.rename(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        sync(final.parent)


def remove_directory(path: Path) -> None:
    """Delete a published directory: it leaves its name at once, so that no reader finds half of it."""
    temporary = temporary_sibling(path)
    path.rename(temporary)
    shutil.rmtree(temporary)


def discard(path: Path) -> bool:
    """Delete a file or directory that nobody needs any more; False if storage does not let it go now.

    A file that somebody still has open stays on NFS, and its directory with it. What was to go is found again as
    `is_temporary`, or under its name, by whoever tidies next.
    """
    try:
        if is_temporary(path):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif path.is_dir():
            remove_directory(path)
        else:
            path.unlink()
    except FileNotFoundError:
        return True
    except OSError as error:
        _log.warning("%s could not be deleted, which is tried again later: %s", path, error)
        return False
    return True


def read_when_there(path: Path, deadline_s: float, read: Callable[[Path], _Read]) -> _Read:
    """What `read` makes of a file that another machine has announced but that storage may not show here yet.

    Raises:
        TimeoutError: it did not appear within `deadline_s` seconds.
    """
    give_up = time.monotonic() + deadline_s
    while True:
        try:
            return read(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
        if time.monotonic() >= give_up:
            raise TimeoutError(
                f"{path} was recorded as written but did not appear within {deadline_s:g} s: "
                "is the run's directory on storage that all machines share?"
            )
        time.sleep(_RETRY_S)


def temporary_sibling(path: Path) -> Path:
    """A fresh hidden name beside `path`; what a killed process leaves behind is recognised by `is_temporary`."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def target_of(temporary: Path) -> Path:
    """The path that a temporary sibling was to become."""
    return temporary.with_name(temporary.name[1:].rsplit(".", 2)[0])


def is_temporary(path: Path) -> bool:
    """Whether `path` is the unfinished work of a writer, alive or dead."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def _sync_tree(root: Path) -> None:
    for directory, _, names in os.walk(root):
        for name in names:
            sync(Path(directory, name))
        sync(Path(directory))


def sync(path: Path) -> None:
    """Bring a file or the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """What a disk refuses, while `path` is written, is a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_REFUSES:
            raise
        raise UserError(
            f"{path} cannot be written: {os.strerror(error.errno)}. Free some space, or choose a writable directory."
        ) from error
