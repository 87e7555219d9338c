"""CISPO: clipped importance-sampling weights, so that every token keeps its gradient.

    advantage          ratio level   clip                  aggregation
    group-normalised   token         weight, at the cap    token mean

PPO's clip takes the gradient from a token whose ratio has moved too far, and such tokens are often the rare ones that
matter. CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5) clips the weight instead, and lets no gradient through it:

    J = Σ mask · sg(min(ρ, cap)) · A · log π_θ / Σ mask,   L = -J + β Σ mask · k3(π_θ ‖ π_reference) / Σ mask

sg is stop-gradient; as in the paper there is no lower bound. The paper's ρ is π_θ / π_old with one policy that both
generated and began the step. Where tokens are stale these are two, and ρ is taken against the one that generated, as in
ScaleRL (arXiv 2510.13786):

    ρ = π_θ / π_behave = (π_θ / π_prox) · (π_prox / π_behave)

So one capped weight corrects both for the updates within the step (decoupled PPO's r) and for staleness (its w), and
the cap bounds their product. ScaleRL used caps of 4 to 8.
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


class Cispo(AlgorithmSection):
    """Log-probabilities weighted by advantage and a capped, detached importance weight."""

    kind: Literal["cispo"] = Field(default="cispo", description="Clips importance weights, not gradients (MiniMax-M1).")
    weight_cap: float = Field(
        default=5.0, gt=0, description="Cap of π_θ/π_behave, the weight of a token's gradient: ε_max."
    )

    def advantages(self, rewards: Sequence[Sequence[float]]) -> list[list[float]]:
        """Normalised within each group."""
        return [group_normalised(of_group) for of_group in rewards]

    def loss(self, logprobs: "Tensor", prox_logprobs: "Tensor", entropy: "Tensor", batch: "MicroBatch") -> LossSums:
        """The token losses, summed; formula in the module's docstring.

        `ratio/…` is of π_θ / π_prox, how far the step itself has moved; `weight/max` is before the cap.
        """
        mask = batch.mask
        current = logprobs.detach()
        uncapped = where_trained(current - batch.behaviour_logprobs, mask).exp()
        weight = uncapped.clamp(max=self.weight_cap)
        ratio = where_trained(current - prox_logprobs, mask).exp()
        losses = -weight * batch.advantages * logprobs
        means = {
            "mismatch_kl": k3(where_trained(prox_logprobs - batch.behaviour_logprobs, mask)),
            "entropy": entropy,
            "ratio/mean": ratio,
            "weight/mean": weight,
            "weight/capped_share": (uncapped > self.weight_cap).float(),
        }
        if self.needs_reference:
            means["reference_kl"] = divergence = reference_divergence(logprobs, batch)
            losses = losses + self.kl_coefficient * divergence
        return summed(losses, mask, means, {"ratio/max": ratio, "weight/max": uncapped})
