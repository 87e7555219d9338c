"""The steps before a run, as Prefect tasks: prepare the model, discover devices, profile them, choose the plan."""

from collections.abc import Mapping
from pathlib import Path

from prefect import task

from planners.hardware.machine import Machine
from planners.hardware.profile import DeviceProfile
from planners.plan.plan import ClusterPlan
from tasks.config.experiment import Experiment
from tasks.config.settings import load_settings
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Ledger
from tasks.machine.discovery import discover_machine
from tasks.models.prepare import find_model
from tasks.planning import plan_run
from tasks.readiness import make_ready, profile_machine


@task
def prepare_here(experiment: Experiment, machine: Machine, run: str | None = None) -> str:
    """Directory of the prepared model, after a check that data, prompts and devices fit the experiment.

    The files of `run`, a run's id, are there already.
    """
    settings = load_settings()
    return str(make_ready(experiment, machine, settings, RunDirectory(settings.shared.runs / run) if run else None))


@task
def discover() -> Machine:
    """This machine and its devices, which the ledger is told of."""
    machine = discover_machine()
    announce(machine)
    return machine


def announce(machine: Machine) -> None:
    """Tell the ledger, and the log, of this machine and its devices."""
    Ledger(load_settings().shared.ledger_url).announce_machine(machine.name, machine.model_dump_json())
    counts = ", ".join(f"{count} × {device_type}" for device_type, count in machine.count_by_type().items())
    print(f"machine {machine.name}: {counts}")


@task
def measure_here(
    experiment: Experiment, machine: Machine, model_path: str, device_type: str | None = None
) -> dict[str, DeviceProfile]:
    """A profile of a device type, or of each that the experiment may use, measured now or known already."""
    return profile_machine(experiment, machine, Path(model_path), load_settings(), device_type)


@task
def choose_plan(experiment: Experiment, machine: Machine, profiles: Mapping[str, DeviceProfile]) -> ClusterPlan:
    """The run's plan; see `tasks.planning.plan_run`."""
    plan = plan_run(experiment, machine, profiles, find_model(experiment.model, load_settings()))
    print(plan.explanation)
    return plan
