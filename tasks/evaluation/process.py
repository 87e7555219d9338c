"""The process that evaluates one set of weights: `python -m tasks.evaluation.process --out FILE …`."""

import argparse
import asyncio
import logging
from pathlib import Path
from typing import Literal

from tasks.config.experiment import Experiment
from tasks.evaluation.heldout import EvaluationResult, evaluate
from tasks.exchange.files import write_atomic
from tasks.machine.processes import apply_device_environment, die_with_parent
from tasks.rollout.serving import AnsweringSetup, open_answerer


def main() -> None:
    """Evaluate on the held-out questions and write the rewards as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiment", required=True, help="the experiment as JSON")
    parser.add_argument("--model-path", required=True, type=Path, help="prepared model, for its tokenizer")
    parser.add_argument("--weights-path", required=True, type=Path)
    parser.add_argument("--kind", required=True, choices=["cuda", "cpu"])
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    die_with_parent()
    apply_device_environment()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    experiment = Experiment.model_validate_json(args.experiment)
    result = asyncio.run(_evaluate(experiment, args.model_path, args.weights_path, args.kind))
    write_atomic(args.out, result.as_json().encode())


async def _evaluate(
    experiment: Experiment, model_path: Path, weights_path: Path, kind: Literal["cuda", "cpu"]
) -> EvaluationResult:
    concurrency = experiment.planner.concurrency or experiment.workload.group_size * 4
    setup = AnsweringSetup(model_path, weights_path, 0, 0, "evaluation", kind, concurrency, seed=experiment.run.seed)
    async with open_answerer(experiment, setup) as (answerer, prompts):
        items = prompts.heldout()
        encoded = [prompts.encode(item) for item in items]
        return await evaluate(answerer, items, encoded, experiment.run.evaluation_samples, concurrency)


if __name__ == "__main__":
    main()
