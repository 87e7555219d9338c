"""Trajectories: ordered segments of token ids with the policy version that produced each; never text.

A token's log-probability and version are what the engine that sampled it said. A group holds the answers to one prompt;
`payloads` says how it lies on storage.

Tokens are arrays from the engine to the trainer, and are not copied on the way where it can be helped: the segments of
a loaded group are views of what was read. Arrays are read-only. What holds arrays is compared by value and not hashed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

MIN_SCORED = 2  # with a single reward a group has no spread to normalise by

TokenIds = NDArray[np.int32]
Logprobs = NDArray[np.float32]
_NO_TOKENS: TokenIds = np.zeros(0, np.int32)


class Outcome(StrEnum):
    """How an answer ended. TRUNCATED ran into its length limit and has a reward; TIMEOUT and ERROR have none."""

    SCORED = "scored"
    TIMEOUT = "timeout"
    ERROR = "error"
    TRUNCATED = "truncated"


_MASKED = (Outcome.TIMEOUT, Outcome.ERROR)


@dataclass(frozen=True, slots=True, init=False, eq=False)
class Segment:
    """Tokens that one replica produced under one policy version.

    `logprobs` are natural logarithms of the sampling probabilities, one per token. `trainable` is False for tokens that
    the policy did not choose.
    """

    token_ids: TokenIds
    logprobs: Logprobs
    version: int
    replica: str
    trainable: bool = True

    def __init__(
        self, token_ids: ArrayLike, logprobs: ArrayLike, version: int, replica: str, trainable: bool = True
    ) -> None:
        """Keeps views of the arrays given if they are of the types kept, else copies.

        Raises:
            ValueError: there is not one log-probability per token.
        """
        object.__setattr__(self, "token_ids", _read_only(token_ids, np.int32))
        object.__setattr__(self, "logprobs", _read_only(logprobs, np.float32))
        object.__setattr__(self, "version", version)
        object.__setattr__(self, "replica", replica)
        object.__setattr__(self, "trainable", trainable)
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"a segment has {len(self.token_ids)} tokens but {len(self.logprobs)} log-probabilities")

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Segment)
            and (self.version, self.replica, self.trainable) == (other.version, other.replica, other.trainable)
            and np.array_equal(self.token_ids, other.token_ids)
            and np.array_equal(self.logprobs, other.logprobs)
        )


@dataclass(frozen=True, slots=True)
class AnswerOutline:
    """An answer without its tokens: what decides whether it is trained on, and by whom.

    `trained_tokens` counts those of trainable segments, and `versions` are those of these segments; see `Trajectory`.
    """

    outcome: Outcome
    reward: float
    tokens: int
    trained_tokens: int
    versions: tuple[int, ...]
    parts: tuple[float, ...]

    @classmethod
    def of(
        cls, outcome: Outcome, reward: float, parts: Sequence[float], segments: Sequence[tuple[int, int, bool]]
    ) -> "AnswerOutline":
        """From its rewards, and the tokens, the version and the trainability of every segment."""
        trained = [(tokens, version) for tokens, version, trainable in segments if trainable and tokens]
        return cls(
            outcome=outcome,
            reward=reward,
            tokens=sum(tokens for tokens, _, _ in segments),
            trained_tokens=sum(tokens for tokens, _ in trained),
            versions=tuple(version for _, version in trained),
            parts=tuple(parts),
        )

    @property
    def masked(self) -> bool:
        """Whether the answer is left out of training."""
        return self.outcome in _MASKED

    @property
    def oldest_version(self) -> int:
        """Policy version of the oldest trainable token. Raises ValueError where there is none."""
        return min(self.versions)


@dataclass(frozen=True, slots=True)
class GroupOutline:
    """A group without its tokens; see `Group`."""

    group_id: int
    prompt_tokens: int
    trajectories: tuple[AnswerOutline, ...]
    reward_names: tuple[str, ...]

    @property
    def trained(self) -> tuple[AnswerOutline, ...]:
        """The answers that are not masked."""
        return tuple(answer for answer in self.trajectories if not answer.masked)

    @property
    def oldest_version(self) -> int:
        """The group's version: that of its oldest trained token. Raises ValueError where nothing is trained on."""
        return min(answer.oldest_version for answer in self.trained)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One answer: its segments in order, how it ended, and its reward (nan exactly when it is masked).

    `parts` is what each of the group's rewards said, unweighted; nan where one was not asked, or failed.
    """

    segments: tuple[Segment, ...]
    outcome: Outcome
    reward: float
    parts: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.masked and not math.isnan(self.reward):
            raise ValueError(f"an answer with outcome {self.outcome} is masked and has no reward, not {self.reward}")
        if not self.masked and not math.isfinite(self.reward):
            raise ValueError(f"an answer with outcome {self.outcome} needs a finite reward, not {self.reward}")

    @property
    def token_ids(self) -> TokenIds:
        """All tokens of the answer in order, trainable or not."""
        return joined_token_ids(self.segments)

    @property
    def tokens(self) -> int:
        """How many tokens the answer has, trainable or not."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def masked(self) -> bool:
        """Whether the answer is left out of training."""
        return self.outcome in _MASKED

    @property
    def oldest_version(self) -> int:
        """Policy version of the oldest trainable token. Raises ValueError where there is none."""
        return self.outline.oldest_version

    @property
    def outline(self) -> AnswerOutline:
        """The answer without its tokens."""
        sizes = [(len(segment.token_ids), segment.version, segment.trainable) for segment in self.segments]
        return AnswerOutline.of(self.outcome, self.reward, self.parts, sizes)


