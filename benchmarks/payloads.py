"""What tokens cost on their way: `python -m benchmarks.payloads [--groups 32] [--answers 16] [--tokens 2000]`.

Saves the payloads of one step, loads them again and lays them out as micro-batches, on one process. Prints seconds of
each, medians of five.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from tasks.exchange.payloads import load_group, save_group
from tasks.exchange.trajectories import Group, Outcome, Segment, Trajectory
from tasks.training.algorithms import DecoupledPpo
from tasks.training.groups import with_advantages
from tasks.training.packing import hand_of

ROUNDS = 5
PROMPT_TOKENS = 200
TOKENS_PER_MICRO_BATCH = 16_384


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--answers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2000, help="of an answer")
    args = parser.parse_args()
    groups = made_up_groups(args.groups, args.answers, args.tokens)
    with tempfile.TemporaryDirectory() as directory:
        rounds = [measure(groups, Path(directory)) for _ in range(ROUNDS)]
    for name in rounds[0]:
        print(f"{name} {statistics.median(seconds[name] for seconds in rounds):.3f} s")


def made_up_groups(count: int, answers: int, tokens: int) -> list[Group]:
    """Groups as an engine leaves them; two segments an answer."""
    generator = np.random.default_rng(0)
    groups = []
    for group_id in range(count):
        trajectories = []
        for number in range(answers):
            halves = [
                Segment(tuple(ids.tolist()), tuple((-generator.random(len(ids))).tolist()), version, "rollout-0")
                for version, ids in enumerate(np.array_split(generator.integers(0, 150_000, tokens), 2))
            ]
            trajectories.append(Trajectory(tuple(halves), Outcome.SCORED, float(number % 2)))
        prompt = tuple(generator.integers(0, 150_000, PROMPT_TOKENS).tolist())
        groups.append(Group(group_id, group_id, prompt, tuple(trajectories)))
    return groups


def measure(groups: list[Group], directory: Path) -> dict[str, float]:
    """Seconds to save, load and lay out the groups of a step."""
    paths = [directory / f"{group.group_id}.safetensors" for group in groups]
    started = time.perf_counter()
    for path, group in zip(paths, groups, strict=True):
        save_group(path, group)
    saved = time.perf_counter()
    loaded_groups = [load_group(path) for path in paths]
    loaded = time.perf_counter()
    hand_of(with_advantages(loaded_groups, DecoupledPpo()), TOKENS_PER_MICRO_BATCH, 0, 1)
    return {"save": saved - started, "load": loaded - saved, "lay out": time.perf_counter() - loaded}


if __name__ == "__main__":
    main()
