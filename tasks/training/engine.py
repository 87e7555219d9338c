"""The optimiser: one training step over packed micro-batches, through DeepSpeed.

The gradient equals that of the token-mean loss over the whole minibatch, however it is cut into micro-batches and
dealt to ranks.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor

from planners.costs.memory import recomputes
from tasks.config.experiment import Experiment
from tasks.config.training import OptimizerSection
from tasks.models.dtypes import torch_dtype
from tasks.training.algorithms.base import AlgorithmSection, LossSums
from tasks.training.packing import MicroBatch, TrainingGroup, hand_of
from tasks.training.policy import Policy, load_policy
from tasks.training.randomness import random_state, set_random_state
from tasks.training.ranks import Ranks
from tasks.training.state import HeldState, StatePart, random_path


@dataclass(frozen=True, slots=True)
class StepData:
    """What a step trains on, of this rank: its micro-batches, of one minibatch after the other.

    Attributes:
        hands: this rank's micro-batches of each minibatch.
        tokens: tokens of each minibatch that the loss counts, on all ranks; 0: it is only measured.
    """

    hands: list[list[MicroBatch]]
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one training step did.

    Attributes:
        metrics: by metric name; loss metrics are absent where no answer has a token to train on.
        updates: optimiser updates applied.
        skipped: updates left out because the loss or the gradient was not finite.
    """

    metrics: dict[str, float]
    updates: int
    skipped: int


