"""What is checked and made ready before a run starts, so that bad input costs seconds and leaves nothing behind."""

import asyncio
import math
import os
import shutil
import tempfile
import time
from pathlib import Path

from planners.costs.memory import CPU_KV_CACHE_BYTES, training_states
from planners.errors import UserError
from planners.hardware.machine import Machine
from planners.hardware.profile import DeviceProfile
from planners.workload.model import ELEMENT_BYTES, Model, read_model
from tasks.config.experiment import Experiment
from tasks.config.settings import Settings
from tasks.data.chat import Chat
from tasks.data.split import Questions
from tasks.exchange.layout import RunDirectory
from tasks.machine.devices import describe_holders
from tasks.machine.memory import gib, memory_bytes
from tasks.machine.private import make_private
from tasks.models.prepare import load_tokenizer, prepare_model
from tasks.profiling.profile import profile_device
from tasks.rewards.python import check_functions
from tasks.rewards.references import check_references
from tasks.training.memory import checkpoint_bytes
from tasks.wishes import check_type, usable_devices

_BFLOAT16_SINCE = 8.0
LEAVING_S = 10.0
"""A run that ends gives its devices back within it."""


def require_free_devices(experiment: Experiment, machine: Machine, run_id: str | None = None) -> None:
    """Refuse to start a run while others have any device that it may use, since its plan may take them all.

    Args:
        experiment: says which devices the run may use.
        machine: this machine.
        run_id: the run, if it is resumed: what its dead supervisor left on the devices is ended by the resume.

    Raises:
        UserError: one is held or in use, also after `LEAVING_S`; by whom is said.
    """
    give_up = time.monotonic() + LEAVING_S
    usable = usable_devices(experiment, machine)
    while True:
        held = describe_holders(usable, run_id)
        if not held:
            return
        if time.monotonic() > give_up:
            raise UserError(f"{held[0]} A run may use every device unless cluster.device_types names fewer.")
        time.sleep(0.2)


def require_places(settings: Settings) -> None:
    """Make the directories of state and runs, and refuse them where they cannot be written.

    The home is closed to other users.

    Raises:
        UserError: names the place and the variable that chooses another.
    """
    _check_writable(settings.local.home, "HEXFLOW_HOME")
    make_private(settings.local.home, "HEXFLOW_HOME")
    _check_writable(settings.shared.runs, "HEXFLOW_RUNS")


def make_ready(experiment: Experiment, machine: Machine, settings: Settings, run: RunDirectory | None = None) -> Path:
    """Prepare the model, and check that data, prompts, devices, memory and storage can serve the experiment.

    Args:
        experiment: the experiment.
        machine: this machine.
        settings: where models and runs lie.
        run: directory of the run, whose versions and checkpoints are there already if it is resumed; None: no run yet.

    Returns:
        The prepared model's directory.

    Raises:
        UserError: the model cannot be used, the data or a prompt does not fit, there are too few devices, or memory or
            storage do not suffice.
    """
    usable = usable_devices(experiment, machine)
    _check_dtype(experiment, usable)
    check_functions(experiment.rewards)
    questions = Questions(experiment)  # before the model, which may take minutes
    require_places(settings)
    model_path = prepare_model(experiment.model, settings)
    model = read_model(model_path, ELEMENT_BYTES[experiment.model.dtype])
    require_memory(experiment, usable, model)
    _check_room(experiment, settings.shared.runs, model, _bytes_of(run) if run else 0)
    _check_prompts(experiment, questions, model_path, model.vocabulary)
    return model_path


def profile_machine(
    experiment: Experiment, machine: Machine, model_path: Path, settings: Settings, device_type: str | None = None
) -> dict[str, DeviceProfile]:
    """A profile of a device type, or of each that the experiment may use, measured now or known already.

    Types are measured beside each other, as they will work beside each other.

    Raises:
        UserError: a measurement failed or did not end in time, or the machine has no such device.
    """
    types = list(usable_devices(experiment, machine).count_by_type())
    if device_type is not None:
        check_type(device_type, machine.count_by_type(), "device_type", machine.name)
        types = [device_type]

    async def measure() -> list[DeviceProfile]:
        return await asyncio.gather(
            *(profile_device(experiment, machine, name, model_path, settings) for name in types)
        )

    return dict(zip(types, asyncio.run(measure()), strict=True))


def _check_prompts(experiment: Experiment, questions: Questions, model_path: Path, vocabulary: int) -> None:
    """Encode what can be known: the evaluations' questions, those of whole files, and the first of the generated."""
    chat = Chat(experiment, load_tokenizer(model_path))
    last = max(chat.stop_token_ids)
    items = list(questions.known())
    for item in items:
        last = max(last, *chat.encode(item))
    if last >= vocabulary:
        raise UserError(
            f"The tokenizer in {model_path} has the token {last} in a prompt or at its end, but the model's embedding "
            f"ends at {vocabulary - 1}: take tokenizer and model from one place."
        )
    check_references(experiment.rewards, experiment.sources, items)


