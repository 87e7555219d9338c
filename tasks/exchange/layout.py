"""Where the files of a run lie: the one definition of the layout of shared storage."""

import re
from dataclasses import dataclass
from pathlib import Path

_VERSION_NAME = re.compile(r"lineage-(\d{3,})-version-(\d{6,})")
_GROUP_NAME = re.compile(r"group-(\d{8,})\.safetensors")
_CHECKPOINT_NAME = re.compile(r"lineage-(\d{3,})-step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of one run. Paths only: nothing here touches the disk except `create`."""

    root: Path

    @property
    def experiment(self) -> Path:
        """The resolved experiment, JSON."""
        return self.root / "experiment.json"

    @property
    def plan(self) -> Path:
        """The plan of the newest plan epoch, JSON."""
        return self.root / "plan.json"

    @property
    def summary(self) -> Path:
        """The result of the run, JSON."""
        return self.root / "summary.json"

    @property
    def curves(self) -> Path:
        """Picture of the reward and staleness curves, PNG."""
        return self.root / "curves.png"

    @property
    def weights(self) -> Path:
        """Directory of weight versions, one directory each."""
        return self.root / "weights"

    @property
    def trajectories(self) -> Path:
        """Directory of group payloads, one file each."""
        return self.root / "trajectories"

    @property
    def checkpoints(self) -> Path:
        """Directory of checkpoints, one directory each."""
        return self.root / "checkpoints"

    @property
    def rewards(self) -> Path:
        """Directory of copies of the person's own reward functions."""
        return self.root / "rewards"

    @property
    def logs(self) -> Path:
        """Directory of the logs of processes."""
        return self.root / "logs"

    def log_path(self, role: str, slot: int, rank: int = 0) -> Path:
        """Log of an actor; of its process `rank`, where it has several."""
        return self.logs / f"{role}-{slot}{f'-rank-{rank}' if rank else ''}.log"

    def create(self) -> None:
        """Make the run's directories, which their owner alone may enter; safe to repeat."""
        for path in (self.root, self.weights, self.trajectories, self.checkpoints, self.logs):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def weights_path(self, lineage: int, number: int) -> Path:
        """Directory of policy version (lineage, number)."""
        return self.weights / f"lineage-{lineage:03d}-version-{number:06d}"

    def group_path(self, group_id: int) -> Path:
        """Payload file of a group."""
        return self.trajectories / f"group-{group_id:08d}.safetensors"

    def checkpoint_path(self, lineage: int, step: int) -> Path:
        """Directory of the checkpoint of a lineage from which step `step` (0-based) is the next one."""
        return self.checkpoints / f"lineage-{lineage:03d}-step-{step:06d}"


def version_of(path: Path) -> tuple[int, int] | None:
    """The (lineage, number) whose directory `path` is, or None for anything else."""
    match = _VERSION_NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2])) if match else None


def group_of(path: Path) -> int | None:
    """The group whose payload `path` is, or None for anything else."""
    match = _GROUP_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def checkpoint_of(path: Path) -> tuple[int, int] | None:
    """The (lineage, step) whose checkpoint `path` is, or None for anything else."""
    match = _CHECKPOINT_NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2])) if match else None
