"""The experiment's data: where questions come from."""

from typing import Any, Literal

from pydantic import Field, model_validator

from planners.sections import Section
from tasks.config.sections import LARGEST_SEED

_OWNERS = {"task": "reasoning_gym", "parameters": "reasoning_gym", "path": "jsonl"}
"""The kind of data that a key belongs to; others would ignore it."""


class DataSection(Section):
    """Where questions come from."""

    kind: Literal["reasoning_gym", "jsonl", "toy"] = Field(
        default="reasoning_gym",
        description="`reasoning_gym` generates questions; `jsonl` reads {question, answer} lines; `toy` asks for one "
        "character and needs no language.",
    )
    task: str = Field(default="chain_sum", description="reasoning-gym generator (kind `reasoning_gym`).")
    parameters: dict[str, Any] = Field(
        default={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        description="Arguments of the reasoning-gym generator.",
    )
    path: str | None = Field(default=None, description="JSON Lines file (kind `jsonl`); in the form, an absolute path.")
    heldout_size: int = Field(default=100, ge=1, description="Unique questions kept for evaluation, never trained on.")
    heldout_seed: int = Field(
        default=10_000_000, ge=0, le=LARGEST_SEED, description="Seed of the held-out questions; far from training's."
    )

    @model_validator(mode="after")
    def _no_key_is_ignored(self) -> "DataSection":
        """Compared with the defaults, since the form and a stored experiment hold every key."""
        for key, owner in _OWNERS.items():
            if self.kind != owner and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is for kind {owner}, but kind is {self.kind}: leave it out or change the kind")
        return self