class Engine:
    """A policy with its optimiser on this rank."""

    def __init__(
        self,
        policy: Policy,
        algorithm: AlgorithmSection,
        optimizer: OptimizerSection,
        steps: int,
        ranks: Ranks,
        dtype: torch.dtype,
        *,
        zero_stage: int,
        micro_batch_tokens: int,
        reference: Policy | None = None,
        count_work: Callable[[int], object] = lambda amount: None,
    ) -> None:
        """`count_work` hears of every micro-batch; `reference` is the model that the run began with, needed where the
        algorithm asks for it.
        """
        if algorithm.needs_reference and reference is None:
            raise ValueError(f"{algorithm.kind} needs a reference policy")
        self._algorithm = algorithm
        self._settings = optimizer
        self._reference = reference
        self._count_work = count_work
        self.zero_stage = zero_stage
        self._parameters = sum(parameter.numel() for parameter in policy.parameters())
        self._micro_batch_tokens = micro_batch_tokens
        self._steps = steps
        self._ranks = ranks
        # Without ZeRO, float32 gradients lie in the parameters, where the norm is known before the update.
        self._clips_here = zero_stage == 0 and dtype == torch.float32
        adamw = torch.optim.AdamW(
            policy.parameters(),
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            weight_decay=optimizer.weight_decay,
            fused=True,  # one pass over the parameters and their moments instead of one for each operation
        )
        self.deepspeed, self.optimizer, _, _ = deepspeed.initialize(
            model=policy, optimizer=adamw, config=self._config(dtype), dist_init_required=False
        )
        if ranks.size == 1 and zero_stage == 0:
            # With nobody to average with, copying all gradients into buckets and back would be for nothing.
            self.deepspeed.enable_backward_allreduce = False
        self._held = HeldState(policy.model, self.optimizer, adamw, ranks)

    def _config(self, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,  # boundaries are set by hand: steps differ in their micro-batches
            "gradient_clipping": 0.0 if self._clips_here else self._settings.gradient_clip,
            # A buffer of this many elements is allocated whole; by default it has 5e8, however small the model is.
            "zero_optimization": {"stage": self.zero_stage, "reduce_bucket_size": min(self._parameters, 500_000_000)},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": dtype == torch.bfloat16},
            "steps_per_print": None,
        }

    def train_step(self, groups: Sequence[TrainingGroup], step: int) -> StepResult:
        """Read the groups of one step and train on them; every rank passes the same groups."""
        return self.train(self.read(groups), step)

    def read(self, groups: Sequence[TrainingGroup]) -> StepData:
        """This rank's share of a step; every rank passes the same groups. Nothing here waits for another rank.

        Groups that the algorithm does not keep, such as those whose advantages are all zero, are left out: they have no
        gradient, so computing them would only cost time, and counting their tokens would shrink the update by the share
        of hopeless and solved prompts. If that leaves none, the loss metrics, `mismatch_kl` above all, are those of the
        first group, without an update.

        Raises:
            DamagedPayload: a payload in this rank's share is damaged or gone.
        """
        counted = [group for group in groups if group.trained_tokens]
        live = [group for group in counted if self._algorithm.keeps(group.advantages)]
        minibatches = [live[k :: self._settings.minibatches] for k in range(self._settings.minibatches)]
        minibatches = [minibatch for minibatch in minibatches if minibatch] or [counted[:1]]
        tokens = [sum(group.trained_tokens for group in minibatch) if live else 0 for minibatch in minibatches]
        hands = [hand_of(m, self._micro_batch_tokens, self._ranks.rank, self._ranks.size) for m in minibatches]
        return StepData(hands, tokens)

    def train(self, data: StepData, step: int) -> StepResult:
        """Train on what every rank has read of one step."""
        hands = [self._ready(hand) for hand in data.hands]
        # π_prox is the policy before the first update. With one update a step it is the policy of that very forward.
        prox = [[self._logprobs(b) for b in hand] for hand in hands] if len(hands) > 1 else None
        lr = self._settings.lr * lr_factor(self._settings, step, self._steps)
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = lr
        totals = StepTotals()
        if not any(data.tokens):
            self._measure(hands[0], totals)
            measured = totals.result(self._ranks, lr)
            return replace(measured, metrics={**measured.metrics, "trained_tokens": 0.0})
        for k, (hand, tokens) in enumerate(zip(hands, data.tokens, strict=True)):
            self._update(hand, prox[k] if prox else [None] * len(hand), tokens, totals)
        return totals.result(self._ranks, lr)

    def logprobs(self, groups: Sequence[TrainingGroup]) -> list[Tensor]:
        """Log-probabilities [N] of the targets of this rank's micro-batches, without gradient."""
        hand = hand_of(groups, self._micro_batch_tokens, self._ranks.rank, self._ranks.size)
        return [self._logprobs(batch) for batch in self._ready(hand)]

    def state_dict(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The model's weights by Hugging Face name, on the CPU. Every rank must call it; rank 0's is complete.

        A head that is tied to the embedding is the same parameter and appears once, under the embedding's name.
        """
        weights: dict[str, Tensor] = {}
        sharded = self.zero_stage == 3
        for name, parameter in self.deepspeed.module.model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=sharded):
                if self._ranks.leads:
                    weights[name] = parameter.detach().to("cpu", dtype, copy=True).contiguous()
        return weights

    def state(self) -> StatePart:
        """This rank's part of a checkpoint of now: weights, optimiser and random generators."""
        return self._held.take(random_state())

    def restore(self, directory: Path, description: Mapping[str, Any]) -> None:
        """Continue from what the ranks of some engine wrote of their states; every rank must call it.

        A rank that has no random generators among them keeps its own.

        Args:
            directory: of the files.
            description: with AdamW's scalars and the shapes, as in `StatePart`.

        Raises:
            UserError: it is of another model.
        """
        self._held.put(directory, description["optimizer"], description["parameters"])
        random = random_path(directory, self._ranks.rank)
        if random.exists():
            set_random_state(json.loads(random.read_text()))

    def _ready(self, hand: Sequence[MicroBatch]) -> list[MicroBatch]:
        """These micro-batches on this rank's device, with reference log-probabilities where the algorithm asks."""
        batches = [batch.to(self._ranks.device) for batch in hand]
        if self._reference is None:
            return batches
        with torch.no_grad():
            return [self._with_reference(self._reference, batch) for batch in batches]

    def _with_reference(self, reference: Policy, batch: MicroBatch) -> MicroBatch:
        logprobs = reference(batch)[0]
        self._count_work(1)
        return batch._replace(reference_logprobs=logprobs)

    @torch.no_grad()
    def _logprobs(self, batch: MicroBatch) -> Tensor:
        logprobs: Tensor = self.deepspeed(batch)[0]
        self._count_work(1)
        return logprobs

    @torch.no_grad()
    def _measure(self, hand: Sequence[MicroBatch], totals: "StepTotals") -> None:
        for batch in hand:
            logprobs, entropy = self.deepspeed(batch)
            totals.add(self._algorithm.loss(logprobs, logprobs, entropy, batch), batch)

    def _update(
        self, hand: Sequence[MicroBatch], prox: Sequence[Tensor | None], tokens: int, totals: "StepTotals"
    ) -> None:
        for number, (batch, prox_logprobs) in enumerate(zip(hand, prox, strict=True), start=1):
            self.deepspeed.set_gradient_accumulation_boundary(number == len(hand))
            logprobs, entropy = self.deepspeed(batch)
            if prox_logprobs is None:
                prox_logprobs = logprobs.detach()
            sums = self._algorithm.loss(logprobs, prox_logprobs, entropy, batch)
            # DeepSpeed averages gradients over ranks; the loss is a mean over the tokens of all ranks.
            self.deepspeed.backward(sums.loss * (self._ranks.size / tokens))
            totals.add(sums, batch)
            self._count_work(1)
        totals.count_update(self._apply())

    def _apply(self) -> float:
        """Clip, update, clear; returns the gradient norm. An update whose norm is not finite changes nothing."""
        if self._clips_here:
            parameters = list(self.deepspeed.module.parameters())
            norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._settings.gradient_clip))
            if math.isfinite(norm):
                self.deepspeed.step()
            else:
                self.deepspeed.zero_grad()
            return norm
        self.deepspeed.step()  # ZeRO leaves the update out itself when the norm is not finite
        return float(self.deepspeed.get_global_grad_norm())


