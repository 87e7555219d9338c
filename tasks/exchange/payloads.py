"""Payloads: a group of trajectories as one file on shared storage, immutable once it has its name.

Every byte is under a checksum: the header with the file's length before it, the small tensors, the prompt, and each
answer by itself, so that who reads some answers checks these. CRC-32 finds what storage does to files, such as flipped
bits and lost ends; it is no protection against people.
"""

import errno
import json
import re
import struct
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from tasks.exchange.files import discard, is_temporary, read_when_there, write_atomic
from tasks.exchange.layout import RunDirectory, group_of
from tasks.exchange.trajectories import (
    AnswerOutline,
    Group,
    GroupOutline,
    Logprobs,
    Outcome,
    Segment,
    Trajectory,
    joined_token_ids,
)
from tasks.exchange.wire import WIRE_VERSION

_FORMAT = f"hexflow-group-{WIRE_VERSION}"
_NO_LOGPROBS: Logprobs = np.zeros(0, np.float32)
_OUTCOMES = list(Outcome)
_TOKENS = ("prompt_ids", "token_ids", "logprobs")
"""The tensors of a payload that are as long as its texts; all others are small."""
_DTYPES: dict[str, np.dtype[Any]] = {
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
"""By their names in safetensors files."""
_UNFINISHED_S = 3600.0
"""Age at which what a writer has begun is nobody's work any more: a payload is written in one go."""
_LENGTH_BYTES = 8
_UNSEALED = b'"checksum":"00000000"'
_SEAL = re.compile(rb'"checksum":"([0-9a-f]{8})"')


class DamagedPayload(ValueError):
    """A payload is gone, or is not what was written.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path, what: str) -> None:
        """`what` is wrong with it, as the end of a sentence that begins with its path."""
        super().__init__(f"{path} {what}")
        self.path = path


def save_group(path: Path, group: Group) -> None:
    """Write one group as one safetensors payload, atomically.

    Tensors: prompt_ids [P]; token_ids and logprobs [T] over all S segments of all G answers in order; segment_start
    [S + 1], where each segment's tokens begin and the last one's end; segment_version, segment_replica and
    segment_trainable [S]; trajectory_start [G + 1], the number of each answer's first segment, and S;
    trajectory_outcome and trajectory_reward [G]; trajectory_parts [G, R]; checksums [1 + G] of the prompt and of each
    answer's tokens and log-probabilities. Names of replicas and rewards, the keys of the group and two more checksums
    are in the file's metadata: `columns`, of the small tensors in the order of their names, and `checksum`, of the
    header with zeros in its own place. Readers pass over tensors that they do not know.
    """
    segments = [segment for trajectory in group.trajectories for segment in trajectory.segments]
    replicas = sorted({segment.replica for segment in segments})
    texts: dict[str, NDArray[Any]] = {
        "prompt_ids": group.prompt_ids,
        "token_ids": joined_token_ids(segments),
        "logprobs": np.concatenate([_NO_LOGPROBS, *(segment.logprobs for segment in segments)]),
    }
    columns: dict[str, NDArray[Any]] = {
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
    bounds = [columns["segment_start"][first] for first in columns["trajectory_start"]]
    answers = [_checksum(texts["token_ids"][a:b], texts["logprobs"][a:b]) for a, b in pairwise(bounds)]
    columns["checksums"] = np.array([_checksum(group.prompt_ids), *answers], dtype=np.int64)
    metadata = {
        "format": _FORMAT,
        "group_id": str(group.group_id),
        "prompt_index": str(group.prompt_index),
        "replicas": json.dumps(replicas),
        "rewards": json.dumps(group.reward_names),
        "columns": str(_checksum(*[columns[name] for name in sorted(columns)])),
        "checksum": "00000000",
    }
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in (texts | columns).items()}
    write_atomic(path, _sealed(save(tensors, metadata)))


def _sealed(payload: bytes) -> bytes:
    """The payload with the checksum of its header in its place."""
    end = _LENGTH_BYTES + struct.unpack("<Q", payload[:_LENGTH_BYTES])[0]
    header = payload[:end]
    if header.count(_UNSEALED) != 1:
        raise ValueError("safetensors does not write the metadata of a payload as it did")
    seal = f'"checksum":"{zlib.crc32(header):08x}"'.encode()
    return b"".join([header.replace(_UNSEALED, seal), payload[end:]])


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
            DamagedPayload: the file ends before them.
        """
        count = (self.size if end is None else end) - first
        file.seek(self.start + first * self.dtype.itemsize)
        data = file.read(count * self.dtype.itemsize)
        if len(data) < count * self.dtype.itemsize:
            raise DamagedPayload(Path(file.name), f"is damaged: it ends within {self.name}")
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
            DamagedPayload: the file went away, or what is read is damaged.
        """
        kept = list(numbers)
        with _no_more_than_damaged(self.path):
            return read_when_there(self.path, self.deadline_s, lambda path: self._read(path, kept))

    def _read(self, path: Path, numbers: Sequence[int]) -> Group:
        with path.open("rb") as file:
            answers = tuple(self._trajectory(file, number) for number in numbers)
            prompt_ids = self.tokens["prompt_ids"].read(file)
            self._check(0, "the prompt", prompt_ids)
            return Group(self.outline.group_id, self.prompt_index, prompt_ids, answers, self.outline.reward_names)

    def _trajectory(self, file: BinaryIO, number: int) -> Trajectory:
        columns, starts = self.columns, self.columns["segment_start"]
        first, end = columns["trajectory_start"][number : number + 2]
        begin = starts[first]
        token_ids = self.tokens["token_ids"].read(file, begin, starts[end])
        logprobs = self.tokens["logprobs"].read(file, begin, starts[end])
        self._check(1 + number, f"answer {number}", token_ids, logprobs)
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

    def _check(self, number: int, what: str, *read: NDArray[Any]) -> None:
        if _checksum(*read) != self.columns["checksums"][number]:
            raise DamagedPayload(self.path, f"is damaged: {what} differs from its checksum")


def open_group(path: Path, deadline_s: float = 30.0) -> StoredGroup:
    """Open a payload, waiting up to `deadline_s` seconds for storage to show it; tokens are not read.

    Raises:
        DamagedPayload: the file did not appear, is no payload of this format, or is damaged.
    """
    with _no_more_than_damaged(path):
        return read_when_there(path, deadline_s, lambda there: _open(there, deadline_s))


def load_group(path: Path, deadline_s: float = 30.0) -> Group:
    """Read a payload with all of its tokens; see `open_group`."""
    stored = open_group(path, deadline_s)
    return stored.with_answers(range(len(stored.outline.trajectories)))


def _open(path: Path, deadline_s: float) -> StoredGroup:
    with path.open("rb") as file:
        header_bytes = _checked_header(file)
        header = json.loads(header_bytes)
        metadata = header.pop("__metadata__")
        places = {
            name: _Place(
                name,
                _DTYPES[entry["dtype"]],
                _LENGTH_BYTES + len(header_bytes) + entry["data_offsets"][0],
                prod(entry["shape"]),
            )
            for name, entry in header.items()
        }
        small = {name: place.read(file) for name, place in sorted(places.items()) if name not in _TOKENS}
    if _checksum(*small.values()) != int(metadata["columns"]):
        raise DamagedPayload(path, "is damaged: its small tensors differ from their checksum")
    columns = {name: tensor.tolist() for name, tensor in small.items()}
    return StoredGroup(
        path=path,
        deadline_s=deadline_s,
        outline=_outline(metadata, columns, places["prompt_ids"].size),
        prompt_index=int(metadata["prompt_index"]),
        replicas=tuple(json.loads(metadata["replicas"])),
        columns=columns,
        tokens={name: places[name] for name in _TOKENS},
    )


def _checked_header(file: BinaryIO) -> bytes:
    """The header of a payload, as it was written."""
    start = file.read(_LENGTH_BYTES)
    length = int.from_bytes(start, "little")
    rest = file.seek(0, 2) - _LENGTH_BYTES
    if not 0 < length <= rest:
        raise DamagedPayload(Path(file.name), f"is damaged: of {length} bytes of its header {max(0, rest)} are there")
    file.seek(_LENGTH_BYTES)
    header = file.read(length)
    seal = _SEAL.search(header)
    if seal is None or f'"format":"{_FORMAT}"'.encode() not in header:
        raise DamagedPayload(Path(file.name), f"is no payload of the format {_FORMAT}; its header: {header[:80]!r}")
    unsealed = header[: seal.start()] + _UNSEALED + header[seal.end() :]
    if zlib.crc32(start + unsealed) != int(seal[1], 16):
        raise DamagedPayload(Path(file.name), "is damaged: its header differs from its checksum")
    return header


def _outline(metadata: Mapping[str, str], columns: Mapping[str, list[Any]], prompt_tokens: int) -> GroupOutline:
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
    return GroupOutline(int(metadata["group_id"]), prompt_tokens, answers, names)


@contextmanager
def _no_more_than_damaged(path: Path) -> Iterator[None]:
    """What storage has lost costs a group, as what it has spoilt does."""
    try:
        yield
    except TimeoutError as error:
        raise DamagedPayload(path, f"is lost: {error}") from error
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise DamagedPayload(path, f"is damaged: {error.strerror}") from error


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


def _checksum(*arrays: NDArray[Any]) -> int:
    """CRC-32 of the bytes of these arrays, one after the other."""
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
    return checksum


def _integers(values: Iterable[int]) -> NDArray[np.int32]:
    return np.fromiter(values, dtype=np.int32)


def _offsets(sizes: Iterable[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.fromiter(sizes, dtype=np.int64))])
