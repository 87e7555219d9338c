"""The GPUs of this machine as NVIDIA's driver lists them (nvidia-ml-py), in the order of the PCI bus, slices apart.

Seen with a fake of nvidia-ml-py only.
"""

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pynvml

from planners.errors import UserError
from planners.hardware.catalogue import CATALOGUE
from planners.hardware.machine import Device

ANSWER_DEADLINE_S = 30.0
"""Longest wait for the driver; it needs a second, and for ever where a GPU has fallen off the bus."""
_SAME_MEMORY = 0.05
_COMMON = re.compile(
    r"nvidia|geforce|tesla|quadro|graphics|device|gpu|generation|edition|workstation|blackwell|sxm\d?|\d+gb|hbm\w*"
)
"""Words of the vendor's that tell no two models apart, and those of memory, which is measured."""
_Answer = TypeVar("_Answer")


def find_gpus() -> tuple[Device, ...]:
    """All GPUs, none where there is no driver; a GPU that is cut into MIG slices is as many devices.

    Raises:
        UserError: the driver fails or gives no answer, or a GPU reports no memory of its own.
    """
    return _ask(lambda parts: tuple(_device(number, *part) for number, part in enumerate(parts)))


def gpu_processes() -> dict[str, tuple[int, ...]]:
    """Processes that compute on each GPU or slice, everybody's, by its UUID; none where the driver does not tell.

    Raises:
        UserError: the driver fails or gives no answer.
    """
    return _ask(lambda parts: {pynvml.nvmlDeviceGetUUID(handle): _processes(handle) for handle, _ in parts})


def visible_gpus() -> tuple[Device, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, by number or UUID; all where it is not set.

    Raises:
        UserError: as `find_gpus`.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = find_gpus()
    if listed is None:
        return gpus
    names = [name for part in listed.split(",") if (name := part.strip())]
    return tuple(gpu for gpu in gpus if any(_is_called(gpu, name) for name in names))


def gpu_uuids(numbers: Sequence[int]) -> dict[int, str]:
    """UUIDs of GPUs by their numbers here.

    Raises:
        UserError: there is no such GPU, or as `find_gpus`.
    """
    uuids = {gpu.index: gpu.uuid for gpu in find_gpus()}
    if gone := [number for number in numbers if number not in uuids]:
        raise UserError(f"GPU {gone[0]} is not there: this machine has {sorted(uuids)}.")
    return {number: uuids[number] for number in numbers}


def gpu_environment(numbers: Sequence[int]) -> dict[str, str]:
    """Variables that bind a process to GPUs by their numbers here: CUDA gets UUIDs, which no setting reorders.

    Raises:
        UserError: as `gpu_uuids`.
    """
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpu_uuids(numbers).values()), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def gpu_type(name: str, memory_bytes: int) -> str:
    """Device type of a GPU: its name without words that all have, its memory in GiB, and a MIG slice's profile.

    The memory is left out where the catalogue knows the name with this memory: `NVIDIA H100 80GB HBM3` → `h100`,
    `NVIDIA A100-SXM4-40GB` → `a100-40`, `NVIDIA A100 80GB PCIe` → `a100-pcie-80`, `NVIDIA RTX 6000 Ada Generation` →
    `rtx-6000-ada-48`, `NVIDIA A100-SXM4-40GB MIG 1g.5gb` → `a100-40-mig-1g-5gb`.

    Args:
        name: as the driver says it.
        memory_bytes: of the whole GPU.
    """
    whole, _, profile = name.partition(" MIG ")
    model = _model(whole)
    known = CATALOGUE.get(model)
    if known is None or abs(memory_bytes / known.memory_bytes - 1) > _SAME_MEMORY:
        model = f"{model}-{round(memory_bytes / 2**30)}"
    return f"{model}-mig-{slug(profile)}" if profile else model


def _model(name: str) -> str:
    """What tells a model from another one of the same memory: PCIe, NVL, Laptop and Max-Q are slower ones."""
    words = [word for word in slug(name).split("-") if not _COMMON.fullmatch(word)]
    if words[:1] == ["rtx"] and re.fullmatch(r"[a-z]\d+", words[1] if len(words) > 1 else ""):
        del words[0]  # RTX A6000 is known as A6000
    return "-".join(words) or "gpu"


def _ask(question: Callable[[list[tuple[Any, Any]]], _Answer]) -> _Answer:
    """The driver's answer to a question about its GPUs, as handles from `_parts`; of no GPU where there is no driver.

    Raises:
        UserError: the driver fails or gives no answer; or as the question.
    """
    answers: list[_Answer] = []
    faults: list[Exception] = []

    def ask() -> None:
        try:
            with _driver() as parts:
                answers.append(question(parts))
        except (pynvml.NVMLError, UserError) as error:
            faults.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(ANSWER_DEADLINE_S)
    if asking.is_alive():
        raise UserError(f"The NVIDIA driver gave no answer in {ANSWER_DEADLINE_S:.0f} s: check it with nvidia-smi.")
    for fault in faults:
        if isinstance(fault, UserError):
            raise fault
        raise UserError(
            f"The NVIDIA driver fails ({fault}): mend the NVIDIA driver, or set HEXFLOW_DEVICES to use cores."
        )
    return answers[0]


@contextmanager
def _driver() -> Iterator[list[tuple[Any, Any]]]:
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        yield []
        return
    try:
        yield [part for index in range(pynvml.nvmlDeviceGetCount()) for part in _parts(index)]
    finally:
        pynvml.nvmlShutdown()


def _parts(index: int) -> list[tuple[Any, Any]]:
    """Handles of a GPU's MIG slices, or of itself, each with the GPU's own."""
    whole = pynvml.nvmlDeviceGetHandleByIndex(index)
    try:
        is_cut = pynvml.nvmlDeviceGetMigMode(whole)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError_NotSupported:
        is_cut = False
    if not is_cut:
        return [(whole, whole)]
    slices = []
    for place in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(whole)):
        try:
            slices.append((pynvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, place), whole))
        except pynvml.NVMLError_NotFound:
            continue
    return slices


def _device(number: int, handle: Any, whole: Any) -> Device:
    name = pynvml.nvmlDeviceGetName(handle)
    try:
        memory_bytes, whole_bytes = (pynvml.nvmlDeviceGetMemoryInfo(one).total for one in (handle, whole))
    except pynvml.NVMLError_NotSupported:
        raise UserError(f"GPU {number} ({name}) reports no device memory; it cannot be planned for.") from None
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(whole)
    return Device(
        index=number,
        device_type=gpu_type(name, whole_bytes),
        kind="cuda",
        memory_bytes=memory_bytes,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        compute_capability=f"{major}.{minor}",
    )


def _processes(handle: Any) -> tuple[int, ...]:
    try:
        return tuple(process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission):
        return ()


def _is_called(gpu: Device, name: str) -> bool:
    """CUDA takes the start of a UUID for the whole."""
    return name == str(gpu.index) or (not name.isdecimal() and gpu.uuid.startswith(name))


def slug(text: str) -> str:
    """A name in lower-case letters, digits and single hyphens, as pools and queues are called."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
