"""`hexflow plan --cluster` and `hexflow simulate`: plans for described clusters, which need no stack and no GPU."""

import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deployments.cli.terminal import telling
from planners.plan.explain import cluster_map, gantt, memory_table, money
from planners.plan.plan import ClusterPlan, read_plan
from planners.plan.simulator import Simulation, simulate
from planners.search.make import rounded_down
from tasks.config.experiment import Experiment
from tasks.exchange.files import write_atomic, write_json
from tasks.planning import ClusterWish, in_keys, study_cluster

CHART_STEPS = 300
"""More steps than these are not drawn: a character would stand for several."""


def plan_cluster(experiment: Experiment, wish: ClusterWish, console: Console, json_file: Path | None) -> None:
    """Plan an experiment for a cluster file, print the plan, and write it as JSON where asked.

    Args:
        experiment: names the model and the workload.
        wish: the cluster file, and what is wanted of it.
        console: where to print.
        json_file: where to write; None: nowhere.

    Raises:
        UserError: bad input, nothing fits, or the wish cannot be met.
    """
    with telling(_to_terminal) as tell:
        study = study_cluster(experiment, wish, tell)
        tell("asking what would help")
        words = study.explain()
    console.print(words, soft_wrap=True, markup=False)
    for picture in (cluster_map(study.plan), memory_table(study.plan)):
        console.print(f"\n{picture}", soft_wrap=True, markup=False)
    if json_file is not None:
        explained = study.plan.model_copy(update={"explanation": words})
        write_atomic(json_file, explained.model_dump_json(indent=2).encode())
        console.print(f"\nplan: {json_file}", soft_wrap=True, markup=False)


def simulate_plan(plan_file: Path, console: Console, json_file: Path | None, *, steps: int, seed: int) -> None:
    """Run a plan file through the simulator, print what happened, and write it as JSON where asked.

    Raises:
        UserError: the file is no plan, or it takes too long.
    """
    with in_keys():
        plan = read_plan(plan_file)
    draws = steps <= CHART_STEPS
    with telling(_to_terminal) as tell:

        def tell_step(step: int) -> None:
            tell(f"simulated {step:,} of {steps:,} steps")

        simulation = simulate(plan, steps=steps, seed=seed, keep_spans=draws, tell=tell_step)
    console.print(_figures(plan, simulation))
    chart = gantt(simulation) if draws else f"A chart is drawn of up to {CHART_STEPS} steps."
    console.print(f"\n{chart}", soft_wrap=True, markup=False)
    if json_file is not None:
        write_json(json_file, {key: value for key, value in asdict(simulation).items() if key != "spans"})
        console.print(f"\nsimulation: {json_file}", soft_wrap=True, markup=False)


def _to_terminal(what: str) -> None:
    """Only to one who waits for it: the result goes to stdout, perhaps into a file."""
    if sys.stderr.isatty():
        print(what, file=sys.stderr, flush=True)


def _figures(plan: ClusterPlan, simulation: Simulation) -> Table:
    table = Table("", "simulated", "planned", box=None)
    table.add_row(
        "response tokens/s",
        rounded_down(simulation.throughput_tokens_per_s),
        rounded_down(plan.throughput_tokens_per_s),
    )
    table.add_row("step", f"{simulation.step_s:.3g} s", f"{plan.step_s:.3g} s")
    if plan.usd_per_h:
        simulated, planned = simulation.usd_per_million_tokens, plan.usd_per_million_tokens
        table.add_row("USD per million tokens", money(simulated), money(planned))
    table.add_row("trainer waits", f"{simulation.trainer_wait_share:.0%}", "")
    table.add_row("gate shut for replicas", f"{simulation.gate_wait_share:.0%}", "")
    staleness = ", ".join(f"{versions}: {groups}" for versions, groups in sorted(simulation.staleness.items()))
    table.add_row("groups by staleness", staleness, f"at most {plan.demand.max_staleness}")
    dropped = ", ".join(f"{reason}: {groups}" for reason, groups in simulation.dropped.items())
    table.add_row("groups dropped", dropped or "none", "")
    return table
