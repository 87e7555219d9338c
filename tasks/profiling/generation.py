"""How fast one replica generates and takes new weights, measured through the engine that runs it."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planners.workload.step import Workload
from tasks.rollout.engine import Answer, Engine, Sampling

MOST_CONCURRENT = 256
"""Answers measured at once at most; beyond it a profile would take too long."""
LONGEST_ANSWER_TOKENS = 256
"""Answers are cut here while measuring, for the same reason."""


@dataclass(frozen=True)
class GenerationRates:
    """Measured response tokens/s by answers in flight, their mean length (None: they were cut), seconds of a swap."""

    tokens_per_s: dict[int, float]
    answer_tokens: float | None
    swap_s: float


def measured_concurrency(workload: Workload) -> list[int]:
    """Answers in flight to measure: one group, and as many groups as a step asks for, up to MOST_CONCURRENT."""
    most = min(workload.prompts_per_step, max(1, MOST_CONCURRENT // workload.group_size))
    return sorted({workload.group_size, most * workload.group_size})


async def measure_generation(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, workload: Workload, weights: Path
) -> GenerationRates:
    """Generate whole groups at each concurrency, then load weights.

    The smallest batch is generated twice and timed the second time: the first meets cold kernels and caches.

    Args:
        engine: started, idle, and holding weights of the same shapes as `weights`.
        prompts: token ids of at least as many prompts as a measured batch has groups.
        sampling: as in the run; `max_new_tokens` is cut to LONGEST_ANSWER_TOKENS.
        workload: sizes of a step.
        weights: a directory in Hugging Face layout, loaded as version (0, 1).
    """
    longest = min(sampling.max_new_tokens, LONGEST_ANSWER_TOKENS)
    sampling = Sampling(sampling.temperature, longest, sampling.stop_token_ids, sampling.seed)
    levels = measured_concurrency(workload)
    rates: dict[int, float] = {}
    tokens = 0.0
    for batch, level in enumerate([levels[0], *levels]):
        groups = prompts[: level // workload.group_size]
        started = time.perf_counter()
        answers = await _generate(engine, batch, groups, workload.group_size, sampling)
        elapsed_s = time.perf_counter() - started
        generated = sum(answer.tokens for answer in answers)
        rates[level] = generated / elapsed_s
        tokens = generated / level
    started = time.perf_counter()
    await engine.load(0, 1, weights, "continue")
    swap_s = time.perf_counter() - started
    return GenerationRates(rates, tokens if longest == workload.max_new_tokens else None, swap_s)


async def _generate(
    engine: Engine, batch: int, prompts: Sequence[Sequence[int]], group_size: int, sampling: Sampling
) -> list[Answer]:
    return await asyncio.gather(
        *(
            engine.generate(f"profile-{batch}-{number}-{copy}", prompt, sampling)
            for number, prompt in enumerate(prompts)
            for copy in range(group_size)
        )
    )
