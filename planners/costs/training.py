"""Cost of a training step for ZeRO 0 to 3 × data × tensor × pipeline parallel layouts.

For a step of N = B·G answers, in u minibatches (optimiser updates):

    work      forward passes: forward 1, backward 2, recomputation 1 where micro-batches may be large, prox
              log-probabilities 1 where u > 1, those of a reference model 1 where it is asked; head on answers only
    compute   work / Σ(devices · peak · training share), times the imbalance of dealing N/u answers to d ranks
    tensor    8 all-reduces of a layer's activations per layer
    gradients u · (reduce-scatter + all-gather of the weights), hierarchical across machines; stage 3 gathers the
              weights again in every micro-batch of every pass
    optimiser u · 28 bytes per parameter through memory
    pipeline  the slowest stage · (1 + (stages − 1)/micro-batches), 1F1B, plus activations over the link

Cores train as one rank with a thread per core, at as many times the rate of one. A device type with a measured profile
trains at the measured rate times its devices, over the imbalance. Both are optimistic: cores share memory bandwidth,
and ranks exchange gradients.

Attention is counted over the tokens that a token sees. The trainer's kernels also compute what its mask forbids, up to
the size of a micro-batch: more than is counted here where that holds many answers.

Layers go to stages in proportion to their compute. The terms are added, as in HexGen (arXiv 2311.11514).
"""

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planners.costs import operators
from planners.costs.memory import Memory, recomputes, training_memory, training_states
from planners.hardware.catalogue import DeviceType
from planners.hardware.profile import DeviceProfile
from planners.workload.demand import Demand
from planners.workload.model import Model

