"""What this machine has: its GPUs, or its CPU cores where it has none."""

import os
import platform
import re

from planners.errors import UserError
from planners.hardware.machine import Device, Machine
from tasks.machine.gpus import slug, visible_gpus
from tasks.machine.memory import memory_bytes

CONTROL = "control"
"""The work pool of flows that decide; device types name pools too, so none may be called like it."""
_TYPE = re.compile(r"[a-z0-9][a-z0-9-]*")


def discover_machine() -> Machine:
    """This machine and its devices.

    Devices are the GPUs that the NVIDIA driver lists, else the CPU cores this process may run on, of type `cpu`.
    `HEXFLOW_DEVICES="fast=0;slow=1"` labels cores by hand instead: type=comma-separated core numbers. The name is
    `$HEXFLOW_MACHINE`, else the host's.

    Raises:
        UserError: HEXFLOW_DEVICES is malformed or names a core that is not there; the NVIDIA driver fails.
    """
    name = os.environ.get("HEXFLOW_MACHINE") or platform.node()
    return Machine(name=slug(name) or "localhost", devices=_devices())


def _devices() -> tuple[Device, ...]:
    labelled = os.environ.get("HEXFLOW_DEVICES")
    cores = sorted(os.sched_getaffinity(0))
    if labelled:
        return _cpu_devices(parse_device_labels(labelled, cores), len(cores))
    return visible_gpus() or _cpu_devices(dict.fromkeys(cores, "cpu"), len(cores))


def _cpu_devices(type_by_core: dict[int, str], cores: int) -> tuple[Device, ...]:
    share_bytes = memory_bytes()[0] // cores
    return tuple(
        Device(index=core, device_type=device_type, kind="cpu", memory_bytes=share_bytes)
        for core, device_type in sorted(type_by_core.items())
    )


def parse_device_labels(text: str, cores: list[int]) -> dict[int, str]:
    """Device type by core number from `fast=0;slow=1,2`.

    Raises:
        UserError: it is not of that form, a type is called `control`, or a core is named twice or is not among `cores`.
    """
    types: dict[int, str] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        device_type, _, listed = part.partition("=")
        numbers = [number.strip() for number in listed.split(",")]
        if not _TYPE.fullmatch(device_type) or not all(number.isdecimal() for number in numbers):
            raise UserError(
                f"HEXFLOW_DEVICES has '{part}', which is not of the form type=core,core as in fast=0;slow=1."
            )
        if device_type == CONTROL:
            raise UserError(
                f"HEXFLOW_DEVICES has '{part}', but {CONTROL} is the pool of flows that decide: give the type another "
                "name."
            )
        for core in map(int, numbers):
            if core not in cores:
                raise UserError(f"HEXFLOW_DEVICES names core {core}; this process may use cores {cores}.")
            if core in types:
                raise UserError(f"HEXFLOW_DEVICES names core {core} twice: a core is one device of one type.")
            types[core] = device_type
    if not types:
        raise UserError("HEXFLOW_DEVICES names no device: write type=core,core as in fast=0;slow=1, or unset it.")
    return types
