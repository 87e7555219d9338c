"""Where the repository and what it ships lie."""

from pathlib import Path

from tasks.config.settings import MachinePlaces, Settings, SharedPlaces

REPOSITORY = Path(__file__).parents[2]
DEPLOYMENTS = REPOSITORY / "deployments"
EXPERIMENTS = DEPLOYMENTS / "experiments"


def settings_of(home: Path, runs: Path, ledger_url: str) -> Settings:
    return Settings(SharedPlaces(runs, ledger_url), MachinePlaces(home))
