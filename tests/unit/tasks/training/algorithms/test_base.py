"""The pieces that algorithms are made of: group advantages, and the estimate of a divergence."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.training.algorithms import Cispo, DecoupledPpo
from tasks.training.algorithms.base import AlgorithmSection, group_normalised, k3


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16))
def test_group_advantages_are_centred_and_of_unit_scale(rewards: list[float]) -> None:
    advantages = group_normalised(rewards)
    assert math.fsum(advantages) == pytest.approx(0, abs=1e-6)
    assert all(
        (a > b) == (r > s) or abs(r - s) < 1e-9
        for a, r in zip(advantages, rewards, strict=True)
        for b, s in zip(advantages, rewards, strict=True)
    )
    spread = math.sqrt(math.fsum(a * a for a in advantages) / len(advantages))
    assert spread <= 1 + 1e-9


def test_advantages_of_known_rewards() -> None:
    scale = 0.5 + 1e-4
    assert group_normalised([1.0, 0.0, 1.0, 0.0]) == pytest.approx([0.5 / scale, -0.5 / scale] * 2)
    # 0.1 + 0.2 style rounding must not turn a constant group into a signal
    assert group_normalised([0.1] * 7) == [0.0] * 7


@pytest.mark.parametrize("algorithm", [DecoupledPpo(), Cispo()])  # those with group-normalised advantages
def test_advantages_are_normalised_within_each_group_and_a_constant_group_is_not_kept(
    algorithm: AlgorithmSection,
) -> None:
    scale = 0.5 + 1e-4
    some, constant, none = algorithm.advantages([[3.0, 2.0], [1.0, 1.0, 1.0], []])
    assert some == pytest.approx([0.5 / scale, -0.5 / scale])
    assert constant == [0.0] * 3
    assert [algorithm.keeps(advantages) for advantages in (some, constant, none)] == [True, False, False]


def test_the_divergence_is_estimated_without_bias_and_never_below_zero() -> None:
    """KL of (0.7, 0.3) against (0.4, 0.6), as the mean over draws of the former."""
    q, p = torch.tensor([0.7, 0.3]), torch.tensor([0.4, 0.6])
    estimates = k3(p.log() - q.log())
    assert (estimates >= 0).all()
    exact = 0.7 * math.log(0.7 / 0.4) + 0.3 * math.log(0.3 / 0.6)
    assert float((q * estimates).sum()) == pytest.approx(exact, rel=1e-5)
