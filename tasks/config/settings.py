"""Where state lives: what all machines of a stack share, and what one machine has for itself."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from planners.errors import UserError

_SQLITE = "sqlite:///"


@dataclass(frozen=True)
class SharedPlaces:
    """What every machine of a stack sees, under the same names."""

    runs: Path
    """One directory per run: weights, trajectories, checkpoints, the logs of its actors."""
    ledger_url: str = field(repr=False)
    """SQLAlchemy URL of the ledger; it may hold a password."""

    @property
    def profiles(self) -> Path:
        """Measured device profiles: of device types, so what one machine has measured is read by all of its type."""
        return self.runs / ".profiles"

    def environment(self) -> dict[str, str]:
        """Variables by which a process, on whichever machine, resolves to these places."""
        return {"HEXFLOW_RUNS": str(self.runs), "HEXFLOW_LEDGER_URL": self.ledger_url}


@dataclass(frozen=True)
class MachinePlaces:
    """What one machine has for itself, below one directory."""

    home: Path
    """The stack's own state on this machine: databases of its servers, its record, its locks."""

    @property
    def models(self) -> Path:
        """Prepared models, cached."""
        return self.home / "models"

    @property
    def cache(self) -> Path:
        """What engines compile and keep."""
        return self.home / "cache"

    @property
    def logs(self) -> Path:
        """Log files of servers, workers and measurements."""
        return self.home / "logs"

    @property
    def locks(self) -> Path:
        """What one process of this machine does at a time."""
        return self.home / "locks"


@dataclass(frozen=True)
class Settings:
    """Resolved places of state; a child process given `environment()` resolves to the same ones."""

    shared: SharedPlaces
    local: MachinePlaces

    def environment(self) -> dict[str, str]:
        """Variables by which a child process resolves to these settings whatever its working directory is."""
        return {"HEXFLOW_HOME": str(self.local.home), **self.shared.environment()}


def load_settings() -> Settings:
    """Resolve the settings from `HEXFLOW_HOME`, `HEXFLOW_RUNS`, `HEXFLOW_LEDGER_URL` and the working directory.

    Home is `$HEXFLOW_HOME`, else the nearest existing `.hexflow` upward of the working directory, else `.hexflow`
    in it. A relative SQLite file starts at the working directory. Creates nothing.

    Raises:
        UserError: the working directory is gone.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise UserError("The working directory is gone: change to one that is there.") from None
    chosen, runs = os.environ.get("HEXFLOW_HOME"), os.environ.get("HEXFLOW_RUNS")
    home = _resolve(chosen) if chosen else _nearest_home(here)
    ledger_url = os.environ.get("HEXFLOW_LEDGER_URL") or f"sqlite:///{home / 'ledger.db'}"
    file = ledger_url.removeprefix(_SQLITE)
    if ledger_url.startswith(_SQLITE) and file and file != ":memory:":
        ledger_url = f"{_SQLITE}{here / file}"
    shared = SharedPlaces(_resolve(runs) if runs else home.parent / "runs", ledger_url)
    return Settings(shared, MachinePlaces(home))


def machine_directory() -> Path:
    """Where all that a user runs on this machine agrees, from whichever home: `$HEXFLOW_LOCAL`, or else one in /tmp.

    Neither a home, of which there may be several, nor TMPDIR, which changes from job to job, nor a directory that
    machines share.
    """
    chosen = os.environ.get("HEXFLOW_LOCAL")
    return _resolve(chosen) if chosen else Path("/tmp") / f"hexflow-{os.getuid()}"


def _resolve(chosen: str) -> Path:
    return Path(os.path.expanduser(chosen)).resolve()


def _nearest_home(start: Path) -> Path:
    for directory in (start, *start.parents):
        if (directory / ".hexflow").is_dir():
            return directory / ".hexflow"
    return start / ".hexflow"
