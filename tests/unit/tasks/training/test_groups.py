"""What a step trains on: unmasked answers with their advantages, and the control that cuts their tie."""

import math

import numpy as np
import pytest

from tasks.exchange.trajectories import Group, Outcome, Segment, Trajectory
from tasks.training.algorithms import DecoupledPpo
from tasks.training.groups import permute_advantages, with_advantages

PPO = DecoupledPpo()


def answer(reward: float, outcome: Outcome = Outcome.SCORED, tokens: int = 2) -> Trajectory:
    return Trajectory((Segment((1,) * tokens, (-0.5,) * tokens, 0, "replica-0"),), outcome, reward)


def group(group_id: int, *answers: Trajectory) -> Group:
    return Group(group_id, group_id, (5, 6), answers)


def test_masked_answers_do_not_touch_the_statistics() -> None:
    (prepared,) = with_advantages(
        [group(0, answer(1.0), answer(math.nan, Outcome.TIMEOUT), answer(0.0), answer(math.nan, Outcome.ERROR))],
        PPO,
    )
    assert prepared.numbers == (0, 2)
    assert prepared.advantages == pytest.approx((0.5 / (0.5 + 1e-4), -0.5 / (0.5 + 1e-4)))
    (constant,) = with_advantages([group(1, answer(1.0), answer(1.0), answer(math.nan, Outcome.TIMEOUT))], PPO)
    assert not PPO.keeps(constant.advantages)


def test_permuted_advantages_are_the_groups_own_on_other_answers() -> None:
    groups = with_advantages([group(k, *(answer(float(j % (k + 2) == 0)) for j in range(6))) for k in range(4)], PPO)
    groups += with_advantages([group(4, answer(1.0), answer(1.0))], PPO)
    shuffled = permute_advantages(groups, seed=3, step=5)
    for before, after in zip(groups, shuffled, strict=True):
        negated = tuple(-a for a in after.advantages)
        assert sorted(before.advantages) in (sorted(after.advantages), sorted(negated))
    dealt = [g.advantages for g in shuffled]
    assert dealt != [g.advantages for g in groups]
    assert dealt == [g.advantages for g in permute_advantages(groups, seed=3, step=5)]
    assert dealt != [g.advantages for g in permute_advantages(groups, seed=3, step=6)]
    assert [g.numbers for g in shuffled] == [g.numbers for g in groups]
    assert not PPO.keeps(shuffled[4].advantages)


def test_permuted_advantages_pull_nowhere_however_gradients_are_clipped() -> None:
    (control,) = with_advantages([group(0, answer(1.0), answer(0.0), answer(0.0), answer(0.0))], PPO)
    # An improbable answer has a long gradient. Orthogonal, of lengths 1 and 3 times 10; clipped to norm 1.
    gradients = np.diag([1.0, 10.0, 10.0, 10.0])
    updates = []
    for step in range(4000):
        update = np.array(permute_advantages([control], seed=0, step=step)[0].advantages) @ gradients
        updates.append(update / max(1.0, float(np.linalg.norm(update))))
    assert np.abs(np.mean(updates, axis=0)).max() < 5 / math.sqrt(4000)  # 5 standard errors of values within 1
