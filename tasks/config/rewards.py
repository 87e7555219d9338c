"""The experiment's rewards: how an answer is scored."""

from typing import Literal

from pydantic import Field

from planners.sections import Section
from tasks.config.sections import LONGEST_S


class RewardSection(Section):
    """How an answer is scored, in killable processes."""

    kind: Literal["reasoning_gym", "math_verify", "character_share"] = Field(
        default="reasoning_gym",
        description="`reasoning_gym`: the generator's own scorer; `math_verify`: mathematical equality with the "
        "answer; `character_share`: share of the answer's characters that equal the expected one.",
    )
    timeout_s: float = Field(
        default=5.0, gt=0, le=LONGEST_S, description="Seconds after which scoring one answer is killed."
    )
    processes: int = Field(default=1, ge=1, le=256, description="Scoring processes per rollout replica.")
