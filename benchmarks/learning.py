"""Does the laptop run learn, and does its control not? `python -m benchmarks.learning [--seeds 0 1] [--json FILE]`.

Runs the laptop experiment and the same with advantages permuted over the batch, one after the other, through the
`hexflow` command, and prints what their summaries say. Each run takes about ten minutes on two cores.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tasks.settings import load_settings

EXPERIMENT = Path(__file__).parent.parent / "deployments" / "experiments" / "laptop.yaml"
COLUMNS = (
    "eval_before",
    "eval_after",
    "eval_ci95",
    "max_staleness_seen",
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
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path, help="file for the whole summaries")
    args = parser.parse_args()
    results = [
        {"variant": variant, "seed": seed, **train(variant == "permuted advantages", seed)}
        for seed in args.seeds
        for variant in ("laptop", "permuted advantages")
    ]
    for result in results:
        print(f"\n{result['variant']}, seed {result['seed']}: {result['run_id']} {result['status']}")
        for column in COLUMNS:
            print(f"  {column:20} {result[column]}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


def train(permuted: bool, seed: int) -> dict[str, Any]:
    """Train the laptop experiment and return its summary."""
    runs = load_settings().runs
    known = set(runs.glob("*/summary.json"))
    overrides = [f"algorithm.permute_advantages={str(permuted).lower()}", f"run.seed={seed}"]
    overrides += ["tracking.experiment=learning", f"run.name={'control' if permuted else 'laptop'}"]
    subprocess.run([sys.executable, "-m", "deployments", "train", str(EXPERIMENT), *overrides], check=True)
    (summary,) = set(runs.glob("*/summary.json")) - known
    return json.loads(summary.read_text())


if __name__ == "__main__":
    main()
