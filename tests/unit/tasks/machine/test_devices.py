"""A device serves one holder at a time, from whichever home, and a holder's death frees it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from planners.errors import UserError
from planners.hardware.machine import Device, Machine
from tasks.config.settings import Settings, machine_directory
from tasks.machine import gpus
from tasks.machine.devices import describe_holders, hold_devices
from tasks.machine.gpus import find_gpus
from tests.support.nvml import FakeGpu, FakeNvml

HOLD_AND_WAIT = """
import sys, time
from tasks.machine.devices import hold_devices
from tasks.config.settings import load_settings
with hold_devices("here", "cpu", [0, 1], "run a, replica 0", load_settings()):
    print("held", flush=True)
    time.sleep(60)
"""
CORES = Machine(
    name="here",
    devices=tuple(Device(index=core, device_type="cpu", kind="cpu", memory_bytes=2**30) for core in (0, 1, 2)),
)


@pytest.fixture
def others(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A process that holds cores 0 and 1 for another home of the same user."""
    monkeypatch.setenv("HEXFLOW_HOME", "/homes/other")
    with subprocess.Popen([sys.executable, "-c", HOLD_AND_WAIT], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder
        holder.kill()


def test_cores_are_held_across_homes_and_death_frees_them(settings: Settings, others: subprocess.Popen[str]) -> None:
    """Whoever wants one is told what holds it, for which home, and since when."""
    said = r"Core 1 is held by run a, replica 0 since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d from /homes/other: wait until"
    with (
        pytest.raises(UserError, match=said),
        hold_devices("here", "cpu", [1], "run b", settings, deadline_s=0.1),
    ):
        raise AssertionError("two holders")
    with hold_devices("here", "cpu", [2], "run b", settings, deadline_s=0.1):
        pass
    assert [sentence[:6] for sentence in describe_holders(CORES)] == ["Core 0", "Core 1"]
    others.kill()
    others.wait()
    with hold_devices("here", "cpu", [0, 1], "run b", settings, deadline_s=5.0):
        note = (machine_directory() / "devices" / "core-0-here").read_text()
        assert note.startswith("run b since ")
        assert note.endswith(f" from {settings.local.home}\n")


def test_cores_are_held_for_a_name_of_the_machine(settings: Settings, others: subprocess.Popen[str]) -> None:
    """Two machines on one home, and a machine under two names, are two."""
    with hold_devices("there", "cpu", [0], "run b", settings, deadline_s=0.1):
        assert describe_holders(CORES.model_copy(update={"name": "elsewhere"})) == []


def test_no_other_user_can_take_a_hold(settings: Settings) -> None:
    with hold_devices("here", "cpu", [0], "run b", settings):
        held = machine_directory() / "devices"
        modes = {path: path.stat().st_mode & 0o777 for path in (held.parent, held, held / "core-0-here.lock")}
    assert list(modes.values()) == [0o700, 0o700, 0o600]


def drive(monkeypatch: pytest.MonkeyPatch, *there: FakeGpu) -> Machine:
    monkeypatch.setattr(gpus, "pynvml", FakeNvml(*there))
    return Machine(name="here", devices=find_gpus())


def test_a_gpu_is_held_by_what_it_is_under_whatever_number(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another home may see fewer GPUs, or call the machine otherwise: a UUID is the same for all."""
    first, second = (FakeGpu("NVIDIA H100 80GB HBM3", 81559, f"GPU-{letter}{letter}", (9, 0)) for letter in "ab")
    drive(monkeypatch, first, second)
    elsewhere = replace(settings, local=replace(settings.local, home=Path("/homes/other")))
    with hold_devices("here", "cuda", [1], "run-a (train 0)", settings):
        machine = drive(monkeypatch, second)
        assert describe_holders(machine, "run-a") == []
        (said,) = describe_holders(machine, "run-b")
        assert said.startswith("GPU 0 is held by run-a (train 0) since ")
        with (
            pytest.raises(UserError, match=r"GPU 0 is held by run-a \(train 0\)"),
            hold_devices("there", "cuda", [0], "run-b (train 0)", elsewhere, deadline_s=0.1),
        ):
            raise AssertionError("two holders")


def test_a_process_that_computes_on_a_gpu_is_named(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users' holds cannot be seen; what the driver tells can, also of a container, without a name."""
    this = psutil.Process()
    busy = FakeGpu("NVIDIA H100 80GB HBM3", 81559, "GPU-aa", (9, 0), pids=[this.pid, 2**30])
    machine = drive(monkeypatch, busy)
    (said,) = describe_holders(machine)
    assert said == (
        f"GPU 0 is in use by process {os.getpid()} ({this.name()}) of {this.username()} and process {2**30} of another "
        "container: wait until that has ended, or leave the GPU out with CUDA_VISIBLE_DEVICES."
    )
    with (
        pytest.raises(UserError, match=rf"GPU 0 is in use by process {os.getpid()}"),
        hold_devices("here", "cuda", [0], "run b", settings, deadline_s=0.1),
    ):
        raise AssertionError("two users")
    busy.pids.clear()
    with hold_devices("here", "cuda", [0], "run b", settings, deadline_s=0.1):
        pass
