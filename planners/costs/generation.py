"""Cost of generation: one engine iteration, and the steady state of continuous batching over the length distribution.

An iteration of a replica with n answers in progress and S tokens in their caches takes

    t(n, S) = base(n) + κ·S + b·S/n                       base: GEMMs, all-reduces, launches, engine

and every answer that starts adds its prefill p (the prompt once per group). With c answers always in progress the mean
cache is c·E[context] (renewal theory, `Demand.context`) and c/E[l] answers start per iteration, so

    t̄(c) = t(c, c·E[context]) + c·p/E[l]        h(c) = c / t̄(c)        latency(l) = ⌈G/c⌉·l·t̄(c)

c is limited by the KV cache: c·E[context] + 2.33·σ·√c tokens must fit (99 % of the time), and one longest answer: the
longest that occurs, or, for replicas as they are started today, the longest that may occur, else vLLM does not start.
A process on several cores is as many times as fast as one core, which is optimistic: they share memory bandwidth.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from planners.costs import operators
from planners.costs.memory import kv_capacity_tokens
from planners.hardware.catalogue import DeviceType
from planners.hardware.profile import DeviceProfile
from planners.workload.demand import Demand
from planners.workload.model import Model

CONCURRENCIES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
GROUPS = (*range(1, 17), 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
TENSOR_RANKS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Iteration:
    """Seconds of one engine iteration; see the module's t(n, S)."""

    base_s: tuple[float, ...]
    per_cached_token_s: float
    per_context_s: float
    prefill_s: float

    def seconds(self, answers: int, cached_tokens: float) -> float:
        """t(n, S) for n ≥ 1."""
        return (
            self.base_s[answers - 1]
            + self.per_cached_token_s * cached_tokens
            + self.per_context_s * cached_tokens / answers
        )

    def on(self, cores: int) -> "Iteration":
        """The same on so many cores, each as fast as one alone."""
        return Iteration(
            base_s=tuple(seconds / cores for seconds in self.base_s),
            per_cached_token_s=self.per_cached_token_s / cores,
            per_context_s=self.per_context_s / cores,
            prefill_s=self.prefill_s / cores,
        )


