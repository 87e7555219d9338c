"""What is checked and made ready before a run starts, so that bad input costs seconds and leaves nothing behind."""

import asyncio
from pathlib import Path

from planners.cluster import Machine
from planners.profile import DeviceProfile
from planners.split import check_devices
from tasks.discovery import discover_machine
from tasks.experiment import Experiment
from tasks.models import load_tokenizer, prepare_model
from tasks.profiling.profile import profile_device
from tasks.rollout.prompts import PromptSource
from tasks.settings import Settings


def make_ready(experiment: Experiment, settings: Settings) -> Path:
    """Prepare the model, and check that data, prompts and devices can serve the experiment; returns its directory.

    Raises:
        UserError: the model cannot be used, the data or a prompt does not fit, or there are too few devices.
    """
    check_devices(
        discover_machine(),
        train_type=experiment.planner.train_type,
        train_devices=experiment.planner.train_devices,
        device_types=experiment.cluster.device_types,
    )
    model_path = prepare_model(experiment.model, settings)
    _check_prompts(experiment, model_path)
    return model_path


def profile_machine(
    experiment: Experiment, machine: Machine, model_path: Path, settings: Settings
) -> dict[str, DeviceProfile]:
    """A profile for each device type that the experiment may use, measured now or cached.

    Types are measured beside each other, as they will work beside each other.

    Raises:
        UserError: a measurement failed or did not end in time.
    """
    allowed = experiment.cluster.device_types
    types = [name for name in machine.count_by_type() if allowed is None or name in allowed]

    async def measure() -> list[DeviceProfile]:
        return await asyncio.gather(
            *(profile_device(experiment, machine, name, model_path, settings) for name in types)
        )

    return dict(zip(types, asyncio.run(measure()), strict=True))


def _check_prompts(experiment: Experiment, model_path: Path) -> None:
    """Encode what can be known: the held-out questions, and those of the first step or of the whole file."""
    prompts = PromptSource(experiment, load_tokenizer(model_path))
    indices = range(prompts.epoch or experiment.workload.prompts_per_step)
    for item in [*prompts.heldout(), *map(prompts.item, indices)]:
        prompts.encode(item)
