"""Is the mean update of the control zero? `python -m benchmarks.control [--steps 8] [--seed 0] [--json FILE]`.

A control whose advantages have no tie to its answers should pull nowhere in the mean. For the first steps of the laptop
run, with its untrained model, this takes the gradient of every answer's log-probability and from them the clipped
update g of any deal of advantages, exactly. Its first-order gain is ⟨g, v⟩, where v is the gradient of the mean
probability of the right answer to other questions. Printed are the gain of the real advantages, and the mean gain over
many deals: permuted within each group, and as the control has them (negated on a coin's toss, too), clipped and not.

Gradients are kept as count sketches of 2^16 numbers, which preserve inner products in the mean. Takes some minutes.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from benchmarks.learning import EXPERIMENT
from tasks.config.experiment import Experiment
from tasks.config.files import load_experiment
from tasks.config.settings import load_settings
from tasks.data.chat import Chat
from tasks.data.split import Questions
from tasks.exchange.trajectories import Group, Outcome, Segment, Trajectory
from tasks.models.prepare import load_tokenizer, prepare_model
from tasks.training.groups import permute_advantages, with_advantages
from tasks.training.packing import TrainingGroup
from tasks.training.policy import Policy, load_policy

SKETCH = 2**16
DEALS = 4000
OTHER_QUESTIONS = range(5000, 5024)


class Gradients:
    """Sketched gradients of log-probabilities: entries are added up by position modulo SKETCH under random signs."""

    def __init__(self, policy: Policy) -> None:
        self.model = policy.model
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._signs = [torch.randint(0, 2, (p.numel(),), dtype=torch.int8) * 2 - 1 for p in self._parameters]

    def of(self, prompt_ids: ArrayLike, answer_ids: ArrayLike) -> tuple[float, Tensor]:
        """Log-probability of the answer, and its gradient as a sketch [SKETCH]."""
        prompt, answer = (torch.as_tensor(np.array(ids, np.int64)) for ids in (prompt_ids, answer_ids))
        logits = self.model(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.float().log_softmax(-1).gather(1, answer[:, None])
        logprobs.sum().backward()
        sketch = torch.zeros(SKETCH)
        for parameter, signs in zip(self._parameters, self._signs, strict=True):
            assert parameter.grad is not None
            signed = parameter.grad.reshape(-1) * signs
            whole = signed.numel() // SKETCH * SKETCH
            sketch += signed[:whole].view(-1, SKETCH).sum(0)
            sketch[: signed.numel() - whole] += signed[whole:]
            parameter.grad = None
        return float(logprobs.detach().sum()), sketch


def main() -> None:
    """Measure, print a table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    experiment = load_experiment(EXPERIMENT, [f"run.seed={args.seed}"])
    path = prepare_model(experiment.model, load_settings())
    tokenizer = load_tokenizer(path)
    source = Questions(experiment), Chat(experiment, tokenizer)
    policy = load_policy(path, 1.0, experiment.model.max_context, torch.float32)
    gradients = Gradients(policy)
    direction = right_answers(gradients, source, tokenizer, experiment)
    rows = []
    for step in range(args.steps):
        algorithm = experiment.algorithm
        sampled = with_advantages(list(sample(policy, source, tokenizer, experiment, step)), algorithm)
        groups = [group for group in sampled if algorithm.keeps(group.advantages)]
        if groups:
            rows.append({"step": step, "groups": len(groups), **measure(gradients, groups, direction, args.seed)})
            print("  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
    print(f"real: mean gain {np.mean([row['real'] for row in rows]):.4f} a step")
    for name in ("permuted", "permuted_unclipped", "control", "control_unclipped"):
        error = np.linalg.norm([row[f"{name}_error"] for row in rows]) / len(rows)
        print(f"{name}: mean gain {np.mean([row[name] for row in rows]):+.4f} ± {error:.4f} a step")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


def right_answers(
    gradients: Gradients, source: tuple[Questions, Chat], tokenizer: Any, experiment: Experiment
) -> Tensor:
    """Gradient [SKETCH] of the mean probability of the right answer to questions that are not trained on here."""
    questions, chat = source
    total = torch.zeros(SKETCH)
    for index in OTHER_QUESTIONS:
        item = questions.item(index)
        answer = tokenizer.encode(f" {item.answer}{chat.stop}", add_special_tokens=False)
        logprob, gradient = gradients.of(chat.encode(item), answer)
        total += np.exp(logprob) * gradient
    return total / len(OTHER_QUESTIONS)


@torch.no_grad()
def sample(
    policy: Policy, source: tuple[Questions, Chat], tokenizer: Any, experiment: Experiment, step: int
) -> Iterator[Group]:
    """The groups of one step, generated by the untrained model."""
    questions, chat = source
    score, (stop,) = experiment.rewards[0].open(experiment.sources), chat.stop_token_ids
    workload = experiment.workload
    for index in range(step * workload.prompts_per_step, (step + 1) * workload.prompts_per_step):
        item = questions.item(index)
        prompt = tuple(chat.encode(item))
        outputs = policy.model.generate(
            torch.tensor([prompt]),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=workload.max_new_tokens,
            num_return_sequences=workload.group_size,
            eos_token_id=stop,
            pad_token_id=stop,
        )
        trajectories = []
        for row in outputs[:, len(prompt) :].tolist():
            answer = tuple(row[: row.index(stop) + 1] if stop in row else row)
            text = tokenizer.decode([token for token in answer if token != stop])
            reward = score(chat.text(item), text, item.facts())
            segment = Segment(answer, (0.0,) * len(answer), 0, "replica-0")
            trajectories.append(Trajectory((segment,), Outcome.SCORED, reward))
        yield Group(index, index, prompt, tuple(trajectories))


def measure(gradients: Gradients, groups: Sequence[TrainingGroup], direction: Tensor, seed: int) -> dict[str, float]:
    """First-order gains of one step by kind of advantages, each with the standard error of its mean over the deals."""
    contents = [group.read() for group in groups]
    answers = [(content.prompt_ids, answer.token_ids) for content in contents for answer in content.trajectories]
    sketches = torch.stack([gradients.of(*answer)[1] for answer in answers]).double()
    gram, pulls = (sketches @ sketches.T).numpy(), (sketches @ direction.double()).numpy()
    tokens = sum(group.trained_tokens for group in groups)

    def gains(dealt: Sequence[TrainingGroup]) -> tuple[float, float]:
        weights = np.array([a for group in dealt for a in group.advantages]) / tokens
        norm = float(np.sqrt(max(0.0, weights @ gram @ weights)))
        gain = float(weights @ pulls)
        return gain / max(1.0, norm), gain

    def permuted(deal: int) -> list[TrainingGroup]:
        generator = np.random.default_rng([seed, deal])
        return [replace(group, advantages=tuple(generator.permutation(group.advantages).tolist())) for group in groups]

    result = {"real": gains(groups)[0]}
    for name, deals in (
        ("permuted", (permuted(deal) for deal in range(DEALS))),
        ("control", (permute_advantages(groups, seed, deal) for deal in range(DEALS))),
    ):
        clipped, whole = np.array([gains(deal) for deal in deals]).T
        result |= {name: float(clipped.mean()), f"{name}_error": float(clipped.std() / np.sqrt(DEALS))}
        result |= {f"{name}_unclipped": float(whole.mean())}
        result |= {f"{name}_unclipped_error": float(whole.std() / np.sqrt(DEALS))}
    return result


if __name__ == "__main__":
    main()
