"""Device types: what each can do, what it costs, how well software uses it, and where every figure is from.

Peaks are the vendors' (dense bf16 with float32 accumulation, no sparsity; links one way per device). Memory is what the
driver reports (`memory.total` of nvidia-smi, in MiB as public listings show it), since that is what an engine takes its
share of: up to 6 % more than a data sheet's GB in powers of ten, and less where ECC takes a part. Efficiencies were
fitted by `python -m benchmarks.costmodel` on A100, H100 and L40S; every other type takes those of its architecture's
fitted member, rescaled to its own ratio of compute to bandwidth, and says so in `fitted_on`.

`source` names where peaks and price are published, and where a vendor's sheet is quoted if that is where the entry was
compared with it. AIC is the system file of that name in NVIDIA's aiconfigurator. Prices can be set in a cluster file.
"""

import difflib
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from planners.errors import UnknownDevice

GEMM_TOKENS = (1.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0, 8192.0)


@dataclass(frozen=True)
class Efficiency:
    """Fitted constants of the operators in `planners.costs.operators`. Shares are of the device's peaks.

    A compute share above one is an artefact of adding compute and memory time where hardware overlaps them; it occurs
    near the ridge of the roofline only, so the table moves with the ridge when another device borrows it.
    """

    fitted_on: str
    gemm_launch_s: float
    gemm_memory_share: float
    gemm_compute_share: tuple[float, ...]
    decode_launch_s: float
    decode_memory_share: float
    decode_s_per_head: float
    decode_s_per_context: float
    prefill_launch_s: float
    prefill_compute_share: float
    prefill_memory_share: float
    all_reduce_share: tuple[float, float, float]
    all_reduce_latency_s: float
    serving_latency_s: tuple[float, float, float]
    gemm_tokens: tuple[float, ...] = GEMM_TOKENS


