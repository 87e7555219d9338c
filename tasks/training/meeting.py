"""Where the trainer's ranks meet, as their environment tells them. Nothing of torch is loaded here.

On one machine they meet in a file that no other user can reach, and talk over loopback. On several, the first machine
listens on the one address that all are told, before any rank is started.
"""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from planners.errors import UserError
from tasks.config.settings import machine_directory
from tasks.machine.network import INTERFACES, LOOPBACK, talking_on
from tasks.machine.private import make_private

PLACE = "HEXFLOW_MEETING"
"""`file://PATH` or `tcp://HOST:PORT`."""
SOCKET = "HEXFLOW_MEETING_SOCKET"
"""Descriptor of the socket that listens at `tcp://HOST:PORT`, for rank 0."""


@dataclass(frozen=True)
class Meeting:
    """`environment` is for all ranks of this machine; `listener` for rank 0, if it is here and others are elsewhere."""

    environment: dict[str, str]
    listener: socket.socket | None = None


@contextmanager
def open_meeting(first: int, master: str | None) -> Iterator[Meeting]:
    """A place to meet, for as long as the context is open.

    Args:
        first: number of this machine's first rank; the machine that has rank 0 listens.
        master: HOST:PORT where the ranks of all machines meet; None: all are on this machine.

    Raises:
        UserError: nobody can listen at `master` here, or it cannot be reached.
    """
    if master is None:
        own = make_private(machine_directory(), "HEXFLOW_LOCAL")
        with tempfile.TemporaryDirectory(dir=own, prefix="ranks-") as directory:
            yield Meeting(meet_here(Path(directory)))
        return
    host, _, port = master.rpartition(":")
    host = host.strip("[]")
    chosen = {name: os.environ[name] for name in INTERFACES if name in os.environ}
    environment = {PLACE: f"tcp://{master}", **talking_on(_address_towards(host, int(port))), **chosen}
    if first > 0:
        yield Meeting(environment)
        return
    with _listen(host, int(port)) as listener:
        yield Meeting(environment, listener)


def meet_here(directory: Path) -> dict[str, str]:
    """Variables of ranks that are all on this machine, and meet in a directory that is theirs alone."""
    return {PLACE: f"file://{directory / 'ranks'}", **talking_on(LOOPBACK)}


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=_family(host), backlog=1024)
    except OSError as error:
        raise UserError(
            f"The trainer's ranks cannot meet at {host}:{port} ({os.strerror(error.errno or 0)}): name an address of "
            "this machine and a port that is free there."
        ) from None


def _address_towards(host: str, port: int) -> str:
    """The address from which this machine reaches another one, or itself; no packet is sent."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as error:
            raise UserError(
                f"The trainer's ranks cannot meet at {host}:{port} ({error.strerror}): name an address that this "
                "machine can reach."
            ) from None
        return str(probe.getsockname()[0])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
