"""The plan: what runs where, and how fast that is predicted to be."""

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


class Candidate(BaseModel):
    """One split that was considered, with its predicted times (seconds per training step)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    train_type: str
    train_devices: int
    rollout_devices: dict[str, int]
    rollout_s: float
    train_s: float
    step_s: float


class Plan(BaseModel):
    """A chosen split and everything that was predicted for it. Times are seconds per training step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: str
    training: Placement
    replicas: tuple[Placement, ...] = Field(min_length=1)
    throughput_tokens_per_s: float = Field(description="Response tokens trained per second.")
    step_s: float
    rollout_s: float
    train_s: float
    sync_s: float
    reward_s: float
    candidates: tuple[Candidate, ...]
    explanation: str