@dataclass(frozen=True)
class DeviceType:
    """One kind of accelerator.

    `training_share` is the share of `flops_per_s` that a whole training pass reaches, recomputation counted as work.
    `serving_share` divides the speed of generation as a whole: 1 is what the operator timings say, less is what a
    given serving stack leaves of it. `host_s` is the engine's own time per iteration. Devices of kind `cpu` are cores:
    those of one role and machine form one process with a thread per core.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int
    link_bytes_per_s: float
    usd_per_h: float
    efficiency: Efficiency
    source: str
    training_share: float = 0.40
    training_source: str = "assumed: 40 % is common for dense models of this size"
    serving_share: float = 1.0
    host_s: float = 1e-3
    kind: Literal["cuda", "cpu"] = "cuda"

    @property
    def ridge(self) -> float:
        """FLOPs per byte at which compute and memory take equally long."""
        return self.flops_per_s / self.memory_bytes_per_s


_H100_FIT = Efficiency(
    fitted_on="h100",
    gemm_launch_s=4.577e-06,
    gemm_memory_share=1.0,
    gemm_compute_share=(0.04326, 0.5701, 1.722, 3.147, 3.807, 1.933, 1.231, 0.9596, 0.8843),
    decode_launch_s=1.165e-05,
    decode_memory_share=0.9205,
    decode_s_per_head=2.607e-09,
    decode_s_per_context=8.178e-10,
    prefill_launch_s=1.24e-05,
    prefill_compute_share=0.6172,
    prefill_memory_share=0.3569,
    all_reduce_share=(0.660, 0.736, 0.732),
    all_reduce_latency_s=2.25e-05,
    serving_latency_s=(4.3e-06, 4.6e-06, 4.7e-06),
)
_A100_FIT = Efficiency(
    fitted_on="a100-80",
    gemm_launch_s=9.34e-06,
    gemm_memory_share=1.0,
    gemm_compute_share=(0.02555, 0.3659, 1.25, 1.219, 1.323, 1.102, 1.015, 0.9492, 0.9334),
    decode_launch_s=1.715e-05,
    decode_memory_share=0.7518,
    decode_s_per_head=3.123e-09,
    decode_s_per_context=3.105e-10,
    prefill_launch_s=1.245e-05,
    prefill_compute_share=0.5873,
    prefill_memory_share=0.3552,
    all_reduce_share=(0.615, 0.652, 0.620),
    all_reduce_latency_s=3.63e-05,
    serving_latency_s=(4.9e-06, 5.2e-06, 5.7e-06),
)
_L40S_FIT = Efficiency(
    fitted_on="l40s",
    gemm_launch_s=8.129e-06,
    gemm_memory_share=0.9381,
    gemm_compute_share=(0.02, 0.2045, 0.5373, 0.9518, 1.609, 1.894, 1.235, 0.8528, 0.818),
    decode_launch_s=1.087e-05,
    decode_memory_share=0.829,
    decode_s_per_head=2.205e-09,
    decode_s_per_context=2.949e-10,
    prefill_launch_s=7.959e-06,
    prefill_compute_share=0.4964,
    prefill_memory_share=1.0,
    all_reduce_share=(0.629, 0.161, 0.0466),
    all_reduce_latency_s=1.57e-05,
    serving_latency_s=(5.4e-06, 1.33e-05, 2.5e-05),
)

_PLAIN = Efficiency(  # a device whose peaks are themselves measured
    fitted_on="itself",
    gemm_launch_s=0.0,
    gemm_memory_share=1.0,
    gemm_compute_share=(1.0,) * len(GEMM_TOKENS),
    decode_launch_s=0.0,
    decode_memory_share=1.0,
    decode_s_per_head=0.0,
    decode_s_per_context=0.0,
    prefill_launch_s=0.0,
    prefill_compute_share=1.0,
    prefill_memory_share=1.0,
    all_reduce_share=(1.0, 1.0, 1.0),
    all_reduce_latency_s=1e-4,
    serving_latency_s=(1e-4, 1e-4, 1e-4),
)

_RENT = "price: RunPod's lowest, as deploybase.ai lists it ('RunPod GPU Pricing', 10 March 2026), rounded"
_GUESS = "price: assumed, at the level of RunPod's lowest, whose list lacks it"
_PAPER = "AReaL-Hex, arXiv 2511.00796, set-up (prices normalised there: use their ratios)"
_A100_SHEET = "NVIDIA A100 datasheet (us-nvidia-1758950-r4), in glennklockwood.com/garden/processors/A100"
_H800_SHEET = "hardware_spec.md of github.com/citsjtu2020/LLM-Prof (NVLink 400 GB/s both ways)"
_A10G_SHEET = "Baseten, 'NVIDIA A10 vs A10G for ML model inference'; the A10 would have 125 TFLOPS"
_A6000_SHEET = "Microway, 'In-Depth Comparison of NVIDIA Ampere GPU Accelerators', in llmperf.net; PCIe 4, no bridge"
_L4_SHEET = "NVIDIA L4 datasheet, in store.sourcecode.com (485 INT8 TOPS with sparsity: a quarter in dense bf16)"
_ADA_SHEET = "NVIDIA Ada GPU Architecture whitepaper, float32 accumulation, as public tables of peaks quote it"
_B200_SHEET = "AIC b200_sxm.yaml; HGX B200 at 1,000 W in glennklockwood.com/garden/processors/B200"


def _device(
    name: str,
    tflops: float,
    tb_per_s: float,
    memory_mib: int,
    link_gb_per_s: float,
    usd_per_h: float,
    fit: Efficiency,
    source: str,
) -> DeviceType:
    flops, bandwidth = tflops * 1e12, tb_per_s * 1e12
    return DeviceType(name, flops, bandwidth, memory_mib * 2**20, link_gb_per_s * 1e9, usd_per_h, fit, source)


def _borrow(device: DeviceType, lender: DeviceType) -> DeviceType:
    """Move the lender's table of compute shares to this device's ridge."""
    scale = device.ridge / lender.ridge
    tokens = tuple(t * scale for t in GEMM_TOKENS)
    return replace(device, efficiency=replace(lender.efficiency, gemm_tokens=tokens))


_H100 = _device("h100", 989, 3.35, 81_559, 450, 2.7, _H100_FIT, f"peaks: AIC h100_sxm.yaml; {_RENT}")
_A100 = _device("a100-80", 312, 2.039, 81_920, 300, 1.4, _A100_FIT, f"peaks: AIC a100_sxm.yaml; {_RENT}")
_L40S = _device("l40s", 362, 0.864, 46_068, 32, 0.8, _L40S_FIT, f"peaks: AIC l40s.yaml, but PCIe 4 x16 only; {_RENT}")

# The paper's training costs per token make one H800 worth 8.9 H20 (its Table 1); peaks alone say 6.7. With the H800 at
# the common 40 % that leaves the H20 30 %.
_H20_TRAINING_SHARE = 0.40 * 989 / 148 / 8.9
_RATIO = "fitted on AReaL-Hex, Table 1: training H800/H20 = 8.9 per device, with the H800 at 40 %"

_TYPES = (
    _H100,
    _A100,
    _L40S,
    _borrow(_device("h200", 989, 4.8, 143_771, 450, 3.6, _H100_FIT, f"peaks: AIC h200_sxm.yaml; {_RENT}"), _H100),
    _borrow(_device("h800", 989, 3.35, 81_559, 200, 5.28, _H100_FIT, f"peaks: {_H800_SHEET}; price: {_PAPER}"), _H100),
    _borrow(_device("h800-paper", 756, 2.0, 81_559, 200, 5.28, _H100_FIT, f"peaks and price: {_PAPER}"), _H100),
    replace(
        _borrow(_device("h20", 148, 4.0, 97_871, 450, 1.85, _H100_FIT, f"peaks and price: {_PAPER}"), _H100),
        training_share=_H20_TRAINING_SHARE,
        training_source=_RATIO,
    ),
    _borrow(_device("a100-40", 312, 1.555, 40_536, 300, 1.2, _A100_FIT, f"peaks: {_A100_SHEET}; {_GUESS}"), _A100),
    _borrow(_device("a10g", 70, 0.6, 23_028, 32, 0.75, _A100_FIT, f"peaks: {_A10G_SHEET}; {_GUESS}"), _A100),
    _borrow(_device("a6000", 154.8, 0.768, 49_140, 32, 0.5, _A100_FIT, f"peaks: {_A6000_SHEET}; {_GUESS}"), _A100),
    _borrow(_device("l4", 121, 0.3, 23_034, 32, 0.45, _L40S_FIT, f"peaks: {_L4_SHEET}; {_RENT}"), _L40S),
    _borrow(_device("rtx-4090", 165.2, 1.008, 24_564, 32, 0.35, _L40S_FIT, f"peaks: {_ADA_SHEET}; {_RENT}"), _L40S),
    _borrow(_device("b200", 2250, 8.0, 183_359, 900, 6.0, _H100_FIT, f"peaks: {_B200_SHEET}; {_RENT}"), _H100),
)
# One core of a two-core x86-64 machine (AMD EPYC, AVX2, float32), measured with NumPy on one thread: 1536³ products and
# a matrix-vector product. Shares from SmolLM2-135M on it: a packed step of 464 tokens in 6.0 s; vLLM 0.32 at 64
# answers, 29.5 tokens/s. A profile replaces all of it.
_CPU = DeviceType(
    name="cpu",
    flops_per_s=89e9,
    memory_bytes_per_s=13.3e9,
    memory_bytes=8 * 10**9,
    link_bytes_per_s=5e9,
    usd_per_h=0.02,
    efficiency=_PLAIN,
    source="measured on one core of an AMD EPYC; price: a small cloud machine per core, rounded",
    training_share=0.9,
    training_source="measured: SmolLM2-135M, 464 packed tokens in 6.0 s",
    serving_share=0.1,
    host_s=0.02,
    kind="cpu",
)
# Ampere cards on PCIe share the A100's kernels but not its links.
_PCIE = (_L40S_FIT.all_reduce_share, _L40S_FIT.all_reduce_latency_s, _L40S_FIT.serving_latency_s)


def _with_pcie(device: DeviceType) -> DeviceType:
    share, latency, serving = _PCIE
    return replace(
        device,
        efficiency=replace(
            device.efficiency, all_reduce_share=share, all_reduce_latency_s=latency, serving_latency_s=serving
        ),
    )


CATALOGUE = MappingProxyType({d.name: _with_pcie(d) if d.name in {"a10g", "a6000"} else d for d in (*_TYPES, _CPU)})


def measured_device(
    name: str, flops_per_s: float, memory_bytes_per_s: float, memory_bytes: int, kind: Literal["cuda", "cpu"]
) -> DeviceType:
    """A type that is known by what was measured on it; its price is zero, for it is there already."""
    return DeviceType(
        name=name,
        flops_per_s=flops_per_s,
        memory_bytes_per_s=memory_bytes_per_s,
        memory_bytes=memory_bytes,
        link_bytes_per_s=5e9,
        usd_per_h=0.0,
        efficiency=_PLAIN,
        source="measured where it stands",
        kind=kind,
    )


def device_type(name: str) -> DeviceType:
    """The catalogue's entry.

    Raises:
        UnknownDevice: no such type; the nearest name is given.
    """
    if name in CATALOGUE:
        return CATALOGUE[name]
    near = difflib.get_close_matches(name.lower(), CATALOGUE, n=1, cutoff=0.4)
    hint = f"did you mean '{near[0]}'?" if near else f"known types: {', '.join(sorted(CATALOGUE))}."
    raise UnknownDevice(f"Unknown device type '{name}': {hint}")
