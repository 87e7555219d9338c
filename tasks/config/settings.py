"""Where local state lives: one directory per working place, the same for every process of it."""

import os
from dataclasses import dataclass
from pathlib import Path

from planners.errors import UserError

_SQLITE = "sqlite:///"


@dataclass(frozen=True)
class Settings:
    """Resolved places of local state; a child process given `environment()` resolves to the same ones."""

    home: Path
    """The stack's state: databases, logs, caches."""
    runs: Path
    """One directory per run."""
    ledger_url: str
    """SQLAlchemy URL of the ledger."""

    @property
    def models(self) -> Path:
        """Prepared models, cached."""
        return self.home / "models"

    @property
    def profiles(self) -> Path:
        """Measured device profiles, cached."""
        return self.home / "profiles"

    @property
    def logs(self) -> Path:
        """Log files of servers and workers."""
        return self.home / "logs"

    def environment(self) -> dict[str, str]:
        """Variables by which a child process resolves to these settings whatever its working directory is."""
        return {
            "HEXFLOW_HOME": str(self.home),
            "HEXFLOW_RUNS": str(self.runs),
            "HEXFLOW_LEDGER_URL": self.ledger_url,
        }


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
    return Settings(home=home, runs=_resolve(runs) if runs else home.parent / "runs", ledger_url=ledger_url)


def _resolve(chosen: str) -> Path:
    return Path(os.path.expanduser(chosen)).resolve()


def _nearest_home(start: Path) -> Path:
    for directory in (start, *start.parents):
        if (directory / ".hexflow").is_dir():
            return directory / ".hexflow"
    return start / ".hexflow"
