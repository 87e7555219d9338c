"""No call that is repeated while a run lives reads more the longer the run gets.

Query plans can look right and read everything (an index searched by the run alone), so what is read is counted: on
SQLite every instruction of its virtual machine, of which each row and index entry costs at least one; on PostgreSQL the
rows and index entries that its statistics name.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import event, text
from sqlalchemy.engine import Engine

from tasks.exchange.ledger import Ledger
from tests.support.history import RUN, History
from tests.support.postgres import PostgresServer

SHORT, LONG = 200, 20_000
_EVERY = 10
"""Counting one by one takes ten times as long."""
EVERYTHING = "groups, all of them"
_ROWS_READ = """
    SELECT (SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) FROM pg_stat_user_tables)
         + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes)
"""


class Counter:
    """What each call has read at most, by its name."""

    def __init__(self, read_so_far: Callable[[], int]) -> None:
        self._read_so_far = read_so_far
        self.most: dict[str, int] = {}

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        before = self._read_so_far()
        answer = call()
        self.most[name] = max(self.most.get(name, 0), self._read_so_far() - before)
        return answer


def live(ledger: Ledger, past: int, read_so_far: Callable[[], int]) -> dict[str, int]:
    """Let a run live on after `past` groups; what its calls read, and a call that does read everything."""
    history = History(ledger, past)
    for _ in range(4):  # until a step follows and goes before others like it, as in any longer run
        history.live_a_step(lambda name, call: call())
    counter = Counter(read_so_far)
    for _ in range(2):
        history.live_a_step(counter)
    history.take_back_a_step(counter)
    history.live_a_step(counter)
    counter(EVERYTHING, lambda: ledger.groups(RUN))
    return counter.most


def assert_constant(short: dict[str, int], long: dict[str, int]) -> None:
    assert long.pop(EVERYTHING) > 20 * short.pop(EVERYTHING), "what grows is not seen to grow"
    assert short.keys() == long.keys()
    grown = {name: (short[name], long[name]) for name in short if long[name] > 1.2 * short[name] + 10}
    assert grown == {}


@contextmanager
def counted_instructions() -> Iterator[Callable[[], int]]:
    """Count the instructions of all SQLite connections that are opened from here on."""
    instructions = 0

    def count() -> int:
        nonlocal instructions
        instructions += _EVERY
        return 0

    def watch(connection: sqlite3.Connection, record: Any) -> None:
        connection.set_progress_handler(count, _EVERY)

    event.listen(Engine, "connect", watch)
    yield lambda: instructions
    event.remove(Engine, "connect", watch)


def test_no_call_reads_more_in_a_long_run_on_sqlite(tmp_path: Path) -> None:
    read = []
    with counted_instructions() as instructions:
        for past in (SHORT, LONG):
            with closing(Ledger(f"sqlite:///{tmp_path / f'{past}.db'}")) as ledger:
                read.append(live(ledger, past, instructions))
    assert_constant(*read)


def test_no_call_reads_more_in_a_long_run_on_postgresql(postgres: PostgresServer) -> None:
    read = []
    for past in (SHORT, LONG):
        url = postgres.new_ledger(f"past_of_{past}")
        with closing(Ledger(url)) as ledger, closing(psycopg.connect(url, autocommit=True)) as watcher:

            def rows_read() -> int:
                with ledger.read() as connection:  # the session that made the call; it tells what it has counted
                    connection.execute(text("SELECT pg_stat_force_next_flush()"))
                row = watcher.execute(_ROWS_READ).fetchone()
                assert row is not None
                return int(row[0])

            read.append(live(ledger, past, rows_read))
    assert_constant(*read)
