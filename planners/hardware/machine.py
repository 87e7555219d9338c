"""The hardware of a machine: its devices and their types."""

from collections import Counter
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Device(BaseModel):
    """One accelerator, or one CPU core that works as one.

    `index` is a GPU's place in the order of the PCI bus, slices of one counted through, and the operating system's core
    number of a CPU device.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    index: int = Field(ge=0)
    device_type: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", description="Also the name of its Prefect work pool.")
    kind: Literal["cuda", "cpu"]
    memory_bytes: int = Field(gt=0, description="Device memory; a CPU device's share of the machine's memory.")
    uuid: str = Field(default="", description="What the driver calls a GPU for good; empty for cores.")
    compute_capability: str = Field(default="", description="Of a GPU, such as 9.0.")


class Machine(BaseModel):
    """A host and its devices. The name is also the name of its Prefect work queue in each of its types' pools."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    devices: tuple[Device, ...]

    def count_by_type(self) -> dict[str, int]:
        """Number of devices of each type, by type name in sorted order."""
        return dict(sorted(Counter(d.device_type for d in self.devices).items()))
