"""What tests of scoring ask, and how they wait."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.config.data import ToySource
from tasks.exchange.trajectories import Outcome
from tasks.rewards.pool import ScoringPool

SOURCE = ToySource()


def item_of(question: str, answer: str, source: str = "toy", **metadata: Any) -> dict[str, Any]:
    return {"question": question, "answer": answer, "metadata": metadata, "source": source}


ITEM = item_of("q", "12")


async def outcome_of(pool: ScoringPool, text: str, item: dict[str, Any] = ITEM) -> tuple[Outcome, float]:
    verdict = await pool.score("prompt", text, item)
    return verdict.outcome, verdict.reward


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def wait_until(holds: Callable[[], Any], deadline_s: float = 20.0) -> None:
    give_up = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < give_up, "did not happen within the deadline"
        await asyncio.sleep(0.02)
