"""What a device can do at best, whatever the model: dense matrix products and memory traffic."""

import time
from collections.abc import Callable

import torch

MEASURE_S = 1.0
"""Each rate is taken over about this long, after one warm-up call."""


def gemm_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a square matrix product, 2·n³ each."""
    n = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2.0 * n**3 / _seconds_per_call(lambda: torch.matmul(left, right, out=out), device)


def memory_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written per second by a copy that no cache holds."""
    size_bytes = 2**30 if device.type == "cuda" else 2**28
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * size_bytes / _seconds_per_call(lambda: target.copy_(source), device)


def _seconds_per_call(call: Callable[[], object], device: torch.device) -> float:
    call()
    finish(device)
    calls, started = 0, time.perf_counter()
    while time.perf_counter() - started < MEASURE_S:
        call()
        finish(device)
        calls += 1
    return (time.perf_counter() - started) / calls


def finish(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
