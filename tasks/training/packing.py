"""Packs groups into micro-batches in which every prompt is computed once.

A packed sequence is a row of trees: a group's prompt is the trunk, its answers are branches. Positions restart at the
prompt's end for every answer, and a token attends to its own prompt and its own answer only, so each answer's
log-probabilities equal those of the prompt and that answer alone. Groups do not see one another.

An answer's last token predicts nothing, so it is a target and never an input.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tasks.exchange.trajectories import Trajectory


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """A prompt with the answers that count (the unmasked ones) and one advantage for each."""

    prompt_ids: tuple[int, ...]
    answers: tuple[Trajectory, ...]
    advantages: tuple[float, ...]

    @property
    def packed_tokens(self) -> int:
        """Tokens this group adds to a packed sequence."""
        return len(self.prompt_ids) + sum(len(answer.token_ids) - 1 for answer in self.answers)

    @property
    def trained_tokens(self) -> int:
        """Answer tokens that the loss counts: those of trainable segments."""
        return sum(len(s.token_ids) for answer in self.answers for s in answer.segments if s.trainable)


class MicroBatch(NamedTuple):
    """One packed sequence of T input tokens with N predicted answer tokens.

    Attributes:
        input_ids: [T] prompts, each followed by its answers without their last tokens.
        position_ids: [T] position within prompt + answer.
        group_ids: [T] number of the group within this micro-batch.
        branch_ids: [T] 0 on prompt tokens; on answer tokens the number of the answer, unique in this micro-batch.
        predict_at: [N] index into T of the token whose hidden state predicts the target.
        targets: [N] answer tokens.
        behaviour_logprobs: [N] log-probabilities under the policy that generated the token, float32.
        advantages: [N] advantage of the token's answer, float32.
        mask: [N] 1 where the loss counts the token, 0 in untrainable segments, float32.
        versions: [N] policy version that generated the token.
    """

    input_ids: Tensor
    position_ids: Tensor
    group_ids: Tensor
    branch_ids: Tensor
    predict_at: Tensor
    targets: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    versions: Tensor

    def attention_mask(self) -> Tensor:
        """[1, 1, T, T] boolean, True where the query (row) may attend to the key (column)."""
        group, branch = self.group_ids, self.branch_ids
        count = len(group)
        causal = torch.ones(count, count, dtype=torch.bool, device=group.device).tril()
        same_group = group[:, None] == group[None, :]
        on_path = (branch[None, :] == 0) | (branch[:, None] == branch[None, :])
        return (causal & same_group & on_path)[None, None]

    def to(self, device: torch.device) -> "MicroBatch":
        """The same micro-batch on another device."""
        return MicroBatch(*(tensor.to(device) for tensor in self))


def pack(groups: Sequence[TrainingGroup], tokens_per_micro_batch: int) -> list[MicroBatch]:
    """Pack groups, largest first, each into the first micro-batch with room; a group above the budget goes alone."""
    bins: list[list[TrainingGroup]] = []
    room: list[int] = []
    for group in sorted(groups, key=lambda g: g.packed_tokens, reverse=True):
        size = group.packed_tokens
        place = next((i for i, free in enumerate(room) if size <= free), None)
        if place is None:
            bins.append([group])
            room.append(tokens_per_micro_batch - size)
        else:
            bins[place].append(group)
            room[place] -= size
    return [lay_out(packed) for packed in bins]


def deal(micro_batches: Sequence[MicroBatch], ranks: int) -> list[list[MicroBatch]]:
    """Deal micro-batches to ranks by token count, the largest to the least loaded rank.

    Every rank gets the same number of micro-batches, because ranks step through collectives together: short ranks are
    filled up with empty ones.
    """
    hands: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for micro_batch in sorted(micro_batches, key=lambda m: len(m.input_ids), reverse=True):
        rank = loads.index(min(loads))
        hands[rank].append(micro_batch)
        loads[rank] += len(micro_batch.input_ids)
    longest = max(len(hand) for hand in hands)
    for hand in hands:
        hand.extend(empty_micro_batch() for _ in range(longest - len(hand)))
    return hands


def empty_micro_batch() -> MicroBatch:
    """One token that predicts one token that no loss counts: keeps a rank in step with the others."""
    index, value = torch.zeros(1, dtype=torch.long), torch.zeros(1)
    return MicroBatch(index, index, index, index, index, index, value, value, value, index)


def lay_out(groups: Sequence[TrainingGroup]) -> MicroBatch:
    """Lay groups out in one packed sequence, in the order given."""
    inputs: list[int] = []
    positions: list[int] = []
    group_ids: list[int] = []
    branch_ids: list[int] = []
    predict_at: list[int] = []
    targets: list[int] = []
    behaviour: list[float] = []
    advantages: list[float] = []
    mask: list[float] = []
    versions: list[int] = []
    branch = 0
    for number, group in enumerate(groups):
        prompt_length = len(group.prompt_ids)
        inputs.extend(group.prompt_ids)
        positions.extend(range(prompt_length))
        branch_ids.extend([0] * prompt_length)
        prompt_end = len(inputs) - 1
        for answer, advantage in zip(group.answers, group.advantages, strict=True):
            branch += 1
            length = len(answer.token_ids)
            predict_at.append(prompt_end)
            predict_at.extend(range(len(inputs), len(inputs) + length - 1))
            inputs.extend(answer.token_ids[:-1])
            positions.extend(range(prompt_length, prompt_length + length - 1))
            branch_ids.extend([branch] * (length - 1))
            targets.extend(answer.token_ids)
            advantages.extend([advantage] * length)
            for segment in answer.segments:
                behaviour.extend(segment.logprobs)
                mask.extend([float(segment.trainable)] * len(segment.token_ids))
                versions.extend([segment.version] * len(segment.token_ids))
        group_ids.extend([number] * (len(inputs) - len(group_ids)))
    return MicroBatch(
        input_ids=torch.tensor(inputs),
        position_ids=torch.tensor(positions),
        group_ids=torch.tensor(group_ids),
        branch_ids=torch.tensor(branch_ids),
        predict_at=torch.tensor(predict_at),
        targets=torch.tensor(targets),
        behaviour_logprobs=torch.tensor(behaviour, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        mask=torch.tensor(mask, dtype=torch.float32),
        versions=torch.tensor(versions),
    )
