"""What was measured on a device type, for one model."""

from bisect import bisect_left

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

    @property
    def best_concurrency(self) -> int:
        """Answers in flight, of those measured, at which one device generates fastest."""
        return max(self.generation_tokens_per_s, key=lambda answers: self.generation_tokens_per_s[answers])

    def generation_rate(self, concurrency: float) -> float:
        """Response tokens/s of one device with this many answers in flight.

        Linear between measured points, proportional below the lowest, constant above the highest.
        """
        measured = self.generation_tokens_per_s
        points = sorted(measured)
        right = bisect_left(points, concurrency)
        if right == len(points):
            return measured[points[-1]]
        if right == 0:
            return measured[points[0]] * concurrency / points[0]
        low, high = points[right - 1], points[right]
        share = (concurrency - low) / (high - low)
        return measured[low] + share * (measured[high] - measured[low])
