"""A packed sequence gives every answer exactly the context it has alone; ranks share answers evenly, once each."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tasks.exchange.payloads import DamagedPayload, StoredGroup, load_group, open_group, save_group
from tasks.exchange.trajectories import Group, Outcome, Segment, TokenIds, Trajectory
from tasks.training import policy as policy_module
from tasks.training.algorithms import DecoupledPpo
from tasks.training.groups import with_advantages
from tasks.training.packing import TrainingGroup, deal, hand_of, lay_out, pack, split, training_group
from tasks.training.policy import Policy

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

token_ids = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=7).map(tuple)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    segments = []
    for tokens in draw(st.lists(token_ids, min_size=1, max_size=3)):
        logprobs = tuple(-0.1 * (k + 1) for k in range(len(tokens)))
        segments.append(Segment(tokens, logprobs, draw(st.integers(0, 9)), "replica-0", draw(st.booleans())))
    return Trajectory(tuple(segments), Outcome.SCORED, 1.0)


@st.composite
def training_groups(draw: st.DrawFn) -> TrainingGroup:
    answers = tuple(draw(st.lists(trajectories(), min_size=1, max_size=4)))
    return training_group(Group(0, 0, draw(token_ids), answers), [0.5 + k for k in range(len(answers))])


@given(st.lists(training_groups(), min_size=1, max_size=4))
@settings(max_examples=60)
def test_what_a_token_attends_to_is_its_prompt_and_its_own_answer(groups: list[TrainingGroup]) -> None:
    batch = lay_out(groups)
    attends = batch.attention_mask()[0, 0]
    at = 0
    for group in groups:
        content = group.read()
        for answer, advantage in zip(content.trajectories, group.advantages, strict=True):
            whole = [*content.prompt_ids.tolist(), *answer.token_ids.tolist()]
            trainable = [s.trainable for s in answer.segments for _ in s.token_ids]
            versions = [s.version for s in answer.segments for _ in s.token_ids]
            behaviour = [p for s in answer.segments for p in s.logprobs]
            for k, target in enumerate(answer.token_ids):
                seen = attends[batch.predict_at[at]].nonzero()[:, 0]
                context = whole[: group.prompt_tokens + k]
                assert batch.input_ids[seen].tolist() == context
                assert batch.position_ids[seen].tolist() == list(range(len(context)))
                assert batch.targets[at] == target
                assert batch.mask[at] == trainable[k]
                assert batch.versions[at] == versions[k]
                assert batch.advantages[at] == advantage
                assert batch.behaviour_logprobs[at] == pytest.approx(behaviour[k])
                at += 1
    assert at == len(batch.targets)
    assert len(batch.input_ids) == sum(group.packed_tokens for group in groups)
    assert batch.mask.sum() == sum(group.trained_tokens for group in groups)


def answers_of(groups: Sequence[TrainingGroup]) -> Counter[tuple[object, ...]]:
    """Every answer with its prompt and its advantage."""
    return Counter(
        (tuple(content.prompt_ids), repr(answer), advantage)
        for group in groups
        for content in [group.read()]
        for answer, advantage in zip(content.trajectories, group.advantages, strict=True)
    )


@given(st.lists(training_groups(), min_size=1, max_size=8), st.integers(1, 60), st.integers(1, 5))
@settings(max_examples=100)
def test_every_answer_is_packed_once_within_the_budget(groups: list[TrainingGroup], budget: int, ranks: int) -> None:
    hands = deal(groups, ranks)
    assert answers_of([part for hand in hands for part in hand]) == answers_of(groups)
    batches = [hand_of(groups, budget, rank, ranks) for rank in range(ranks)]
    assert len({len(hand) for hand in batches}) == 1
    for hand, laid_out in zip(hands, batches, strict=True):
        packed = pack(hand, budget)
        assert answers_of([part for bin_ in packed for part in bin_]) == answers_of(hand)
        for bin_ in packed:
            tokens = sum(part.packed_tokens for part in bin_)
            assert tokens <= budget or sum(len(part.numbers) for part in bin_) == 1
        for bin_, batch in zip(packed, laid_out, strict=False):
            assert torch.equal(batch.targets, lay_out(bin_).targets)
        assert not any(batch.mask.any() for batch in laid_out[len(packed) :])


def test_a_rank_reads_its_own_answers_and_nothing_else(tmp_path: Path) -> None:
    """The numbers that it asks of each payload; and of the files, in which all that others were dealt is damaged."""
    plain = some_groups()
    for number, group in enumerate(plain):
        save_group(tmp_path / str(number), group.read())
    asked: set[tuple[int, int]] = set()

    class Watched(StoredGroup):
        def with_answers(self, numbers: Iterable[int]) -> Group:
            asked.update((id(self), number) for number in numbers)
            return super().with_answers(numbers)

    opened = [open_group(tmp_path / str(number)) for number in range(len(plain))]
    stored = [Watched(*(getattr(payload, field.name) for field in fields(payload))) for payload in opened]
    groups = with_advantages(stored, DecoupledPpo())
    assert [group.advantages for group in groups] == [group.advantages for group in plain]
    for rank in range(2):
        expected = hand_of(plain, 20, rank, 2)
        mine = {(id(group.source), number) for group in deal(groups, 2)[rank] for number in group.numbers}
        for number, payload in enumerate(stored):
            save_group(tmp_path / str(number), plain[number].read())
            others = [k for k in range(len(payload.outline.trajectories)) if (id(payload), k) not in mine]
            spoil(payload, others)
        asked.clear()
        hand = hand_of(groups, 20, rank, 2)
        assert asked == mine
        for found, batch in zip(hand, expected, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(found[:10], batch[:10], strict=True))
        assert any(is_damaged(tmp_path / str(number)) for number in range(len(plain)))


def is_damaged(path: Path) -> bool:
    try:
        load_group(path)
    except DamagedPayload:
        return True
    return False


def spoil(payload: StoredGroup, numbers: Sequence[int]) -> None:
    """Write other token ids over those of some answers."""
    data = bytearray(payload.path.read_bytes())
    place, columns = payload.tokens["token_ids"], payload.columns
    for number in numbers:
        first, end = columns["trajectory_start"][number : number + 2]
        begin, stop = columns["segment_start"][first], columns["segment_start"][end]
        data[place.start + 4 * begin : place.start + 4 * stop] = b"\xff" * 4 * (stop - begin)
    payload.path.write_bytes(data)


def group_of(prompt: int, *lengths: int) -> TrainingGroup:
    """A group whose answers add so many tokens to a packed sequence."""
    answers = tuple(
        Trajectory((Segment((1,) * (n + 1), (-1.0,) * (n + 1), 0, "replica-0"),), Outcome.SCORED, 0.0) for n in lengths
    )
    return training_group(Group(0, 0, np.ones(prompt), answers), [1.0] * len(answers))


@pytest.mark.parametrize(
    ("budget", "parts"),
    [
        (70, [[30, 20, 10, 5]]),
        (60, [[30, 5], [20, 10]]),  # even, where filling the first would give 55 and 10
        (35, [[30], [20], [10, 5]]),
        (10, [[30], [20], [10], [5]]),
        (1, [[30], [20], [10], [5]]),
    ],
)
def test_a_group_above_the_budget_is_cut_into_the_fewest_even_parts(budget: int, parts: list[list[int]]) -> None:
    found = split(group_of(5, 30, 20, 10, 5), budget)
    assert [part.answer_sizes for part in found] == parts
    assert all(part.prompt_tokens == 5 for part in found)


@pytest.mark.parametrize(
    ("groups", "ranks", "loads"),
    [
        ([group_of(10, *[20] * 4)] * 4, 2, [180, 180]),  # whole groups are even
        ([group_of(10, *[20] * 16)], 4, [90] * 4),  # one group for all
        ([group_of(10, *[20] * 4)] * 3, 2, [140, 140]),
        ([group_of(500, *[20] * 4)] * 3, 2, [1120, 1120]),
        ([group_of(10, 20)] * 3, 2, [60, 30]),  # answers stay whole
        ([group_of(10, 300, 20, 20)], 3, [50, 310, 0]),
    ],
)
def test_groups_are_cut_where_that_makes_the_busiest_rank_end_earlier(
    groups: list[TrainingGroup], ranks: int, loads: list[int]
) -> None:
    assert [sum(part.packed_tokens for part in hand) for hand in deal(groups, ranks)] == loads


def models() -> list[PreTrainedModel]:
    torch.manual_seed(0)
    return [
        Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)),
        Qwen2ForCausalLM(Qwen2Config(**SIZES)),
        LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
        MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    ]


def some_groups() -> list[TrainingGroup]:
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> TokenIds:
        return torch.randint(0, VOCABULARY, (count,), generator=generator).numpy().astype(np.int32)

    groups = []
    for prompt_length, lengths in ((5, (3, 1, 4)), (9, (2, 6)), (1, (1, 2, 3, 8))):
        answers = tuple(
            Trajectory((Segment(tokens(n), (-1.0,) * n, 0, "replica-0"),), Outcome.SCORED, 0.0) for n in lengths
        )
        groups.append(training_group(Group(0, 0, tokens(prompt_length), answers), [0.0] * len(answers)))
    return groups


@pytest.mark.parametrize("model", models(), ids=lambda m: m.config.model_type)
@pytest.mark.parametrize("head_chunk", [1024, 4])
def test_log_probabilities_equal_each_answer_computed_alone(
    model: PreTrainedModel, head_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_module, "HEAD_CHUNK", head_chunk)
    temperature = 0.7
    groups = some_groups()
    expected, expected_entropy = [], []
    for content in [group.read() for group in groups]:
        for answer in content.trajectories:
            row = torch.tensor([[*content.prompt_ids, *answer.token_ids]])
            logprobs = (model(row).logits[0, len(content.prompt_ids) - 1 : -1] / temperature).log_softmax(-1)
            expected.append(logprobs.gather(1, row[0, len(content.prompt_ids) :, None])[:, 0])
            expected_entropy.append(torch.distributions.Categorical(logits=logprobs).entropy())
    model.config._attn_implementation = "sdpa"
    logprobs, entropy = Policy(model, temperature)(lay_out(groups))
    torch.testing.assert_close(logprobs, torch.cat(expected), atol=1e-4, rtol=0)
    torch.testing.assert_close(entropy, torch.cat(expected_entropy), atol=1e-4, rtol=0)

    parameters = list(model.parameters())
    packed_gradients = torch.autograd.grad(logprobs.sum(), parameters)
    alone_gradients = torch.autograd.grad(torch.cat(expected).sum(), parameters)
    for packed, alone in zip(packed_gradients, alone_gradients, strict=True):
        torch.testing.assert_close(packed, alone, atol=1e-3, rtol=1e-3)
    assert not entropy.requires_grad


def test_one_mask_serves_all_layers_as_it_is() -> None:
    """In the dtype of the weights, with rows where the memory-efficient kernel wants them."""
    seen = []
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, attn_implementation="sdpa")).to(torch.bfloat16)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True)
    batch = lay_out(some_groups())
    Policy(model, 1.0)(batch)
    assert len({mask.data_ptr() for mask in seen}) == 1
    assert seen[0].dtype == torch.bfloat16
    assert seen[0].stride()[-2:] == (48, 1)
    assert torch.equal(seen[0] == 0, batch.attention_mask())
    assert torch.equal(seen[0].isinf(), ~batch.attention_mask())
