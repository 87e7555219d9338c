"""A training step equals plain PyTorch on the whole batch, and the engine learns."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tasks.config.training import OptimizerSection
from tasks.exchange.payloads import open_group, save_group
from tasks.exchange.trajectories import Group, Outcome, Segment, Trajectory
from tasks.training import groups as groups_module
from tasks.training.algorithms import Cispo, DecoupledPpo
from tasks.training.algorithms.base import AlgorithmSection, LossSums
from tasks.training.engine import Engine, lr_factor
from tasks.training.groups import permute_advantages
from tasks.training.packing import MicroBatch, TrainingGroup, hand_of, lay_out
from tasks.training.policy import Policy, load_policy
from tests.support.training import make_engine, parameters_of, random_groups, save_tiny_model, tiny_model

PPO = DecoupledPpo()


def adamw(**values: object) -> OptimizerSection:
    return OptimizerSection.model_validate({"lr": 1e-2, "gradient_clip": 0.5, **values})


def with_advantages(groups: Sequence[Group]) -> list[TrainingGroup]:
    return groups_module.with_advantages(groups, PPO)


def plain_logprobs(model: torch.nn.Module, group: TrainingGroup, k: int) -> torch.Tensor:
    content = group.read()
    answer = content.trajectories[k].token_ids.tolist()
    row = torch.tensor([[*content.prompt_ids.tolist(), *answer]])
    logprobs = model(row).logits[0, group.prompt_tokens - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]


def plain_steps(
    choices: OptimizerSection, batches: list[list[TrainingGroup]]
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same steps in plain PyTorch: no packing, no micro-batches, no DeepSpeed."""
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=choices.lr, betas=(0.9, 0.99), weight_decay=0.0)
    norms = []
    for groups in batches:
        n = choices.minibatches
        chunks = [groups[k::n] for k in range(n)]
        prox = [
            [plain_logprobs(model, g, k).detach() for g in chunk for k in range(len(g.numbers))] for chunk in chunks
        ]
        for chunk, old in zip(chunks, prox, strict=True):
            total, tokens, at = torch.zeros(()), 0, 0
            for group in chunk:
                for k, advantage in enumerate(group.advantages):
                    new = plain_logprobs(model, group, k)
                    behave = torch.tensor(group.read().trajectories[k].segments[0].logprobs)
                    weight = (old[at] - behave).exp().clamp(max=PPO.behaviour_weight_cap)
                    ratio = (new - old[at]).exp()
                    bounded = ratio.clamp(1 - PPO.clip, 1 + PPO.clip)
                    total = total + (weight * torch.maximum(-advantage * ratio, -advantage * bounded)).sum()
                    tokens += len(new)
                    at += 1
            optimizer.zero_grad()
            (total / tokens).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), choices.gradient_clip)))
            optimizer.step()
    return dict(model.named_parameters()), norms


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("minibatches", "micro_batch_tokens"), [(1, 40), (3, 40), (3, 12)])
def test_steps_equal_plain_pytorch(zero_stage: int, minibatches: int, micro_batch_tokens: int) -> None:
    """Also where most groups are above the budget."""
    choices = adamw(minibatches=minibatches)
    batches = [with_advantages(random_groups(6, seed)) for seed in range(2)]
    expected, norms = plain_steps(choices, batches)
    engine = make_engine(PPO, choices, zero_stage=zero_stage, micro_batch_tokens=micro_batch_tokens)
    results = [engine.train_step(groups, step) for step, groups in enumerate(batches)]
    trained = parameters_of(engine)
    assert trained.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(trained[name], value.detach(), atol=2e-4, rtol=0, msg=name)
    assert results[0].metrics["grad_norm"] == pytest.approx(max(norms[:minibatches]), rel=1e-3)
    assert [result.updates for result in results] == [minibatches] * 2
    assert (results[0].metrics["ratio/max"] == 1) == (minibatches == 1)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_split_group_trains_like_a_whole_one(minibatches: int) -> None:
    """A budget of 1 leaves every answer alone with its prompt; losses, their metrics and the weights stay."""
    groups = with_advantages(random_groups(6, seed=0, answers=16))
    results, weights = [], []
    for budget in (10_000, 30, 1):
        engine = make_engine(PPO, adamw(minibatches=minibatches), micro_batch_tokens=budget)
        results.append(engine.train_step(groups, 0))
        weights.append(parameters_of(engine))
    for result, trained in zip(results[1:], weights[1:], strict=True):
        assert result.metrics == pytest.approx(results[0].metrics, rel=1e-4, abs=1e-5)
        for name, value in weights[0].items():
            torch.testing.assert_close(trained[name], value, atol=1e-4, rtol=1e-5, msg=name)


