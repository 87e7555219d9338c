"""The loss: decoupled PPO with group-normalised advantages.

An algorithm is a row of choices, one function each; this is the row that experiments offer:

    advantage          ratio level   clip               aggregation
    group-normalised   token         1 - ε … 1 + ε      token mean

With π_θ the current policy, π_prox the policy at the start of the step and π_behave the one that sampled the token
(decoupled objective of AReaL, arXiv 2505.24298, eq. 5; group advantages of GRPO, arXiv 2402.03300):

    r = π_θ / π_prox,   w = min(π_prox / π_behave, cap)   (w carries no gradient)
    L = Σ mask · w · max(-A r, -A clip(r, 1 - ε, 1 + ε)) / Σ mask

Sums run over all tokens of a minibatch on all ranks: `policy_loss` returns sums, whoever calls it divides.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tasks.exchange.trajectories import Group
from tasks.training.packing import MicroBatch, TrainingGroup

STD_FLOOR = 1e-4  # keeps a nearly constant group from being blown up

SUM_NAMES = ("tokens", "loss", "mismatch_kl", "ratio", "weight", "clipped", "capped", "entropy")
PEAK_NAMES = ("ratio", "weight")


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over the trained tokens of one micro-batch.

    Attributes:
        loss: scalar with gradient, the sum of the token losses.
        sums: [len(SUM_NAMES)] detached sums, for means over ranks and micro-batches.
        peaks: [len(PEAK_NAMES)] detached maxima.
    """

    loss: Tensor
    sums: Tensor
    peaks: Tensor


def normalise_group(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (std + 1e-4) with the population's standard deviation; equal rewards give exact zeros."""
    if len(set(rewards)) <= 1:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / (std + STD_FLOOR) for r in rewards]


def with_advantages(groups: Sequence[Group]) -> list[TrainingGroup]:
    """Each group with its unmasked answers and their advantages, normalised within the group."""
    prepared = []
    for group in groups:
        answers = tuple(answer for answer in group.trained if answer.tokens)
        advantages = tuple(normalise_group([answer.reward for answer in answers]))
        prepared.append(TrainingGroup(group.prompt_ids, answers, advantages))
    return prepared


def permute_advantages(groups: Sequence[TrainingGroup], seed: int, step: int) -> list[TrainingGroup]:
    """The control experiment: each group's advantages dealt to its answers at random, and negated on a coin's toss.

    Within the group, so that the same groups train with values of the same size as in a real run, and only what ties
    a value to its answer is cut. Negated, because advantages are skewed: among few right answers, one is far above
    the mean and the others little below. Clipping the gradient's norm shrinks the one large push more often than the
    many small ones, so without the coin the mean update would press improbable answers down, and rewards up with
    them. With it, a gradient and its opposite are equally likely. The same for (seed, step).
    """
    generator = np.random.default_rng([seed, step])
    return [
        replace(group, advantages=tuple((generator.choice([-1, 1]) * generator.permutation(group.advantages)).tolist()))
        for group in groups
    ]


def has_gradient(group: TrainingGroup) -> bool:
    """Whether any answer of the group pulls: a group without variance has only zero advantages."""
    return any(group.advantages)


def policy_loss(
    logprobs: Tensor, prox_logprobs: Tensor, entropy: Tensor, batch: MicroBatch, clip: float, weight_cap: float
) -> LossSums:
    """The token losses of one micro-batch, summed; formula in the module's docstring.

    Args:
        logprobs: [N] log π_θ of the targets, with gradient.
        prox_logprobs: [N] log π_prox, detached.
        entropy: [N] entropy of the prediction in nats, for the metrics only.
        batch: where mask, advantages and behaviour log-probabilities come from.
        clip: ε.
        weight_cap: cap of w.
    """
    mask = batch.mask
    # Untrainable tokens carry no behaviour log-probability: zero their differences before any exp can overflow.
    drift = torch.where(mask > 0, prox_logprobs - batch.behaviour_logprobs, 0.0)
    ratio = torch.exp(torch.where(mask > 0, logprobs - prox_logprobs, 0.0))
    uncapped = torch.exp(drift)
    weight = uncapped.clamp(max=weight_cap)
    plain = -batch.advantages * ratio
    clipped = -batch.advantages * ratio.clamp(1 - clip, 1 + clip)
    loss = (mask * weight * torch.maximum(plain, clipped)).sum()
    with torch.no_grad():
        rows = (
            torch.ones_like(mask),
            weight * torch.maximum(plain, clipped),
            uncapped - 1 - drift,  # the k3 estimate of KL(π_behave ‖ π_prox): never negative, low variance
            ratio,
            weight,
            (clipped > plain).float(),
            (uncapped > weight_cap).float(),
            entropy,
        )
        sums = torch.stack([(mask * row).sum() for row in rows])
        peaks = torch.stack([(mask * ratio).max(), (mask * uncapped).max()])
    return LossSums(loss, sums, peaks)


def loss_metrics(sums: Sequence[float], peaks: Sequence[float]) -> dict[str, float]:
    """Token means and maxima by metric name; empty if no token was trained.

    `mismatch_kl` compares the policy at the start of the step with the one that generated: staleness and any
    disagreement between the inference engine and the trainer. `weight/max` is before the cap.
    """
    total = dict(zip(SUM_NAMES, sums, strict=True))
    peak = dict(zip(PEAK_NAMES, peaks, strict=True))
    tokens = total["tokens"]
    if tokens == 0:
        return {}
    return {
        "loss": total["loss"] / tokens,
        "mismatch_kl": total["mismatch_kl"] / tokens,
        "entropy": total["entropy"] / tokens,
        "ratio/mean": total["ratio"] / tokens,
        "ratio/max": peak["ratio"],
        "ratio/clipped_share": total["clipped"] / tokens,
        "weight/mean": total["weight"] / tokens,
        "weight/max": peak["weight"],
        "weight/capped_share": total["capped"] / tokens,
    }
