"""From the groups of a step to what is trained on: their unmasked answers, and the advantage of each."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tasks.exchange.payloads import StoredGroup
from tasks.exchange.trajectories import Group
from tasks.training.algorithms.base import AlgorithmSection
from tasks.training.packing import TrainingGroup


def with_advantages(groups: Sequence[Group | StoredGroup], algorithm: AlgorithmSection) -> list[TrainingGroup]:
    """Each group with its unmasked answers and the advantages that the algorithm gives them; all groups of a step.

    Outlines are enough for that, so of stored groups nothing is read.
    """
    outlines = [group.outline for group in groups]
    counted = [
        tuple(number for number, answer in enumerate(outline.trajectories) if answer.tokens and not answer.masked)
        for outline in outlines
    ]
    rewards = [
        [outline.trajectories[number].reward for number in numbers]
        for outline, numbers in zip(outlines, counted, strict=True)
    ]
    return [
        TrainingGroup(group, outline, numbers, tuple(advantages))
        for group, outline, numbers, advantages in zip(
            groups, outlines, counted, algorithm.advantages(rewards), strict=True
        )
    ]


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
