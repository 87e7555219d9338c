"""Scoring by the real worker: several rewards and their sum, a person's own functions, and what an answer cannot do."""

import asyncio
import json
import logging
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from tasks.config.data import JsonlSource
from tasks.config.rewards import CharacterShareReward, MathVerifyReward, Reward
from tasks.exchange.trajectories import Outcome
from tasks.rewards.pool import ScoringPool, Verdict
from tests.support.scoring import ITEM, SOURCE, alive, item_of, outcome_of, wait_until

OWN = """
import os
def length(prompt, answer, item):
    return len(answer) / 10 - 1.5
def told(prompt, answer, item):
    assert prompt.startswith("ask ") and item["source"] == "toy" and item["metadata"] == {"hard": (1, 2)}
    return item["answer"] == answer
def odd(prompt, answer, item):
    import numpy
    return {"nan": float("nan"), "none": None, "text": "1", "list": [1.0], "numpy": numpy.float32(0.5)}[answer]
def broken(prompt, answer, item):
    if answer == "exit":
        raise SystemExit(3)
    raise KeyError(answer)
def surroundings(prompt, answer, item):
    return float(answer in os.environ)
def slow(prompt, answer, item):
    while answer == "hang":
        pass
    return 0.25
"""


def rewards_of(tmp_path: Path, *trees: dict[str, Any]) -> list[Reward]:
    (tmp_path / "own.py").write_text(OWN)
    for tree in trees:
        if "function" in tree:
            tree["function"] = f"{tmp_path / 'own.py'}:{tree['function']}"
    return TypeAdapter(list[Reward]).validate_python(trees)


def own(function: str, **keys: Any) -> dict[str, Any]:
    return {"kind": "python", "function": function, **keys}


def scored(rewards: list[Reward], *texts: str, item: dict[str, Any] = ITEM) -> list[Verdict]:
    async def run() -> list[Verdict]:
        pool = ScoringPool(rewards, [SOURCE, JsonlSource(path="/rows.jsonl")], 1)
        try:
            async with asyncio.timeout(90):
                return [await pool.score("ask q", text, item) for text in texts]
        finally:
            await pool.close()

    return asyncio.run(run())


def test_rewards_are_summed_by_weight_and_their_parts_kept(tmp_path: Path) -> None:
    rewards = rewards_of(
        tmp_path, {"kind": "character_share", "weight": 2.0}, own("length", weight=-0.5), own("told", weight=0.0)
    )
    item = item_of("q", "a", hard=(1, 2))
    short, long = scored(rewards, "a", "ab" * 10, item=item)
    assert (short.outcome, short.parts) == (Outcome.SCORED, (1.0, pytest.approx(-1.4), 1.0))
    assert short.reward == pytest.approx(2.0 + 0.7)
    assert long.parts == (0.5, 0.5, 0.0)
    assert long.reward == pytest.approx(1.0 - 0.25)


def test_a_reward_scores_the_sources_that_it_names_alone(tmp_path: Path) -> None:
    rewards = rewards_of(tmp_path, {"kind": "character_share"}, own("length", sources=["rows"]))
    (of_toy,) = scored(rewards, "a" * 20, item=item_of("q", "a"))
    (of_rows,) = scored(rewards, "a" * 20, item=item_of("q", "a", "rows"))
    assert of_toy.reward == 1
    assert math.isnan(of_toy.parts[1])
    assert (of_rows.reward, of_rows.parts) == (1.5, (1.0, 0.5))


def test_what_is_no_finite_number_is_an_error_and_its_first_traceback_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        *bad, good = scored(rewards_of(tmp_path, own("odd")), "nan", "none", "text", "list", "absent", "numpy")
    assert [(v.outcome, math.isnan(v.reward), math.isnan(v.parts[0])) for v in bad] == [(Outcome.ERROR, True, True)] * 5
    assert (good.outcome, good.reward) == (Outcome.SCORED, 0.5)
    assert "TypeError: it returned None, which is no finite number; reward odd; question: q" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert [v.outcome for v in scored(rewards_of(tmp_path, own("broken")), "x", "y", "exit")] == [Outcome.ERROR] * 3
    assert caplog.text.count("Traceback (most recent call last)") == 1
    assert "in broken\n    raise KeyError(answer)\nKeyError: 'x'" in caplog.text
    assert "KeyError: 'y'" in caplog.text
    assert "SystemExit: 3" in caplog.text


