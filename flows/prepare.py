"""Flow `prepare`: this machine's model made ready for an experiment, and whether data, memory and storage suffice."""

from typing import Any

from prefect import State, flow
from prefect.states import Failed

from flows.preparation import discover, prepare_here
from planners.errors import UserError
from tasks.config.experiment import LAPTOP, Experiment


@flow(name="prepare", flow_run_name="prepare-{experiment.run.name}", log_prints=True)
def prepare(experiment: Experiment = LAPTOP, run: str | None = None) -> str | State[Any]:
    """Prepare the model, and check that data, prompts, devices, memory and storage can serve the experiment.

    Args:
        experiment: What is to be run.
        run: Run that is resumed, whose files are there already; empty: a new one.
    """
    try:
        return prepare_here(experiment, discover(), run)
    except UserError as error:
        return Failed(message=str(error))  # raised, the log would have a traceback of ours before it
