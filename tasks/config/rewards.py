"""The experiment's rewards: what an answer is worth, the sum of what each reward says of it by weight."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from planners.sections import NAME_PATTERN, Section, as_choices
from tasks.config.data import DataSource
from tasks.config.paths import FUNCTION, FunctionPath
from tasks.config.sections import LONGEST_S

if TYPE_CHECKING:
    from tasks.rewards.base import Score

TAKEN_NAMES = frozenset({"mean", "std", "zero_variance_groups", "masked_share"})
"""Metrics under `reward/` that say something of the sum."""


class RewardSection(Section):
    """What every reward has.

    `open` imports what scores, in a scoring process: whoever only reads an experiment does without it.
    """

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

    @property
    def compares(self) -> bool:
        """Whether it compares with the reference answer, which it then has to find right itself."""
        return False

    def can_score(self, source_kind: str) -> bool:
        """Whether it can score questions of sources of a kind at all."""
        return True

    def applies(self, source: str, source_kind: str) -> bool:
        """Whether it scores the questions of a source by its name and kind."""
        return self.can_score(source_kind) and (self.sources is None or source in self.sources)

    def open(self, sources: Sequence[DataSource]) -> "Score":
        """The score that this section describes, with its library imported; `sources` are all of the experiment.

        Raises:
            UserError: a reasoning-gym task or its parameters are wrong, or a person's function cannot be used.
        """
        raise NotImplementedError


class ReasoningGymReward(RewardSection):
    """The score of the generator that made the question, in [0, 1]."""

    kind: Literal["reasoning_gym"] = Field(default="reasoning_gym", description="The generator's own scorer.")

    def can_score(self, source_kind: str) -> bool:
        """Questions of generators only."""
        return source_kind == "reasoning_gym"

    def open(self, sources: Sequence[DataSource]) -> "Score":
        """See `RewardSection.open`."""
        from tasks.rewards.builtin import open_reasoning_gym

        return open_reasoning_gym(sources)


class MathVerifyReward(RewardSection):
    """1 or 0."""

    kind: Literal["math_verify"] = Field(default="math_verify", description="Mathematical equality with the answer.")

    @property
    def compares(self) -> bool:
        """It does."""
        return True

    def open(self, sources: Sequence[DataSource]) -> "Score":
        """See `RewardSection.open`."""
        from tasks.rewards.builtin import open_mathematics

        return open_mathematics()


class CharacterShareReward(RewardSection):
    """In [0, 1]."""

    kind: Literal["character_share"] = Field(
        default="character_share", description="Share of the answer's characters that equal the expected one."
    )

    def open(self, sources: Sequence[DataSource]) -> "Score":
        """See `RewardSection.open`."""
        from tasks.rewards.builtin import score_character_share

        return score_character_share


class PythonReward(RewardSection):
    """Whatever finite number a function of one's own returns."""

    kind: Literal["python"] = Field(default="python", description="A function of one's own.")
    function: FunctionPath = Field(
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

    def open(self, sources: Sequence[DataSource]) -> "Score":
        """See `RewardSection.open`."""
        from tasks.rewards.python import open_function

        return open_function(self)


Reward = Annotated[
    ReasoningGymReward | MathVerifyReward | CharacterShareReward | PythonReward,
    Field(discriminator="kind", json_schema_extra=as_choices),
]
