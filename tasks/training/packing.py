"""Deals a minibatch to the ranks and packs each rank's hand into micro-batches.

A packed sequence is a row of trees: a group's prompt is the trunk, its answers are branches. Positions restart at the
prompt's end for every answer, and a token attends to its own prompt and its own answer only, so each answer's
log-probabilities equal those of the prompt and that answer alone. Groups do not see one another.

A group stays whole where it can. Its answers go to several ranks where that makes the busiest rank end earlier, and to
several micro-batches where the group is above the budget; each part computes the prompt once. What an answer adds to
the loss depends on none of this.

An answer's last token predicts nothing, so it is a target and never an input.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasks.exchange.payloads import StoredGroup
from tasks.exchange.trajectories import Group, GroupOutline, TokenIds

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TrainingGroup:
    """A group's answers that count (unmasked ones), by their numbers in it, and one advantage for each.

    Everything is decided by the outline; tokens stay in `source` until a micro-batch is laid out of them.
    """

    source: Group | StoredGroup
    outline: GroupOutline
    numbers: tuple[int, ...]
    advantages: tuple[float, ...]

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.outline.prompt_tokens

    @property
    def packed_tokens(self) -> int:
        """Tokens this group adds to a packed sequence."""
        return self.prompt_tokens + sum(self.answer_sizes)

    @property
    def trained_tokens(self) -> int:
        """Answer tokens that the loss counts: those of trainable segments."""
        return sum(self.outline.trajectories[number].trained_tokens for number in self.numbers)

    @property
    def answer_sizes(self) -> list[int]:
        """Tokens that each answer adds to a packed sequence."""
        return [self.outline.trajectories[number].tokens - 1 for number in self.numbers]

    def part(self, places: Iterable[int]) -> "TrainingGroup":
        """The prompt with some of the answers, by their places among these; in the group's order."""
        kept = sorted(places)
        return replace(
            self,
            numbers=tuple(self.numbers[k] for k in kept),
            advantages=tuple(self.advantages[k] for k in kept),
        )

    def read(self) -> Group:
        """The prompt and these answers with their tokens."""
        return self.source.with_answers(self.numbers)


def training_group(group: Group, advantages: Sequence[float]) -> TrainingGroup:
    """All answers of a group that is in memory."""
    return TrainingGroup(group, group.outline, tuple(range(len(group.trajectories))), tuple(advantages))


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
        reference_logprobs: [N] log-probabilities under the model that the run began with, float32; None where the
            algorithm does not ask for them.
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
    reference_logprobs: Tensor | None = None

    def attention_mask(self) -> Tensor:
        """[1, 1, T, T] boolean, True where the query (row) may attend to the key (column)."""
        group, branch = self.group_ids, self.branch_ids
        allowed = branch[:, None] == branch[None, :]
        allowed |= branch[None, :] == 0
        allowed &= group[:, None] == group[None, :]
        return allowed.tril_()[None, None]

    def to(self, device: torch.device) -> "MicroBatch":
        """The same micro-batch on another device."""
        return MicroBatch._make(None if tensor is None else tensor.to(device) for tensor in self)


def hand_of(groups: Sequence[TrainingGroup], tokens_per_micro_batch: int, rank: int, ranks: int) -> list[MicroBatch]:
    """The micro-batches of one rank; every rank passes the same groups, and reads the tokens of its own share only.

    Every rank gets the same number of micro-batches, because ranks step through collectives together: short ranks are
    filled up with empty ones.
    """
    packed = [pack(hand, tokens_per_micro_batch) for hand in deal(groups, ranks)]
    missing = max(len(bins) for bins in packed) - len(packed[rank])
    return [lay_out(parts) for parts in packed[rank]] + [empty_micro_batch() for _ in range(missing)]


def deal(groups: Sequence[TrainingGroup], ranks: int) -> list[list[TrainingGroup]]:
    """Deal groups to ranks by token count: whole ones first, the largest to the least loaded rank.

    Then single answers leave the busiest rank, for as long as that leaves the busier of both with less. A prompt counts
    on every rank that has answers of its group, so groups are not cut where it would not help.
    """
    sizes = [group.answer_sizes for group in groups]
    prompts = [group.prompt_tokens for group in groups]
    totals = [group.packed_tokens for group in groups]
    hands: list[dict[int, set[int]]] = [{} for _ in range(ranks)]
    loads = [0] * ranks
    for group in sorted(range(len(groups)), key=lambda g: totals[g], reverse=True):
        rank = loads.index(min(loads))
        hands[rank][group] = set(range(len(sizes[group])))
        loads[rank] += totals[group]
    while (move := _best_move(hands, loads, sizes, prompts)) is not None:
        source, target, group, answer = move
        hands[source][group].remove(answer)
        loads[source] -= sizes[group][answer]
        if not hands[source][group]:
            del hands[source][group]
            loads[source] -= prompts[group]
        if group not in hands[target]:
            hands[target][group] = set()
            loads[target] += prompts[group]
        hands[target][group].add(answer)
        loads[target] += sizes[group][answer]
    return [[groups[group].part(numbers) for group, numbers in hand.items()] for hand in hands]


