"""How fast one device trains and publishes, measured through the training step that a run makes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from planners.workload.step import Workload
from tasks.config.experiment import Experiment
from tasks.exchange.layout import RunDirectory
from tasks.exchange.trajectories import Group, Outcome, Segment, Trajectory
from tasks.exchange.weights import publish_weights, verify_weights
from tasks.models.dtypes import torch_dtype
from tasks.profiling.hardware import finish
from tasks.training.engine import Engine, load_engine
from tasks.training.export import write_weights
from tasks.training.packing import TrainingGroup, training_group
from tasks.training.ranks import join_ranks

MOST_TOKENS = 65_536
"""Answer tokens trained at most while measuring; beyond it a profile would take too long."""
_MEET_S, _WAIT_S = 60.0, 60.0


@dataclass(frozen=True)
class TrainingRates:
    """Measured response tokens/s of a step, and seconds to publish and to verify one weight version."""

    tokens_per_s: float
    publish_s: float
    verify_s: float


def measure_training(
    experiment: Experiment,
    prompts: Sequence[Sequence[int]],
    model_path: Path,
    answer_tokens: int,
    scratch: Path,
    *,
    zero_stage: int,
    micro_batch_tokens: int,
) -> TrainingRates:
    """Train one group as warm-up, then a step's groups; then publish and verify the weights below `scratch`.

    This process is the only rank, as its environment says; see `join_ranks`.

    Args:
        experiment: as of the run.
        prompts: token ids of the step's prompts.
        model_path: the prepared model.
        answer_tokens: length of the made-up answers.
        scratch: an empty directory on the disk where runs lie.
        zero_stage: DeepSpeed ZeRO stage.
        micro_batch_tokens: what answers are packed into.
    """
    ranks = join_ranks(_MEET_S, _WAIT_S)
    dtype = torch_dtype(experiment.model.dtype)
    engine = load_engine(model_path, experiment, ranks, zero_stage=zero_stage, micro_batch_tokens=micro_batch_tokens)
    groups = made_up_groups(prompts, experiment.workload, answer_tokens)
    engine.train_step(groups[:1], 0)
    finish(ranks.device)
    started = time.perf_counter()
    engine.train_step(groups, 1)
    finish(ranks.device)
    step_s = time.perf_counter() - started
    tokens = sum(group.trained_tokens for group in groups)
    publish_s, verify_s = _measure_publication(engine, dtype, model_path, scratch)
    return TrainingRates(tokens / step_s, publish_s, verify_s)


def made_up_groups(prompts: Sequence[Sequence[int]], workload: Workload, answer_tokens: int) -> list[TrainingGroup]:
    """One group per prompt, up to MOST_TOKENS in all, with answers of one length and advantages of both signs."""
    most = max(1, MOST_TOKENS // (workload.group_size * answer_tokens))
    groups = []
    for prompt in prompts[:most]:
        # The prompt's own tokens are answers as good as any: only their number costs time.
        prompt_ids = np.array(prompt, np.int32)
        tokens = np.resize(prompt_ids, answer_tokens)
        answer = Trajectory((Segment(tokens, np.full(answer_tokens, -1.0), 0, "profile"),), Outcome.SCORED, 0.0)
        group = Group(0, 0, prompt_ids, (answer,) * workload.group_size)
        groups.append(training_group(group, [1.0 if number % 2 else -1.0 for number in range(workload.group_size)]))
    return groups


def _measure_publication(engine: Engine, dtype: torch.dtype, model_path: Path, scratch: Path) -> tuple[float, float]:
    """Seconds to publish a version, from the weights on the device to files that are synced, and to verify it."""
    run = RunDirectory(scratch)
    started = time.perf_counter()
    weights = engine.state_dict(dtype)
    path = publish_weights(run, 0, 1, lambda directory: write_weights(directory, model_path, weights))
    published = time.perf_counter()
    verify_weights(path)
    return published - started, time.perf_counter() - published
