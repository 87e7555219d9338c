"""A way to PostgreSQL that loses answers: it can cut a connection when the server has said what it did."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SOCKET = ".s.PGSQL.5432"
COMMITTED, FOUND = b"COMMIT\x00", b"SELECT "
"""How the server ends its answer to a commit, and to a query."""


class CuttingWay:
    """Passes everything on, until `cut_next`: then the next such answer is lost with its connection."""

    def __init__(self, server: Path, own: Path) -> None:
        self.directory = own
        self._server = server
        self._armed: bytes | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(own / _SOCKET))
        self._listener.listen()

    def cut_next(self, answer: bytes | None) -> None:
        """Lose the next answer with these bytes; None: lose none."""
        self._armed = answer

    @property
    def has_cut(self) -> bool:
        """Whether the answer was lost that was to be lost."""
        return self._armed is None

    def serve(self) -> None:
        """Accept connections until `close`."""
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                upstream = socket.socket(socket.AF_UNIX)
                upstream.connect(str(self._server / _SOCKET))
                for source, target, may_cut in ((client, upstream, False), (upstream, client, True)):
                    threading.Thread(target=self._pass_on, args=(source, target, may_cut), daemon=True).start()

    def close(self) -> None:
        """Accept nothing more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _pass_on(self, source: socket.socket, target: socket.socket, may_cut: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if may_cut and self._armed is not None and self._armed in data:
                    self._armed = None
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def cutting_way(server: Path, own: Path) -> Iterator[CuttingWay]:
    """Such a way to the server whose socket is in `server`, with a socket of its own in `own`."""
    way = CuttingWay(server, own)
    thread = threading.Thread(target=way.serve, daemon=True)
    thread.start()
    yield way
    way.close()
    thread.join()
