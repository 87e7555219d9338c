"""What was measured on a device type, for one model."""

from pydantic import BaseModel, ConfigDict, Field


class DeviceProfile(BaseModel):
    """Measured rates of one device (one GPU, or one CPU core) of a type. Rates are for that single device."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device_type: str
    model_key: str = Field(description="Which model was measured: its source and the checksum of its config.")
    versions_key: str = Field(description="Versions of the libraries that were measured.")
    gemm_flops_per_s: float = Field(gt=0)
    memory_bytes_per_s: float = Field(gt=0)
    generation_tokens_per_s: dict[int, float] = Field(description="Response tokens/s by number of concurrent answers.")
    training_tokens_per_s: float = Field(gt=0, description="Response tokens/s of a full training step, packed groups.")
    publish_s: float = Field(ge=0, description="Seconds to write one weight version.")
    load_s: float = Field(ge=0, description="Seconds for a replica to load one weight version.")
    answer_tokens: float | None = Field(
        default=None, gt=0, description="Mean tokens of an answer in the measurement; empty: not known."
    )
