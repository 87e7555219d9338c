"""Does the laptop run learn, and does its control not? `python -m benchmarks.learning [--seeds 0 1]`.

For each seed, runs the laptop experiment and the same with each group's advantages permuted and, on a coin's toss,
negated, one after the other, through the `hexflow` command, and prints what their summaries say; `--json FILE` keeps
them, and `--variants control` leaves the laptop run out. A run takes 5 to 13 minutes on two cores.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tasks.config.settings import load_settings

EXPERIMENT = Path(__file__).parent.parent / "deployments" / "experiments" / "laptop.yaml"
VARIANTS = ("laptop", "control")
COLUMNS = (
    "eval_before",
    "eval_after",
    "eval_ci95",
    "eval_before_greedy",
    "eval_after_greedy",
    "max_staleness_seen",
    "trajectories_dropped",
    "step_s_predicted",
    "step_s_measured",
    "tokens_per_s",
    "wait_trainer_share",
    "wait_rollout_share",
    "overlap_share",
)


def main() -> None:
    """Run, print a table, and write the summaries as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", default=VARIANTS)
    parser.add_argument("--json", type=Path, help="file for the whole summaries")
    args = parser.parse_args()
    results = []
    for seed in args.seeds:
        for variant in args.variants:
            result = {"variant": variant, "seed": seed, **train(variant, seed)}
            print(f"\n{variant}, seed {seed}: {result['run_id']} {result['status']}: {verdict(result)}")
            for column in COLUMNS:
                print(f"  {column:20} {result[column]}", flush=True)
            results.append(result)
            if args.json:
                args.json.write_text(json.dumps(results, indent=2))


def train(variant: str, seed: int) -> dict[str, Any]:
    """Train the laptop experiment and return its summary."""
    runs = load_settings().shared.runs
    known = set(runs.glob("*/summary.json"))
    overrides = [f"algorithm.permute_advantages={str(variant == 'control').lower()}", f"run.seed={seed}"]
    overrides += ["tracking.experiment=learning", f"run.name={variant}"]
    subprocess.run([sys.executable, "-m", "deployments", "train", str(EXPERIMENT), *overrides], check=True)
    (summary,) = set(runs.glob("*/summary.json")) - known
    return dict(json.loads(summary.read_text()))


def verdict(result: dict[str, Any]) -> str:
    """What the interval of the paired difference of held-out rewards allows to say."""
    low, high = result["eval_ci95"]
    if low > 0:
        return "rises"
    return "falls" if high < 0 else "neither rises nor falls"


if __name__ == "__main__":
    main()
