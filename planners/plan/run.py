"""What the runtime starts of a plan: a trainer on one or several machines, and replicas, each on concrete devices.

A plan epoch in the ledger holds it, and every actor reads its part from there: what is decided here is decided nowhere
else. `planners.plan.plan` adds what the planner predicts of it.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Number = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class Part(BaseModel):
    """A part of a plan."""

    # Built when first used: imports stay fast.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class MachineShare(Part):
    """Devices of one type on one machine that work for one actor."""

    machine: str = Field(description="Machine name; also the work queue.")
    device_type: str = Field(description="Device type; also the work pool.")
    kind: Literal["cuda", "cpu"]
    devices: tuple[int, ...] = Field(min_length=1, description="Device indices on that machine.")

    @property
    def ranks(self) -> int:
        """Processes of a trainer here: one per GPU; a single one with a thread per core on CPUs."""
        return len(self.devices) if self.kind == "cuda" else 1


class StagePlan(Part):
    """One pipeline stage of the trainer; there is one without a pipeline."""

    machines: tuple[MachineShare, ...] = Field(min_length=1, description="All of one device type.")
    data: Count = Field(description="Data-parallel ranks; cores form one, with a thread each.")
    tensor: Count = Field(description="Tensor-parallel ranks.")
    layer_share: Amount = Field(description="Share of the layers.")

    @property
    def device_type(self) -> str:
        """The type of its devices."""
        return self.machines[0].device_type

    @property
    def kind(self) -> Literal["cuda", "cpu"]:
        """What its devices are."""
        return self.machines[0].kind

    @property
    def devices(self) -> int:
        """Its devices on all machines."""
        return sum(len(share.devices) for share in self.machines)


class TrainerPlan(Part):
    """Who trains, and in what layout."""

    layout: str = Field(description="The layout in words.")
    stages: tuple[StagePlan, ...] = Field(min_length=1)
    zero_stage: int = Field(ge=0, le=3, description="DeepSpeed ZeRO stage.")
    micro_batch_tokens: Count = Field(description="Largest packed micro-batch; a single longer answer goes alone.")

    @property
    def machines(self) -> tuple[MachineShare, ...]:
        """Its share of every machine; ranks are counted through in this order."""
        return tuple(share for stage in self.stages for share in stage.machines)

    @property
    def ranks(self) -> int:
        """Processes on all machines."""
        return sum(share.ranks for share in self.machines)

    def share_of(self, machine: str) -> tuple[MachineShare, int]:
        """The trainer's share of a machine, and the number of its first rank there.

        Raises:
            LookupError: it has none.
        """
        first = 0
        for share in self.machines:
            if share.machine == machine:
                return share, first
            first += share.ranks
        raise LookupError(f"the trainer has no devices on machine {machine}")


class ReplicaPlan(MachineShare):
    """One engine."""

    slot: Number = Field(description="Number of the replica in its run.")
    tensor_parallel: Count = Field(description="Devices that share every layer; cores of one process are one.")
    concurrency: Count = Field(description="Answers in progress at most.")
    layout: str = Field(description="Key of a plan's `iterations` and `memory`.")
    tokens_per_s: Positive
    latency_s: Amount = Field(description="Seconds of the longest answer of a step.")


class RunPlan(BaseModel):
    """All actors of a run. What else a stored plan says, such as its predictions, is left out when read as this."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, defer_build=True)

    trainer: TrainerPlan
    replicas: tuple[ReplicaPlan, ...] = Field(min_length=1, description="In the order of their slots.")

    @property
    def shares(self) -> tuple[MachineShare, ...]:
        """Devices of all actors, the trainer's first."""
        return (*self.trainer.machines, *self.replicas)
