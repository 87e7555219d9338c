"""One scoring process: `python -m tasks.rewards.worker CONFIG`, started and ended by `ScoringPool`.

It writes `{"ready": true}` when its scorer is loaded, then answers each line `{"item": …, "text": …}` on standard input
with `{"reward": number}` or `{"error": "…"}`. Standard output carries nothing else.
"""

import ctypes
import json
import math
import os
import resource
import signal
import sys
from typing import IO

from tasks.config.data import DataSection
from tasks.config.rewards import RewardSection
from tasks.data.prompts import Item
from tasks.rewards.builtin import Scorer, open_scorer

MEMORY_BYTES = 2 * 2**30
"""Address space of a scoring process; the libraries take an eighth of it."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until standard input ends."""
    config = json.loads(sys.argv[1])
    _die_with_parent(config["parent_pid"])
    reward = RewardSection.model_validate(config["reward"])
    scorer = open_scorer(reward, DataSection.model_validate(config["data"]))
    # What a library prints must not be read as a reply.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    limit_memory()
    _reply(replies, {"ready": True})
    for line in sys.stdin.buffer:
        _limit_cpu(reward.timeout_s)
        _reply(replies, _score(scorer, line))


def limit_memory() -> None:
    """Let this process have `MEMORY_BYTES` of address space, and no core dump of it."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _score(scorer: Scorer, line: bytes) -> dict[str, object]:
    request = json.loads(line)
    try:
        return {"reward": scorer(Item.from_json(request["item"]), request["text"])}
    except Exception as error:  # noqa: BLE001  whatever a scorer raises on a hostile answer is that answer's outcome
        return {"error": f"{type(error).__name__}: {error}"[:500]}


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
