"""`hexflow plan --cluster` and `hexflow simulate`: plans for described clusters, which need no stack and no GPU."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from planners.cluster_plan import ClusterPlan, read_plan
from planners.demand import demand_of
from planners.explain import cluster_map, explain, gantt, memory_table, next_device_gains
from planners.make import make_plan
from planners.model import read_model
from planners.simulator import Simulation, simulate
from planners.topology import read_cluster
from tasks.exchange.files import write_atomic, write_json
from tasks.experiment import Experiment
from tasks.models import prepare_model
from tasks.settings import Settings

_BYTES = {"float32": 4, "bfloat16": 2}


def plan_cluster(
    experiment: Experiment,
    cluster: Path,
    settings: Settings,
    console: Console,
    json_file: Path | None,
    **how: Any,
) -> None:
    """Plan an experiment for a cluster file, print the plan, and write it as JSON where asked.

    Args:
        how: further arguments of `planners.make.make_plan`.

    Raises:
        UserError: bad input, nothing fits, or the wish cannot be met.
    """
    source = Path(experiment.model.source)
    # A plan needs the model's sizes only, so a directory without weights will do.
    directory = source if source.is_dir() else prepare_model(experiment.model, settings)
    model = read_model(directory, _BYTES[experiment.model.dtype])
    topology = read_cluster(cluster)
    demand = demand_of(experiment.workload, experiment.algorithm.minibatches)
    with console.status("planning"):
        plan = make_plan(topology, model, demand, **how)
        rents = how.get("budget_usd_per_h") or how.get("target_tokens_per_s")
        gains = None if plan.mode != "joint" or rents else next_device_gains(topology, model, demand, plan)
    console.print(explain(plan, gains), soft_wrap=True, markup=False)
    for picture in (cluster_map(plan), memory_table(plan)):
        console.print(f"\n{picture}", soft_wrap=True, markup=False)
    if json_file is not None:
        write_atomic(json_file, plan.model_dump_json(indent=2).encode())
        console.print(f"\nplan: {json_file}", soft_wrap=True, markup=False)


def simulate_plan(plan_file: Path, console: Console, json_file: Path | None, *, steps: int, seed: int) -> None:
    """Run a plan file through the simulator, print what happened, and write it as JSON where asked.

    Raises:
        UserError: the file is no plan.
    """
    plan = read_plan(plan_file)
    with console.status("simulating"):
        simulation = simulate(plan, steps=steps, seed=seed, keep_spans=True)
    console.print(_figures(plan, simulation))
    console.print(f"\n{gantt(simulation)}", soft_wrap=True, markup=False)
    if json_file is not None:
        write_json(json_file, asdict(replace(simulation, spans=())))
        console.print(f"\nsimulation: {json_file}", soft_wrap=True, markup=False)


def _figures(plan: ClusterPlan, simulation: Simulation) -> Table:
    table = Table("", "simulated", "planned", box=None)
    table.add_row(
        "response tokens/s",
        f"{simulation.throughput_tokens_per_s:,.0f}",
        f"{plan.throughput_tokens_per_s:,.0f}",
    )
    table.add_row("step", f"{simulation.step_s:.1f} s", f"{plan.step_s:.1f} s")
    table.add_row(
        "USD per million tokens",
        f"{simulation.usd_per_million_tokens:.2f}",
        f"{plan.usd_per_million_tokens:.2f}",
    )
    table.add_row("trainer waits", f"{simulation.trainer_wait_share:.0%}", "")
    table.add_row("gate shut for replicas", f"{simulation.gate_wait_share:.0%}", "")
    staleness = ", ".join(f"{versions}: {groups}" for versions, groups in sorted(simulation.staleness.items()))
    table.add_row("groups by staleness", staleness, f"at most {plan.demand.max_staleness}")
    dropped = ", ".join(f"{reason}: {groups}" for reason, groups in simulation.dropped.items())
    table.add_row("groups dropped", dropped or "none", "")
    return table