def test_ranks_that_share_groups_add_up_to_one() -> None:
    """The loss and its gradient over all hands are those of the whole minibatch in one micro-batch."""
    groups = with_advantages(random_groups(4, seed=0, answers=16))
    policy = Policy(tiny_model(), 1.0)

    def gradient(batches: Sequence[MicroBatch]) -> tuple[float, list[torch.Tensor]]:
        policy.zero_grad()
        total = 0.0
        for batch in batches:
            logprobs, entropy = policy(batch)
            sums = PPO.loss(logprobs, logprobs.detach(), entropy, batch)
            sums.loss.backward()
            total += float(sums.loss.detach())
        return total, [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]

    loss, whole = gradient([lay_out(groups)])
    shared_loss, shared = gradient([batch for rank in range(3) for batch in hand_of(groups, 50, rank, 3)])
    assert shared_loss == pytest.approx(loss, rel=1e-5, abs=1e-5)
    for one, other in zip(whole, shared, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_recomputed_layers_train_like_kept_ones(zero_stage: int, tmp_path: Path) -> None:
    groups = with_advantages(random_groups(4, seed=0))
    save_tiny_model(tmp_path)
    weights, forwards = [], []
    for recompute in (False, True):
        policy = load_policy(tmp_path, 1.0, 64, torch.float32, recompute=recompute)
        calls: list[None] = []
        policy.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(None))
        engine = make_engine(PPO, adamw(minibatches=2), policy=policy, zero_stage=zero_stage, micro_batch_tokens=40)
        for step in range(2):
            assert engine.train_step(groups, step).skipped == 0
        weights.append(parameters_of(engine))
        forwards.append(len(calls))
    assert forwards[1] == forwards[0] * 3 / 2  # scored, trained, and trained again
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=1e-5, rtol=1e-5, msg=name)


def test_attention_dropout_of_a_models_configuration_is_off(tmp_path: Path) -> None:
    """Engines have none, so the log-probabilities of both would differ."""
    save_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    policy = load_policy(tmp_path, 1.0, 64, torch.float32)
    batch = lay_out(with_advantages(random_groups(2, seed=0)))
    assert policy.training
    torch.testing.assert_close(policy(batch)[0], policy(batch)[0], atol=0, rtol=0)


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_an_update_that_is_not_finite_changes_nothing_and_is_counted(zero_stage: int) -> None:
    engine = make_engine(PPO, adamw(), zero_stage=zero_stage, micro_batch_tokens=40)
    groups = with_advantages(random_groups(6, seed=0))
    engine.train_step(groups, 0)
    before = parameters_of(engine)
    poisoned = [replace(g, advantages=(math.nan,) * len(g.numbers)) for g in groups[:1]]
    result = engine.train_step([*poisoned, *groups[1:]], 1)
    assert (result.updates, result.skipped) == (0, 1)
    after = parameters_of(engine)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert engine.train_step(groups, 2).updates == 1
    assert all(torch.isfinite(value).all() for value in parameters_of(engine).values())


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_step_without_any_gradient_leaves_the_policy_alone_and_still_measures_it(zero_stage: int) -> None:
    engine = make_engine(PPO, adamw(), zero_stage=zero_stage, micro_batch_tokens=40)
    groups = with_advantages(random_groups(3, seed=0))
    engine.train_step(groups, 0)
    before = parameters_of(engine)
    flat = [replace(g, advantages=(0.0,) * len(g.numbers)) for g in groups]
    result = engine.train_step(flat, 1)
    assert (result.updates, result.skipped, result.metrics["trained_tokens"]) == (0, 0, 0)
    (logprobs,) = engine.logprobs(flat[:1])
    drift = logprobs - lay_out(flat[:1]).behaviour_logprobs
    assert result.metrics["mismatch_kl"] == pytest.approx(float((drift.exp() - 1 - drift).mean()), rel=1e-4)
    assert result.metrics["loss"] == 0
    assert "mismatch_kl" not in engine.train_step([], 2).metrics
    after = parameters_of(engine)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_groups_that_teach_nothing_are_not_read(tmp_path: Path) -> None:
    """Their payloads are gone before the step; the others train as they do from memory."""
    groups = random_groups(3, seed=0)
    same = tuple(replace(answer, reward=1.0) for answer in groups[1].trajectories)
    groups[1] = Group(1, 1, groups[1].prompt_ids, same)
    weights = []
    for stored in (False, True):
        engine = make_engine(PPO, adamw(minibatches=2))
        if stored:
            paths = [tmp_path / str(group.group_id) for group in groups]
            for path, group in zip(paths, groups, strict=True):
                save_group(path, group)
            opened = [open_group(path, deadline_s=0.0) for path in paths]
            paths[1].unlink()
            engine.train_step(groups_module.with_advantages(opened, PPO), 0)
        else:
            engine.train_step(with_advantages(groups), 0)
        weights.append(parameters_of(engine))
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())


