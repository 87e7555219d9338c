"""The loss against its formula written out token by token."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.exchange.trajectories import Group, Outcome, Segment, Trajectory
from tasks.training.algorithms.losses import (
    SUM_NAMES,
    has_gradient,
    loss_metrics,
    normalise_group,
    permute_advantages,
    policy_loss,
    with_advantages,
)
from tasks.training.packing import MicroBatch

finite = st.floats(-3, 3, allow_nan=False)


def answer(reward: float, outcome: Outcome = Outcome.SCORED, tokens: int = 2) -> Trajectory:
    return Trajectory((Segment((1,) * tokens, (-0.5,) * tokens, 0, "replica-0"),), outcome, reward)


def group(group_id: int, *answers: Trajectory) -> Group:
    return Group(group_id, group_id, (5, 6), answers)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16))
def test_group_advantages_are_centred_and_of_unit_scale(rewards: list[float]) -> None:
    advantages = normalise_group(rewards)
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
    assert normalise_group([1.0, 0.0, 1.0, 0.0]) == pytest.approx([0.5 / scale, -0.5 / scale] * 2)
    # 0.1 + 0.2 style rounding must not turn a constant group into a signal
    assert normalise_group([0.1] * 7) == [0.0] * 7


def test_masked_answers_do_not_touch_the_statistics() -> None:
    (prepared,) = with_advantages(
        [group(0, answer(1.0), answer(math.nan, Outcome.TIMEOUT), answer(0.0), answer(math.nan, Outcome.ERROR))]
    )
    assert len(prepared.answers) == 2
    assert prepared.advantages == pytest.approx((0.5 / (0.5 + 1e-4), -0.5 / (0.5 + 1e-4)))
    (constant,) = with_advantages([group(1, answer(1.0), answer(1.0), answer(math.nan, Outcome.TIMEOUT))])
    assert not has_gradient(constant)


def test_permuted_advantages_are_the_groups_own_on_other_answers() -> None:
    groups = with_advantages([group(k, *(answer(float(j % (k + 2) == 0)) for j in range(6))) for k in range(4)])
    groups += with_advantages([group(4, answer(1.0), answer(1.0))])
    shuffled = permute_advantages(groups, seed=3, step=5)
    for before, after in zip(groups, shuffled, strict=True):
        negated = tuple(-a for a in after.advantages)
        assert sorted(before.advantages) in (sorted(after.advantages), sorted(negated))
    dealt = [g.advantages for g in shuffled]
    assert dealt != [g.advantages for g in groups]
    assert dealt == [g.advantages for g in permute_advantages(groups, seed=3, step=5)]
    assert dealt != [g.advantages for g in permute_advantages(groups, seed=3, step=6)]
    assert [g.answers for g in shuffled] == [g.answers for g in groups]
    assert not has_gradient(shuffled[4])


def test_permuted_advantages_pull_nowhere_however_gradients_are_clipped() -> None:
    (control,) = with_advantages([group(0, answer(1.0), answer(0.0), answer(0.0), answer(0.0))])
    # An improbable answer has a long gradient. Orthogonal, of lengths 1 and 3 times 10; clipped to norm 1.
    gradients = np.diag([1.0, 10.0, 10.0, 10.0])
    updates = []
    for step in range(4000):
        update = np.array(permute_advantages([control], seed=0, step=step)[0].advantages) @ gradients
        updates.append(update / max(1.0, float(np.linalg.norm(update))))
    assert np.abs(np.mean(updates, axis=0)).max() < 5 / math.sqrt(4000)  # 5 standard errors of values within 1


def batch_of(behaviour: list[float], advantages: list[float], mask: list[float]) -> MicroBatch:
    index = torch.zeros(len(mask), dtype=torch.long)
    rows = (torch.tensor(behaviour), torch.tensor(advantages), torch.tensor(mask))
    return MicroBatch(index, index, index, index, index, index, *rows, index)


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
    sums = policy_loss(
        torch.tensor(new), torch.tensor(prox), torch.zeros(len(rows)), batch_of(behave, advantages, mask), clip, cap
    )
    total = dict(zip(SUM_NAMES, sums.sums.tolist(), strict=True))
    assert float(sums.loss) == pytest.approx(loss, rel=1e-4, abs=1e-3)
    assert total["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-3)
    assert total["mismatch_kl"] == pytest.approx(kl, rel=1e-3, abs=1e-2)
    assert total["tokens"] == sum(mask)
    assert total["clipped"] >= clipped
    assert total["capped"] == capped


def test_gradient_stops_at_the_clip_and_never_flows_through_the_weight() -> None:
    new = torch.tensor([0.5, -0.5, 0.5, -0.5, 0.0], requires_grad=True)
    prox = torch.zeros(5)
    batch = batch_of([-0.5] * 5, [1.0, 1.0, -1.0, -1.0, 1.0], [1.0] * 5)
    policy_loss(new, prox, torch.zeros(5), batch, clip=0.2, weight_cap=10.0).loss.backward()
    weight = math.exp(0.5)
    expected = [0.0, -weight * math.exp(-0.5), weight * math.exp(0.5), 0.0, -weight]
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx(expected)


def test_a_masked_token_cannot_poison_the_loss() -> None:
    new = torch.tensor([-1.0, -200.0], requires_grad=True)
    batch = batch_of([-1.0, 300.0], [1.0, 1.0], [1.0, 0.0])
    sums = policy_loss(new, torch.tensor([-1.0, -900.0]), torch.zeros(2), batch, clip=0.2, weight_cap=2.0)
    sums.loss.backward()
    assert torch.isfinite(sums.sums).all()
    assert torch.isfinite(sums.peaks).all()
    assert new.grad is not None
    assert new.grad.tolist() == [-1.0, 0.0]


def test_no_trained_token_gives_no_metrics() -> None:
    assert loss_metrics([0.0] * len(SUM_NAMES), [0.0, 0.0]) == {}
