"""What the runtime starts of a plan: actors on concrete devices."""

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Placement(BaseModel):
    """One actor of the run on concrete devices of one machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["train", "rollout"]
    slot: int = Field(ge=0, description="Number of this actor among those of its role.")
    machine: str = Field(description="Machine name; also the work queue.")
    device_type: str = Field(description="Device type; also the work pool.")
    kind: Literal["cuda", "cpu"]
    devices: tuple[int, ...] = Field(min_length=1, description="Device indices on that machine.")
    concurrency: int = Field(default=0, ge=0, description="Answers in flight at once (rollout only).")

    @property
    def ranks(self) -> int:
        """Processes this placement runs: one per GPU; a single one with a thread per core on CPUs."""
        return len(self.devices) if self.kind == "cuda" else 1


@dataclass(frozen=True)
class Placements:
    """All actors of a run."""

    training: Placement
    replicas: tuple[Placement, ...]

    @property
    def all(self) -> tuple[Placement, ...]:
        """The trainer, then the replicas."""
        return (self.training, *self.replicas)
