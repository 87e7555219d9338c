"""Fit the operator cost model on public measurements and report its error on what was not fitted.

    python -m benchmarks.costmodel [--data DIR] [--json FILE]

It needs the extra `bench` of pyproject.toml (pandas, pyarrow, SciPy), which the locked environment contains.

Fitted: NVIDIA aiconfigurator's timings under vLLM 0.14 (bf16), seven rows in ten. Not fitted: the other three rows, the
same operators under vLLM 0.24, and Vidur's MLP timings (another kernel library, other shapes, the A40 with the
constants of the A100). The formulas are those of `planners.costs.operators`:

    gemm(m, n, k)   t0 + 2·m·n·k / (e_c(m)·C) + 2·(m·k + n·k + m·n) / (e_w·M)
    decode          t0 + KV bytes / (e_kv·M) + a·batch·heads + b·context
    prefill         t0 + causal FLOPs / (e_a·C) + (Q, K, V, O bytes) / (e_b·M)
    all-reduce      α + 2·(n − 1)/n · bytes / β_n

Matrices and caches that fit into the L2 cache are left out: in an engine the weights of the next layer evict them.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from planners.hardware.catalogue import GEMM_TOKENS, device_type

DEVICES = {"a100_sxm": "a100-80", "h100_sxm": "h100", "l40s": "l40s"}
L2_BYTES = {"a100_sxm": 40e6, "h100_sxm": 50e6, "l40s": 96e6}  # NVIDIA datasheets
VIDUR = {"a100": "a100-80", "a40": "a100-80", "h100": "h100"}
A40_PEAKS = (149.7e12, 696e9)  # NVIDIA A40 datasheet: bf16 dense FLOP/s, bytes/s

Array = Any


@dataclass(frozen=True)
class Operator:
    """Measured calls of one operator on one device, and the formula with free constants (given as logarithms)."""

    kind: str
    seconds: Array
    formula: Callable[[Array], Array]
    start: Array
    lowest: Array
    highest: Array

    def fit(self, rows: Array) -> Array:
        """Constants of least squared relative error over `rows`, robust against single odd kernels."""
        result = least_squares(
            lambda p: np.log(self.formula(p)[rows] / self.seconds[rows]),
            np.clip(self.start, self.lowest + 1e-9, self.highest - 1e-9),
            bounds=(self.lowest, self.highest),
            loss="soft_l1",
            f_scale=0.1,
        )
        return result.x

    def errors(self, constants: Array) -> Array:
        """Relative errors of the formula, signed."""
        return self.formula(constants) / self.seconds - 1


def gemm(frame: pd.DataFrame, device: str) -> Operator:
    """bf16 matrix products whose weights exceed the L2 cache."""
    frame = frame[(frame.gemm_dtype == "bfloat16") & (2.0 * frame.n * frame.k >= L2_BYTES[device])]
    m, n, k = (frame[c].to_numpy(float) for c in "mnk")
    return _gemm_operator(m, n, k, frame.latency.to_numpy() * 1e-3, *_peaks(DEVICES[device]))


def _gemm_operator(m: Array, n: Array, k: Array, seconds: Array, flops: float, bandwidth: float) -> Operator:
    grid = np.log(np.array(GEMM_TOKENS, float))

    def formula(p: Array) -> Array:
        compute = np.exp(np.interp(np.log(m), grid, p[2:])) * flops
        return np.exp(p[0]) + 2 * (m * k + n * k + m * n) / (np.exp(p[1]) * bandwidth) + 2 * m * n * k / compute

    size = len(grid)
    return Operator(
        "gemm",
        seconds,
        formula,
        np.log(np.array([3e-6, 0.8] + [0.7] * size)),
        np.log(np.array([1e-7, 0.3] + [0.02] * size)),
        np.log(np.array([5e-5, 1.0] + [4.0] * size)),
    )


def decode(frame: pd.DataFrame, device: str) -> Operator:
    """One generated token per sequence over bf16 KV caches: tiny ones, and those that exceed the L2 cache."""
    frame = _plain_attention(frame)
    kv = frame.batch_size * (frame.isl + frame.step) * frame.num_key_value_heads * 512.0
    frame = frame[(kv >= L2_BYTES[device]) | ((kv < 1e6) & (frame.step >= 127))]
    batch, heads = frame.batch_size.to_numpy(float), frame.num_heads.to_numpy(float)
    context = (frame.isl + frame.step).to_numpy(float)
    kv = batch * context * frame.num_key_value_heads.to_numpy(float) * 512
    bandwidth = _peaks(DEVICES[device])[1]

    def formula(p: Array) -> Array:
        t0, share, per_head, per_context = np.exp(p)
        return t0 + kv / (share * bandwidth) + per_head * batch * heads + per_context * context

    return Operator(
        "decode",
        frame.latency.to_numpy() * 1e-3,
        formula,
        np.log([1e-5, 0.8, 5e-10, 5e-10]),
        np.log([1e-6, 0.2, 1e-13, 1e-13]),
        np.log([1e-4, 1.0, 1e-7, 1e-7]),
    )


def prefill(frame: pd.DataFrame, device: str) -> Operator:
    """Causal attention over whole prompts in bf16."""
    frame = _plain_attention(frame)
    batch, length = frame.batch_size.to_numpy(float), frame.isl.to_numpy(float)
    heads, kv_heads = frame.num_heads.to_numpy(float), frame.num_key_value_heads.to_numpy(float)
    work = 2 * batch * length**2 * heads * 128
    traffic = 2 * batch * length * (2 * heads + 2 * kv_heads) * 128
    flops, bandwidth = _peaks(DEVICES[device])

    def formula(p: Array) -> Array:
        t0, compute, memory = np.exp(p)
        return t0 + work / (compute * flops) + traffic / (memory * bandwidth)

    return Operator(
        "prefill",
        frame.latency.to_numpy() * 1e-3,
        formula,
        np.log([1e-5, 0.5, 0.4]),
        np.log([1e-6, 0.05, 0.05]),
        np.log([1e-4, 1.0, 1.0]),
    )


def _plain_attention(frame: pd.DataFrame) -> pd.DataFrame:
    """bf16 over heads of 128 and the whole context (later files also time sliding windows)."""
    plain = (frame.attn_dtype == "bfloat16") & (frame.kv_cache_dtype == "bfloat16") & (frame.head_dim == 128)
    return frame[plain & (frame.window_size == 0)] if "window_size" in frame else frame[plain]


def all_reduce(frame: pd.DataFrame, device: str) -> Operator:
    """NCCL all-reduce of at least 1 MiB inside a machine, one β per group size."""
    frame = frame[(frame.op_name == "all_reduce") & (frame.nccl_dtype == "half") & (frame.message_size >= 2**19)]
    ranks, size = frame.num_gpus.to_numpy(int), 2 * frame.message_size.to_numpy(float)  # counted in elements
    column = np.searchsorted([2, 4, 8], ranks)

    def formula(p: Array) -> Array:
        return np.exp(p[0]) + 2 * (ranks - 1) / ranks * size / np.exp(p[1:])[column]

    return Operator(
        "all_reduce",
        frame.latency.to_numpy() * 1e-3,
        formula,
        np.log([1e-5, 1e11, 1e11, 1e11]),
        np.log([1e-6, 1e8, 1e8, 1e8]),
        np.log([1e-3, 1e12, 1e12, 1e12]),
    )


FILES: dict[str, tuple[str, Callable[[pd.DataFrame, str], Operator]]] = {
    "gemm": ("{device}_gemm_vllm_{version}_gemm_perf.parquet", gemm),
    "decode": ("{device}_attention_vllm_{version}_generation_attention_perf.parquet", decode),
    "prefill": ("{device}_attention_vllm_{version}_context_attention_perf.parquet", prefill),
    "all_reduce": ("{device}_comm_nccl_*_nccl_perf.parquet", all_reduce),
}


def fit_and_report(data: Path) -> tuple[dict[str, dict[str, list[float]]], list[dict[str, Any]]]:
    """Constants by device and operator, and one row of errors per set that was not fitted."""
    constants: dict[str, dict[str, list[float]]] = {}
    rows: list[dict[str, Any]] = []
    for device, name in DEVICES.items():
        constants[name] = {}
        for kind, (pattern, build) in FILES.items():
            (path,) = (data / "aiconfigurator").glob(pattern.format(device=device, version="0.14.0"))
            operator = build(pd.read_parquet(path), device)
            held_out = np.arange(len(operator.seconds)) * 7919 % 10 < 3
            fitted = operator.fit(~held_out)
            constants[name][kind] = [float(x) for x in np.exp(fitted)]
            rows.append(_row(name, kind, "fitted 70 %", operator.errors(fitted)[~held_out]))
            rows.append(_row(name, kind, "held-out 30 %", operator.errors(fitted)[held_out]))
            newer = data / "aiconfigurator" / pattern.format(device=device, version="0.24.0")
            if newer.exists():
                rows.append(_row(name, kind, "vLLM 0.24", build(pd.read_parquet(newer), device).errors(fitted)))
    rows.extend(_vidur_rows(data / "vidur", constants))
    return constants, rows


def _vidur_rows(folder: Path, constants: dict[str, dict[str, list[float]]]) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("compute_*_mlp.csv")):
        device = path.name.split("_")[1]
        frame = pd.read_csv(path)
        ranks = frame.num_tensor_parallel_workers.to_numpy(float)
        tokens, hidden = frame.num_tokens.to_numpy(float), frame.n_embd.to_numpy(float)
        inner = frame.n_expanded_embd.to_numpy(float) / ranks
        gated = np.where(frame.use_gated_mlp, 2.0, 1.0)
        peaks = A40_PEAKS if device == "a40" else _peaks(VIDUR[device])
        errors = []
        for column, n, k in (("mlp_up_proj", inner * gated, hidden), ("mlp_down_proj", hidden, inner)):
            seconds = frame[f"time_stats.{column}.median"].to_numpy() * 1e-3
            operator = _gemm_operator(tokens, n, k, seconds, *peaks)
            known = np.isfinite(seconds) & (seconds > 0) & (2 * n * k >= 40e6)
            errors.append(operator.errors(np.log(constants[VIDUR[device]]["gemm"]))[known])
        model = path.name.removeprefix(f"compute_{device}_").removesuffix("_mlp.csv")
        yield _row(device, "gemm", f"Vidur {model}", np.concatenate(errors))


def _peaks(name: str) -> tuple[float, float]:
    device = device_type(name)
    return device.flops_per_s, device.memory_bytes_per_s


def _row(device: str, kind: str, part: str, errors: Array) -> dict[str, Any]:
    return {
        "device": device,
        "operator": kind,
        "part": part,
        "calls": len(errors),
        "median_error": float(np.median(np.abs(errors))),
        "p90_error": float(np.quantile(np.abs(errors), 0.9)),
        "bias": float(np.median(errors)),
    }


def main() -> None:
    """Print the table of errors and the constants that `planners.hardware.catalogue` carries."""
    parser = argparse.ArgumentParser(description="Fit and check the operator cost model.")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with aiconfigurator/, vidur/")
    parser.add_argument("--json", type=Path, help="write constants and errors here")
    arguments = parser.parse_args()
    if not (arguments.data / "aiconfigurator").is_dir():
        print(f"Skipped: there is no {arguments.data}/aiconfigurator; give the folder of measurements with --data.")
        return
    began = time.perf_counter()
    constants, rows = fit_and_report(arguments.data)
    print("| device | operator | part | calls | median | 90 % | bias |\n|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['device']} | {row['operator']} | {row['part']} | {row['calls']} | {row['median_error']:.1%} "
            f"| {row['p90_error']:.1%} | {row['bias']:+.1%} |"
        )
    for device, operators in constants.items():
        for kind, values in operators.items():
            print(device, kind, ", ".join(f"{value:.4g}" for value in values))
    unfitted = [r["median_error"] for r in rows if r["part"] != "fitted 70 %"]
    median, seconds = float(np.median(unfitted)), time.perf_counter() - began
    print(f"Median over unfitted parts {median:.1%}, worst part {max(unfitted):.1%}; {seconds:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps({"constants": constants, "errors": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
