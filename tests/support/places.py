"""Where the repository and what it ships lie."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DEPLOYMENTS = REPOSITORY / "deployments"
EXPERIMENTS = DEPLOYMENTS / "experiments"
