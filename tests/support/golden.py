"""Golden files: answers and choices in a form of their own, made into what the present code trains on.

This is the one place to adapt when groups, sections or the engine change; `tests/golden/` stays as it is.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tasks.config.training import OptimizerSection
from tasks.exchange.trajectories import Group, Outcome, Segment, Trajectory
from tasks.training.algorithms import DecoupledPpo
from tasks.training.engine import Engine, StepResult
from tasks.training.groups import permute_advantages, with_advantages
from tasks.training.policy import Policy, load_policy
from tests.support.places import REPOSITORY
from tests.support.training import make_engine, tiny_model

GOLDEN = REPOSITORY / "tests" / "golden"
RECORDED = json.loads((GOLDEN / "recordings.json").read_text())
_MAX_CONTEXT = 128


@dataclass(frozen=True)
class Replay:
    """What the present code makes of a recording: weights by name before and after, and each step's result."""

    start: dict[str, Tensor]
    steps: list[StepResult]
    end: dict[str, Tensor]


def replay(recording: dict[str, Any], tiny_random: Path) -> Replay:
    """Train as the recording did; `tiny_random` is the directory of that model."""
    choices = recording["choices"]
    engine = _engine(recording["model"], choices, tiny_random)
    start = engine.state_dict(torch.float32)
    results = []
    for step, groups in enumerate(recorded_groups(recording["model"])):
        batch = with_advantages(groups, DecoupledPpo())
        if choices["permute_advantages"]:
            batch = permute_advantages(batch, RECORDED["seed"], step)
        results.append(engine.train_step(batch, step))
    return Replay(start, results, engine.state_dict(torch.float32))


def recorded_groups(model: str) -> list[list[Group]]:
    """The groups of every step."""
    return [[_group(group) for group in step] for step in json.loads((GOLDEN / f"{model}-groups.json").read_text())]


def digest(weight: Tensor) -> list[float]:
    """Norm, mean and Σ w_k cos(k) of a tensor, in float64."""
    values = weight.double().flatten()
    wave = torch.cos(torch.arange(len(values), dtype=torch.float64))
    return [float(values.norm()), float(values.mean()), float(values @ wave)]


def _engine(model: str, choices: dict[str, Any], tiny_random: Path) -> Engine:
    algorithm = DecoupledPpo(clip=choices["clip"], behaviour_weight_cap=choices["behaviour_weight_cap"])
    optimizer = OptimizerSection(
        lr=choices["lr"],
        schedule=choices["lr_schedule"],
        warmup_steps=choices["warmup_steps"],
        beta1=choices["adam_beta1"],
        beta2=choices["adam_beta2"],
        weight_decay=choices["weight_decay"],
        gradient_clip=choices["gradient_clip"],
        minibatches=choices["minibatches"],
    )
    if model == "tiny-random":
        policy = load_policy(tiny_random, choices["temperature"], _MAX_CONTEXT, torch.float32)
    else:
        small = tiny_model()
        small.load_state_dict(load_file(GOLDEN / "small-start.safetensors"), strict=False)  # the tied head is not there
        policy = Policy(small, choices["temperature"])
    return make_engine(
        algorithm,
        optimizer,
        steps=len(recorded_groups(model)),
        policy=policy,
        zero_stage=choices["zero_stage"],
        micro_batch_tokens=choices["tokens_per_micro_batch"],
    )


def _group(group: dict[str, Any]) -> Group:
    answers = tuple(_trajectory(answer) for answer in group["answers"])
    return Group(group["group_id"], group["prompt_index"], group["prompt_ids"], answers)


def _trajectory(answer: dict[str, Any]) -> Trajectory:
    segments = tuple(Segment(**segment) for segment in answer["segments"])
    reward = math.nan if answer["reward"] is None else answer["reward"]
    return Trajectory(segments, Outcome(answer["outcome"]), reward)