@dataclass(frozen=True, slots=True, init=False, eq=False)
class Group:
    """The answers to one prompt: the unit of lease, staleness, consumption and drop.

    `reward_names` are those of the parts of every answer's reward.
    """

    group_id: int
    prompt_index: int
    prompt_ids: TokenIds
    trajectories: tuple[Trajectory, ...]
    reward_names: tuple[str, ...]

    def __init__(
        self,
        group_id: int,
        prompt_index: int,
        prompt_ids: ArrayLike,
        trajectories: tuple[Trajectory, ...],
        reward_names: tuple[str, ...] = (),
    ) -> None:
        """Raises ValueError where an answer's reward does not have these parts."""
        object.__setattr__(self, "group_id", group_id)
        object.__setattr__(self, "prompt_index", prompt_index)
        object.__setattr__(self, "prompt_ids", _read_only(prompt_ids, np.int32))
        object.__setattr__(self, "trajectories", trajectories)
        object.__setattr__(self, "reward_names", reward_names)
        if any(len(trajectory.parts) != len(reward_names) for trajectory in trajectories):
            raise ValueError(f"group {group_id} has answers whose rewards do not have the parts {reward_names}")

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Group)
            and (self.group_id, self.prompt_index, self.reward_names)
            == (other.group_id, other.prompt_index, other.reward_names)
            and self.trajectories == other.trajectories
            and np.array_equal(self.prompt_ids, other.prompt_ids)
        )

    @property
    def trained(self) -> tuple[Trajectory, ...]:
        """The answers that are not masked."""
        return tuple(trajectory for trajectory in self.trajectories if not trajectory.masked)

    @property
    def usable(self) -> bool:
        """Whether enough answers have a reward; a group that has not is dropped."""
        return len(self.trained) >= MIN_SCORED

    @property
    def oldest_version(self) -> int:
        """The group's version: that of its oldest trained token. Raises ValueError where nothing is trained on."""
        return self.outline.oldest_version

    @property
    def outline(self) -> GroupOutline:
        """The group without its tokens."""
        answers = tuple(trajectory.outline for trajectory in self.trajectories)
        return GroupOutline(self.group_id, len(self.prompt_ids), answers, self.reward_names)

    def with_answers(self, numbers: Iterable[int]) -> "Group":
        """The group with only these of its answers, by their numbers."""
        kept = tuple(self.trajectories[number] for number in numbers)
        return Group(self.group_id, self.prompt_index, self.prompt_ids, kept, self.reward_names)

    @property
    def newest_version(self) -> int:
        """Policy version of the newest token of a trained answer. Raises ValueError where nothing is trained on."""
        return max(segment.version for trajectory in self.trained for segment in trajectory.segments)


def joined_token_ids(segments: Sequence[Segment]) -> TokenIds:
    """The tokens of segments in order, one array."""
    if len(segments) == 1:
        return segments[0].token_ids
    return np.concatenate([_NO_TOKENS, *(segment.token_ids for segment in segments)])


def _read_only(values: ArrayLike, dtype: type[np.generic]) -> NDArray[Any]:
    """The values as an array that nobody may write through."""
    array = np.asarray(values, dtype=dtype)
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array
