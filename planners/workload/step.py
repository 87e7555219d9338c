"""What one training step asks of the cluster."""

from pydantic import Field

from planners.sections import Section
from planners.workload.lengths import LengthSpec


class Workload(Section):
    """Sizes of a training step and how stale its data may be. B and G are the symbols of the paper (AReaL-Hex)."""

    prompts_per_step: int = Field(
        default=8, ge=1, le=100_000, description="Prompts (groups) consumed by one training step: B."
    )
    group_size: int = Field(default=8, ge=1, le=10_000, description="Answers generated for each prompt: G.")
    max_prompt_tokens: int = Field(default=64, ge=1, description="Longest prompt accepted, in tokens.")
    max_new_tokens: int = Field(default=8, ge=1, description="Longest answer generated, in tokens.")
    max_staleness: int = Field(
        default=2,
        ge=0,
        le=100,  # far beyond what learns
        description="Largest number of policy versions between a trained token and the step that trains on it: η.",
    )
    prompt_lengths: LengthSpec | None = Field(
        default=None, description="How long prompts are in tokens, for the planner; empty: all of max_prompt_tokens."
    )
    response_lengths: LengthSpec | None = Field(
        default=None, description="How long answers are in tokens, for the planner; empty: all of max_new_tokens."
    )
    reward_s: float = Field(
        default=0.0,
        ge=0,
        le=86_400,
        description="Seconds from the end of a group's last answer until the group is scored, for the planner.",
    )
    scorers: int | None = Field(
        default=None, ge=1, description="Groups scored at once, for the planner; empty: all that there are."
    )
