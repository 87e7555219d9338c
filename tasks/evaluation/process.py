"""The process that evaluates one set of weights: `python -m tasks.evaluation.process --out FILE …`."""

import argparse
import asyncio
import logging
from functools import partial
from pathlib import Path

from tasks.config.experiment import Experiment
from tasks.evaluation.examine import as_json, evaluate
from tasks.evaluation.progress import count_work
from tasks.exchange.files import write_atomic
from tasks.machine.processes import apply_device_environment, die_with_parent
from tasks.rollout.serving import AnsweringSetup, open_answerer


def main() -> None:
    """Evaluate on the questions of the experiment's evaluations and write the rewards as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiment", required=True, help="the experiment as JSON")
    parser.add_argument("--model-path", required=True, type=Path, help="prepared model, for its tokenizer")
    parser.add_argument("--weights-path", required=True, type=Path)
    parser.add_argument("--kind", required=True, choices=["cuda", "cpu"])
    parser.add_argument("--concurrency", required=True, type=int, help="answers in flight")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    die_with_parent()
    apply_device_environment()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    experiment = Experiment.model_validate_json(args.experiment)
    setup = AnsweringSetup(
        args.model_path,
        args.weights_path,
        lineage=0,
        number=0,
        replica="evaluation",
        kind=args.kind,
        concurrency=args.concurrency,
        seed=experiment.run.seed,
        count_work=partial(count_work, args.out),
    )
    text = asyncio.run(_evaluate(experiment, setup))
    write_atomic(args.out, text.encode())


async def _evaluate(experiment: Experiment, setup: AnsweringSetup) -> str:
    async with open_answerer(experiment, setup) as (answerer, questions):
        return as_json(await evaluate(answerer, questions.examinations, setup.concurrency))


if __name__ == "__main__":
    main()
