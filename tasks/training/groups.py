"""From the groups of a step to what is trained on: their unmasked answers, and the advantage of each."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tasks.exchange.trajectories import Group
from tasks.training.algorithms.base import AlgorithmSection
from tasks.training.packing import TrainingGroup


def with_advantages(groups: Sequence[Group], algorithm: AlgorithmSection) -> list[TrainingGroup]:
    """Each group with its unmasked answers and the advantages that the algorithm gives them; all groups of a step."""
    counted = [tuple(answer for answer in group.trained if answer.tokens) for group in groups]
    advantages = algorithm.advantages([[answer.reward for answer in answers] for answers in counted])
    return [
        TrainingGroup(group.prompt_ids, answers, tuple(of_group))
        for group, answers, of_group in zip(groups, counted, advantages, strict=True)
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
