"""Flow `plan`: what would run where on this machine, and how fast."""

from prefect import flow

from flows.artifacts import show_plan
from flows.planning import discover, make_plan, measure, prepare
from planners.plan import Plan
from tasks.experiment import Experiment


@flow(name="plan", flow_run_name="plan-{experiment.run.name}", log_prints=True)
def plan(experiment: Experiment = Experiment()) -> Plan:
    """Choose the split of this machine's devices for an experiment, from measured profiles.

    Args:
        experiment: Names the model and the sizes of a step.
    """
    model_path = prepare(experiment)
    machine = discover()
    profiles = measure(experiment, machine, model_path)
    chosen = make_plan(experiment, machine, profiles)
    show_plan(chosen)
    return chosen
