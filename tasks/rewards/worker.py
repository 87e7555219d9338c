"""One scoring process: `python -m tasks.rewards.worker CONFIG`, started and ended by `ScoringPool`.

It writes `{"ready": true}` when its scores are loaded (or `{"error": "…"}`, and ends), then answers each line
`{"reward": number of the reward, "prompt": …, "text": …, "item": …}` on standard input with `{"value": number}` or
`{"error": "…", "traceback": "…"}`. Standard output carries nothing else.
"""

import ctypes
import json
import math
import numbers
import os
import resource
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import IO

from pydantic import TypeAdapter

from planners.errors import UserError
from tasks.config.data import DataSource
from tasks.config.rewards import Reward
from tasks.rewards.base import Score, from_line

MEMORY_BYTES = 2 * 2**30
"""Address space of a scoring process; the libraries take an eighth of it."""
_LONGEST_MESSAGE = 500
_LONGEST_TRACEBACK = 4000
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until standard input ends."""
    config = json.loads(sys.argv[1])
    _die_with_parent(config["parent_pid"])
    rewards = TypeAdapter(list[Reward]).validate_python(config["rewards"])
    sources = TypeAdapter(list[DataSource]).validate_python(config["sources"])
    # What a library or a person's file prints must not be read as a reply.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        scores = [reward.open(sources) for reward in rewards]
    except UserError as error:
        _reply(replies, {"error": str(error)})
        return
    limit_memory()
    _reply(replies, {"ready": True})
    for line in sys.stdin.buffer:
        request = from_line(line)
        number = request["reward"]
        _limit_cpu(rewards[number].timeout_s)
        _reply(replies, _score(scores[number], request))


def limit_memory() -> None:
    """Let this process have `MEMORY_BYTES` of address space, and no core dump of it."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _score(score: Score, request: Mapping[str, object]) -> dict[str, object]:
    try:
        value: object = score(str(request["prompt"]), str(request["text"]), request["item"])  # type: ignore[arg-type]
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise TypeError(f"it returned {value!r:.100}, which is no finite number")
        return {"value": float(value)}
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a score raises on an answer is its outcome
        message = f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE]
        return {"error": message, "traceback": traceback.format_exc()[-_LONGEST_TRACEBACK:]}


def _reply(replies: IO[str], reply: dict[str, object]) -> None:
    replies.write(json.dumps(reply) + "\n")


def _limit_cpu(timeout_s: float) -> None:
    """The backstop for a pool that is itself stopped: CPU time of this answer, past which the kernel ends us."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit_s = math.ceil(usage.ru_utime + usage.ru_stime + timeout_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))


def _die_with_parent(parent_pid: int) -> None:
    """By the kernel: a thread that watches the parent would wait for ever on a scorer that holds the interpreter."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit("the scoring pool that started this process is gone")


if __name__ == "__main__":
    main()
