"""Solve time, gap and memory of the planners against the size of the cluster; concurrency, and where the gate bites.

    python -m benchmarks.scaling [--most 4096] [--json FILE]

R1-Distill-Qwen 7B, 512 prompts × 16 answers (the batch that AReaL publishes), lengths as in `benchmarks.paper`, η = 8.
Everything is what-if with tree sync, so that all layouts are searched. Two types: an eighth H800, the rest H20. Six
types: the mix of `deployments/clusters/mix-1024.yaml`.
"""

import argparse
import json
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.paper import DEMAND, DEPLOYMENTS, models
from planners.costs.sync import SyncMode
from planners.hardware.topology import ClusterFile, Link, MachineGroup, Topology, parse_cluster
from planners.plan.plan import ClusterPlan
from planners.plan.simulator import simulate
from planners.search.columns import Problem
from planners.search.make import Goal, Mode, make_plan
from planners.workload.demand import Demand
from planners.workload.lengths import LogNormal
from tasks.config.trees import read_cluster

SIZES = (24, 32, 40, 56, 128, 256, 512, 1024, 4096)
TWO = {"h800": 1, "h20": 7}
SIX = {"h100": 1, "h200": 1, "h800": 1, "h20": 3, "a100-80": 1, "l40s": 1}
LARGE_STEP = Demand(
    prompts_per_step=512,
    group_size=16,
    max_staleness=8,
    prompt=DEMAND.prompt,
    response=DEMAND.response,
    longest_tokens=DEMAND.longest_tokens,
    minibatches=4,
)
TWO_PHASE_MOST = 128


def cluster(devices: int, mix: dict[str, int]) -> Topology:
    """Machines of 8, by the mix's shares, each type at least once."""
    machines = devices // 8
    counts = {t: max(1, machines * share // sum(mix.values())) for t, share in mix.items()}
    counts[max(mix, key=lambda t: mix[t])] += machines - sum(counts.values())
    counts = {t: n for t, n in counts.items() if n > 0}
    types = list(counts)
    links = [Link(between=(a, b), gb_per_s=5 if a == b else 1.5) for i, a in enumerate(types) for b in types[i:]]
    groups = [MachineGroup(name=t, device_type=t, count=n, devices=8) for t, n in counts.items()]
    return parse_cluster(ClusterFile(name=f"{devices}-{len(types)}", machines=groups, links=links))


def measure(topology: Topology, mode: Mode) -> tuple[dict[str, Any], ClusterPlan]:
    """One plan and what it cost to make."""
    began, worked = time.perf_counter(), time.process_time()
    sync: SyncMode = "blocking" if mode == "two-phase" else "tree"
    plan = make_plan(Problem(topology, models()["7b"], LARGE_STEP, what_if=True, sync_mode=sync), Goal(mode))
    in_flight = sum(r.concurrency for r in plan.replicas)
    row = {
        "devices": topology.devices,
        "types": len(topology.types),
        "mode": mode,
        "solve_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - worked,
        "gap": plan.gap,
        "gap_solver": plan.gap_solver,
        "gap_placement": plan.gap_placement,
        "step_s": plan.step_s,
        "tokens_per_s": plan.throughput_tokens_per_s,
        "limited_by": plan.limited_by,
        "replicas": len(plan.replicas),
        "concurrency": f"{min(r.concurrency for r in plan.replicas)}-{max(r.concurrency for r in plan.replicas)}",
        "gate_used": in_flight / LARGE_STEP.gate_answers,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    return row, plan


def agreement() -> list[dict[str, Any]]:
    """Planned and simulated throughput, also where a steady state is least true: small η, small B, heavy tails."""
    topology = read_cluster(DEPLOYMENTS / "clusters" / "paper-h800-8-h20-48.yaml")
    tails = {"paper": DEMAND.response, "heavy": LogNormal(mean=2000, q99=20000, cap=32768).lengths()}
    rows = []
    for tail, lengths in tails.items():
        for prompts in (32, 8):
            for staleness in (8, 4, 2, 1, 0):
                demand = replace(DEMAND, prompts_per_step=prompts, max_staleness=staleness, response=lengths)
                plan = make_plan(Problem(topology, models()["7b"], demand, what_if=True, sync_mode="tree"))
                outcome = simulate(plan, steps=100, warm_up=40)
                rows.append(
                    {
                        "lengths": tail,
                        "B": prompts,
                        "eta": staleness,
                        "planned": plan.throughput_tokens_per_s,
                        "simulated": outcome.throughput_tokens_per_s,
                        "error": outcome.throughput_tokens_per_s / plan.throughput_tokens_per_s - 1,
                        "limited_by": plan.limited_by,
                        "stale": outcome.dropped.get("stale", 0),
                    }
                )
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Solve time and gap by cluster size.")
    parser.add_argument("--most", type=int, default=SIZES[-1], help="largest cluster, in devices")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    rows = []
    print(
        "| devices | types | mode | solve s | CPU s | gap | of it placement | step s | k-tokens/s | limited by "
        "| replicas | answers each | gate used | peak GiB |\n" + "|---" * 14 + "|"
    )
    for devices in (d for d in SIZES if d <= arguments.most):
        for mix in (TWO, SIX):
            if devices < 8 * len(mix):
                continue
            topology = cluster(devices, mix)
            for mode in ("joint", "two-phase") if devices <= TWO_PHASE_MOST else ("joint",):
                row, plan = measure(topology, mode)
                rows.append(row)
                gap, lost = ("-" if row[key] is None else f"{row[key]:.2%}" for key in ("gap", "gap_placement"))
                print(
                    f"| {devices} | {row['types']} | {mode} | {row['solve_s']:.2f} | {row['cpu_s']:.2f} | {gap} "
                    f"| {lost} | {row['step_s']:.1f} | {row['tokens_per_s'] / 1e3:.1f} "
                    f"| {row['limited_by']} | {row['replicas']} "
                    f"| {row['concurrency']} | {row['gate_used']:.0%} | {row['peak_gib']:.2f} |",
                    flush=True,
                )
                if devices == 56 and mode == "joint" and mix is TWO:
                    simulated_plan = plan
    began = time.perf_counter()
    outcome = simulate(simulated_plan, steps=30)
    seconds = time.perf_counter() - began
    ratio = outcome.throughput_tokens_per_s / simulated_plan.throughput_tokens_per_s
    print(
        f"\n30 steps of {LARGE_STEP.answers_per_step} trajectories on 56 devices simulated in {seconds:.1f} s; "
        f"simulated/planned throughput {ratio:.3f}"
    )
    agreed = agreement()
    print("\n| lengths | B | η | planned k-tokens/s | simulated | difference | limited by | dropped as stale |")
    print("|---" * 8 + "|")
    for r in agreed:
        print(
            f"| {r['lengths']} | {r['B']} | {r['eta']} | {r['planned'] / 1e3:.2f} | {r['simulated'] / 1e3:.2f} "
            f"| {r['error']:+.1%} | {r['limited_by']} | {r['stale']} |"
        )
    if arguments.json:
        result = {"rows": rows, "simulation_s": seconds, "ratio": ratio, "agreement": agreed}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
