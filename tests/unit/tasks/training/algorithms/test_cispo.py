"""CISPO against its formula with numbers worked out by hand."""

import math

import pytest
import torch

from tasks.training.algorithms import Cispo
from tests.support.training import batch_of


def test_loss_and_gradient_of_known_tokens() -> None:
    """Weights e^0.5, 2 (capped from e), e^-1, and an untrainable token; the gradient is -weight · A, at the cap too."""
    new = torch.tensor([-1.0, -1.0, -3.0, -5.0], requires_grad=True)
    batch = batch_of([-1.5, -2.0, -2.0, 300.0], [1.0, -1.0, 0.5, 9.0], [1.0, 1.0, 1.0, 0.0])
    sums = Cispo(weight_cap=2.0).loss(new, new.detach() - 0.25, torch.ones(4), batch)
    sums.loss.backward()
    root = math.exp(0.5)
    assert float(sums.loss.detach()) == pytest.approx(root * 1.0 - 2.0 * 1.0 + math.exp(-1) * 0.5 * 3.0)
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-root, 2.0, -0.5 * math.exp(-1), 0.0])
    drifts = [0.25, 0.75, -1.25]  # from the policy that generated to the one at the step's start
    expected = {
        "loss": float(sums.loss.detach()),
        "mismatch_kl": sum(math.exp(d) - 1 - d for d in drifts),
        "entropy": 3.0,
        "ratio/mean": 3 * math.exp(0.25),
        "weight/mean": root + 2.0 + math.exp(-1),
        "weight/capped_share": 1.0,
    }
    assert {name: float(value) for name, value in sums.sums.items()} == pytest.approx(expected)
    peaks = {"ratio/max": math.exp(0.25), "weight/max": math.e}
    assert {name: float(value) for name, value in sums.peaks.items()} == pytest.approx(peaks)


def test_a_token_that_a_clipped_ratio_would_silence_still_pulls() -> None:
    """PPO's clip at 1 ± 0.2 gives no gradient for a good token that has become 3 times likelier within the step."""
    new = torch.tensor([-1.0], requires_grad=True)
    prox = torch.tensor([-1.0 - math.log(3)])
    batch = batch_of(prox.tolist(), [1.0], [1.0])
    Cispo().loss(new, prox, torch.zeros(1), batch).loss.backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-3.0])


def test_the_penalty_is_added_with_its_gradient() -> None:
    new = torch.tensor([-1.0], requires_grad=True)
    batch = batch_of([-1.0], [2.0], [1.0], reference=[-1.5])
    sums = Cispo(kl_coefficient=0.5).loss(new, new.detach(), torch.zeros(1), batch)
    sums.loss.backward()
    divergence = math.exp(-0.5) - 1 + 0.5
    assert float(sums.loss.detach()) == pytest.approx(2.0 + 0.5 * divergence)
    assert float(sums.sums["reference_kl"]) == pytest.approx(divergence)
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-2.0 - 0.5 * (math.exp(-0.5) - 1)])