OPTIMISER_BYTES = 28


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: `data` × `tensor` ranks of one type on `machines` machines; a rank on CPUs has `cores`."""

    device_type: str
    data: int
    tensor: int
    machines: int
    cores: int = 1

    @property
    def devices(self) -> int:
        """Devices of the stage."""
        return self.data * self.tensor * self.cores


@dataclass(frozen=True)
class TrainingLayout:
    """σ: the stages (one without a pipeline) and the ZeRO stage."""

    stages: tuple[Stage, ...]
    zero: int

    @property
    def runs_today(self) -> bool:
        """Whether the trainer can run it: ZeRO over devices of one machine."""
        return len(self.stages) == 1 and self.stages[0].tensor == 1 and self.stages[0].machines == 1

    @property
    def devices(self) -> int:
        """Devices of all stages."""
        return sum(stage.devices for stage in self.stages)

    @property
    def name(self) -> str:
        """Such as `h800 dp4·tp2 zero1`, or `cpu dp1·tp1·4 cores zero0`."""
        parts = [
            f"{s.device_type} dp{s.data}·tp{s.tensor}{f'·{s.cores} cores' if s.cores > 1 else ''}" for s in self.stages
        ]
        return f"{' + '.join(parts)} zero{self.zero}"


class TrainingCost:
    """Training of one model under one demand."""

    def __init__(
        self,
        model: Model,
        demand: Demand,
        types: Mapping[str, DeviceType],
        profiles: Mapping[str, DeviceProfile] | None = None,
    ) -> None:
        self.model = model
        self.demand = demand
        self.types = types
        self.profiles = profiles or {}
        answers, response, prompt = demand.answers_per_step, demand.response, demand.prompt
        self._tokens = demand.prompts_per_step * prompt.mean + answers * response.mean
        squared = response.moment(2) + 2 * prompt.mean * response.mean + prompt.moment(2) / demand.group_size
        self._layer_flops = model.layer_flops_per_token * self._tokens + model.attention_flops(answers * squared)
        self._head_flops = model.head_flops_per_token * demand.tokens_per_step
        self._imbalances: dict[int, float] = {}

    def step_s(self, layout: TrainingLayout, links: Sequence[float]) -> float:
        """Seconds of one step.

        Args:
            layout: σ.
            links: bytes/s between the machines of each stage, then from each stage to the next.
        """
        stages, model, demand = layout.stages, self.model, self.demand
        if len(stages) == 1 and stages[0].device_type in self.profiles:
            profile = self.profiles[stages[0].device_type]
            even_s = demand.tokens_per_step / (profile.training_tokens_per_s * stages[0].devices)
            return even_s * self.imbalance(stages[0].data)
        shares = self.layer_shares(stages)
        slowest_s = max(
            self._stage_s(stage, layout.zero, share, last=i == len(stages) - 1, link=links[i])
            for i, (stage, share) in enumerate(zip(stages, shares, strict=True))
        )
        if len(stages) == 1:
            return slowest_s
        bubble = (len(stages) - 1) / self.micro_batches(stages[0].data)
        crossing = 3 * self._tokens * model.hidden * model.element_bytes
        return slowest_s * (1 + bubble) + sum(crossing / link for link in links[len(stages) :])

    def layer_shares(self, stages: Sequence[Stage]) -> list[float]:
        """Share of the layers of each stage, in proportion to its compute."""
        compute = [s.devices * self._speed(s) for s in stages]
        return [c / sum(compute) for c in compute]

    @property
    def passes(self) -> int:
        """Forward passes that a step's work is worth."""
        recomputed = recomputes(self.demand.micro_batch_tokens, self.demand.longest_tokens)
        return 3 + recomputed + (self.demand.minibatches > 1) + self.demand.reference

    @property
    def most_ranks(self) -> int:
        """Ranks that a minibatch has work for: one per answer."""
        return self.demand.minibatch_groups[0] * self.demand.group_size

    def micro_batches(self, data_ranks: int) -> float:
        """Micro-batches of one rank in one minibatch: full ones, but none has less than an answer."""
        share = self.demand.minibatches * data_ranks
        full = self._tokens / share / self.demand.micro_batch_tokens
        return max(1.0, min(full, self.demand.answers_per_step / share))

    def memory(self, layout: TrainingLayout) -> list[Memory]:
        """Memory of one device of each stage."""
        depth = len(layout.stages)
        return [
            training_memory(
                self.model,
                self.demand,
                self.types[stage.device_type],
                data_ranks=stage.data,
                tensor_ranks=stage.tensor,
                layer_share=share,
                zero=layout.zero,
                micro_batches_in_flight=depth - i,
            )
            for i, (stage, share) in enumerate(zip(layout.stages, self.layer_shares(layout.stages), strict=True))
        ]

    def states_bytes(self, layout: TrainingLayout) -> float:
        """Weights, gradients and optimiser states on all ranks together."""
        stages = zip(layout.stages, self.layer_shares(layout.stages), strict=True)
        return sum(
            s.data
            * s.tensor
            * training_states(
                self.model,
                data_ranks=s.data,
                tensor_ranks=s.tensor,
                layer_share=share,
                zero=layout.zero,
                reference=self.demand.reference,
            ).total
            for s, share in stages
        )

    def imbalance(self, data_ranks: int) -> float:
        """Largest over mean work of the ranks when a minibatch's answers are dealt to them, longest first.

        Groups stay together where they can: of g prompts a rank computes ⌈g/d⌉.
        """
        if data_ranks not in self._imbalances:
            prompt = self.model.layer_flops_per_token * self.demand.prompt.mean
            busiest = total = 0.0
            for groups, times in Counter(self.demand.minibatch_groups).items():
                loads = self._dealt(groups * self.demand.group_size, data_ranks)
                busiest += times * (max(loads) + prompt * math.ceil(groups / data_ranks))
                total += times * (sum(loads) + prompt * groups)
            self._imbalances[data_ranks] = busiest * data_ranks / total
        return self._imbalances[data_ranks]

    def _dealt(self, answers: int, data_ranks: int) -> list[float]:
        """FLOPs of each rank's answers, prompts not included."""
        points, prompt = self.demand.response.points, self.demand.prompt.mean
        linear = self.model.layer_flops_per_token + self.model.head_flops_per_token
        loads = [0.0] * data_ranks
        for i in reversed(range(answers)):
            length = points[int((i + 0.5) * len(points) / answers)]
            squared = length * (length + 2 * prompt)
            heapq.heapreplace(loads, loads[0] + linear * length + self.model.attention_flops(squared))
        return loads

    def _speed(self, stage: Stage) -> float:
        device = self.types[stage.device_type]
        return device.flops_per_s * device.training_share

    def _stage_s(self, stage: Stage, zero: int, share: float, *, last: bool, link: float) -> float:
        device, model = self.types[stage.device_type], self.model
        flops = self.passes * (self._layer_flops * share + (self._head_flops if last else 0.0))
        compute_s = flops / (stage.devices * self._speed(stage)) * self.imbalance(stage.data)
        messages = 8 * model.layers * share * self.micro_batches(stage.data) * self.demand.minibatches
        activations = self._tokens / stage.data * model.hidden * model.element_bytes * 8 * model.layers * share
        tensor_s = messages * operators.all_reduce_s(device, activations / messages, stage.tensor)
        optimiser = OPTIMISER_BYTES * model.parameters * share / stage.tensor / (stage.data if zero else 1)
        optimiser_s = self.demand.minibatches * optimiser / device.memory_bytes_per_s
        return compute_s + tensor_s + self._gradient_s(stage, zero, share, link) + optimiser_s

    def _gradient_s(self, stage: Stage, zero: int, share: float, link: float) -> float:
        """Reduction of gradients and gathering of weights over the data-parallel ranks."""
        if stage.data == 1:
            return 0.0
        device = self.types[stage.device_type]
        shard = self.model.weight_bytes * share / stage.tensor
        inside = max(1, stage.data // stage.machines)
        once_s = operators.all_reduce_s(device, shard, inside)
        if stage.machines > 1:
            once_s += 2 * (stage.machines - 1) / stage.machines * self.model.weight_bytes * share / link
        rounds = float(self.demand.minibatches)
        if zero == 3:  # an all-reduce moves as much as two gathers: 2 passes to train and 1 to score, per micro-batch
            rounds += 1.5 * self.micro_batches(stage.data) * self.demand.minibatches
        return rounds * once_s
