"""Output that every terminal and pipe takes, signs of life, and exit statuses. Needs the standard library only."""

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tasks.config.passwords import without_password

FAILED, BAD_INPUT, CANCELLED = 1, 2, 130
"""Exit status of a command."""
TELL_EVERY_S = 10.0
"""Longest silence of a command that is at work."""


def tolerate_encodings() -> None:
    """Print `?` for what the encoding of stdout or stderr lacks, such as η in ASCII, instead of failing there."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def complain(message: str) -> int:
    """Say it on stderr; returns the exit status of bad input. Libraries' own words may have a server's URL in them."""
    print(f"hexflow: {without_password(message)}", file=sys.stderr)
    return BAD_INPUT


@contextmanager
def telling(say: Callable[[str], object]) -> Iterator[Callable[[str], object]]:
    """Takes what is being done, and says it with its time so far every TELL_EVERY_S, as long as that lasts."""
    doing, since, ended = "", time.monotonic(), threading.Event()

    def begin(what: str) -> None:
        nonlocal doing, since
        doing, since = what, time.monotonic()

    def tell() -> None:
        while not ended.wait(TELL_EVERY_S):
            say(f"{doing}, {time.monotonic() - since:.0f} s so far")

    thread = threading.Thread(target=tell, name="telling", daemon=True)
    thread.start()
    try:
        yield begin
    finally:
        ended.set()
        thread.join()