def _check_writable(directory: Path, variable: str) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"hexflow")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(
            f"{directory} cannot be written ({error.strerror}): make room or mend its permissions, or name another "
            f"place in {variable}."
        ) from None


def _check_dtype(experiment: Experiment, machine: Machine) -> None:
    """Refuse GPUs that do not compute in the model's format: bfloat16 came with compute capability 8.0."""
    if experiment.model.dtype != "bfloat16":
        return
    for device in machine.devices:
        if device.compute_capability and float(device.compute_capability) < _BFLOAT16_SINCE:
            raise UserError(
                f"model.dtype is bfloat16, which {device.device_type} (compute capability {device.compute_capability}) "
                "does not compute in: write model.dtype=float32, or name other types in cluster.device_types."
            )


def require_memory(experiment: Experiment, machine: Machine, model: Model) -> None:
    """Refuse what cannot fit however the devices are split; activations and libraries come on top.

    Raises:
        UserError: says how much is missing, and the remedy.
    """
    if any(device.kind == "cuda" for device in machine.devices):
        _check_gpu_memory(experiment, machine, model)
        return
    # One process trains and one generates, in the same memory.
    reference = experiment.algorithm.needs_reference
    training = training_states(model, data_ranks=1, zero=experiment.planner.zero_stage or 0, reference=reference).total
    rollout = model.weight_bytes + CPU_KV_CACHE_BYTES
    _, available = memory_bytes()
    if training + rollout > available:
        raise UserError(
            f"{experiment.model.source} needs at least {gib(training + rollout)} of memory here, {gib(training)} to "
            f"train and {gib(rollout)} to generate, but {gib(available)} are available: end other programs or choose "
            "a smaller model."
        )


def _check_gpu_memory(experiment: Experiment, machine: Machine, model: Model) -> None:
    """The best case: one type trains on all of its devices but one to generate, and the largest device generates."""
    planner = experiment.planner
    stage = 3 if planner.zero_stage is None else planner.zero_stage
    memory = {device.device_type: device.memory_bytes for device in machine.devices}
    needed = {}
    for name, count in machine.count_by_type().items():
        if planner.train_type in (None, name):
            ranks = planner.train_devices or min(count, len(machine.devices) - 1)
            reference = experiment.algorithm.needs_reference
            needed[name] = training_states(model, data_ranks=ranks, zero=stage, reference=reference).total
    best = max(needed, key=lambda name: memory[name] - needed[name])
    if needed[best] > memory[best]:
        raise UserError(
            f"Training {experiment.model.source} in ZeRO stage {stage} needs {gib(needed[best])} on each "
            f"device, but a {best} has {gib(memory[best])}: use planner.zero_stage 3, more devices, or a smaller "
            "model."
        )
    rollout = model.weight_bytes + model.kv_bytes_per_token * experiment.model.max_context
    if rollout > max(memory.values()):
        raise UserError(
            f"Generating with {experiment.model.source} needs {gib(rollout)} on one device, for the weights and one "
            f"answer of model.max_context tokens, but the largest has {gib(max(memory.values()))}: choose a smaller "
            "model or context."
        )


def _check_room(experiment: Experiment, runs: Path, model: Model, present: int) -> None:
    """Room for the versions and checkpoints kept at once; a new one is written before the oldest is deleted.

    `present` bytes of them are there already.
    """
    run, storage = experiment.run, experiment.storage
    version = model.weight_bytes
    checkpoint = checkpoint_bytes(model.parameters, experiment.model.dtype)
    versions = min(storage.keep_versions, run.steps) + 1
    checkpoints = min(storage.keep_checkpoints + 1, math.ceil(run.steps / run.checkpoint_every))
    needed, free = versions * version + checkpoints * checkpoint - present, shutil.disk_usage(runs).free
    if needed > free:
        raise UserError(
            f"The run needs about {gib(needed)} {'more ' if present else ''}in {runs}, for {versions} weight versions "
            f"of {gib(version)} and {checkpoints} checkpoints of {gib(checkpoint)}, but {gib(free)} are free: make "
            "room, name another place in HEXFLOW_RUNS, or lower storage.keep_versions or storage.keep_checkpoints."
        )


def _bytes_of(run: RunDirectory) -> int:
    """Size of the run's weight versions and checkpoints."""
    files = [path for root in (run.weights, run.checkpoints) for path in root.rglob("*")]
    return sum(path.stat().st_size for path in files if path.is_file())
