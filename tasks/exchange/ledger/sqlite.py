"""Connections to SQLite on which every call ends: with its answer, or with an error within 10 seconds.

One process writes at a time, and SQLite takes the lock from none that has stopped while it writes: others can only wait
and be told who it is. Readers go on meanwhile, for which there is the write-ahead log.
"""

import contextlib
import os
import sqlite3
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import filelock
import psutil
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, ExceptionContext
from sqlalchemy.exc import OperationalError

from tasks.machine.private import OWN_DIRECTORY, OWN_FILE, open_own

LOCK_WAIT_S = 8.0
_WRITE_LOCK = 120
"""Byte of the file `-shm` that a writer locks: WAL_WRITE_LOCK in https://sqlite.org/walformat.html."""
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class Locked(sqlite3.OperationalError):
    """Another process has kept a lock for LOCK_WAIT_S; the message names it."""


def open_engines(url: URL) -> tuple[Engine, Engine]:
    """Two pools of connections, for transactions that read and for those that write; nothing is connected yet."""
    return _engine(url, "BEGIN"), _engine(url, "BEGIN IMMEDIATE")


@contextlib.contextmanager
def opening(path: Path) -> Iterator[None]:
    """One process at a time opens the file, which then is one in WAL mode.

    Several that switch a new file to WAL at once get "database is locked" in spite of the busy timeout.

    Raises:
        Locked: another process has been in here for too long.
    """
    path.parent.mkdir(mode=OWN_DIRECTORY, parents=True, exist_ok=True)
    lock = path.with_name(path.name + ".lock")
    try:
        held = filelock.FileLock(lock, timeout=LOCK_WAIT_S, mode=OWN_FILE).acquire()
    except filelock.Timeout:
        raise Locked(_who_has(path, _holder(lock, 0))) from None
    with held:
        if not path.exists():  # else a file to close would release the locks that this process itself has on it
            os.close(open_own(str(path), os.O_RDWR | os.O_CREAT))  # SQLite's files beside it get its mode
        with closing(sqlite3.connect(path, timeout=LOCK_WAIT_S)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
        yield


def stopped_writer(path: Path) -> int | None:
    """The process that has stopped while it writes to this database, which keeps all others from writing."""
    holder = _writer(path)
    return holder.pid if holder and _is_stopped(holder) else None


def _engine(url: URL, begin: str) -> Engine:
    engine = create_engine(url)

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, record: Any) -> None:
        connection.isolation_level = None  # the driver must not begin transactions; `begin` below does
        connection.execute(f"PRAGMA busy_timeout = {LOCK_WAIT_S * 1000:.0f}")
        connection.execute("PRAGMA foreign_keys = ON")
        # FULL, not NORMAL: in WAL mode NORMAL survives a SIGKILL, but a power cut may undo the last commits. The files
        # that the ledger speaks of are synced before they are recorded, and a checkpoint that outlives the record of
        # what it consumed would let groups be used twice. Costs one fsync (a few ms) per transaction that changes rows.
        connection.execute("PRAGMA synchronous = FULL")

    @event.listens_for(engine, "begin")
    def begin_transaction(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    @event.listens_for(engine, "handle_error")
    def name_writer(context: ExceptionContext) -> Exception | None:
        error = context.original_exception
        if not isinstance(error, sqlite3.OperationalError) or error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            return None
        path = Path(url.database or "")
        return OperationalError(context.statement, context.parameters, Locked(_who_has(path, _writer(path))))

    return engine


def _who_has(path: Path, holder: psutil.Process | None) -> str:
    """The message of `Locked`."""
    with contextlib.suppress(psutil.Error):
        if holder:
            who = f"process {holder.pid} ({textwrap.shorten(' '.join(holder.cmdline()), 100)})"
            if _is_stopped(holder):
                return f"{who} has stopped while it locks {path}: end it, or let it go on (`kill -CONT {holder.pid}`)"
            return f"{who} has locked {path} for {LOCK_WAIT_S:.0f} s"
    return f"others have locked {path} for {LOCK_WAIT_S:.0f} s"


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() in _STOPPED
    except psutil.Error:
        return False


def _writer(path: Path) -> psutil.Process | None:
    return _holder(Path(f"{path}-shm"), _WRITE_LOCK)


def _holder(path: Path, byte: int) -> psutil.Process | None:
    """The process on this machine that has locked the file from this byte on.

    The kernel's list says it without a file to open: to close one would release the locks that this process has on it.
    """
    if sys.platform != "linux":
        return None
    with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
        file = os.stat(path)
        for line in Path("/proc/locks").read_text().splitlines():
            # 3: POSIX  ADVISORY  WRITE 4711 08:01:1234 120 120, with an arrow before POSIX for one that only waits
            *_, kind, pid, inode, start, _ = line.split()
            is_it = (kind, inode.rpartition(":")[2], start) == ("WRITE", str(file.st_ino), str(byte))
            if is_it and "->" not in line and _has_open(int(pid), file):
                return psutil.Process(int(pid))
    return None


def _has_open(pid: int, file: os.stat_result) -> bool:
    """Whether the process has this file open: numbers of files are the same on other file systems."""
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.path.samestat(descriptor.stat(), file):
                    return True
    return False
