"""How a scoring process is started: with which command, and what it sees of the environment."""

import json
import os
import sys
from collections.abc import Sequence

from tasks.config.data import DataSource
from tasks.config.rewards import Reward

_ALLOWED = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
    *("PYTHONPATH", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "HF_HOME", "HF_HUB_OFFLINE"),
)
"""Variables that scoring processes see, besides `LC_…`: others may hold secrets, and they run what is not ours."""


def worker_command(rewards: Sequence[Reward], sources: Sequence[DataSource]) -> list[str]:
    """The command of a scoring process for these rewards; it dies with the process that this is called in."""
    config = {
        "rewards": [reward.model_dump() for reward in rewards],
        "sources": [source.model_dump() for source in sources],
        "parent_pid": os.getpid(),
    }
    # -P: what lies in the working directory is not imported.
    return [sys.executable, "-P", "-m", "tasks.rewards.worker", json.dumps(config)]


def scoring_environment() -> dict[str, str]:
    """The whole environment of a scoring process."""
    allowed = {name: value for name, value in os.environ.items() if name in _ALLOWED or name.startswith("LC_")}
    # No accelerator, and no idle threads whose stacks would count as address space.
    return {**allowed, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
