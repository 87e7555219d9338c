"""GPUs as the driver lists them; the driver is a fake of nvidia-ml-py."""

import threading

import pynvml
import pytest

from planners.errors import UserError
from planners.hardware.catalogue import CATALOGUE
from tasks.machine import gpus
from tasks.machine.discovery import discover_machine
from tasks.machine.gpus import find_gpus, gpu_environment, gpu_type, visible_gpus
from tasks.machine.processes import device_environment
from tests.support.nvml import MIB, FakeGpu, FakeNvml

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEXFLOW_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def drive(monkeypatch: pytest.MonkeyPatch, *there: FakeGpu, fault: int | None = None) -> FakeNvml:
    fake = FakeNvml(*there, fault=fault)
    monkeypatch.setattr(gpus, "pynvml", fake)
    return fake


def two_h100() -> list[FakeGpu]:
    return [FakeGpu(H100, 81559, f"GPU-{letter}{letter}", (9, 0)) for letter in "ab"]


def test_gpus_are_devices_by_their_place_on_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = drive(monkeypatch, *two_h100())
    assert [
        (d.index, d.device_type, d.kind, d.memory_bytes, d.uuid, d.compute_capability)
        for d in discover_machine().devices
    ] == [
        (0, "h100", "cuda", 81559 * MIB, "GPU-aa", "9.0"),
        (1, "h100", "cuda", 81559 * MIB, "GPU-bb", "9.0"),
    ]
    assert fake.opened == 0, "the driver was let go"


@pytest.mark.parametrize("fault", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_without_a_driver_cores_are_the_devices(monkeypatch: pytest.MonkeyPatch, fault: int) -> None:
    drive(monkeypatch, fault=fault)
    assert find_gpus() == ()
    assert {device.kind for device in discover_machine().devices} == {"cpu"}


def test_a_driver_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    drive(monkeypatch, fault=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    with pytest.raises(UserError, match=r"fails \(.*mismatch.*\): mend the NVIDIA driver, or set HEXFLOW_DEVICES"):
        discover_machine()


def test_a_driver_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    fake = drive(monkeypatch)
    monkeypatch.setattr(fake, "nvmlInit", released.wait)
    monkeypatch.setattr(gpus, "ANSWER_DEADLINE_S", 0.05)
    try:
        with pytest.raises(UserError, match=r"no answer in 0 s"):
            find_gpus()
    finally:
        released.set()


def test_gpu_without_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    drive(monkeypatch, FakeGpu("NVIDIA GB10", None, "GPU-aa", (12, 1)))
    with pytest.raises(UserError, match=r"GPU 0 \(NVIDIA GB10\) reports no device memory"):
        find_gpus()


@pytest.mark.parametrize(
    ("visible", "numbers"), [("1", [1]), ("GPU-bb", [1]), ("GPU-b", [1]), ("", []), ("0, GPU-bb", [0, 1]), ("2", [])]
)
def test_visible_gpus_only(monkeypatch: pytest.MonkeyPatch, visible: str, numbers: list[int]) -> None:
    drive(monkeypatch, *two_h100())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in visible_gpus()] == numbers


def test_slices_of_a_gpu_are_devices_of_a_type_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU that is cut is none itself; each slice has its own memory and UUID."""
    whole = "NVIDIA A100-SXM4-40GB"
    slices = [FakeGpu(f"{whole} MIG {p}", m, f"MIG-{p}") for p, m in (("3g.20gb", 19968), ("1g.5gb", 4864))]
    drive(monkeypatch, FakeGpu(whole, 40536, "GPU-aa", slices=slices), FakeGpu(whole, 40536, "GPU-bb"))
    assert [(gpu.index, gpu.device_type, gpu.memory_bytes // MIB, gpu.uuid) for gpu in find_gpus()] == [
        (0, "a100-40-mig-3g-20gb", 19968, "MIG-3g.20gb"),
        (1, "a100-40-mig-1g-5gb", 4864, "MIG-1g.5gb"),
        (2, "a100-40", 40536, "GPU-bb"),
    ]


def test_a_process_is_bound_by_uuid_in_the_order_of_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the one that starts it is bound already: numbers are those of the machine."""
    drive(monkeypatch, *two_h100())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb")
    bound = {"CUDA_VISIBLE_DEVICES": "GPU-bb,GPU-aa", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert gpu_environment([1, 0]) == device_environment("cuda", [1, 0]) == bound
    with pytest.raises(UserError, match=r"GPU 2 is not there: this machine has \[0, 1\]"):
        gpu_environment([2])


NAMES = [
    (H100, 81559, "h100"),
    ("NVIDIA H100 PCIe", 81559, "h100-pcie-80"),
    ("NVIDIA H100 NVL", 95830, "h100-nvl-94"),
    ("NVIDIA H200", 143771, "h200"),
    ("NVIDIA H200 NVL", 143771, "h200-nvl-140"),
    ("NVIDIA H20", 97871, "h20"),
    ("NVIDIA L40S", 46068, "l40s"),
    ("NVIDIA L4", 23034, "l4"),
    ("NVIDIA A10G", 23028, "a10g"),
    ("NVIDIA A100-SXM4-80GB", 81920, "a100-80"),
    ("NVIDIA A100 80GB PCIe", 81920, "a100-pcie-80"),
    ("NVIDIA A100-SXM4-40GB", 40536, "a100-40"),
    ("Tesla V100-SXM2-16GB", 16160, "v100-16"),
    ("Tesla V100-SXM2-32GB", 32510, "v100-32"),
    ("Tesla V100-PCIE-32GB", 32510, "v100-pcie-32"),
    ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090"),
    ("NVIDIA GeForce RTX 3070", 8192, "rtx-3070-8"),
    ("NVIDIA GeForce RTX 3070 Laptop GPU", 8192, "rtx-3070-laptop-8"),
    ("NVIDIA GeForce GTX 1060 6GB", 6144, "gtx-1060-6"),
    ("NVIDIA TITAN V", 12066, "titan-v-12"),
    ("NVIDIA TITAN Xp", 12196, "titan-xp-12"),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", 16376, "rtx-4070-ti-super-16"),
    ("NVIDIA RTX A6000", 49140, "a6000"),
    ("Quadro RTX 6000", 24576, "rtx-6000-24"),
    ("NVIDIA RTX 6000 Ada Generation", 49140, "rtx-6000-ada-48"),
    ("NVIDIA RTX 4000 Ada Generation", 20475, "rtx-4000-ada-20"),
    ("NVIDIA RTX 4000 SFF Ada Generation", 20475, "rtx-4000-sff-ada-20"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, "rtx-pro-6000-96"),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887, "rtx-pro-6000-max-q-96"),
    ("NVIDIA Graphics Device", 8192, "gpu-8"),
    ("NVIDIA H800", 81559, "h800"),
    ("NVIDIA B200", 183359, "b200"),
]
"""What drivers say, with the memory in MiB, and the type that it is."""


@pytest.mark.parametrize(("name", "memory_mib", "device_type"), NAMES)
def test_types_are_name_and_memory(name: str, memory_mib: int, device_type: str) -> None:
    """Types of GPUs that differ in either are two, since neither speed nor capacity is the same.

    What differs in the name alone differs in bandwidth, clocks or power.
    """
    assert gpu_type(name, memory_mib * MIB) == device_type


def test_what_is_described_is_called_as_what_is_found() -> None:
    """So that a plan for a described cluster speaks of the pools that its machines will have."""
    only_described = {"cpu", "h800-paper"}
    assert set(CATALOGUE) - only_described <= {device_type for _, _, device_type in NAMES}
