"""Keys that experiments of before had: refused with a sentence that says what to write instead."""

from collections.abc import Mapping
from typing import Any

_MOVED = {
    "algorithm.temperature": "`sampling.temperature`",
    "algorithm.lr": "`optimizer.lr`",
    "algorithm.lr_schedule": "`optimizer.schedule`",
    "algorithm.warmup_steps": "`optimizer.warmup_steps`",
    "algorithm.adam_beta1": "`optimizer.beta1`",
    "algorithm.adam_beta2": "`optimizer.beta2`",
    "algorithm.weight_decay": "`optimizer.weight_decay`",
    "algorithm.gradient_clip": "`optimizer.gradient_clip`",
    "algorithm.minibatches": "`optimizer.minibatches`",
    "algorithm.tokens_per_micro_batch": "`planner.micro_batch_tokens`",
    "algorithm.zero_stage": "`planner.zero_stage`",
    "rollout.concurrency": "`planner.concurrency`",
    "data.heldout_size": "`evaluations: [{kind: held_out, size: …}]`",
    "data.heldout_seed": "`evaluations: [{kind: held_out, seed: …}]`",
    "run.evaluation_samples": "`evaluations: [{kind: held_out, samples: …}]`",
    "reward.processes": "`rollout.scoring_processes`",
}
"""What to write in place of a dotted key of before."""


def moved_keys(tree: Mapping[str, Any]) -> str | None:
    """What to write in place of the keys of before in an experiment's tree of values, or None without any."""
    found = [f"`{key}` has moved, write {instead}" for key, instead in _MOVED.items() if _is_there(tree, key)]
    algorithm = tree.get("algorithm")
    if isinstance(algorithm, Mapping) and algorithm and "kind" not in algorithm:
        found.append("`algorithm` has kinds now, write `algorithm.kind: decoupled_ppo` for the one of before")
    if isinstance(tree.get("data"), Mapping):
        found.append("`data` is a list of sources now, write `data: [{kind: …}]`")
    if "reward" in tree:
        found.append("`reward` is a list now, write `rewards: [{kind: …}]`")
    if found and not isinstance(tree.get("prompt"), Mapping):
        found.append(
            "without a `prompt` section questions are now put by the tokenizer's chat template, write one to keep the "
            "prompt of before"
        )
    return "; ".join(found) or None


def _is_there(tree: Mapping[str, Any], key: str) -> bool:
    section, _, name = key.partition(".")
    node = tree.get(section)
    return isinstance(node, Mapping) and name in node
