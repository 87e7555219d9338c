"""Connections to PostgreSQL on which every call ends: with its answer, or with an error within 10 seconds.

The server ends waits for a lock, statements that take too long and transactions in which nobody does anything any more,
so that a process that stops in the middle of one holds up nobody for long. Against a host that is cut off, or a server
that is stopped, only the client itself can help: it gives up a connection from which it has heard nothing.
"""

import time
from collections.abc import Generator
from typing import Any

import psycopg
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, DisconnectionError

IDLE_IN_TRANSACTION_S = 5.0
LOCK_WAIT_S = 8.0
"""Longer than who holds the lock may do nothing."""
STATEMENT_S = 8.5
SILENCE_S = 9.0
"""Longer than the server lets anybody wait for a lock, so that its own errors come first."""
REACH_S = 3.0
"""For a connection of before to show that it is alive, and again for each address at which another one is tried."""
_ASK_AGAIN = {
    "40001",  # serialization_failure
    "40P01",  # deadlock_detected
    "55P03",  # lock_not_available: lock_timeout
    "57014",  # query_canceled: statement_timeout
    "57P01",  # admin_shutdown
    "57P02",  # crash_shutdown
    "57P03",  # cannot_connect_now
}
"""Errors after which the transaction is undone, and may well succeed when it is made again."""


_Exchange = Generator[Any, Any, Any]


class ServerSilent(psycopg.OperationalError):
    """Nothing was heard from the server; whether it did what it was asked is not known."""


class _Connection(psycopg.Connection[Any]):
    """A connection that is closed once its server is silent while an answer is due."""

    patience_s = SILENCE_S

    def wait(self, gen: _Exchange, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().wait(_while_heard_from(gen, self.patience_s), *args, **kwargs)
        except ServerSilent:
            self.pgconn.finish()
            raise


def open_engine(url: URL) -> Engine:
    """A pool of such connections; nothing is connected yet."""
    settings = {
        # Every statement is a search by key. A planner that last saw a table when it was small would read all of it.
        "enable_seqscan": "off",
        "lock_timeout": f"{LOCK_WAIT_S * 1000:.0f}",
        "statement_timeout": f"{STATEMENT_S * 1000:.0f}",
        "idle_in_transaction_session_timeout": f"{IDLE_IN_TRANSACTION_S * 1000:.0f}",
        # For a client that stops while an answer is sent to it, which no other deadline of the server sees.
        "tcp_user_timeout": f"{LOCK_WAIT_S * 1000:.0f}",
    }
    arguments = {
        "options": " ".join(f"-c {name}={value}" for name, value in settings.items()),
        "connect_timeout": int(REACH_S),
        "keepalives_idle": 2,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": int(LOCK_WAIT_S * 1000),
    }
    engine = create_engine(url, connect_args=arguments)

    @event.listens_for(engine, "do_connect")
    def connect(dialect: Any, record: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return _Connection.connect(*args, **kwargs)

    @event.listens_for(engine, "checkout")
    def ping(connection: _Connection, record: Any, proxy: Any) -> None:
        """The server may have been started anew since the connection was made: then another one is."""
        is_new = "used" not in record.info
        record.info["used"] = True
        if is_new:
            return
        connection.patience_s = REACH_S
        try:
            connection.autocommit = True
            connection.execute("")
            connection.autocommit = False
        except psycopg.OperationalError as error:
            raise DisconnectionError from error
        connection.patience_s = SILENCE_S

    return engine


def is_unanswered(error: DBAPIError) -> bool:
    """Whether the server has not answered, or may answer otherwise when it is asked again.

    One that cannot be reached gives no code; nor does one that refuses a password, which libpq does not tell apart.
    """
    if error.connection_invalidated:
        return True
    cause = error.orig
    return isinstance(cause, psycopg.OperationalError) and (cause.sqlstate is None or cause.sqlstate in _ASK_AGAIN)


def _while_heard_from(steps: _Exchange, patience_s: float) -> _Exchange:
    """The steps of an exchange with the server, each of which yields what it waits for and gets what is there.

    Nothing being there is told a few times a second.

    Raises:
        ServerSilent: nothing has been there for `patience_s`.
    """
    heard = time.monotonic()
    try:
        waits_for = next(steps)
        while True:
            ready = yield waits_for
            if ready:
                heard = time.monotonic()
            elif time.monotonic() - heard > patience_s:
                raise ServerSilent(f"the server has not answered for {patience_s:.0f} s")
            waits_for = steps.send(ready)
    except StopIteration as end:
        return end.value
