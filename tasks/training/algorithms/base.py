"""What every algorithm has, and the pieces that they are made of."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from planners.sections import Section

if TYPE_CHECKING:  # the command reads experiments without loading torch
    from torch import Tensor

    from tasks.training.packing import MicroBatch

STD_FLOOR = 1e-4  # keeps a nearly constant group from being blown up


@dataclass(frozen=True, slots=True)
class LossSums:
    """What the trained tokens of one micro-batch say.

    Attributes:
        loss: scalar with gradient, the sum of the token losses. Whoever calls divides by the tokens of a minibatch.
        sums: detached sums over the trained tokens by metric name; the metric is their mean over all of a step.
        peaks: detached maxima over the trained tokens by metric name, 0 where there is none.
    """

    loss: "Tensor"
    sums: Mapping[str, "Tensor"]
    peaks: Mapping[str, "Tensor"]


class AlgorithmSection(Section, ABC):
    """What an algorithm answers, and the keys that all have."""

    kind: str
    kl_coefficient: float = Field(
        default=0.0,
        ge=0,
        description="Weight β of the divergence from the model that the run began with, added to the loss; 0 is none, "
        "else that model is held in memory beside the trained one.",
    )
    permute_advantages: bool = Field(
        default=False, description="Control experiment: shuffle advantages within each group, with a random sign."
    )

    @property
    def needs_reference(self) -> bool:
        """Whether `loss` reads the micro-batch's reference log-probabilities."""
        return self.kl_coefficient > 0

    @abstractmethod
    def advantages(self, rewards: Sequence[Sequence[float]]) -> list[list[float]]:
        """One advantage for each answer that counts, from the rewards of a step: those of each group in a list."""

    def keeps(self, advantages: Sequence[float]) -> bool:
        """Whether a group with these advantages is trained on: one whose answers all have 0 has no gradient."""
        return any(advantages)

    @abstractmethod
    def loss(self, logprobs: "Tensor", prox_logprobs: "Tensor", entropy: "Tensor", batch: "MicroBatch") -> LossSums:
        """The token losses of one micro-batch, summed.

        Args:
            logprobs: [N] log π_θ of the targets, with gradient.
            prox_logprobs: [N] log π_prox, of the policy at the start of the step, detached.
            entropy: [N] entropy of the prediction in nats, for the metrics only.
            batch: where mask, advantages, behaviour and reference log-probabilities come from.
        """


def group_normalised(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (std + 1e-4) with the population's standard deviation; equal rewards give exact zeros.

    The group advantage of GRPO (arXiv 2402.03300).
    """
    if len(set(rewards)) <= 1:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / (std + STD_FLOOR) for r in rewards]


def where_trained(values: "Tensor", mask: "Tensor") -> "Tensor":
    """The values [N] on trained tokens, 0 elsewhere.

    Untrainable tokens carry no behaviour log-probability: their differences must be 0 before any exp can overflow.
    """
    return values.where(mask > 0, 0.0)


def k3(log_ratio: "Tensor") -> "Tensor":
    """[N] e^d - 1 - d of d = log p(x) - log q(x): on draws x of q its mean is KL(q ‖ p); never negative, low variance.

    Schulman, "Approximating KL divergence" (2020), there called k3.
    """
    return log_ratio.exp() - 1 - log_ratio


def reference_divergence(logprobs: "Tensor", batch: "MicroBatch") -> "Tensor":
    """[N] the k3 estimate of KL(π_θ ‖ π_reference) with its gradient, as in GRPO (arXiv 2402.03300, eq. 4).

    The tokens are draws of the policy that generated them, which is taken for π_θ here, as it is there.
    """
    if batch.reference_logprobs is None:
        raise ValueError("the micro-batch has no reference log-probabilities")
    return k3(where_trained(batch.reference_logprobs - logprobs, batch.mask))


def summed(losses: "Tensor", mask: "Tensor", means: Mapping[str, "Tensor"], peaks: Mapping[str, "Tensor"]) -> LossSums:
    """Sums and maxima over the trained tokens of values [N] by metric name; `losses` keeps its gradient."""
    return LossSums(
        loss=(mask * losses).sum(),
        sums={name: (mask * values.detach()).sum() for name, values in {"loss": losses, **means}.items()},
        peaks={name: (mask * values.detach()).max() for name, values in peaks.items()},
    )
