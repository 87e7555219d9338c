"""Output that every terminal and pipe takes. Needs the standard library only."""

import io
import sys


def tolerate_encodings() -> None:
    """Print `?` for what the encoding of stdout or stderr lacks, such as η in ASCII, instead of failing there."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
