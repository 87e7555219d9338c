"""Trajectories: ordered segments of token ids with the policy version that produced each; never text.

A token's log-probability and version are what the engine that sampled it said. A group holds the answers to one
prompt and is one payload file; a payload is immutable once it has its name.
"""

import json
import math
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

from tasks.exchange.files import read_when_there, write_atomic
from tasks.exchange.layout import RunDirectory, group_of

MIN_SCORED = 2  # with a single reward a group has no spread to normalise by
_FORMAT = "hexflow-group-1"


class Outcome(StrEnum):
    """How an answer ended. TRUNCATED ran into its length limit and has a reward; TIMEOUT and ERROR have none."""

    SCORED = "scored"
    TIMEOUT = "timeout"
    ERROR = "error"
    TRUNCATED = "truncated"


_OUTCOMES = list(Outcome)
_MASKED = (Outcome.TIMEOUT, Outcome.ERROR)


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that one replica produced under one policy version.

    `logprobs` are natural logarithms of the sampling probabilities, one per token, in float32. `trainable` is False
    for tokens that the policy did not choose.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    replica: str
    trainable: bool = True

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"a segment has {len(self.token_ids)} tokens but {len(self.logprobs)} log-probabilities")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One answer: its segments in order, how it ended, and its reward (nan exactly when it is masked)."""

    segments: tuple[Segment, ...]
    outcome: Outcome
    reward: float

    def __post_init__(self) -> None:
        if self.masked and not math.isnan(self.reward):
            raise ValueError(f"an answer with outcome {self.outcome} is masked and has no reward, not {self.reward}")
        if not self.masked and not math.isfinite(self.reward):
            raise ValueError(f"an answer with outcome {self.outcome} needs a finite reward, not {self.reward}")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens of the answer in order, trainable or not."""
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def masked(self) -> bool:
        """Whether the answer is left out of training."""
        return self.outcome in _MASKED

    @property
    def oldest_version(self) -> int:
        """Policy version of the oldest trainable token. Raises ValueError where there is none."""
        return min(segment.version for segment in self.segments if segment.trainable and segment.token_ids)


@dataclass(frozen=True, slots=True)
class Group:
    """The answers to one prompt: the unit of lease, staleness, consumption and drop."""

    group_id: int
    prompt_index: int
    prompt_ids: tuple[int, ...]
    trajectories: tuple[Trajectory, ...]

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
        return min(trajectory.oldest_version for trajectory in self.trained)

    @property
    def newest_version(self) -> int:
        """Policy version of the newest token of a trained answer. Raises ValueError where nothing is trained on."""
        return max(segment.version for trajectory in self.trained for segment in trajectory.segments)


def save_group(path: Path, group: Group) -> None:
    """Write one group as one safetensors payload, atomically.

    Tensors: prompt_ids [P], token_ids and logprobs [T] over all segments of all answers in order; segment_* [S];
    trajectory_* [G]. Names of replicas and the keys of the group are in the file's metadata.
    """
    segments = [segment for trajectory in group.trajectories for segment in trajectory.segments]
    replicas = sorted({segment.replica for segment in segments})
    tensors = {
        "prompt_ids": _integers(group.prompt_ids),
        "token_ids": _integers(token for segment in segments for token in segment.token_ids),
        "logprobs": np.array([value for segment in segments for value in segment.logprobs], dtype=np.float32),
        "segment_tokens": _integers(len(segment.token_ids) for segment in segments),
        "segment_version": _integers(segment.version for segment in segments),
        "segment_replica": _integers(replicas.index(segment.replica) for segment in segments),
        "segment_trainable": _integers(segment.trainable for segment in segments),
        "trajectory_segments": _integers(len(trajectory.segments) for trajectory in group.trajectories),
        "trajectory_outcome": _integers(_OUTCOMES.index(trajectory.outcome) for trajectory in group.trajectories),
        "trajectory_reward": np.array([trajectory.reward for trajectory in group.trajectories], dtype=np.float64),
    }
    metadata = {
        "format": _FORMAT,
        "group_id": str(group.group_id),
        "prompt_index": str(group.prompt_index),
        "replicas": json.dumps(replicas),
    }
    write_atomic(path, save(tensors, metadata))


def load_group(path: Path, deadline_s: float = 30.0) -> Group:
    """Read a payload, waiting up to `deadline_s` seconds for storage to show it.

    Raises:
        TimeoutError: the file did not appear.
        ValueError: the file is no payload of this format.
    """
    data = read_when_there(path, deadline_s)
    (header_bytes,) = struct.unpack_from("<Q", data)
    metadata = json.loads(data[8 : 8 + header_bytes])["__metadata__"]
    if metadata["format"] != _FORMAT:
        raise ValueError(f"{path} has the format {metadata['format']}, not {_FORMAT}")
    columns = {name: tensor.tolist() for name, tensor in load(data).items()}
    replicas = json.loads(metadata["replicas"])
    segments = []
    start = 0
    for tokens, version, replica, trainable in zip(
        columns["segment_tokens"],
        columns["segment_version"],
        columns["segment_replica"],
        columns["segment_trainable"],
        strict=True,
    ):
        end = start + tokens
        token_ids, logprobs = columns["token_ids"][start:end], columns["logprobs"][start:end]
        segments.append(Segment(tuple(token_ids), tuple(logprobs), version, replicas[replica], bool(trainable)))
        start = end
    trajectories = []
    first = 0
    for count, outcome, reward in zip(
        columns["trajectory_segments"], columns["trajectory_outcome"], columns["trajectory_reward"], strict=True
    ):
        trajectories.append(Trajectory(tuple(segments[first : first + count]), _OUTCOMES[outcome], reward))
        first += count
    return Group(
        group_id=int(metadata["group_id"]),
        prompt_index=int(metadata["prompt_index"]),
        prompt_ids=tuple(columns["prompt_ids"]),
        trajectories=tuple(trajectories),
    )


def delete_payloads(run: RunDirectory, disposable: Collection[int]) -> list[int]:
    """Delete the payloads of the groups that `Ledger.disposable_groups` named; returns the ids deleted."""
    found = {group_id: path for path in run.trajectories.iterdir() if (group_id := group_of(path)) is not None}
    doomed = sorted(found.keys() & set(disposable))
    for group_id in doomed:
        found[group_id].unlink(missing_ok=True)
    return doomed


def _integers(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), dtype=np.int32)
