"""Decoupled PPO with group-normalised advantages.

An algorithm is a row of choices; this one's are

    advantage          ratio level   clip               aggregation
    group-normalised   token         1 - ε … 1 + ε      token mean

With π_θ the current policy, π_prox the policy at the start of the step and π_behave the one that sampled the token
(decoupled objective of AReaL, arXiv 2505.24298, eq. 5; group advantages and the divergence of GRPO, arXiv 2402.03300):

    r = π_θ / π_prox,   w = min(π_prox / π_behave, cap)   (w carries no gradient)
    L = Σ mask · (w · max(-A r, -A clip(r, 1 - ε, 1 + ε)) + β k3(π_θ ‖ π_reference)) / Σ mask

Sums run over all tokens of a minibatch on all ranks: `loss` returns sums, whoever calls it divides.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tasks.training.algorithms.base import (
    AlgorithmSection,
    LossSums,
    group_normalised,
    k3,
    reference_divergence,
    summed,
    where_trained,
)

if TYPE_CHECKING:
    from torch import Tensor

    from tasks.training.packing import MicroBatch


class DecoupledPpo(AlgorithmSection):
    """PPO whose clip is around the policy at the start of the step, with a capped weight for stale tokens."""

    kind: Literal["decoupled_ppo"] = Field(
        default="decoupled_ppo", description="Clipped around the policy at the start of the step (AReaL)."
    )
    clip: float = Field(default=0.2, gt=0, description="PPO clip range ε.")
    behaviour_weight_cap: float = Field(
        default=2.0, gt=0, description="Cap of π_prox/π_behave, the correction for stale tokens."
    )

    def advantages(self, rewards: Sequence[Sequence[float]]) -> list[list[float]]:
        """Normalised within each group."""
        return [group_normalised(of_group) for of_group in rewards]

    def loss(self, logprobs: "Tensor", prox_logprobs: "Tensor", entropy: "Tensor", batch: "MicroBatch") -> LossSums:
        """The token losses, summed; formula in the module's docstring.

        `mismatch_kl` compares the policy at the start of the step with the one that generated: staleness and any
        disagreement between the inference engine and the trainer. `weight/max` is before the cap.
        """
        mask = batch.mask
        drift = where_trained(prox_logprobs - batch.behaviour_logprobs, mask)
        ratio = where_trained(logprobs - prox_logprobs, mask).exp()
        uncapped = drift.exp()
        weight = uncapped.clamp(max=self.behaviour_weight_cap)
        plain = -batch.advantages * ratio
        clipped = -batch.advantages * ratio.clamp(1 - self.clip, 1 + self.clip)
        losses = weight * plain.maximum(clipped)
        means = {
            "mismatch_kl": k3(drift),  # of KL(π_behave ‖ π_prox)
            "entropy": entropy,
            "ratio/mean": ratio,
            "ratio/clipped_share": (clipped > plain).float(),
            "weight/mean": weight,
            "weight/capped_share": (uncapped > self.behaviour_weight_cap).float(),
        }
        if self.needs_reference:
            means["reference_kl"] = divergence = reference_divergence(logprobs, batch)
            losses = losses + self.kl_coefficient * divergence
        return summed(losses, mask, means, {"ratio/max": ratio, "weight/max": uncapped})
