"""What does a checkpoint cost beside DeepSpeed's? `python -m benchmarks.checkpoints [--zero-stage 0] [--rounds 5]`.

A model of SmolLM2-135M's sizes, random, with Adam's moments, in float32 on one rank, is written and loaded in turns by
DeepSpeed (`save_checkpoint`, pickles without a checksum) and by hexflow (safetensors by name, and a manifest). Both
write into a directory that is brought to the disk and gets its name last, and both load what was just written, so
reading is from memory. Prints medians of wall and processor seconds, and bytes. It takes 8 GB of memory and 4 GB of
disk, in the place that TMPDIR names.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.exchange.files import publish_directory
from tasks.exchange.layout import RunDirectory
from tasks.training.algorithms import DecoupledPpo
from tasks.training.checkpoints import check_checkpoint, load_checkpoint, save_checkpoint
from tasks.training.engine import Engine
from tasks.training.groups import with_advantages
from tasks.training.policy import Policy
from tests.support.training import make_engine, one_rank, random_groups

SIZES = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}
_TAG = "state"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--zero-stage", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as here:
        os.environ["HEXFLOW_LOCAL"] = here  # where ranks meet
        show(args.zero_stage, args.rounds)


def show(zero_stage: int, rounds: int) -> None:
    """Measure so many rounds in a ZeRO stage, and print their medians."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True, attn_implementation="sdpa"))
    engine = make_engine(policy=Policy(model, 1.0), zero_stage=zero_stage)
    engine.train_step(with_advantages(random_groups(4, seed=0), DecoupledPpo()), 0)
    times: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as place:
            sizes = compare(engine, RunDirectory(Path(place) / "run"), times)
    for name, measured in times.items():
        wall_s, processor_s = (statistics.median(column) for column in zip(*measured, strict=True))
        print(f"{name:22} {wall_s:6.2f} s  {processor_s:6.2f} s of processors")
    for name, size_bytes in sizes.items():
        print(f"{name:22} {size_bytes / 1e6:,.0f} MB")


def compare(engine: Engine, run: RunDirectory, times: defaultdict[str, list[tuple[float, float]]]) -> dict[str, int]:
    """Write and load once with each; adds to `times`, and returns the bytes of each."""
    run.create()
    ranks, before = one_rank(), run.root / "deepspeed"

    def timed(name: str, act: Callable[[], object]) -> None:
        started, processor = time.perf_counter(), time.process_time()
        act()
        times[name].append((time.perf_counter() - started, time.process_time() - processor))

    def fill(directory: Path) -> None:
        engine.deepspeed.save_checkpoint(str(directory), tag=_TAG, save_latest=False)

    timed("DeepSpeed writes", lambda: publish_directory(before, fill))
    timed("DeepSpeed loads", lambda: engine.deepspeed.load_checkpoint(str(before), tag=_TAG))
    sizes = {"DeepSpeed": _bytes_of(before)}
    shutil.rmtree(before)
    timed("hexflow writes", lambda: save_checkpoint(run, 1, 0, engine, ranks, lambda: None))
    timed("hexflow checks", lambda: check_checkpoint(run, 0, 1))
    timed("hexflow checks, loads", lambda: load_checkpoint(run, 0, 1, engine, ranks))
    return {**sizes, "hexflow": _bytes_of(run.checkpoints)}


def _bytes_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
