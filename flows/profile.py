"""Flow `profile`: measure this machine's devices for a model, and keep the result for later plans."""

from typing import Any

from prefect import State, flow
from prefect.states import Failed

from flows.pages import show_profiles
from flows.preparation import discover, measure_here, prepare_here
from planners.errors import UserError
from planners.hardware.profile import DeviceProfile
from tasks.config.experiment import LAPTOP, Experiment


@flow(name="profile", flow_run_name="profile-{experiment.run.name}", log_prints=True)
def profile(
    experiment: Experiment = LAPTOP, device_type: str | None = None, run: str | None = None
) -> dict[str, DeviceProfile] | State[Any]:
    """Measure generation, training, GEMM and memory rates of each device type for the experiment's model.

    Args:
        experiment: Names the model and the sizes of a step.
        device_type: The type to measure; empty: all types of this machine that the experiment may use.
        run: Run that is resumed, whose files are there already; empty: a new one.
    """
    try:
        machine = discover()
        model_path = prepare_here(experiment, machine, run)
        profiles = measure_here(experiment, machine, model_path, device_type)
    except UserError as error:
        return Failed(message=str(error))  # raised, the log would have a traceback of ours before it
    show_profiles(profiles)
    return profiles
