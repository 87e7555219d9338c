"""Opening the ledger's database and running transactions on it: all that differs between SQLite and PostgreSQL.

SQLite serves one machine, PostgreSQL a cluster; one URL says which. Times are the database's, in seconds since 1970, so
the clocks of machines need not agree.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock
from sqlalchemy import Connection, Engine, Float, create_engine, event, func, insert, inspect, select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from planners.errors import UserError
from tasks.config.passwords import without_password
from tasks.exchange.ledger.schema import metadata, schema_info
from tasks.exchange.wire import WIRE_VERSION
from tasks.machine.private import OWN_DIRECTORY, OWN_FILE, open_own

_BUSY_TIMEOUT_S = 60.0


class now_s(FunctionElement[float]):
    """The database's clock: seconds since 1970, as a float."""

    type = Float()
    inherit_cache = True


@compiles(now_s, "sqlite")
def _now_on_sqlite(element: Any, compiler: Any, **options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now_s, "postgresql")
def _now_on_postgresql(element: Any, compiler: Any, **options: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"


class Database:
    """A pool of connections and the two kinds of transaction that the ledger needs. Threads may share it."""

    def __init__(self, url: str) -> None:
        """Open the database, creating its tables if they are absent; safe from many processes at once.

        Raises:
            UserError: the URL is wrong, the database cannot be opened, or another version of hexflow made it.
        """
        place = _parse(url)
        with _explained(place):
            if place.get_backend_name() == "sqlite":
                self._open_sqlite(place, Path(place.database or "").absolute())
            else:
                self._open_postgresql(place)
            with self.read() as connection:
                found = connection.scalar(select(schema_info.c.version))
        _require_version(found, place)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads: one consistent state, without waiting for writers."""
        with self._readers.connect() as connection:
            yield connection

    @contextmanager
    def write(self, key: str | None) -> Iterator[Connection]:
        """A transaction that writes what belongs to `key` (a run's id): whole or not at all, one at a time.

        Writers wait for each other before their first statement, so what a transaction has read is still true when it
        commits. None is for a single statement on a single row, which is one at a time by itself.
        """
        with self._writers.connect() as connection, connection.begin():
            if key is not None and connection.dialect.name == "postgresql":
                connection.execute(select(func.pg_advisory_xact_lock(func.hashtext(key))))
            yield connection

    def close(self) -> None:
        """Close the pooled connections."""
        self._writers.dispose()
        self._readers.dispose()

    def _open_sqlite(self, url: URL, path: Path) -> None:
        self._readers = _sqlite_engine(url, "BEGIN")
        self._writers = _sqlite_engine(url, "BEGIN IMMEDIATE")
        path.parent.mkdir(mode=OWN_DIRECTORY, parents=True, exist_ok=True)
        # Several processes that switch a new file to WAL at once get "database is locked" in spite of the busy timeout.
        with FileLock(path.with_name(path.name + ".lock"), timeout=_BUSY_TIMEOUT_S, mode=OWN_FILE):
            os.close(open_own(str(path), os.O_RDWR | os.O_CREAT))  # SQLite's files beside it get its mode
            with closing(sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
            self._create_tables()

    def _open_postgresql(self, url: URL) -> None:
        self._writers = _postgresql_engine(url)
        self._readers = self._writers.execution_options(isolation_level="REPEATABLE READ")
        self._create_tables()

    def _create_tables(self) -> None:
        with self.write("schema") as connection:
            metadata.create_all(connection)
            if connection.scalar(select(schema_info.c.version)) is None:
                connection.execute(insert(schema_info).values(version=WIRE_VERSION))


def require_usable(url: str) -> None:
    """Look at a ledger that may exist already, and change nothing.

    Raises:
        UserError: as `Database`.
    """
    place = _parse(url)
    is_file = place.get_backend_name() == "sqlite"
    if is_file and not Path(place.database or "").exists():
        return
    with _explained(place):
        engine = create_engine(place) if is_file else _postgresql_engine(place)
        with closing(engine.connect()) as connection:
            is_new = not inspect(connection).has_table(schema_info.name)
            found = WIRE_VERSION if is_new else connection.scalar(select(schema_info.c.version))
        engine.dispose()
    _require_version(found, place)


def cause_of(error: Exception) -> str:
    """What the database itself says, in one line without a full stop; SQLAlchemy adds the statement and a link."""
    return str(getattr(error, "orig", None) or error).splitlines()[0].rstrip(".")


@contextmanager
def _explained(place: URL) -> Iterator[None]:
    """What the database and its driver refuse in here is a person's to mend."""
    shown = _shown(place)
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(
            f"The ledger {shown} needs the Python package {error.name}, which is not installed: run "
            "`pip install 'psycopg[binary]'` in hexflow's environment."
        ) from None
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        raise UserError(
            f"The ledger {shown} cannot be opened: {cause_of(error)}. Start its server or mend its place, or name "
            "another with HEXFLOW_LEDGER_URL."
        ) from error


def _shown(place: URL) -> str:
    return without_password(place.render_as_string(hide_password=True))


def _require_version(found: int | None, place: URL) -> None:
    if found != WIRE_VERSION:
        raise UserError(
            f"The ledger {_shown(place)} has tables of version {found}, but this hexflow "
            f"needs version {WIRE_VERSION}: use the hexflow that made it, or name another ledger with "
            "HEXFLOW_LEDGER_URL."
        )


def _parse(url: str) -> URL:
    try:
        place = make_url(url)
        backend = place.get_backend_name()
    except (ArgumentError, ValueError):
        backend = ""
    if backend == "postgresql":
        return place.set(drivername="postgresql+psycopg")
    if backend == "sqlite" and place.database not in (None, "", ":memory:"):
        return place
    raise UserError(
        "The ledger's URL must be sqlite:///<file> (one machine) or postgresql://<user>@<host>/<database> (a cluster): "
        "see HEXFLOW_LEDGER_URL."
    )


def _postgresql_engine(url: URL) -> Engine:
    from tasks.exchange.ledger.postgres import open_engine  # not before: its driver is an extra of a cluster

    return open_engine(url)


def _sqlite_engine(url: URL, begin: str) -> Engine:
    engine = create_engine(url)

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, record: Any) -> None:
        connection.isolation_level = None  # the driver must not begin transactions; `begin` below does
        connection.execute(f"PRAGMA busy_timeout = {int(_BUSY_TIMEOUT_S * 1000)}")
        connection.execute("PRAGMA foreign_keys = ON")
        # FULL, not NORMAL: in WAL mode NORMAL survives a SIGKILL, but a power cut may undo the last commits. The files
        # that the ledger speaks of are synced before they are recorded, and a checkpoint that outlives the record of
        # what it consumed would let groups be used twice. Costs one fsync (a few ms) per transaction that changes rows.
        connection.execute("PRAGMA synchronous = FULL")

    @event.listens_for(engine, "begin")
    def begin_transaction(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine
