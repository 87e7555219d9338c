"""Every published row of AReaL-Hex (arXiv 2511.00796) beside ours. All what-if: it is the paper's stack.

    python -m benchmarks.paper [--json FILE]

The paper does not give its workload. Assumed: 32 prompts × 16 answers a step, lengths log-normal with mean 5,000 and
99 % at 16,000 tokens, cap 27,648, prompt 250, 4 minibatches, η = 8: about its tokens per step.

Four constants describe its stack. Two are fitted on one row, AReaL on 24 H800 with 7B, split 16/8:

    training share of an H800   from its 246 s of training on 8 devices
    serving share of an H800    from its 405 s of generation on 16

The H20's training share follows from Table 1's 8.9 per device, the only published figure on it. For its serving share
three choices are examined, see CHOICES, and what each would yield is printed. Taken is `row`: like the H800's shares it
comes from seconds of a step of known devices, the only such row of the H20, where Table 1 contradicts the step times
(see `contradictions`). Every other number is a prediction, and none is bent to match. The homogeneous baselines split
by whole machines, as the published seconds of 24 H800 say (16/8); mode two-phase on the same devices, which splits
finer, is printed below the table.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from planners.costs.generation import ServingCost
from planners.costs.training import Stage, TrainingCost, TrainingLayout
from planners.hardware.catalogue import DeviceType, device_type
from planners.hardware.topology import Topology
from planners.plan.plan import ClusterPlan, build_plan
from planners.plan.simulator import simulate
from planners.search.columns import Problem
from planners.search.make import Goal, make_plan
from planners.search.two_phase import Search
from planners.workload.demand import Demand
from planners.workload.lengths import LogNormal, constant
from planners.workload.model import Model, read_model
from tasks.config.trees import read_cluster

DEPLOYMENTS = Path(__file__).parent.parent / "deployments"
SIZES = ("1.5b", "7b", "14b")
DEMAND = Demand(
    prompts_per_step=32,
    group_size=16,
    max_staleness=8,
    prompt=constant(250),
    response=LogNormal(mean=5000, q99=16000, cap=27648).lengths(),
    longest_tokens=28672,
    minibatches=4,
)
FITTED_TRAIN_S, FITTED_ROLLOUT_S = 246.0, 405.0  # AReaL on 24 H800, 7B: 8 devices train, 16 generate
FITTED_HEX_ROLLOUT_S = 252.5  # Hex, 7B: 48 H20 generate
TRAINING_RATIO, ROLLOUT_RATIO = 8.9, 0.95  # Table 1, per device: H800/H20 in training, H20/H800 in generation
CHOICES = {
    "as-h800": "the H800's serving share",
    "table-1": f"such that an H20 generates {ROLLOUT_RATIO} times an H800's tokens with 7B, as Table 1 says",
    "row": f"such that 48 H20 generate a step of Hex 7B in {FITTED_HEX_ROLLOUT_S} s",
}
CHOSEN = "row"
H800_24, H20_64, HEX = "paper-h800-24", "paper-h20-64", "paper-h800-8-h20-48"

PUBLISHED: dict[str, dict[str, float]] = {
    "Hex k-tokens/s": {"1.5b": 25.1, "7b": 7.82, "14b": 3.25},
    "AReaL-H800 k-tokens/s": {"1.5b": 18.4, "7b": 5.98, "14b": 2.16},
    "AReaL-H20 k-tokens/s": {"1.5b": 8.96, "7b": 2.83, "14b": 1.42},
    "Hex / AReaL-H800": {"1.5b": 1.36, "7b": 1.31, "14b": 1.50},
    "Hex / AReaL-H20": {"1.5b": 2.80, "7b": 2.76, "14b": 2.29},
    "Hex rollout s": {"1.5b": 107.5, "7b": 252.5, "14b": 742},
    "Hex train s": {"1.5b": 107.5, "7b": 251.5, "14b": 570},
    "AReaL-H800 rollout s": {"1.5b": 145, "7b": 405, "14b": 1051},
    "AReaL-H800 train s": {"1.5b": 95.5, "7b": 246, "14b": 459},
    "AReaL-H20 rollout s": {"1.5b": 334, "7b": 603, "14b": 1206},
    "AReaL-H20 train s": {"1.5b": 334, "7b": 603, "14b": 1206},
    "sync s, H800": {"1.5b": 4.75, "7b": 14.79, "14b": 26.0},
    "sync s, H20": {"1.5b": 2.74, "7b": 7.46, "14b": 13.05},
    "sync s, Hex": {"1.5b": 10.06, "7b": 58.34, "14b": 112.93},
    "24 H800, uniform k-tokens/s": {"1.5b": 11.7, "7b": 3.57, "14b": 1.29},
    "24 H800, optimised / uniform": {"1.5b": 1.57, "7b": 1.68, "14b": 1.67},
    "USD per rollout token, H800 / H20": {"1.5b": 2.71, "7b": 2.75, "14b": 2.70},
    "USD per training token, H20 / H800": {"1.5b": 3.11, "7b": 3.12, "14b": 3.13},
}
REQUIRED = {  # row: tolerance on the ratio to the published value
    "Hex / AReaL-H800": {"1.5b": 0.20, "7b": 0.20, "14b": 0.20},
    "sync s, Hex": {"7b": 0.25, "14b": 0.25},
}
OURS_OPEN = {"1.5b": (1.43, 1.45), "7b": (1.55, 1.61), "14b": (1.68, 1.72)}


def models() -> dict[str, Model]:
    """The three R1-Distill-Qwen shapes."""
    return {size: read_model(DEPLOYMENTS / "models" / f"r1-distill-qwen-{size}") for size in SIZES}


def fitted_devices(model: Model, choice: str) -> dict[str, DeviceType]:
    """H800 and H20 as the paper's stack uses them: such that our own plans of the fitted rows take their seconds."""
    h800, h20 = device_type("h800"), device_type("h20")

    def h800_row(training_share: float, serving_share: float) -> ClusterPlan:
        device = replace(h800, training_share=training_share, serving_share=serving_share)
        return split(paper_cluster(H800_24, {"h800": device}), model, (8, 0, 0))

    training = _bisect(lambda share: FITTED_TRAIN_S - h800_row(share, 0.1).train_s)
    serving = _bisect(lambda share: FITTED_ROLLOUT_S - h800_row(training, share).rollout_s)
    fitted = replace(h800, training_share=training, serving_share=serving)
    reference = h800_row(training, serving)

    def devices(h20_serving: float) -> dict[str, DeviceType]:
        share = training * h800.flops_per_s / h20.flops_per_s / TRAINING_RATIO
        return {"h800": fitted, "h20": replace(h20, training_share=share, serving_share=h20_serving)}

    def ratio(share: float) -> float:
        prices = _token_prices(devices(share), model, reference)[0]
        return prices * h20.usd_per_h / h800.usd_per_h

    def hex_row(share: float) -> ClusterPlan:
        topology = paper_cluster(HEX, devices(share))
        return split(topology, model, (8,) + (0,) * (len(topology.nodes) - 1))

    share = {
        "as-h800": lambda: serving,
        "table-1": lambda: _bisect(lambda x: ratio(x) - ROLLOUT_RATIO),
        "row": lambda: _bisect(lambda x: FITTED_HEX_ROLLOUT_S - hex_row(x).rollout_s),
    }[choice]()
    return devices(share)


def _bisect(excess: Callable[[float], float]) -> float:
    """The share at which a rising function crosses zero."""
    low, high = 0.01, 1.0
    for _ in range(16):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    return (low * high) ** 0.5


def paper_cluster(name: str, devices: dict[str, DeviceType]) -> Topology:
    """A shipped cluster with the fitted devices."""
    topology = read_cluster(DEPLOYMENTS / "clusters" / f"{name}.yaml")
    return replace(topology, nodes=tuple(replace(n, device=devices[n.type_name]) for n in topology.nodes))


def split(topology: Topology, model: Model, partition: tuple[int, ...]) -> ClusterPlan:
    """The search phase alone on a given split."""
    problem = Problem(topology, model, DEMAND, what_if=True, sync_mode="blocking")
    found = Search(problem, 60)(partition)
    if found is None:
        raise ValueError(f"{partition} of {topology.name} cannot train and generate")
    step_s = found.placed.step_s
    return build_plan(problem, found.placed, mode="split", bound_step_s=step_s, solver_step_s=step_s, solve_s=0.0)


def areal(topology: Topology, model: Model) -> ClusterPlan:
    """The baseline: AReaL gives whole machines to a role, in the best split."""
    sizes = [n.devices for n in topology.nodes]
    splits = [tuple(d if i < k else 0 for i, d in enumerate(sizes)) for k in range(1, len(sizes))]
    return min((split(topology, model, s) for s in splits), key=lambda plan: plan.step_s)


def _two_phase(topology: Topology, model: Model, **goal: Any) -> ClusterPlan:
    return make_plan(Problem(topology, model, DEMAND, what_if=True, sync_mode="blocking"), Goal("two-phase", **goal))


Rows = dict[str, dict[str, float]]
Plans = dict[str, dict[str, ClusterPlan]]


def compare(devices: dict[str, DeviceType]) -> tuple[Rows, Plans]:
    """Hex and the two homogeneous baselines: our values of their rows, and the plans behind them."""
    clusters = {name: paper_cluster(name, devices) for name in (H800_24, H20_64, HEX)}
    ours: Rows = {row: {} for row in PUBLISHED}
    plans: Plans = {}
    for size, model in models().items():
        hex_ = _two_phase(clusters[HEX], model)
        h800, h20 = areal(clusters[H800_24], model), areal(clusters[H20_64], model)
        for row, plan in (("Hex", hex_), ("AReaL-H800", h800), ("AReaL-H20", h20)):
            ours[f"{row} k-tokens/s"][size] = plan.throughput_tokens_per_s / 1e3
            ours[f"{row} rollout s"][size] = plan.rollout_s
            ours[f"{row} train s"][size] = plan.train_s
            ours[f"sync s, {row.removeprefix('AReaL-')}"][size] = plan.sync_s
        ours["Hex / AReaL-H800"][size] = hex_.throughput_tokens_per_s / h800.throughput_tokens_per_s
        ours["Hex / AReaL-H20"][size] = hex_.throughput_tokens_per_s / h20.throughput_tokens_per_s
        plans[size] = {"h800": h800, "h20": h20, "hex": hex_}
    return ours, plans


def reproduce(devices: dict[str, DeviceType], ours: Rows, plans: Plans) -> None:
    """Add the other published rows: uniform split, Table 1's prices, Eq 3 as printed; and the baseline split finer."""
    clusters = {name: paper_cluster(name, devices) for name in (H800_24, HEX)}
    for size, model in models().items():
        h800 = plans[size]["h800"]
        uniform = split(clusters[H800_24], model, (8, 4, 0))
        ours["24 H800, uniform k-tokens/s"][size] = uniform.throughput_tokens_per_s / 1e3
        ours["24 H800, optimised / uniform"][size] = h800.throughput_tokens_per_s / uniform.throughput_tokens_per_s
        rollout, training = _token_prices(devices, model, h800)
        ours["USD per rollout token, H800 / H20"][size] = rollout
        ours["USD per training token, H20 / H800"][size] = training
        plans[size]["hex printed"] = _two_phase(clusters[HEX], model, partition="printed")
        plans[size]["h800 by two-phase"] = _two_phase(clusters[H800_24], model)


