"""What a rollout replica needs of an inference engine, and nothing about any particular one.

Invariant: the engine that produced a token names the weight version it ran, so a segment's version is never the
client's guess. Token ids travel, never text; the stop token is the last id of an answer that ended with `stop`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from tasks.exchange.trajectories import Segment, TokenIds, joined_token_ids

InFlight = Literal["continue", "restart", "drain"]
"""Answers in flight when weights change: go on under the new weights with versions kept per token, start again from
nothing, or finish under the old weights before the new ones are loaded."""

FinishReason = Literal["stop", "length", "aborted"]
"""`stop`: a stop token was sampled (it is kept); `length`: `max_new_tokens` reached; `aborted`: ended by `abort`."""

LOAD_DEADLINE_S = 900.0
"""Longest time for one swap of weights, the wait for answers in flight under `drain` included."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn: the whole vocabulary at `temperature`, without top-k, top-p or penalties.

    `temperature` 0 is greedy. `seed` makes one request's draws repeatable under unchanged weights; None draws freely.
    """

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One generated answer: segments in order, each produced under one version, versions never decreasing.

    A log-probability is that of the sampled token in the distribution it was drawn from: softmax(logits /
    temperature) over the whole vocabulary, so the trainer divides its logits by the same temperature. (A greedy
    answer reports softmax(logits).)
    """

    segments: tuple[Segment, ...]
    finish_reason: FinishReason

    @property
    def token_ids(self) -> TokenIds:
        """All answer tokens in order."""
        return joined_token_ids(self.segments)

    @property
    def tokens(self) -> int:
        """How many tokens the answer has."""
        return sum(len(segment.token_ids) for segment in self.segments)


class EngineDied(Exception):
    """The engine's process is gone, and this one with it.

    Attributes:
        by_itself: nobody from outside has ended it, see `machine.deaths`; perhaps what it was asked has.
    """

    def __init__(self, message: str, by_itself: bool) -> None:
        """The message says how it ended."""
        super().__init__(message)
        self.by_itself = by_itself


class Engine(Protocol):
    """An inference engine that answers many requests at once and takes new weights between two tokens.

    Every call raises EngineDied once the engine's process is gone.
    """

    @property
    def replica(self) -> str:
        """Name written into every segment."""

    @property
    def loaded(self) -> tuple[int, int]:
        """(lineage, number) of the weights in use; moves only after the engine holds them."""

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> Answer:
        """Answer one prompt. `request_id` is unique among the requests in flight."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; each `generate` returns what it has, with finish reason `aborted`. Unknown ids pass."""

    async def load(self, lineage: int, number: int, path: Path, in_flight: InFlight) -> None:
        """Take the weights of a verified directory in Hugging Face layout; calls one at a time."""

    async def shutdown(self) -> None:
        """End the engine and every process it started; safe to repeat."""
