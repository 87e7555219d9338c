"""Seconds of single operators on one device: an additive roofline with fitted efficiencies.

    gemm(m, n, k)   t0 + 2·m·n·k / (e_c(m)·C) + 2·(m·k + n·k + m·n) / (e_w·M)
    decode          t0 + KV bytes / (e_kv·M) + a·batch·heads + b·context
    prefill         t0 + causal FLOPs / (e_a·C) + (Q, K, V, O bytes) / (e_b·M)
    all-reduce      α + 2·(n − 1)/n · bytes / β_n

C, M: the device's peak bf16 FLOP/s and memory bytes/s. The form is HexGen's (arXiv 2311.11514) with the terms it lacks:
KV reads, real matrix widths, efficiency by token count, launches.
"""

import math
from bisect import bisect_left

from planners.hardware.catalogue import DeviceType


def gemm_s(device: DeviceType, tokens: float, outputs: float, inputs: float, element_bytes: int = 2) -> float:
    """One product (tokens × inputs)·(inputs × outputs); never faster than the peak allows."""
    e = device.efficiency
    flops = 2 * tokens * outputs * inputs
    traffic = element_bytes * (tokens * inputs + outputs * inputs + tokens * outputs)
    compute_s = flops / (_compute_share(device, tokens) * device.flops_per_s)
    additive_s = compute_s + traffic / (e.gemm_memory_share * device.memory_bytes_per_s)
    return e.gemm_launch_s + max(additive_s, flops / device.flops_per_s)


def decode_attention_s(device: DeviceType, batch: float, context: float, heads: float, kv_bytes: float) -> float:
    """One new token for each of `batch` sequences of mean length `context`; `kv_bytes` are read in all."""
    e = device.efficiency
    read_s = kv_bytes / (e.decode_memory_share * device.memory_bytes_per_s)
    return e.decode_launch_s + read_s + e.decode_s_per_head * batch * heads + e.decode_s_per_context * context


def prefill_attention_s(device: DeviceType, tokens: float, heads: float, kv_heads: float, head_dim: int) -> float:
    """Causal attention over one prompt of `tokens`."""
    e = device.efficiency
    flops = 2 * tokens**2 * heads * head_dim
    traffic = 2 * tokens * (2 * heads + 2 * kv_heads) * head_dim
    return (
        e.prefill_launch_s
        + flops / (e.prefill_compute_share * device.flops_per_s)
        + traffic / (e.prefill_memory_share * device.memory_bytes_per_s)
    )


def all_reduce_s(device: DeviceType, size_bytes: float, ranks: int) -> float:
    """NCCL inside one machine."""
    if ranks == 1:
        return 0.0
    share = device.efficiency.all_reduce_share[_rank_column(ranks)]
    return device.efficiency.all_reduce_latency_s + _ring_s(size_bytes, ranks, share * device.link_bytes_per_s)


def serving_all_reduce_s(device: DeviceType, size_bytes: float, ranks: int) -> float:
    """The engine's own kernel for small messages inside a captured graph."""
    if ranks == 1:
        return 0.0
    column = _rank_column(ranks)
    share = device.efficiency.all_reduce_share[column]
    return device.efficiency.serving_latency_s[column] + _ring_s(size_bytes, ranks, share * device.link_bytes_per_s)


def _ring_s(size_bytes: float, ranks: int, bytes_per_s: float) -> float:
    return 2 * (ranks - 1) / ranks * size_bytes / bytes_per_s


def _rank_column(ranks: int) -> int:
    return 0 if ranks <= 2 else 1 if ranks <= 4 else 2


def _compute_share(device: DeviceType, tokens: float) -> float:
    grid, shares = device.efficiency.gemm_tokens, device.efficiency.gemm_compute_share
    if tokens <= grid[0]:
        return shares[0]
    if tokens >= grid[-1]:
        return shares[-1]
    right = bisect_left(grid, tokens)
    low, high = grid[right - 1], grid[right]
    weight = (math.log(tokens) - math.log(low)) / (math.log(high) - math.log(low))
    return math.exp((1 - weight) * math.log(shares[right - 1]) + weight * math.log(shares[right]))