class StepTotals:
    """Adds up what the losses of a step say, by name, over micro-batches and at the end over ranks."""

    def __init__(self) -> None:
        self._tokens = torch.zeros(())
        self._sums: dict[str, Tensor] = {}
        self._peaks: dict[str, Tensor] = {}
        self._norms: list[float] = []

    def add(self, loss: LossSums, batch: MicroBatch) -> None:
        """Add one micro-batch; everything stays on its device, so that nothing waits for it."""
        self._tokens = batch.mask.sum() + self._tokens.to(batch.mask.device)
        for name, value in loss.sums.items():
            self._sums[name] = value + self._sums[name] if name in self._sums else value
        for name, value in loss.peaks.items():
            self._peaks[name] = value.maximum(self._peaks[name]) if name in self._peaks else value

    def count_update(self, norm: float) -> None:
        """Note the gradient norm of one update, the same on every rank."""
        self._norms.append(norm)

    def result(self, ranks: Ranks, lr: float) -> StepResult:
        """Means over the trained tokens of all ranks, and peaks; every rank must call it."""
        of_rank = torch.stack([self._tokens, *self._sums.values(), *self._peaks.values()]).cpu()
        everything = ranks.gather(of_rank)
        tokens, *sums = everything[:, : 1 + len(self._sums)].sum(dim=0).tolist()
        peaks = everything[:, 1 + len(self._sums) :].amax(dim=0).tolist()
        metrics = {"lr": lr, "trained_tokens": tokens}
        if tokens:
            metrics |= {name: total / tokens for name, total in zip(self._sums, sums, strict=True)}
            metrics |= dict(zip(self._peaks, peaks, strict=True))
        finite = [norm for norm in self._norms if math.isfinite(norm)]
        if finite:
            metrics["grad_norm"] = max(finite)
        return StepResult(metrics, updates=len(finite), skipped=len(self._norms) - len(finite))


def load_engine(
    model_path: Path,
    experiment: Experiment,
    ranks: Ranks,
    *,
    zero_stage: int,
    micro_batch_tokens: int,
    count_work: Callable[[int], object] = lambda amount: None,
) -> Engine:
    """The model that a run begins with and its optimiser, and the model once more if the algorithm refers to it.

    Args:
        model_path: the prepared model.
        experiment: as of the run.
        ranks: this process's place.
        zero_stage: DeepSpeed ZeRO stage.
        micro_batch_tokens: largest packed micro-batch in tokens.
        count_work: hears of every micro-batch.
    """
    dtype, max_context = torch_dtype(experiment.model.dtype), experiment.model.max_context
    temperature = experiment.sampling.temperature
    recompute = recomputes(micro_batch_tokens, max_context)
    policy = load_policy(model_path, temperature, max_context, dtype, recompute=recompute).to(ranks.device)
    reference = None
    if experiment.algorithm.needs_reference:
        reference = load_policy(model_path, temperature, max_context, dtype).to(ranks.device).eval()
    return Engine(
        policy,
        experiment.algorithm,
        experiment.optimizer,
        experiment.run.steps,
        ranks,
        dtype,
        zero_stage=zero_stage,
        micro_batch_tokens=micro_batch_tokens,
        reference=reference,
        count_work=count_work,
    )


def lr_factor(optimizer: OptimizerSection, step: int, steps: int) -> float:
    """Share of the learning rate used at `step` (0-based) of `steps`: linear warm-up, then the chosen decay to 0."""
    if step < optimizer.warmup_steps:
        return (step + 1) / optimizer.warmup_steps
    progress = (step - optimizer.warmup_steps) / max(1, steps - optimizer.warmup_steps)
    if optimizer.schedule == "linear":
        return 1 - progress
    if optimizer.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1.0
