"""Everything that answers prompts, opened together and ended together: engine, scoring processes, prompts."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks.config.experiment import Experiment
from tasks.config.settings import load_settings
from tasks.data.prompts import PromptSource
from tasks.models.prepare import load_tokenizer
from tasks.rewards.pool import ScoringPool
from tasks.rollout.answering import Answerer
from tasks.rollout.engine import Sampling
from tasks.rollout.vllm.engine import VllmEngine


@dataclass(frozen=True)
class AnsweringSetup:
    """Which weights to serve, and how.

    `model_path` has the tokenizer; `weights_path` is the same directory or a version of (`lineage`, `number`).
    """

    model_path: Path
    weights_path: Path
    lineage: int
    number: int
    replica: str
    kind: Literal["cuda", "cpu"]
    concurrency: int
    seed: int


@asynccontextmanager
async def open_answerer(experiment: Experiment, setup: AnsweringSetup) -> AsyncIterator[tuple[Answerer, PromptSource]]:
    """An answerer under the experiment's sampling and reward, and the prompts it is asked."""
    tokenizer = load_tokenizer(setup.model_path)
    prompts = PromptSource(experiment, tokenizer)
    engine = await VllmEngine.start(
        setup.weights_path,
        replica=setup.replica,
        lineage=setup.lineage,
        number=setup.number,
        dtype=experiment.model.dtype,
        max_context=experiment.model.max_context,
        concurrency=setup.concurrency,
        kind=setup.kind,
        cache_dir=load_settings().local.cache,
        seed=setup.seed,
    )
    try:
        scoring = ScoringPool(experiment.reward, experiment.data)
        try:
            sampling = Sampling(
                experiment.sampling.temperature, experiment.workload.max_new_tokens, prompts.stop_token_ids
            )
            yield Answerer(engine, tokenizer, scoring, sampling), prompts
        finally:
            await scoring.close()
    finally:
        await engine.shutdown()
