"""A fake of nvidia-ml-py: a driver with the GPUs that a test wants."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

MIB = 2**20


@dataclass
class FakeGpu:
    """A GPU, or a slice of one; `memory_mib` None: it reports none."""

    name: str
    memory_mib: int | None
    uuid: str
    capability: tuple[int, int] = (8, 0)
    slices: "list[FakeGpu]" = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    """Of the processes that compute on it."""


class FakeNvml:
    """The functions of pynvml that we call; handles are the GPUs themselves. `fault` is what starting it raises."""

    NVMLError = pynvml.NVMLError
    NVMLError_LibraryNotFound = pynvml.NVMLError_LibraryNotFound
    NVMLError_DriverNotLoaded = pynvml.NVMLError_DriverNotLoaded
    NVMLError_NotSupported = pynvml.NVMLError_NotSupported
    NVMLError_NotFound = pynvml.NVMLError_NotFound
    NVMLError_NoPermission = pynvml.NVMLError_NoPermission
    NVML_DEVICE_MIG_ENABLE = pynvml.NVML_DEVICE_MIG_ENABLE

    def __init__(self, *gpus: FakeGpu, fault: int | None = None) -> None:
        self._gpus, self._fault = gpus, fault
        self.opened = 0

    def nvmlInit(self) -> None:
        if self._fault is not None:
            raise pynvml.NVMLError(self._fault)
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self._gpus[index]

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return gpu.name

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetCudaComputeCapability(self, gpu: FakeGpu) -> list[int]:
        return list(gpu.capability)

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:
        if gpu.memory_mib is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(total=gpu.memory_mib * MIB)

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        """As the driver has it: GPUs older than Ampere, and those for desks, know of no slices."""
        if gpu.capability < (8, 0) or "RTX" in gpu.name:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(bool(gpu.slices)), int(bool(gpu.slices))]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:
        if index >= len(gpu.slices):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return gpu.slices[index]

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in gpu.pids]