class ServingCost:
    """Generation of one model under one demand; device types with a measured profile use that instead."""

    def __init__(
        self,
        model: Model,
        demand: Demand,
        profiles: Mapping[str, DeviceProfile] | None = None,
        *,
        full_context: bool = False,
    ) -> None:
        self.model = model
        self.demand = demand
        self.profiles = profiles or {}
        occurs = demand.prompt.longest + demand.response.longest
        self.longest_tokens = max(occurs, float(demand.longest_tokens)) if full_context else occurs
        self._bases: dict[tuple[DeviceType, int, int], float] = {}

    def tensor_ranks(self, device: DeviceType, devices_per_machine: int) -> list[int]:
        """Tensor-parallel degrees that divide the heads and stay inside a machine."""
        return [k for k in TENSOR_RANKS if k <= devices_per_machine and self.model.heads % k == 0]

    def most_answers(self, device: DeviceType, ranks: int) -> int:
        """Largest concurrency that the KV cache allows; 0 if not even the longest answer fits."""
        capacity = kv_capacity_tokens(self.model, device, ranks)
        if capacity < self.longest_tokens:
            return 0
        mean, spread = self.demand.context, 2.33 * self.demand.context_deviation
        root = (-spread + (spread**2 + 4 * mean * capacity) ** 0.5) / (2 * mean)
        return max(1, min(CONCURRENCIES[-1], int(root**2)))

    def concurrencies(self, device: DeviceType, ranks: int) -> list[int]:
        """The concurrencies that plans may choose from: a fixed ladder and the most that fits, within the gate."""
        most = min(self.most_answers(device, ranks), self.demand.gate_answers)
        return [c for c in CONCURRENCIES if c < most] + ([most] if most else [])

    def group_concurrencies(self, device: DeviceType) -> list[int]:
        """The concurrencies of a replica on one device that leases whole groups; where none fits, what fits of one.

        Where a person has said how many answers, the nearest below.
        """
        group, wished = self.demand.group_size, self.demand.concurrency
        most = min(self.most_answers(device, 1), self.demand.gate_answers, wished or self.demand.gate_answers)
        if most < group:
            return [most] if most else []
        fewer = [] if wished else [groups * group for groups in GROUPS if groups < most // group]
        return [*fewer, most // group * group]

    def iteration(self, device: DeviceType, ranks: int, most: int) -> Iteration:
        """Costs of one iteration for 1 … `most` answers in progress."""
        slow = 1 / device.serving_share
        prefill_tokens = self.demand.prompt.mean / self.demand.group_size
        return Iteration(
            base_s=tuple(self._base_s(device, ranks, n) for n in range(1, most + 1)),
            per_cached_token_s=slow * self._per_cached_token_s(device, ranks),
            per_context_s=0.0 if device.name in self.profiles else slow * self._per_context_s(device),
            prefill_s=slow * self._prefill_s(device, ranks, prefill_tokens),
        )

    def mean_iteration_s(self, device: DeviceType, ranks: int, answers: int) -> float:
        """t̄(c)."""
        context = self.demand.context
        slow = 1 / device.serving_share
        attention_s = self._per_cached_token_s(device, ranks) * answers * context
        if device.name not in self.profiles:
            attention_s += self._per_context_s(device) * context
        prefill_s = self._prefill_s(device, ranks, self.demand.prompt.mean / self.demand.group_size)
        starts = answers / self.demand.response.mean
        return self._base_s(device, ranks, answers) + slow * (attention_s + starts * prefill_s)

    def tokens_per_s(self, device: DeviceType, ranks: int, answers: int) -> float:
        """h(c)."""
        return answers / self.mean_iteration_s(device, ranks, answers)

    def latency_s(self, device: DeviceType, ranks: int, answers: int) -> float:
        """Seconds from lease to end of a step's longest answer; a replica narrower than a group does it in waves."""
        waves = math.ceil(self.demand.group_size / answers)
        return waves * self.demand.latency_tokens * self.mean_iteration_s(device, ranks, answers)

    def _base_s(self, device: DeviceType, ranks: int, answers: int) -> float:
        key = (device, ranks, answers)
        if key not in self._bases:
            profile = self.profiles.get(device.name)
            self._bases[key] = (
                answers / (ranks * profile.generation_rate(answers))
                if profile
                else self._modelled_base_s(device, ranks, answers) / device.serving_share
            )
        return self._bases[key]

    def _modelled_base_s(self, device: DeviceType, ranks: int, answers: int) -> float:
        layers = self._layers_s(device, ranks, answers)
        attention_s = operators.decode_attention_s(device, answers, 0, self.model.heads / ranks, 0)
        head_s = operators.gemm_s(
            device, answers, self.model.vocabulary / ranks, self.model.hidden, self.model.element_bytes
        )
        return layers + self.model.layers * attention_s + head_s + device.host_s

    def _layers_s(self, device: DeviceType, ranks: int, tokens: float) -> float:
        """Matrix products and all-reduces of all layers."""
        m = self.model
        width, inner = (m.heads + 2 * m.kv_heads) * m.head_dim / ranks, m.intermediate / ranks
        shapes = ((width, m.hidden), (m.hidden, m.heads * m.head_dim / ranks), (2 * inner, m.hidden), (m.hidden, inner))
        products_s = sum(operators.gemm_s(device, tokens, n, k, m.element_bytes) for n, k in shapes)
        reduce_s = operators.serving_all_reduce_s(device, tokens * m.hidden * m.element_bytes, ranks)
        return m.layers * (products_s + 2 * reduce_s)

    def _prefill_s(self, device: DeviceType, ranks: int, tokens: float) -> float:
        """Prefill of `tokens` among a full batch of prefills, so that launches and weights are shared."""
        if device.name in self.profiles:
            return 0.0
        chunk = 8192.0
        m = self.model
        attention_s = operators.prefill_attention_s(
            device, max(tokens, 1.0), m.heads / ranks, max(1, m.kv_heads / ranks), m.head_dim
        )
        return self._layers_s(device, ranks, chunk) * tokens / chunk + m.layers * attention_s

    def _per_cached_token_s(self, device: DeviceType, ranks: int) -> float:
        if device.name in self.profiles:
            return 0.0
        bytes_ = self.model.kv_bytes_per_token / min(ranks, self.model.kv_heads)
        return bytes_ / (device.efficiency.decode_memory_share * device.memory_bytes_per_s)

    def _per_context_s(self, device: DeviceType) -> float:
        return self.model.layers * device.efficiency.decode_s_per_context
