"""`hexflow plan --cluster` and `hexflow simulate`: plans for described clusters, which need no stack and no GPU."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from planners.cluster_plan import ClusterPlan, read_plan
from planners.explain import cluster_map, gantt, memory_table
from planners.simulator import Simulation, simulate
from tasks.cluster_planning import study_cluster
from tasks.exchange.files import write_atomic, write_json
from tasks.experiment import Experiment
from tasks.settings import Settings


def plan_cluster(
    experiment: Experiment,
    cluster: Path,
    settings: Settings,
    console: Console,
    json_file: Path | None,
    **wishes: Any,
) -> None:
    """Plan an experiment for a cluster file, print the plan, and write it as JSON where asked.

    Args:
        experiment: names the model and the workload.
        cluster: the cluster file.
        settings: where prepared models lie.
        console: where to print.
        json_file: where to write; None: nowhere.
        wishes: further arguments of `planners.make.make_plan`.

    Raises:
        UserError: bad input, nothing fits, or the wish cannot be met.
    """
    with console.status("planning"):
        study = study_cluster(experiment, cluster, settings, **wishes)
        words = study.explain()
    console.print(words, soft_wrap=True, markup=False)
    for picture in (cluster_map(study.plan), memory_table(study.plan)):
        console.print(f"\n{picture}", soft_wrap=True, markup=False)
    if json_file is not None:
        write_atomic(json_file, study.plan.model_dump_json(indent=2).encode())
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
