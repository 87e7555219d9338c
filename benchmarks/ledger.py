"""Does the ledger cost the same however long a run is? `python -m benchmarks.ledger [--json FILE]`.

Every call of a lease, beat, poll, step, checkpoint, publication or page is timed in runs with 0, 10⁴ and 10⁶ groups
behind them, on SQLite and on PostgreSQL, with commits on the disk as in use. The three runs of a database live on in
turns, step by step, so that other work on the machine falls on all of them alike. Printed are medians in milliseconds,
and how many times the shortest the longest is: to be at most 1.5.

It starts a PostgreSQL of its own, which needs the extra `dev`, unless HEXFLOW_BENCHMARK_URL names a server
(`postgresql://…`), which gets three databases for as long as it lasts. Takes some minutes, many of them to write the
past.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy.engine import make_url

from tasks.exchange.ledger import Ledger
from tests.support.history import History
from tests.support.postgres import private_postgres

PASTS = (0, 10**4, 10**6)
_WARM_UP_STEPS, _RESUME_EVERY = 4, 4


class Timer:
    """Collects the milliseconds of calls by name."""

    def __init__(self) -> None:
        self.times_ms: defaultdict[str, list[float]] = defaultdict(list)

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        """Make the call and return its answer."""
        started = time.perf_counter()
        answer = call()
        self.times_ms[name].append((time.perf_counter() - started) * 1000)
        return answer


def measure(urls: dict[int, str], steps: int) -> list[dict[str, Any]]:
    """A row per call: its median milliseconds by the number of past groups, and the largest over the least."""
    with ExitStack() as stack:
        histories: dict[int, History] = {}
        for past, url in urls.items():
            ledger = stack.enter_context(closing(Ledger(url)))
            started = time.perf_counter()
            histories[past] = History(ledger, past)
            print(f"  {past} groups written in {time.perf_counter() - started:.0f} s", flush=True)
        timers = {past: Timer() for past in histories}
        for step in range(_WARM_UP_STEPS + steps):
            for past, history in histories.items():
                call: Any = timers[past] if step >= _WARM_UP_STEPS else Timer()
                history.live_a_step(call)
                if step % _RESUME_EVERY == _RESUME_EVERY - 1:
                    history.take_back_a_step(call)
    return [_row(name, timers) for name in timers[0].times_ms]


def _row(name: str, timers: dict[int, Timer]) -> dict[str, Any]:
    medians = {past: statistics.median(timer.times_ms[name]) for past, timer in timers.items()}
    ratio = max(medians.values()) / min(medians.values())
    return {"call": name, "samples": len(timers[0].times_ms[name]), "median_ms": medians, "ratio": ratio}


@contextmanager
def sqlite_urls() -> Iterator[dict[int, str]]:
    """New files in a directory that goes with the block."""
    with tempfile.TemporaryDirectory(prefix="hexflow-ledger-") as directory:
        yield {past: f"sqlite:///{Path(directory) / f'past-{past}.db'}" for past in PASTS}


@contextmanager
def postgres_urls() -> Iterator[dict[int, str]]:
    """Databases of a server that goes with the block."""
    with private_postgres(durable=True) as server:
        yield {past: server.new_ledger(f"past_{past}") for past in PASTS}


@contextmanager
def named_urls(url: str) -> Iterator[dict[int, str]]:
    """Databases, gone with the block, of the server that a person named."""
    server = make_url(url)
    names = {past: f"hexflow_benchmark_{past}" for past in PASTS}
    with closing(psycopg.connect(url, autocommit=True)) as connection:
        for name in names.values():
            connection.execute(f"CREATE DATABASE {name}".encode())
        try:
            yield {
                past: server.set(database=name).render_as_string(hide_password=False) for past, name in names.items()
            }
        finally:
            for name in names.values():
                connection.execute(f"DROP DATABASE {name}".encode())


def main() -> None:
    """Measure, print a table per database, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    print(f"{os.uname().machine}, {os.cpu_count()} cores, Python {platform.python_version()}", flush=True)
    results = {}
    url = os.environ.get("HEXFLOW_BENCHMARK_URL")  # no argument: it may hold a password, which all could read there
    postgres = named_urls(url) if url else postgres_urls()
    for database, urls in (("sqlite", sqlite_urls()), ("postgresql", postgres)):
        print(f"{database}; load {os.getloadavg()[0]:.1f}", flush=True)
        with urls as places:
            results[database] = measure(places, args.steps)
        _print(results[database])
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


def _print(rows: list[dict[str, Any]]) -> None:
    print("| call | " + " | ".join(f"{past:,} groups" for past in PASTS) + " | ratio |")
    print("|---|" + "---|" * (len(PASTS) + 1))
    for row in rows:
        medians = " | ".join(f"{row['median_ms'][past]:.2f}" for past in PASTS)
        print(f"| {row['call']} | {medians} | {row['ratio']:.2f} |")
    worst = max(rows, key=lambda row: row["ratio"])
    print(f"\nWorst: {worst['call']}, {worst['ratio']:.2f}; load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
