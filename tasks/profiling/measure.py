"""The process that measures one device: `python -m tasks.profiling.measure --request FILE --out FILE`.

The request names the part ("generation" or "training"), the experiment, the prepared model and a scratch directory.
"""

import argparse
import asyncio
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks.config.experiment import Experiment
from tasks.exchange.files import write_json
from tasks.machine.processes import apply_device_environment, die_with_parent
from tasks.models.prepare import load_tokenizer


def main() -> None:
    """Measure what the request asks for and write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--request", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    die_with_parent()
    apply_device_environment()
    request = json.loads(args.request.read_bytes())
    experiment = Experiment.model_validate(request["experiment"])
    model_path = Path(request["model_path"])
    if request["part"] == "generation":
        figures = asyncio.run(_generation(experiment, model_path, request))
    else:
        figures = _training(experiment, model_path, request)
    write_json(args.out, figures)


async def _generation(experiment: Experiment, model_path: Path, request: dict[str, Any]) -> dict[str, Any]:
    from tasks.profiling.generation import measure_generation, measured_concurrency
    from tasks.rollout.serving import AnsweringSetup, open_answerer

    workload = experiment.workload
    levels = measured_concurrency(workload)
    setup = AnsweringSetup(
        model_path, model_path, 0, 0, "profile", request["kind"], concurrency=levels[-1], seed=experiment.run.seed
    )
    async with open_answerer(experiment, setup) as (answerer, questions):
        groups = levels[-1] // workload.group_size
        encoded = [answerer.environment.prompt(questions.item(index)) for index in range(groups)]
        rates = await measure_generation(answerer.engine, encoded, answerer.sampling, workload, model_path)
    return asdict(rates)


def _training(experiment: Experiment, model_path: Path, request: dict[str, Any]) -> dict[str, Any]:
    import torch

    from tasks.data.chat import Chat
    from tasks.data.split import Questions
    from tasks.profiling.hardware import gemm_flops_per_s, memory_bytes_per_s
    from tasks.profiling.training import measure_training
    from tasks.training.meeting import open_meeting

    questions, chat = Questions(experiment), Chat(experiment, load_tokenizer(model_path))
    prompts = [chat.encode(questions.item(index)) for index in range(experiment.workload.prompts_per_step)]
    device = torch.device("cuda" if request["kind"] == "cuda" else "cpu")
    answer_tokens, scratch = request["answer_tokens"], Path(request["scratch"])
    with open_meeting(0, None) as meeting:
        os.environ.update(meeting.environment, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        rates = measure_training(experiment, prompts, model_path, answer_tokens, scratch, **request["trainer"])
    return {
        "gemm_flops_per_s": gemm_flops_per_s(device, torch.float32 if device.type == "cpu" else torch.bfloat16),
        "memory_bytes_per_s": memory_bytes_per_s(device),
        **asdict(rates),
    }


if __name__ == "__main__":
    main()
