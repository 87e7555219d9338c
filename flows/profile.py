"""Flow `profile`: measure this machine's devices for a model, and keep the result for later plans."""

from prefect import flow

from flows.pages import show_profiles
from flows.preparation import discover, measure, prepare
from planners.hardware.profile import DeviceProfile
from tasks.config.experiment import Experiment


@flow(name="profile", flow_run_name="profile-{experiment.run.name}", log_prints=True)
def profile(experiment: Experiment = Experiment()) -> dict[str, DeviceProfile]:
    """Measure generation, training, GEMM and memory rates of each device type for the experiment's model.

    Args:
        experiment: Names the model and the sizes of a step.
    """
    machine = discover()
    model_path = prepare(experiment, machine)
    profiles = measure(experiment, machine, model_path)
    show_profiles(profiles)
    return profiles
