"""Flow `train`: the trainer's ranks on the devices of this worker's machine, until the last step."""

from prefect import flow

from flows.running.children import is_too_late, on_devices
from planners.plan.actors import Placement
from tasks.training.launch import run_trainer


@flow(name="train", flow_run_name="train-{run_id}")
def train(run_id: str, model_path: str, placement: Placement, supervisor: int, resume_step: int | None = None) -> None:
    """Train until the run's last step.

    Args:
        run_id: Run to train for.
        model_path: Prepared model directory.
        placement: Devices, as the plan has them.
        supervisor: Attempt of the supervisor that starts it; it leaves where the run has another.
        resume_step: Step to continue from; empty: the run's first.
    """
    if is_too_late(run_id, supervisor):
        return
    with on_devices(placement, run_id):
        run_trainer(run_id, model_path, placement, resume_step)
