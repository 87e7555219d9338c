"""Everything that answers prompts, opened together and ended together: engine, scoring processes, questions."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks.config.experiment import Experiment
from tasks.config.settings import load_settings
from tasks.data.chat import Chat
from tasks.data.split import Questions
from tasks.environments.single_turn import SingleTurn
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
    tensor_parallel: int = 1
    count_work: Callable[[int], object] = lambda amount: None
    """Hears of tokens generated and answers scored."""


@asynccontextmanager
async def open_answerer(experiment: Experiment, setup: AnsweringSetup) -> AsyncIterator[tuple[Answerer, Questions]]:
    """An answerer under the experiment's sampling and rewards, and the questions it is asked."""
    questions = Questions(experiment)
    tokenizer = load_tokenizer(setup.model_path)
    chat = Chat(experiment, tokenizer)
    engine = await VllmEngine.start(
        setup.weights_path,
        replica=setup.replica,
        lineage=setup.lineage,
        number=setup.number,
        dtype=experiment.model.dtype,
        max_context=experiment.model.max_context,
        concurrency=setup.concurrency,
        tensor_parallel=setup.tensor_parallel,
        kind=setup.kind,
        cache_dir=load_settings().local.cache,
        seed=setup.seed,
        count_tokens=setup.count_work,
    )
    try:
        scoring = ScoringPool(experiment.rewards, experiment.sources, experiment.rollout.scoring_processes)
        try:
            sampling = Sampling(
                experiment.sampling.temperature, experiment.workload.max_new_tokens, chat.stop_token_ids
            )
            yield Answerer(engine, SingleTurn(chat, tokenizer, scoring), sampling, setup.count_work), questions
        finally:
            await scoring.close()
    finally:
        await engine.shutdown()
