"""Trajectories: ordered segments of token ids with the policy version that produced each; never text.

A token's log-probability and version are what the engine that sampled it said. A group holds the answers to one
prompt and is one payload file; a payload is immutable once it has its name.

Tokens are arrays from the engine to the trainer, and are not copied on the way where it can be helped: the segments of
a loaded group are views of what was read. Arrays are read-only. What holds arrays is compared by value and not hashed.
"""

import json
import math
import struct
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray
from safetensors.numpy import save

from tasks.exchange.files import discard, is_temporary, read_when_there, write_atomic
from tasks.exchange.layout import RunDirectory, group_of
from tasks.exchange.wire import WIRE_VERSION

MIN_SCORED = 2  # with a single reward a group has no spread to normalise by
_FORMAT = f"hexflow-group-{WIRE_VERSION}"

TokenIds = NDArray[np.int32]
Logprobs = NDArray[np.float32]
_NO_TOKENS: TokenIds = np.zeros(0, np.int32)
_NO_LOGPROBS: Logprobs = np.zeros(0, np.float32)
_TOKENS = ("prompt_ids", "token_ids", "logprobs")
"""The tensors of a payload that are as long as its texts; all others are small."""
_DTYPES: dict[str, np.dtype[Any]] = {
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
"""By their names in safetensors files."""


class Outcome(StrEnum):
    """How an answer ended. TRUNCATED ran into its length limit and has a reward; TIMEOUT and ERROR have none."""

    SCORED = "scored"
    TIMEOUT = "timeout"
    ERROR = "error"
    TRUNCATED = "truncated"


_OUTCOMES = list(Outcome)
_UNFINISHED_S = 3600.0
"""Age at which what a writer has begun is nobody's work any more: a payload is written in one go."""
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


def save_group(path: Path, group: Group) -> None:
    """Write one group as one safetensors payload, atomically.

    Tensors: prompt_ids [P]; token_ids and logprobs [T] over all S segments of all G answers in order; segment_start
    [S + 1], where each segment's tokens begin and the last one's end; segment_version, segment_replica and
    segment_trainable [S]; trajectory_start [G + 1], the number of each answer's first segment, and S;
    trajectory_outcome and trajectory_reward [G]; trajectory_parts [G, R]. Names of replicas and rewards and the keys of
    the group are in the file's metadata. Readers pass over tensors that they do not know.
    """
    segments = [segment for trajectory in group.trajectories for segment in trajectory.segments]
    replicas = sorted({segment.replica for segment in segments})
    tensors = {
        "prompt_ids": group.prompt_ids,
        "token_ids": joined_token_ids(segments),
        "logprobs": np.concatenate([_NO_LOGPROBS, *(segment.logprobs for segment in segments)]),
        "segment_start": _offsets(len(segment.token_ids) for segment in segments),
        "segment_version": _integers(segment.version for segment in segments),
        "segment_replica": _integers(replicas.index(segment.replica) for segment in segments),
        "segment_trainable": _integers(segment.trainable for segment in segments),
        "trajectory_start": _offsets(len(trajectory.segments) for trajectory in group.trajectories),
        "trajectory_outcome": _integers(_OUTCOMES.index(trajectory.outcome) for trajectory in group.trajectories),
        "trajectory_reward": np.array([trajectory.reward for trajectory in group.trajectories], dtype=np.float64),
        "trajectory_parts": np.array([t.parts for t in group.trajectories], dtype=np.float64).reshape(
            len(group.trajectories), len(group.reward_names)
        ),
    }
    metadata = {
        "format": _FORMAT,
        "group_id": str(group.group_id),
        "prompt_index": str(group.prompt_index),
        "replicas": json.dumps(replicas),
        "rewards": json.dumps(group.reward_names),
    }
    write_atomic(path, save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, metadata))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in a payload."""

    name: str
    dtype: np.dtype[Any]
    start: int
    size: int

    def read(self, file: BinaryIO, first: int = 0, end: int | None = None) -> NDArray[Any]:
        """Its elements from `first` to before `end`.

        Raises:
            ValueError: the file ends before them.
        """
        count = (self.size if end is None else end) - first
        file.seek(self.start + first * self.dtype.itemsize)
        data = file.read(count * self.dtype.itemsize)
        if len(data) < count * self.dtype.itemsize:
            raise ValueError(f"{file.name} is damaged: it ends within {self.name}")
        return np.frombuffer(data, self.dtype)


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A payload that was opened: its outline is here, its tokens are read when they are asked for."""

    path: Path
    deadline_s: float
    outline: GroupOutline
    prompt_index: int
    replicas: tuple[str, ...]
    columns: Mapping[str, list[Any]]
    tokens: Mapping[str, _Place]

    def with_answers(self, numbers: Iterable[int]) -> Group:
        """The group with only these of its answers, by their numbers; nothing else is read.

        Raises:
            TimeoutError: the file went away.
            ValueError: the file is damaged.
        """
        kept = list(numbers)
        return read_when_there(self.path, self.deadline_s, lambda path: self._read(path, kept))

    def _read(self, path: Path, numbers: Sequence[int]) -> Group:
        with path.open("rb") as file:
            answers = tuple(self._trajectory(file, number) for number in numbers)
            prompt_ids = self.tokens["prompt_ids"].read(file)
            return Group(self.outline.group_id, self.prompt_index, prompt_ids, answers, self.outline.reward_names)

    def _trajectory(self, file: BinaryIO, number: int) -> Trajectory:
        columns, starts = self.columns, self.columns["segment_start"]
        first, end = columns["trajectory_start"][number : number + 2]
        begin = starts[first]
        token_ids = self.tokens["token_ids"].read(file, begin, starts[end])
        logprobs = self.tokens["logprobs"].read(file, begin, starts[end])
        segments = tuple(
            Segment(
                token_ids[starts[k] - begin : starts[k + 1] - begin],
                logprobs[starts[k] - begin : starts[k + 1] - begin],
                columns["segment_version"][k],
                self.replicas[columns["segment_replica"][k]],
                bool(columns["segment_trainable"][k]),
            )
            for k in range(first, end)
        )
        outline = self.outline.trajectories[number]
        return Trajectory(segments, outline.outcome, outline.reward, outline.parts)


