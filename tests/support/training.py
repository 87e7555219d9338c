"""A single trainer rank inside the test process, tiny models, and groups made up by hand."""

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tasks.config.training import OptimizerSection
from tasks.exchange.trajectories import Group, Outcome, Segment, Trajectory
from tasks.training.algorithms import DecoupledPpo
from tasks.training.algorithms.base import AlgorithmSection
from tasks.training.engine import Engine
from tasks.training.meeting import meet_here
from tasks.training.packing import MicroBatch
from tasks.training.policy import Policy
from tasks.training.ranks import Ranks, join_ranks

VOCABULARY = 32


@functools.cache
def one_rank() -> Ranks:
    """This process as the only rank of a trainer; made once."""
    directory = Path(tempfile.mkdtemp(dir=os.environ["HEXFLOW_LOCAL"]))  # as long as the process
    os.environ.update(meet_here(directory), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    return join_ranks(rendezvous_s=30, wait_s=30)


def tiny_model(layers: int = 2, seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


def make_engine(
    algorithm: AlgorithmSection | None = None,
    optimizer: OptimizerSection | None = None,
    *,
    steps: int = 10,
    seed: int = 0,
    policy: Policy | None = None,
    reference: Policy | None = None,
    zero_stage: int = 0,
    micro_batch_tokens: int = 1024,
    dtype: torch.dtype = torch.float32,
    ranks: Ranks | None = None,
    count_work: Callable[[int], object] = lambda amount: None,
) -> Engine:
    return Engine(
        policy or Policy(tiny_model(seed=seed).to(dtype), 1.0),
        algorithm or DecoupledPpo(),
        optimizer or OptimizerSection(),
        steps,
        ranks or one_rank(),
        dtype,
        zero_stage=zero_stage,
        micro_batch_tokens=micro_batch_tokens,
        reference=reference,
        count_work=count_work,
    )


def random_groups(count: int, seed: int, answers: int = 4, version: int = 0) -> list[Group]:
    """Groups with prompts and answers of many lengths, random rewards and behaviour log-probabilities."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, size: int = 1) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    groups = []
    for group_id in range(count):
        trajectories = []
        for _ in range(answers):
            (length,) = integers(1, 7)
            logprobs = (-3.0 - torch.rand(length, generator=generator)).tolist()
            segment = Segment(tuple(integers(0, VOCABULARY, length)), tuple(logprobs), version, "replica-0")
            trajectories.append(Trajectory((segment,), Outcome.SCORED, float(torch.rand(1, generator=generator))))
        prompt = tuple(integers(0, VOCABULARY, integers(2, 9)[0]))
        groups.append(Group(group_id, group_id, prompt, tuple(trajectories)))
    return groups


def batch_of(
    behaviour: list[float], advantages: list[float], mask: list[float], reference: list[float] | None = None
) -> MicroBatch:
    """A micro-batch for a loss alone: only what losses read is filled in."""
    index = torch.zeros(len(mask), dtype=torch.long)
    rows = (torch.tensor(behaviour), torch.tensor(advantages), torch.tensor(mask))
    return MicroBatch(
        index, index, index, index, index, index, *rows, index, None if reference is None else torch.tensor(reference)
    )


def parameters_of(engine: Engine) -> dict[str, torch.Tensor]:
    return engine.state_dict(torch.float32)


def save_tiny_model(directory: Path) -> Path:
    tiny_model().save_pretrained(directory)
    return directory
