"""The loss of decoupled PPO against its formula written out token by token."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.training.algorithms import DecoupledPpo
from tests.support.training import batch_of

finite = st.floats(-3, 3, allow_nan=False)

tokens = st.lists(st.tuples(finite, finite, finite, finite, st.sampled_from([0.0, 1.0])), min_size=1, max_size=12)


@given(tokens, st.sampled_from([0.1, 0.2]), st.sampled_from([1.5, 2.0]))
@settings(max_examples=100)
def test_loss_and_metrics_equal_the_formula(
    rows: list[tuple[float, float, float, float, float]], clip: float, cap: float
) -> None:
    new, prox, behave, advantages, mask = (list(column) for column in zip(*rows, strict=True))
    loss, kl, clipped, capped = 0.0, 0.0, 0, 0
    for n, p, b, a, m in rows:
        if not m:
            continue
        ratio, weight = math.exp(n - p), math.exp(p - b)
        bounded = min(max(ratio, 1 - clip), 1 + clip)
        loss += min(weight, cap) * max(-a * ratio, -a * bounded)
        kl += weight - 1 - (p - b)
        clipped += -a * bounded > -a * ratio + 1e-5
        capped += weight > cap
    algorithm = DecoupledPpo(clip=clip, behaviour_weight_cap=cap)
    batch = batch_of(behave, advantages, mask)
    sums = algorithm.loss(torch.tensor(new), torch.tensor(prox), torch.zeros(len(rows)), batch)
    assert float(sums.loss) == pytest.approx(loss, rel=1e-4, abs=1e-3)
    assert float(sums.sums["loss"]) == pytest.approx(loss, rel=1e-4, abs=1e-3)
    assert float(sums.sums["mismatch_kl"]) == pytest.approx(kl, rel=1e-3, abs=1e-2)
    assert float(sums.sums["ratio/clipped_share"]) >= clipped
    assert float(sums.sums["weight/capped_share"]) == capped


def test_gradient_stops_at_the_clip_and_never_flows_through_the_weight() -> None:
    new = torch.tensor([0.5, -0.5, 0.5, -0.5, 0.0], requires_grad=True)
    prox = torch.zeros(5)
    batch = batch_of([-0.5] * 5, [1.0, 1.0, -1.0, -1.0, 1.0], [1.0] * 5)
    DecoupledPpo(behaviour_weight_cap=10.0).loss(new, prox, torch.zeros(5), batch).loss.backward()
    weight = math.exp(0.5)
    expected = [0.0, -weight * math.exp(-0.5), weight * math.exp(0.5), 0.0, -weight]
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx(expected)


def test_a_masked_token_cannot_poison_the_loss() -> None:
    new = torch.tensor([-1.0, -200.0], requires_grad=True)
    batch = batch_of([-1.0, 300.0], [1.0, 1.0], [1.0, 0.0])
    sums = DecoupledPpo().loss(new, torch.tensor([-1.0, -900.0]), torch.zeros(2), batch)
    sums.loss.backward()
    assert all(torch.isfinite(value) for value in (*sums.sums.values(), *sums.peaks.values()))
    assert new.grad is not None
    assert new.grad.tolist() == [-1.0, 0.0]


def test_the_penalty_is_added_to_the_loss_with_its_gradient() -> None:
    """One token with w = 1 and r = 1: the loss is -A + β (e^d - 1 - d), and its slope -A - β (e^d - 1)."""
    new = torch.tensor([-1.0], requires_grad=True)
    batch = batch_of([-1.0], [2.0], [1.0], reference=[-0.5])
    sums = DecoupledPpo(kl_coefficient=0.1).loss(new, torch.tensor([-1.0]), torch.zeros(1), batch)
    sums.loss.backward()
    divergence = math.exp(0.5) - 1 - 0.5
    assert float(sums.loss.detach()) == pytest.approx(-2.0 + 0.1 * divergence)
    assert float(sums.sums["reference_kl"]) == pytest.approx(divergence)
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-2.0 - 0.1 * (math.exp(0.5) - 1)])


def test_without_a_penalty_nothing_is_said_of_a_reference() -> None:
    algorithm = DecoupledPpo()
    batch = batch_of([-1.0], [2.0], [1.0])
    assert not algorithm.needs_reference
    assert "reference_kl" not in algorithm.loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), batch).sums
    with pytest.raises(ValueError, match="no reference log-probabilities"):
        DecoupledPpo(kl_coefficient=0.1).loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), batch)
