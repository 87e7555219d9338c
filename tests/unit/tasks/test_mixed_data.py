"""The lists are real: two sources mixed by weight and two rewards summed train a model, through replica and ledger."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from tasks.config.experiment import Experiment
from tasks.config.files import parse_experiment
from tasks.data.chat import Chat
from tasks.data.split import Questions
from tasks.environments.single_turn import SingleTurn
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Ledger
from tasks.exchange.payloads import load_group
from tasks.exchange.trajectories import Group, Segment
from tasks.exchange.weights import publish_weights
from tasks.lifecycle.work import Work
from tasks.rewards.pool import ScoringPool
from tasks.rollout.answering import Answerer
from tasks.rollout.engine import Answer, InFlight, Sampling
from tasks.rollout.replica import Replica, ReplicaParts
from tasks.rollout.versions import WholeVersions
from tasks.tracking.tracker import Tracker
from tasks.training.groups import with_advantages
from tasks.training.leader import batch_metrics
from tasks.training.policy import Policy
from tests.support.data import ByteTokenizer
from tests.support.ledger import begin, join
from tests.support.training import VOCABULARY, make_engine, tiny_model

RUN = "mixed"
STEPS = 16
LENGTH = 3
STYLE = """
def style(prompt, answer, item):
    return float(answer.endswith(prompt[-1])) if item["metadata"].get("styled") else 0.0
"""


class Letters(ByteTokenizer):
    """One token per letter: `a` is 1; 0 ends an answer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [0] if text == "<eos>" else [ord(letter) % VOCABULARY for letter in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(chr(96 + int(token)) for token in token_ids)


class PolicyEngine:
    """Samples from the policy that is trained here; its weights are new as soon as they are trained."""

    replica = "policy"

    def __init__(self, policy: Policy) -> None:
        self.loaded = (0, 0)
        self._model = policy.model
        self._one_at_a_time = threading.Lock()
        self._generator = torch.Generator().manual_seed(0)

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> Answer:
        return await asyncio.to_thread(self._sample, list(prompt_ids), sampling)

    @torch.no_grad()
    def _sample(self, token_ids: list[int], sampling: Sampling) -> Answer:
        answer: list[int] = []
        logprobs: list[float] = []
        with self._one_at_a_time:
            for _ in range(sampling.max_new_tokens):
                scores = self._model(input_ids=torch.tensor([token_ids + answer])).logits[0, -1].log_softmax(-1)
                token = int(torch.multinomial(scores.exp(), 1, generator=self._generator))
                answer.append(token)
                logprobs.append(float(scores[token]))
        return Answer((Segment(answer, logprobs, self.loaded[1], self.replica),), "length")

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Nothing waits here."""

    async def load(self, lineage: int, number: int, path: Path, in_flight: InFlight) -> None:
        self.loaded = (lineage, number)

    async def shutdown(self) -> None:
        """It holds nothing."""


def mixed_experiment(tmp_path: Path) -> Experiment:
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"question": f"{x}{y}", "answer": y, "styled": True}) for x in "defg" for y in "ab")
    )
    (tmp_path / "own.py").write_text(STYLE)
    tree: dict[str, Any] = {
        "data": [
            {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl"), "weight": 3},
            {"kind": "toy", "weight": 1},
        ],
        "rewards": [
            {"kind": "character_share", "timeout_s": 60},
            {"kind": "python", "function": f"{tmp_path / 'own.py'}:style", "weight": 0.5, "timeout_s": 60},
        ],
        "evaluations": [{"kind": "held_out", "size": 4}],
        "prompt": {"template": "{question}", "stop": "<eos>"},
        "workload": {"prompts_per_step": 4, "group_size": 6, "max_new_tokens": LENGTH, "max_staleness": 0},
        "optimizer": {"lr": 2e-2},
        "run": {"steps": STEPS},
    }
    return parse_experiment(tree, "test")


def train(experiment: Experiment, ledger: Ledger, run: RunDirectory) -> list[tuple[list[Group], dict[str, float]]]:
    """Roll out and train to the last step; returns each step's groups and metrics."""
    policy = Policy(tiny_model(), 1.0)
    trained = make_engine(experiment.algorithm, experiment.optimizer, steps=STEPS, policy=policy)
    tokenizer = Letters()

    async def rollout() -> list[tuple[list[Group], dict[str, float]]]:
        engine, chat = PolicyEngine(policy), Chat(experiment, tokenizer)
        sampling = Sampling(1.0, LENGTH, chat.stop_token_ids)
        actor, trainer = (join(ledger, role, run_id=RUN) for role in ("replica", "trainer"))
        questions, tracker = Questions(experiment), Tracker.child(None, lambda: None, "replica", {})
        pool = ScoringPool(experiment.rewards, experiment.sources, 1)
        work = Work()
        answerer = Answerer(engine, SingleTurn(chat, tokenizer, pool), sampling, work.add)
        versions = WholeVersions(ledger, actor, run, print)
        parts = ReplicaParts(
            experiment, ledger, actor, run, engine, answerer, questions, tracker, 24, work, print, versions
        )
        replica = Replica(parts)
        running = asyncio.create_task(replica.run())
        steps = []
        try:
            for step in range(STEPS):
                ledger.record_version(trainer, step, str(publish_weights(run, 0, step, fill)))
                while (rows := ledger.take_groups(trainer, step)) is None:
                    assert not running.done(), "the replica ended"
                    await asyncio.sleep(0.01)
                groups = [load_group(run.group_path(row.group_id)) for row in rows]
                trained.train_step(with_advantages(groups, experiment.algorithm), step)
                steps.append((groups, batch_metrics(rows, [group.outline for group in groups], step)))
        finally:
            replica.leave()
            await running
            await pool.close()
        return steps

    return asyncio.run(rollout())


def fill(directory: Path) -> None:
    """The policy's weights are where they are trained; the ledger wants files."""
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"")


def test_two_sources_and_two_rewards_train(tmp_path: Path) -> None:
    experiment = mixed_experiment(tmp_path)
    ledger, run = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}"), RunDirectory(tmp_path / "run")
    run.create()
    begin(ledger, RUN, (4, 0, STEPS))
    steps = train(experiment, ledger, run)

    questions = Questions(experiment)
    sources = Counter(questions.item(group.prompt_index).source for groups, _ in steps for group in groups)
    assert sources["rows"] + sources["toy"] == 4 * STEPS
    assert abs(sources["rows"] - 3 * STEPS) <= 4
    for _, metrics in steps:
        summed = metrics["reward/character_share"] + 0.5 * metrics["reward/style"]
        assert abs(metrics["reward/mean"] - summed) < 1e-9
    first, last = (fmean(metrics["reward/mean"] for _, metrics in part) for part in (steps[:5], steps[-5:]))
    assert last > first + 0.2
