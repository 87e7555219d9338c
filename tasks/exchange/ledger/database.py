"""Opening the ledger's database, running transactions on it, and making calls again that it did not answer.

SQLite serves one machine, PostgreSQL a cluster; one URL says which. Times are the database's, in seconds since 1970, so
the clocks of machines need not agree; they are kept to be shown, and decide nothing.
"""

import copy
import inspect
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, Self

import tenacity
from sqlalchemy import Connection, Engine, Float, create_engine, func, insert, select
from sqlalchemy import inspect as look_into
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from planners.errors import UserError
from tasks.config.passwords import without_password
from tasks.exchange.ledger import sqlite
from tasks.exchange.ledger.schema import metadata, schema_info
from tasks.exchange.wire import WIRE_VERSION

OUTAGE_S = 300.0
"""For so long a process that works on a run asks a ledger again that does not answer: its server is started anew, its
host is cut off, or somebody keeps the lock."""
_LONGEST_PAUSE_S = 3.0
_log = logging.getLogger(__name__)


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
    """A pool of connections and the two kinds of transaction that the ledger needs. Threads may share it.

    The public calls of the ledger's parts, which are its subclasses, are made again where the database did not answer.
    An answer that was lost cannot be told from a call that was, so each of them may be repeated.
    """

    def __init_subclass__(cls) -> None:
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method) and not name.startswith("_"):
                setattr(cls, name, _repeated(method))

    def __init__(self, url: str, patience_s: float = OUTAGE_S) -> None:
        """Open the database, creating its tables if they are absent; safe from many processes at once.

        Args:
            url: the database.
            patience_s: for so long a call that is not answered, this one included, is made again; 0: it is not, for
                who asks again anyway, or tells a person.

        Raises:
            UserError: the URL is wrong, the database cannot be opened, or another version of hexflow made it.
        """
        place = _parse(url)
        self.hurry = threading.Event()
        """Set it where the process is to end: from then on no call is made again."""
        self._file = Path(place.database or "").absolute() if place.get_backend_name() == "sqlite" else None
        self._repeating = tenacity.Retrying(
            retry=tenacity.retry_if_exception(self._is_unanswered),
            stop=tenacity.stop_after_delay(patience_s) | tenacity.stop_when_event_set(self.hurry),
            wait=tenacity.wait_exponential(multiplier=0.1, max=_LONGEST_PAUSE_S),
            sleep=tenacity.sleep_using_event(self.hurry),
            before_sleep=lambda state: _tell(state, patience_s),
            reraise=True,
        )
        with _explained(place):
            if self._file:
                self._readers, self._writers = sqlite.open_engines(place)
            else:
                self._writers = _postgresql_engine(place)
                self._readers = self._writers.execution_options(isolation_level="REPEATABLE READ")
            found = self._repeating(self._open_tables)
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

    def at_once(self) -> Self:
        """The same ledger, whose calls are not made again: for who has another way, or no time."""
        quick = copy.copy(self)
        quick._repeating = self._repeating.copy(stop=tenacity.stop_after_attempt(1))
        return quick

    def close(self) -> None:
        """Close the pooled connections."""
        self._writers.dispose()
        self._readers.dispose()

    def stopped_writer(self) -> int | None:
        """Pid of a process on this machine that has stopped and keeps all others from writing.

        On PostgreSQL there is none: the server ends its transaction.
        """
        return sqlite.stopped_writer(self._file) if self._file else None

    def _open_tables(self) -> int | None:
        """The version of the tables. Where they are there, nothing is written: the lock may be somebody else's."""
        with sqlite.opening(self._file) if self._file else nullcontext():
            with self.read() as connection:
                if look_into(connection).has_table(schema_info.name):
                    found = connection.scalar(select(schema_info.c.version))
                    if found is not None:
                        return found
            with self.write("schema") as connection:
                metadata.create_all(connection)
                found = connection.scalar(select(schema_info.c.version))
                if found is None:
                    connection.execute(insert(schema_info).values(version=WIRE_VERSION))
        return WIRE_VERSION if found is None else found

    def _is_unanswered(self, error: BaseException) -> bool:
        """Whether the call may be made again; whatever else is raised is an answer."""
        if not isinstance(error, DBAPIError):
            return isinstance(error, sqlite.Locked)
        if self._file:
            return isinstance(error.orig, sqlite.Locked)
        from tasks.exchange.ledger.postgres import is_unanswered  # see `_postgresql_engine`

        return is_unanswered(error)


def _repeated(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Database, *args: Any, **kwargs: Any) -> Any:
        return self._repeating(method, self, *args, **kwargs)

    return call


def _tell(state: tenacity.RetryCallState, patience_s: float) -> None:
    """Say what is waited for."""
    assert state.outcome is not None
    error, call = state.outcome.exception(), getattr(state.fn, "__name__", "")
    assert isinstance(error, Exception)
    waited_s = state.seconds_since_start or 0.0
    _log.warning(
        "the ledger has not answered %s for %.0f s, and is asked again until %.0f s have passed: %s",
        *(call.strip("_"), waited_s, patience_s, cause_of(error)),
    )


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
            is_new = not look_into(connection).has_table(schema_info.name)
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
