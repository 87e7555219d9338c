"""The steps before a run, as Prefect tasks: prepare the model, discover devices, profile them, choose the plan."""

from collections.abc import Mapping
from pathlib import Path

from prefect import task

from planners.cluster import Machine
from planners.plan import Plan
from planners.profile import DeviceProfile
from planners.split import plan_split
from tasks.discovery import discover_machine
from tasks.experiment import Experiment
from tasks.models import prepare_model
from tasks.profiling.profile import profile_device
from tasks.rollout.prompts import PromptSource
from tasks.settings import load_settings


@task
def prepare(experiment: Experiment) -> str:
    """Directory of the prepared model, after a check that its tokenizer and the data fit the experiment."""
    from transformers import AutoTokenizer  # seconds to import

    model_path = prepare_model(experiment.model, load_settings())
    prompts = PromptSource(experiment, AutoTokenizer.from_pretrained(model_path))
    for item in [*prompts.heldout(), *(prompts.item(index) for index in range(experiment.workload.prompts_per_step))]:
        prompts.encode(item)
    return str(model_path)


@task
def discover(experiment: Experiment) -> Machine:
    """This machine's devices, of the types that the experiment may use."""
    machine = discover_machine()
    counts = ", ".join(f"{count} × {device_type}" for device_type, count in machine.count_by_type().items())
    print(f"machine {machine.name}: {counts}")
    return machine


@task
def measure(experiment: Experiment, machine: Machine, model_path: str) -> dict[str, DeviceProfile]:
    """A profile per device type, measured now or cached."""
    wanted = experiment.cluster.device_types
    profiles = {}
    for device_type in machine.count_by_type():
        if wanted is None or device_type in wanted:
            profiles[device_type] = profile_device(experiment, machine, device_type, Path(model_path), load_settings())
    return profiles


@task
def make_plan(experiment: Experiment, machine: Machine, profiles: Mapping[str, DeviceProfile]) -> Plan:
    """The fastest split of the machine's devices under the measured rates."""
    plan = plan_split(
        machine,
        profiles,
        experiment.workload,
        train_type=experiment.planner.train_type,
        train_devices=experiment.planner.train_devices,
        device_types=experiment.cluster.device_types,
    )
    print(plan.explanation)
    return plan
