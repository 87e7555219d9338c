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
from tasks.planning import plan_run
from tasks.readiness import make_ready, profile_machine
from tasks.training.checkpoints import WrittenBy


@task
def prepare(experiment: Experiment, machine: Machine, run: RunDirectory | None = None) -> str:
    """Directory of the prepared model, after a check that data, prompts and devices fit the experiment, and `run`."""
    return str(make_ready(experiment, machine, load_settings(), run))


@task
def discover() -> Machine:
    """This machine and its devices, which the ledger is told of."""
    machine = discover_machine()
    announce(machine)
    return machine


def announce(machine: Machine) -> None:
    """Tell the ledger, and the log, of this machine and its devices."""
    Ledger(load_settings().ledger_url).announce_machine(machine.name, machine.model_dump_json())
    counts = ", ".join(f"{count} × {device_type}" for device_type, count in machine.count_by_type().items())
    print(f"machine {machine.name}: {counts}")


@task
def measure(experiment: Experiment, machine: Machine, model_path: str) -> dict[str, DeviceProfile]:
    """A profile per device type that the experiment may use, measured now or cached."""
    return profile_machine(experiment, machine, Path(model_path), load_settings())


@task
def choose_plan(
    experiment: Experiment,
    machine: Machine,
    profiles: Mapping[str, DeviceProfile],
    model_path: str,
    checkpoint: WrittenBy | None = None,
) -> ClusterPlan:
    """The run's plan; see `tasks.planning.plan_run`."""
    plan = plan_run(experiment, machine, profiles, Path(model_path), checkpoint)
    print(plan.explanation)
    return plan