def test_learning_rate_warms_up_and_decays() -> None:
    warm = adamw(warmup_steps=4)
    assert [lr_factor(warm, step, 10) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    linear = adamw(schedule="linear")
    assert [lr_factor(linear, step, 4) for step in range(4)] == [1.0, 0.75, 0.5, 0.25]
    cosine = adamw(schedule="cosine", warmup_steps=1)
    assert lr_factor(cosine, 1, 11) == 1.0
    assert lr_factor(cosine, 6, 11) == pytest.approx(0.5)
    assert 0 < lr_factor(cosine, 10, 11) < 0.1
    engine = make_engine(PPO, adamw(schedule="linear"), steps=4)
    assert engine.train_step(with_advantages(random_groups(2, seed=0)), 3).metrics["lr"] == pytest.approx(2.5e-3)


TARGET = 7


def sampled_groups(engine: Engine, generator: torch.Generator) -> list[Group]:
    """Rollouts by hand: 8 groups of 4 answers of 4 tokens; the reward is the share of the target token."""
    model = engine.deepspeed.module.model
    prompts = torch.randint(0, 32, (8, 3), generator=generator).repeat_interleave(4, dim=0)
    tokens, logprobs = prompts, []
    with torch.no_grad():
        for _ in range(4):
            scores = model(tokens).logits[:, -1].log_softmax(-1)
            new = torch.multinomial(scores.exp(), 1, generator=generator)
            logprobs.append(scores.gather(1, new))
            tokens = torch.cat([tokens, new], dim=1)
    behaviour = torch.cat(logprobs, dim=1)
    answers = []
    for row in range(32):
        answer = tokens[row, 3:].tolist()
        segment = Segment(tuple(answer), tuple(behaviour[row].tolist()), 0, "replica-0")
        answers.append(Trajectory((segment,), Outcome.SCORED, answer.count(TARGET) / 4))
    return [Group(g, g, tuple(prompts[4 * g].tolist()), tuple(answers[4 * g : 4 * g + 4])) for g in range(8)]


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize(("algorithm", "minibatches"), [(PPO, 1), (Cispo(), 2)], ids=["decoupled_ppo", "cispo"])
def test_learns_to_emit_the_target_unless_advantages_are_permuted(
    algorithm: AlgorithmSection, minibatches: int, permuted: bool
) -> None:
    choices = adamw(lr=6e-3 / minibatches, gradient_clip=1.0, minibatches=minibatches)
    engine = make_engine(algorithm, choices, steps=40, policy=Policy(tiny_model(layers=3), 1.0))
    generator = torch.Generator().manual_seed(0)
    rewards, updates = [], []
    for step in range(40):
        groups = sampled_groups(engine, generator)
        rewards.append(sum(t.reward for g in groups for t in g.trajectories) / 32)
        batch = groups_module.with_advantages(groups, algorithm)
        result = engine.train_step(permute_advantages(batch, 0, step) if permuted else batch, step)
        updates.append(result.updates)
    assert max(updates) == minibatches
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert first < 0.15
    if permuted:
        assert last < 0.3
    else:
        assert last > 0.8


def test_weights_are_capped_once_an_update_has_moved_the_policy() -> None:
    """Of a generator that agrees with the trainer no token is capped in the first update; the second has moved away."""
    algorithm = Cispo(weight_cap=1.001)
    engine = make_engine(algorithm, adamw(lr=5e-2, minibatches=2))
    sampled = groups_module.with_advantages(sampled_groups(engine, torch.Generator().manual_seed(0)), algorithm)
    groups = [group for group in sampled if algorithm.keeps(group.advantages)]
    before = make_engine(algorithm, adamw(lr=5e-2)).train_step(groups, 0).metrics
    assert (before["weight/max"], before["weight/capped_share"]) == (pytest.approx(1, abs=1e-4), 0)
    metrics = engine.train_step(groups, 0).metrics
    assert metrics["weight/max"] > 1.1
    assert 0 < metrics["weight/capped_share"] < 1


def test_every_micro_batch_counts_as_work() -> None:
    """Also those that only measure: between two counts lies one forward pass, with its backward pass at most."""
    counted: list[int] = []
    reference = Policy(tiny_model(seed=5), 1.0).eval()
    engine = make_engine(
        Cispo(kl_coefficient=0.1),
        adamw(minibatches=2),
        reference=reference,
        micro_batch_tokens=40,
        count_work=counted.append,
    )
    groups = with_advantages(random_groups(6, seed=3))
    hands = [hand_of(groups[k::2], 40, 0, 1) for k in range(2)]
    engine.train_step(groups, 0)
    assert counted == [1] * 3 * sum(map(len, hands)), "reference, proximal policy and update of each micro-batch"


@pytest.mark.parametrize("minibatches", [1, 2])
def test_reference_log_probabilities_are_those_of_the_model_that_the_run_began_with(minibatches: int) -> None:
    """As Hugging Face computes them, after steps that have moved the policy; none without an algorithm that asks."""
    seen: list[MicroBatch] = []

    class Watching(Cispo):
        def loss(self, logprobs: Tensor, prox_logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> LossSums:
            seen.append(batch)
            return super().loss(logprobs, prox_logprobs, entropy, batch)

    reference = tiny_model()
    engine = make_engine(
        Watching(kl_coefficient=0.1), adamw(minibatches=minibatches), reference=Policy(reference, 1.0).eval()
    )
    groups = with_advantages(random_groups(2, seed=0))
    metrics = [engine.train_step(groups, step).metrics for step in range(3)]
    assert len(seen) == 3 * minibatches
    expected = [plain_logprobs(reference, group, k).detach() for group in groups for k in range(len(group.numbers))]
    for step in range(3):
        batches = seen[step * minibatches : (step + 1) * minibatches]
        found = torch.cat([batch.reference_logprobs for batch in batches if batch.reference_logprobs is not None])
        torch.testing.assert_close(found.sort()[0], torch.cat(expected).sort()[0], atol=1e-5, rtol=1e-5)
        assert not found.requires_grad
    divergences = [of_step["reference_kl"] for of_step in metrics]
    assert (divergences[0] < 1e-9) == (minibatches == 1)
    assert divergences[2] > divergences[0]

    with pytest.raises(ValueError, match="cispo needs a reference policy"):
        make_engine(Cispo(kl_coefficient=0.1))
    seen.clear()
    make_engine(Watching()).train_step(groups, 0)
    assert all(batch.reference_logprobs is None for batch in seen)
