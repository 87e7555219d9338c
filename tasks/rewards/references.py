"""Reference answers that no reward can score are found before a run: their questions would teach nothing."""

import asyncio
import os
import sys
from collections.abc import Sequence

from planners.errors import UserError
from tasks.config.data import DataSource
from tasks.config.rewards import Reward
from tasks.data.item import Item
from tasks.data.sources.rows import LINE
from tasks.rewards.pool import ScoringPool, Verdict

CHECK_DEADLINE_S = 120.0
"""Time for it; the run itself counts what cannot be scored among the lines that are left."""
_AT_ONCE, _NAMED = 64, 10


def check_references(rewards: Sequence[Reward], sources: Sequence[DataSource], items: Sequence[Item]) -> None:
    """Score the reference answer of every question that comes from a file as if the model had given it.

    A person's own reward may say of it what it likes, so long as it says something; one that compares with the
    reference has to find it right.

    Raises:
        UserError: there are lines whose reference answers make a reward fail or take too long.
    """
    of_files = [item for item in items if LINE in item.metadata]
    if not of_files:
        return
    failed, checked = asyncio.run(_score(rewards, sources, of_files))
    if checked < len(of_files):
        print(
            f"Scored {checked} of {len(of_files)} reference answers in {CHECK_DEADLINE_S:.0f} s; the rest is left to "
            "the run.",
            file=sys.stderr,
        )
    if failed:
        first, reason = failed[0]
        lines = ", ".join(str(item.metadata[LINE]) for item, _ in failed[:_NAMED])
        more = f" and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
        raise UserError(
            f"Reference answers that cannot be scored are in line {lines}{more} of {first.source}: {reason} Mend or "
            "remove these lines, or choose another reward."
        )


async def _score(
    rewards: Sequence[Reward], sources: Sequence[DataSource], items: Sequence[Item]
) -> tuple[list[tuple[Item, str]], int]:
    """Those that could not be scored, each with the reason, in order; and how many were looked at in time."""
    pool = ScoringPool(rewards, sources, processes=min(4, len(os.sched_getaffinity(0))), tells=False)
    failed: list[tuple[Item, str]] = []
    checked = 0
    try:
        async with asyncio.timeout(CHECK_DEADLINE_S):
            for start in range(0, len(items), _AT_ONCE):
                some = items[start : start + _AT_ONCE]
                verdicts = await asyncio.gather(*(pool.score(i.question, i.answer, i.facts()) for i in some))
                faults = [_fault(rewards, verdict) for verdict in verdicts]
                failed += [(item, fault) for item, fault in zip(some, faults, strict=True) if fault]
                checked += len(some)
    except TimeoutError:
        pass
    finally:
        await pool.close()
    return failed, checked


def _fault(rewards: Sequence[Reward], verdict: Verdict) -> str:
    """What is wrong with an answer that was scored so; empty if nothing is."""
    for reward, part in zip(rewards, verdict.parts, strict=True):
        if reward.compares and part < 1.0:
            return f"{reward.label} does not find the reference itself right."
    return verdict.reason
