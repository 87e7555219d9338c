"""What an experiment wishes of devices and planner, checked against what is there, in the words of its keys."""

import difflib
from collections.abc import Collection, Mapping

from planners.costs.memory import fitting_micro_batch_tokens
from planners.errors import UserError
from planners.hardware.machine import Machine
from planners.search.columns import TrainingWish
from planners.workload.demand import Demand, demand_of
from planners.workload.model import Model
from tasks.config.experiment import Experiment


def usable_devices(experiment: Experiment, machine: Machine) -> Machine:
    """The machine with only the devices that the experiment may use.

    Raises:
        UserError: fewer than two devices, an unknown type, or a wish that leaves no plan.
    """
    chosen = _choose_devices(machine, experiment.cluster.device_types)
    _check_training(chosen.count_by_type(), experiment.planner.train_type, experiment.planner.train_devices)
    return chosen


def wish_for(experiment: Experiment) -> TrainingWish:
    """What the experiment leaves no choice about."""
    planner = experiment.planner
    return TrainingWish(planner.train_type, planner.train_devices, planner.zero_stage)


def demand_for(experiment: Experiment, micro_batch_tokens: int, answer_tokens: float | None = None) -> Demand:
    """What a step of the experiment asks, with the mean length of answers where it was measured."""
    return demand_of(
        experiment.workload,
        experiment.optimizer.minibatches,
        answer_tokens,
        micro_batch_tokens=micro_batch_tokens,
        max_context=experiment.model.max_context,
        concurrency=experiment.planner.concurrency,
        reference=experiment.algorithm.needs_reference,
    )


def micro_batch_tokens_for(experiment: Experiment, model: Model, gpu_memory_bytes: Collection[int]) -> int:
    """What the trainer packs answers into: as the experiment wishes, else as memory allows.

    A profile is measured with it as well, so it depends on nothing that is measured.

    Args:
        experiment: the experiment.
        model: its model.
        gpu_memory_bytes: of the GPUs that may train; none where cores do.
    """
    wished = experiment.planner.micro_batch_tokens
    return wished or fitting_micro_batch_tokens(model, demand_for(experiment, 1), gpu_memory_bytes)


def gpu_memory_bytes(experiment: Experiment, machine: Machine) -> list[int]:
    """Memory of the machine's GPUs that the experiment lets train."""
    train_type = experiment.planner.train_type
    devices = usable_devices(experiment, machine).devices
    return [d.memory_bytes for d in devices if d.kind == "cuda" and train_type in (None, d.device_type)]


def check_type(name: str, counts: Mapping[str, int], key: str, where: str) -> None:
    """Refuse a device type that is not there.

    Raises:
        UserError: `key` of the experiment names it, but `where` lacks it; the nearest is named.
    """
    if name in counts:
        return
    near = difflib.get_close_matches(name, counts, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"found: {', '.join(counts) or 'none'}"
    raise UserError(f"{key} names the device type '{name}', which {where} lacks ({hint}).")


def _choose_devices(machine: Machine, device_types: list[str] | None) -> Machine:
    for name in sorted(device_types or ()):
        check_type(name, machine.count_by_type(), "cluster.device_types", "this machine")
    devices = [d for d in machine.devices if device_types is None or d.device_type in device_types]
    if len(devices) < 2:
        found = ", ".join(f"{d.device_type} {d.index}" for d in devices) or "none"
        raise UserError(
            f"A run needs at least 2 devices, one to generate and one to train, found {len(devices)} on "
            f"{machine.name}: {found}. Allow more types in cluster.device_types, or label cores as devices with "
            "HEXFLOW_DEVICES, as in cpu=0,1."
        )
    return Machine(name=machine.name, devices=tuple(devices))


def _check_training(counts: Mapping[str, int], train_type: str | None, train_devices: int | None) -> None:
    if train_type is not None:
        check_type(train_type, counts, "planner.train_type", "this machine")
    if train_devices is None:
        return
    types = [train_type] if train_type is not None else list(counts)
    most = min(max(counts[name] for name in types), sum(counts.values()) - 1)
    if not 1 <= train_devices <= most:
        raise UserError(
            f"planner.train_devices is {train_devices}, but between 1 and {most} can train here: training uses one "
            f"device type ({', '.join(f'{counts[name]} {name}' for name in types)}) and at least one device generates."
        )