def open_group(path: Path, deadline_s: float = 30.0) -> StoredGroup:
    """Open a payload, waiting up to `deadline_s` seconds for storage to show it; tokens are not read.

    Raises:
        TimeoutError: the file did not appear.
        ValueError: the file is no payload of this format, or damaged.
    """
    return read_when_there(path, deadline_s, lambda there: _open(there, deadline_s))


def load_group(path: Path, deadline_s: float = 30.0) -> Group:
    """Read a payload with all of its tokens; see `open_group`."""
    stored = open_group(path, deadline_s)
    return stored.with_answers(range(len(stored.outline.trajectories)))


def _open(path: Path, deadline_s: float) -> StoredGroup:
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
        metadata = header.pop("__metadata__")
        if metadata["format"] != _FORMAT:
            raise ValueError(f"{path} has the format {metadata['format']}, not {_FORMAT}")
        places = {
            name: _Place(
                name, _DTYPES[entry["dtype"]], 8 + header_bytes + entry["data_offsets"][0], prod(entry["shape"])
            )
            for name, entry in header.items()
        }
        columns = {name: place.read(file).tolist() for name, place in places.items() if name not in _TOKENS}
    sizes = [end - start for start, end in pairwise(columns["segment_start"])]
    segments = list(zip(sizes, columns["segment_version"], columns["segment_trainable"], strict=True))
    names = tuple(json.loads(metadata["rewards"]))
    parts = columns["trajectory_parts"]
    answers = tuple(
        AnswerOutline.of(_OUTCOMES[outcome], reward, parts[n * len(names) : (n + 1) * len(names)], segments[first:end])
        for n, ((first, end), outcome, reward) in enumerate(
            zip(
                pairwise(columns["trajectory_start"]),
                columns["trajectory_outcome"],
                columns["trajectory_reward"],
                strict=True,
            )
        )
    )
    return StoredGroup(
        path=path,
        deadline_s=deadline_s,
        outline=GroupOutline(int(metadata["group_id"]), places["prompt_ids"].size, answers, names),
        prompt_index=int(metadata["prompt_index"]),
        replicas=tuple(json.loads(metadata["replicas"])),
        columns=columns,
        tokens={name: places[name] for name in _TOKENS},
    )


def found_payloads(run: RunDirectory) -> list[int]:
    """The groups whose payloads are on storage, in order; the ledger says which of them are needed."""
    found = (group_of(path) for path in run.trajectories.iterdir())
    return sorted(group_id for group_id in found if group_id is not None)


def delete_payloads(run: RunDirectory, disposable: Collection[int]) -> list[Path]:
    """Delete the payloads of the groups that `Ledger.disposable_groups` named, and what killed writers left unfinished.

    Returns:
        What storage did not let go.
    """
    doomed = [run.group_path(group_id) for group_id in sorted(disposable)]
    doomed += [path for path in run.trajectories.iterdir() if is_temporary(path) and _age_s(path) > _UNFINISHED_S]
    return [path for path in doomed if not discard(path)]


def _age_s(path: Path) -> float:
    """Seconds since it was written to, by the clocks of storage and of this machine; 0 if it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _integers(values: Iterable[int]) -> NDArray[np.int32]:
    return np.fromiter(values, dtype=np.int32)


def _offsets(sizes: Iterable[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.fromiter(sizes, dtype=np.int64))])


def _read_only(values: ArrayLike, dtype: type[np.generic]) -> NDArray[Any]:
    """The values as an array that nobody may write through."""
    array = np.asarray(values, dtype=dtype)
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array
