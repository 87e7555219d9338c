"""The experiment's rewards: what an answer is worth, the sum of what each reward says of it by weight."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from planners.sections import NAME_PATTERN, Section, as_choices
from tasks.config.sections import LONGEST_S

FUNCTION = re.compile(r"(?P<file>.+):(?P<name>[A-Za-z_]\w*)")
"""`file.py:function` or `module:function`."""
TAKEN_NAMES = frozenset({"mean", "std", "zero_variance_groups", "masked_share"})
"""Metrics under `reward/` that say something of the sum."""


class RewardSection(Section):
    """What every reward has."""

    kind: str
    weight: float = Field(
        default=1.0, ge=-1e6, le=1e6, description="Factor of this reward in the sum; negative for a penalty."
    )
    name: str | None = Field(
        default=None, pattern=NAME_PATTERN, description="Name in metrics; empty: the kind's, or the function's."
    )
    sources: list[str] | None = Field(
        default=None, min_length=1, description="Names of the sources that it scores; empty: all that it can."
    )
    timeout_s: float = Field(
        default=5.0, gt=0, le=LONGEST_S, description="Seconds after which scoring one answer is killed."
    )

    @property
    def label(self) -> str:
        """The name, or what stands for it."""
        return self.name or self.kind


class ReasoningGymReward(RewardSection):
    """The score of the generator that made the question, in [0, 1]."""

    kind: Literal["reasoning_gym"] = Field(default="reasoning_gym", description="The generator's own scorer.")


class MathVerifyReward(RewardSection):
    """1 or 0."""

    kind: Literal["math_verify"] = Field(default="math_verify", description="Mathematical equality with the answer.")


class CharacterShareReward(RewardSection):
    """In [0, 1]."""

    kind: Literal["character_share"] = Field(
        default="character_share", description="Share of the answer's characters that equal the expected one."
    )


class PythonReward(RewardSection):
    """Whatever finite number a function of one's own returns."""

    kind: Literal["python"] = Field(default="python", description="A function of one's own.")
    function: str = Field(
        description="`file.py:function` or `module:function`, found beside the experiment file (in the form, an "
        "absolute path); called with prompt, answer text and item, it returns a number."
    )
    sha256: str | None = Field(
        default=None, pattern="^[0-9a-f]{64}$", description="Checksum of the file; a run notes that of its copy."
    )

    @field_validator("function")
    @classmethod
    def _names_a_function(cls, function: str) -> str:
        if not FUNCTION.fullmatch(function):
            raise ValueError(f"{function!r} is not of the form file.py:function or module:function")
        return function

    @property
    def label(self) -> str:
        """The name, or the function's."""
        return self.name or self.function.rpartition(":")[2]


Reward = Annotated[
    ReasoningGymReward | MathVerifyReward | CharacterShareReward | PythonReward,
    Field(discriminator="kind", json_schema_extra=as_choices),
]


def can_score(reward: Reward, source_kind: str) -> bool:
    """Whether a reward can score questions of sources of a kind at all."""
    return reward.kind != "reasoning_gym" or source_kind == "reasoning_gym"


def applies(reward: Reward, source: str, source_kind: str) -> bool:
    """Whether a reward scores the questions of a source by its name and kind."""
    return can_score(reward, source_kind) and (reward.sources is None or source in reward.sources)