def _best_move(
    hands: Sequence[dict[int, set[int]]], loads: Sequence[int], sizes: Sequence[Sequence[int]], prompts: Sequence[int]
) -> tuple[int, int, int, int] | None:
    """(from, to, group, answer) that takes most from the busiest rank without making another as busy."""
    source = loads.index(max(loads))
    least, best = loads[source], None
    for group, answers in hands[source].items():
        for answer in sorted(answers):
            given = sizes[group][answer] + (prompts[group] if len(answers) == 1 else 0)
            for target, load in enumerate(loads):
                taken = sizes[group][answer] + (0 if group in hands[target] else prompts[group])
                busier = max(loads[source] - given, load + taken)
                if busier < least:
                    least, best = busier, (source, target, group, answer)
    return best


def pack(groups: Sequence[TrainingGroup], tokens_per_micro_batch: int) -> list[list[TrainingGroup]]:
    """Put groups, split where they are above the budget, into the first micro-batch with room, largest first.

    Only a single answer that is above the budget with its prompt makes a micro-batch larger than that.
    """
    bins: list[list[TrainingGroup]] = []
    room: list[int] = []
    parts = [part for group in groups for part in split(group, tokens_per_micro_batch)]
    for part in sorted(parts, key=lambda p: p.packed_tokens, reverse=True):
        size = part.packed_tokens
        place = next((i for i, free in enumerate(room) if size <= free), None)
        if place is None:
            bins.append([part])
            room.append(tokens_per_micro_batch - size)
        else:
            bins[place].append(part)
            room[place] -= size
    return bins


def split(group: TrainingGroup, tokens: int) -> list[TrainingGroup]:
    """Cut a group into the fewest even parts of at most so many tokens; a longer answer is a part of its own."""
    sizes, prompt = group.answer_sizes, group.prompt_tokens
    for count in range(1, len(sizes)):
        parts = _even_parts(sizes, count)
        if all(len(part) == 1 or prompt + sum(sizes[k] for k in part) <= tokens for part in parts):
            return [group.part(part) for part in parts]
    return [group.part([k]) for k in range(len(sizes))]


def _even_parts(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Numbers of the answers in each part: the largest answer to the smallest part."""
    parts: list[list[int]] = [[] for _ in range(count)]
    totals = [0] * count
    for answer in sorted(range(len(sizes)), key=lambda k: sizes[k], reverse=True):
        smallest = min(range(count), key=lambda i: (totals[i], len(parts[i])))
        parts[smallest].append(answer)
        totals[smallest] += sizes[answer]
    return parts


def empty_micro_batch() -> MicroBatch:
    """One token that predicts one token that no loss counts: keeps a rank in step with the others."""
    index, value = torch.zeros(1, dtype=torch.long), torch.zeros(1)
    return MicroBatch(index, index, index, index, index, index, value, value, value, index)


def lay_out(groups: Sequence[TrainingGroup]) -> MicroBatch:
    """Lay groups out in one packed sequence, in the order given."""
    inputs: list[TokenIds] = []
    positions: list[Index] = []
    group_ids: list[Index] = []
    branch_ids: list[Index] = []
    predict_at: list[Index] = []
    at = branch = 0
    contents = [group.read() for group in groups]
    for number, (group, content) in enumerate(zip(groups, contents, strict=True)):
        prompt = group.prompt_tokens
        inputs.append(content.prompt_ids)
        positions.append(np.arange(prompt))
        branch_ids.append(np.zeros(prompt, np.int64))
        at += prompt
        prompt_end = at - 1
        for answer, size in zip(content.trajectories, group.answer_sizes, strict=True):
            branch += 1
            inputs.append(answer.token_ids[:-1])
            positions.append(np.arange(prompt, prompt + size))
            branch_ids.append(np.full(size, branch))
            predict_at += [np.array([prompt_end]), np.arange(at, at + size)]
            at += size
        group_ids.append(np.full(group.packed_tokens, number))
    answers = [answer for content in contents for answer in content.trajectories]
    advantages = np.array([advantage for group in groups for advantage in group.advantages], np.float32)
    segments = [segment for answer in answers for segment in answer.segments]
    lengths = [len(segment.token_ids) for segment in segments]
    return MicroBatch(
        input_ids=_joined(inputs, np.int64),
        position_ids=_joined(positions, np.int64),
        group_ids=_joined(group_ids, np.int64),
        branch_ids=_joined(branch_ids, np.int64),
        predict_at=_joined(predict_at, np.int64),
        targets=_joined([segment.token_ids for segment in segments], np.int64),
        behaviour_logprobs=_joined([segment.logprobs for segment in segments], np.float32),
        advantages=torch.from_numpy(np.repeat(advantages, [answer.tokens for answer in answers])),
        mask=torch.from_numpy(np.repeat(np.array([s.trainable for s in segments], np.float32), lengths)),
        versions=torch.from_numpy(np.repeat(np.array([s.version for s in segments], np.int64), lengths)),
    )


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts, dtype=dtype))
