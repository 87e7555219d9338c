"""The experiment's rollout: how replicas generate."""

from typing import Literal

from pydantic import Field

from planners.sections import Section


class RolloutSection(Section):
    """How replicas generate and take new weights."""

    on_new_version: Literal["continue", "restart", "drain"] = Field(
        default="continue",
        description="Answers in flight when weights change: `continue` under the new weights with versions kept per "
        "token, `restart` from nothing, or `drain` (finish first, then load).",
    )
    scoring_processes: int = Field(
        default=1, ge=1, le=256, description="Processes per replica that score answers, each one answer at a time."
    )
    max_attempts_per_prompt: int = Field(
        default=3,
        ge=1,
        description="Failed attempts of a prompt before it is given up; one lost with a dead replica does not count.",
    )