def test_the_first_reward_that_fails_decides_and_each_has_its_own_time(tmp_path: Path) -> None:
    rewards = rewards_of(tmp_path, own("length", timeout_s=30), own("slow", timeout_s=1.0), own("broken"))
    hanging, broken = scored(rewards, "hang", "go")
    assert (hanging.outcome, hanging.parts[0]) == (Outcome.TIMEOUT, pytest.approx(-1.1))
    assert broken.outcome is Outcome.ERROR
    assert broken.parts[:2] == (pytest.approx(-1.3), 0.25)
    assert math.isnan(broken.parts[2])


def test_scoring_processes_see_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("HEXFLOW_LEDGER_URL", "PREFECT_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD")
    for name in secrets:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    seen = scored(rewards_of(tmp_path, own("surroundings")), *secrets, "PATH", "LC_ALL")
    assert [verdict.reward for verdict in seen] == [0.0] * len(secrets) + [1.0, 1.0]


def test_a_pool_whose_processes_cannot_be_forked_says_so() -> None:
    async def run() -> None:
        pool = ScoringPool([CharacterShareReward()], [SOURCE], 1, ["/nowhere/python"])
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"A scoring process cannot be started: .*nowhere"):
                async with asyncio.timeout(20):
                    await pool.score("", "x", ITEM)
        await pool.close()

    asyncio.run(run())


def test_a_function_that_cannot_be_loaded_is_named_by_the_pool(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"did not start: .*own\.py has no function absent"):
        scored(rewards_of(tmp_path, own("absent")), "x")


def test_a_persons_number_may_leave_the_bounds_of_ours(tmp_path: Path) -> None:
    (verdict,) = scored(rewards_of(tmp_path, own("length")), "x")
    assert verdict.reward == pytest.approx(-1.4)


def test_hostile_mathematics_is_killed_and_the_rest_is_scored() -> None:
    async def run() -> None:
        pool = ScoringPool([MathVerifyReward(timeout_s=2.0)], [SOURCE], 1)
        try:
            assert await outcome_of(pool, "12") == (Outcome.SCORED, 1.0)
            outcome, _ = await outcome_of(pool, "9^{9^{9^{9}}}")
            assert outcome is Outcome.TIMEOUT
            assert await outcome_of(pool, "\ud800 \x00 \n $\\frac{24}{2}$") == (Outcome.SCORED, 1.0)
            outcome, reward = await outcome_of(pool, "12", item_of("q", ""))
            assert (outcome, math.isnan(reward)) == (Outcome.ERROR, True)
            outcome, _ = await outcome_of(pool, "(" * 2_000_000)
            assert outcome in (Outcome.TIMEOUT, Outcome.ERROR, Outcome.SCORED)
            assert await outcome_of(pool, "13") == (Outcome.SCORED, 0.0)
        finally:
            await pool.close()

    asyncio.run(run())


def test_memory_is_limited() -> None:
    program = """
from tasks.rewards.worker import MEMORY_BYTES, limit_memory
limit_memory()
bytearray(MEMORY_BYTES // 2)
bytearray(MEMORY_BYTES)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stderr.splitlines()[-1] == "MemoryError"
    assert "line 5" in ended.stderr  # not for the first, which fits


PARENT = """
import asyncio, json, sys
from tasks.config.data import ToySource
from tasks.config.rewards import MathVerifyReward
from tasks.rewards.pool import ScoringPool

ITEM = {"question": "q", "answer": "12", "metadata": {}, "source": "toy"}

async def main():
    pool = ScoringPool([MathVerifyReward(timeout_s=600.0)], [ToySource()], 1)
    await pool.score("", "12", ITEM)
    asking = asyncio.create_task(pool.score("", "9^{9^{9^{9}}}", ITEM))
    await asyncio.sleep(0.5)
    print(json.dumps([worker._process.pid for worker in pool._workers]), flush=True)
    await asking

asyncio.run(main())
"""


def test_workers_die_with_their_parent_even_while_busy() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert parent.stdout is not None
        pids = json.loads(parent.stdout.readline())
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.communicate()
    asyncio.run(wait_until(lambda: not any(alive(pid) for pid in pids)))