def _digits(value: float) -> str:
    """Three digits, and never fewer than all before the point."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _token_prices(devices: dict[str, DeviceType], model: Model, reference: ClusterPlan) -> tuple[float, float]:
    """Price of a token on one type over the other, at the concurrency that a step of the reference plan allows."""
    serving, cost = ServingCost(model, DEMAND), TrainingCost(model, DEMAND, devices)
    turn_s = (DEMAND.max_staleness + 1) * reference.step_s - reference.train_s

    def rollout(device: DeviceType) -> float:
        rates = [
            serving.tokens_per_s(device, k, c) / k
            for k in serving.tensor_ranks(device, 8)
            for c in serving.concurrencies(device, k)
            if serving.latency_s(device, k, c) <= turn_s
        ]
        return device.usd_per_h / max(rates)

    def training(device: DeviceType) -> float:
        layout = TrainingLayout((Stage(device.name, 8, 1, 1),), 3)
        return device.usd_per_h * cost.step_s(layout, [5e9])

    h800, h20 = devices["h800"], devices["h20"]
    return rollout(h800) / rollout(h20), training(h20) / training(h800)


def improve(devices: dict[str, DeviceType], plans: Plans) -> list[dict[str, Any]]:
    """Mode joint: better sync on the same GPUs, free composition at the same budget, and the cheapest equal."""
    rows = []
    everything = paper_cluster("paper-h800-24-h20-24", devices)
    h20_nodes = paper_cluster(HEX, devices).nodes[1:]
    extra = tuple(replace(n, name=f"more-{n.name}") for n in h20_nodes)
    rentable = replace(everything, name="24 H800 and 72 H20 to rent", nodes=everything.nodes + extra)
    for size, model in models().items():
        base = plans[size]["h800"]
        budget = paper_cluster(HEX, devices).usd_per_h

        def joint(topology: Topology, sync: Any, model: Model = model, **goal: Any) -> ClusterPlan:
            return make_plan(Problem(topology, model, DEMAND, what_if=True, sync_mode=sync), Goal(**goal))

        cluster = paper_cluster(HEX, devices)
        cases = {f"8 H800 + 48 H20, {s}": joint(cluster, s) for s in ("blocking", "tree", "overlapped")}
        fewer = paper_cluster("paper-h800-8-h20-24", devices)
        cases.update({f"8 H800 + 24 H20, {s}": joint(fewer, s) for s in ("blocking", "tree", "overlapped")})
        cases["24 H800, blocking"] = joint(paper_cluster(H800_24, devices), "blocking")
        cases["24 H800, overlapped"] = joint(paper_cluster(H800_24, devices), "overlapped")
        free = joint(rentable, "overlapped", budget_usd_per_h=budget)
        cases[f"free composition at {budget:.0f} USD/h, overlapped"] = free
        cases["as fast as AReaL on 24 H800, cheapest, tree"] = joint(
            rentable, "tree", target_tokens_per_s=base.throughput_tokens_per_s
        )
        for name, plan in cases.items():
            simulated = simulate(plan, steps=100, warm_up=40)
            rows.append(
                {
                    "model": size,
                    "case": name,
                    "over_h800": plan.throughput_tokens_per_s / base.throughput_tokens_per_s,
                    "cheaper": 24 * devices["h800"].usd_per_h / plan.usd_per_h,
                    "usd_per_h": plan.usd_per_h,
                    "gap": plan.gap,
                    "simulated": simulated.throughput_tokens_per_s / plan.throughput_tokens_per_s,
                    "training": plan.trainer.layout,
                    "rollout_devices": _by_type(plan),
                    "solve_s": plan.solve_s,
                }
            )
    return rows


def _by_type(plan: ClusterPlan) -> dict[str, int]:
    counts: dict[str, int] = {}
    for replica in plan.replicas:
        counts[replica.device_type] = counts.get(replica.device_type, 0) + len(replica.devices)
    return counts


def verdicts(ours: Rows) -> list[str]:
    """What is required, and whether it holds."""
    lines = []
    for row, tolerances in REQUIRED.items():
        for size, tolerance in tolerances.items():
            error = ours[row][size] / PUBLISHED[row][size] - 1
            verdict = "holds " if abs(error) <= tolerance else "MISSED"
            lines.append(f"{verdict} {row} {size}: {error:+.0%} (±{tolerance:.0%})")
    for faster, slower in (("Hex", "AReaL-H800"), ("Hex", "AReaL-H20"), ("AReaL-H800", "AReaL-H20")):
        for size in SIZES:
            holds = ours[f"{faster} k-tokens/s"][size] > ours[f"{slower} k-tokens/s"][size]
            lines.append(f"{'holds ' if holds else 'MISSED'} {faster} faster than {slower}, {size}")
    return lines


def contradictions() -> list[dict[str, float | str]]:
    """What the published step times themselves say of an H20, and of 64 of them, by arithmetic alone.

    An H800 generates a step's share in rollout s × 16 of AReaL-H800, an H20 in rollout s × 48 of Hex; an H800 trains it
    in train s × 8, an H20 in 8.9 times that. 64 H20 in their best split, fractions allowed, then take the sum of an
    H20's two times over 64; with Table 1's 0.95 an H20 generates in the H800's time over 0.95.
    """
    rows: list[dict[str, float | str]] = []
    for size in SIZES:
        seconds = {row: PUBLISHED[row][size] for row in PUBLISHED}
        h800_s = 16 * seconds["AReaL-H800 rollout s"]
        trains_s = TRAINING_RATIO * 8 * seconds["AReaL-H800 train s"]
        generates_s = 48 * seconds["Hex rollout s"]
        rows.append(
            {
                "model": size,
                "rollout_ratio": h800_s / generates_s,
                "h800_step_s": seconds["AReaL-H800 rollout s"] + seconds["sync s, H800"],
                "h20_step_s": (generates_s + trains_s) / 64 + seconds["sync s, H20"],
                "h20_step_table_1_s": (h800_s / ROLLOUT_RATIO + trains_s) / 64 + seconds["sync s, H20"],
                "h20_published_s": seconds["AReaL-H20 rollout s"] + seconds["sync s, H20"],
            }
        )
    return rows


Outcome = tuple[dict[str, DeviceType], Rows, Plans]


def _print_contradictions(rows: list[dict[str, float | str]]) -> None:
    print("\nFrom the published seconds alone, without any model of ours:")
    print("\n| model | rollout H20/H800 | step of 24 H800 | of 64 H20 | of 64 H20, Table 1's 0.95 | published, H20 |")
    print("|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {r['model']} | {r['rollout_ratio']:.2f} | {r['h800_step_s']:.0f} s | {r['h20_step_s']:.0f} s "
            f"| {r['h20_step_table_1_s']:.0f} s | {r['h20_published_s']:.0f} s |"
        )


def _print_choices(outcomes: dict[str, Outcome]) -> None:
    """What is required, for each choice of the H20's serving share."""
    print("\nThe H20's serving share, and what each choice would yield:")
    for choice, words in CHOICES.items():
        print(f"  {choice}{' (taken)' if choice == CHOSEN else ''}: {words}")
    heads = ("Hex / AReaL-H800", "AReaL-H800 / AReaL-H20", "sync s, Hex")
    print("\n| choice | share | " + " | ".join(f"{head}, {s}" for head in heads for s in SIZES) + " | missed |")
    print("|---" * (3 + len(heads) * len(SIZES)) + "|")
    for choice, (devices, ours, _) in outcomes.items():
        h800, h20 = ours["AReaL-H800 k-tokens/s"], ours["AReaL-H20 k-tokens/s"]
        order = {size: h800[size] / h20[size] for size in SIZES}
        values = [row[s] for row in (ours[heads[0]], order, ours[heads[2]]) for s in SIZES]
        missed = [line.removeprefix("MISSED ") for line in verdicts(ours) if line.startswith("MISSED")]
        print(
            f"| {choice} | {devices['h20'].serving_share:.4f} | {' | '.join(f'{value:.3g}' for value in values)} "
            f"| {'; '.join(missed) or 'nothing'} |"
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="AReaL-Hex's rows beside ours.")
    parser.add_argument("--json", type=Path, help="write everything here")
    arguments = parser.parse_args()
    began = time.perf_counter()
    _print_contradictions(contradictions())
    seven = models()["7b"]
    outcomes = {choice: (d := fitted_devices(seven, choice), *compare(d)) for choice in CHOICES}
    _print_choices(outcomes)
    devices, ours, plans = outcomes[CHOSEN]
    reproduce(devices, ours, plans)
    for device in devices.values():
        print(f"{device.name}: training share {device.training_share:.4f}, serving share {device.serving_share:.4f}")
    print("\n| row | " + " | ".join(f"{s} paper | ours" for s in SIZES) + " |\n|---|" + "---|" * 6)
    for row, values in PUBLISHED.items():
        print(f"| {row} | " + " | ".join(f"{values[s]:g} | {_digits(ours[row][s])}" for s in SIZES) + " |")
    lines = verdicts(ours)
    print("\n" + "\n".join(lines))
    print("\nPlans (two-phase, blocking):")
    for size in SIZES:
        for name, plan in plans[size].items():
            print(
                f"  {size} {name}: {plan.trainer.layout}; generating {_by_type(plan)}; step {plan.step_s:.1f} s, "
                f"{plan.throughput_tokens_per_s / 1e3:.2f} k-tokens/s, solved in {plan.solve_s:.1f} s"
            )
    improved = improve(devices, plans)
    print(
        "\n| model | joint, what-if | × AReaL-H800 | × cheaper | USD/h | gap | simulated/planned | trains | generate |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for r in improved:
        print(
            f"| {r['model']} | {r['case']} | {r['over_h800']:.2f} | {r['cheaper']:.2f} | {r['usd_per_h']:.1f} "
            f"| {r['gap']:.2%} | {r['simulated']:.3f} | {r['training']} | {r['rollout_devices']} |"
        )
    print(f"\n{time.perf_counter() - began:.0f} s")
    if arguments.json:
        shares = {n: {"training": d.training_share, "serving": d.serving_share} for n, d in devices.items()}
        result = {
            "published": PUBLISHED,
            "contradictions": contradictions(),
            "choices": {choice: outcome[1] for choice, outcome in outcomes.items()},
            "ours": ours,
            "verdicts": lines,
            "shares": shares,
            "joint": improved,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
