"""Flow `plan`: what would run where, on this machine or on a described cluster, and how fast."""

import os
import tempfile
from pathlib import Path
from typing import Any

from prefect import State, flow
from prefect.states import Failed

from flows.pages import show_cluster_plan, show_plan
from flows.preparation import choose_plan, discover
from flows.running.readying import ready_and_measured
from planners.errors import UserError
from planners.plan.explain import cluster_map, gantt, memory_table
from planners.plan.simulator import simulate
from tasks.config.experiment import LAPTOP, Experiment
from tasks.planning import ClusterWish, study_cluster
from tasks.tracking.tracker import Tracker


@flow(name="plan", flow_run_name="plan-{experiment.run.name}", log_prints=True)
def plan(experiment: Experiment = LAPTOP, cluster: ClusterWish | None = None) -> dict[str, Any] | State[Any]:
    """Choose who generates and who trains, and predict how fast that is.

    Args:
        experiment: Names the model and the sizes of a step.
        cluster: Machines to plan for, by a cost model; empty: this machine, measured.
    """
    try:
        return plan_on_this_machine(experiment) if cluster is None else plan_for_cluster(experiment, cluster)
    except UserError as error:
        return Failed(message=str(error))  # raised, the log would have a traceback of ours before it


def plan_on_this_machine(experiment: Experiment) -> dict[str, Any]:
    """Let this machine measure itself, plan for it, and show the plan."""
    machine = discover()
    profiles = ready_and_measured(experiment, machine)
    chosen = choose_plan(experiment, machine, profiles)
    show_plan(chosen)
    return chosen.model_dump(mode="json", include=SHOWN | {"trainer", "replicas"})


def plan_for_cluster(experiment: Experiment, cluster: ClusterWish) -> dict[str, Any]:
    """Plan, simulate, and show both here and in MLflow."""
    study = study_cluster(experiment, cluster, tell=print)
    simulation = simulate(study.plan, keep_spans=True)
    words = study.explain()
    print(words)
    pictures = {
        "cluster-map": cluster_map(study.plan),
        "memory": memory_table(study.plan),
        "gantt": gantt(simulation),
    }
    curve = study.budget_curve() if cluster.mode == "joint" else []
    show_cluster_plan(study.plan, words, pictures, curve)
    tracker = Tracker.parent(
        os.environ.get("MLFLOW_TRACKING_URI"),
        experiment.tracking.experiment,
        f"plan-{experiment.run.name}",
        {"experiment": experiment.model_dump(mode="json"), "cluster": cluster.model_dump(mode="json")},
        {**experiment.tracking.tags, "hexflow.role": "plan"},
    )
    with tempfile.TemporaryDirectory() as scratch:
        texts = {
            "plan.json": study.plan.model_copy(update={"explanation": words}).model_dump_json(indent=2),
            "plan.txt": "\n\n".join([words, *pictures.values()]),
        }
        for name, text in texts.items():
            path = Path(scratch) / name
            path.write_text(text)
            tracker.log_artifact(path)
        tracker.log({"plan/predicted_step_s": study.plan.step_s, "plan/simulated_step_s": simulation.step_s}, step=0)
        for budget, affordable in curve:
            tracker.log({"plan/tokens_per_s_by_usd_per_h": affordable.throughput_tokens_per_s}, step=round(budget))
        tracker.finish("FINISHED")
    return study.plan.model_dump(mode="json", include=SHOWN)


SHOWN = {"mode", "cluster", "model", "throughput_tokens_per_s", "step_s", "usd_per_h", "gap", "limited_by"}
"""What the flow returns of a plan; the whole of a cluster's is in MLflow."""
