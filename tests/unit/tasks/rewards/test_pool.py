"""Scoring: what an answer is worth, and that no answer can hold up, crash or outlive the pool."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.config.data import DataSection
from tasks.config.rewards import RewardSection
from tasks.data.prompts import Item, open_generator
from tasks.exchange.trajectories import Outcome
from tasks.machine.processes import group_alive
from tasks.rewards.builtin import open_scorer, score_character_share, score_mathematics
from tasks.rewards.pool import ScoringPool

ITEM = Item("q", "12", {})

# --- scorers ---


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        # signs
        ("-7", "-7", 1),
        ("-7", "\u22127", 1),
        ("7", "+7", 1),
        ("-7", "7", 0),
        ("7", "-7", 0),
        ("7", "$-7$", 0),
        # thousands and decimals
        ("1234567", "1,234,567", 1),
        ("1,234", "1234", 1),
        ("-1,234", "-1234", 1),
        ("1000", "1000.00", 1),
        ("1,234.5", "1234.5", 1),
        ("12", "12,000", 0),
        ("1234", "1.234", 0),
        ("007", "7", 1),
        # units and money
        ("12", "12 cm", 1),
        ("12 cm", "12", 1),
        ("12", "12\\text{ cm}", 1),
        ("12", "12 dollars", 1),
        ("12", "\\$12.00", 1),
        # fractions
        ("1/2", "\\frac{1}{2}", 1),
        ("\\frac{1}{2}", "1/2", 1),
        ("\\frac{1}{2}", "0.5", 1),
        ("1/2", "\\dfrac12", 1),
        ("-3/4", "$-\\frac{3}{4}$", 1),
        ("\\frac{1}{2}", "\\frac{1}{3}", 0),
        ("1/2", "2", 0),
        # percent
        ("50%", "0.5", 1),
        ("0.5", "50%", 1),
        ("50", "50%", 1),
        ("50%", "5", 0),
        # expressions
        ("2\\sqrt{3}", "\\sqrt{12}", 1),
        ("x^2+2x+1", "(x+1)^2", 1),
        ("(1,2)", "(1,2)", 1),
        # in prose, and no answer at all
        ("42", "The answer is 42.", 1),
        ("12", "so \\boxed{12} apples", 1),
        ("12", "12, no: 13", 0),
        ("12", "twelve", 0),
        ("12", "", 0),
    ],
)
def test_mathematics_reads_the_forms_of_numbers(answer: str, text: str, reward: float) -> None:
    assert score_mathematics(Item("", answer, {}), text) == reward


def test_mathematics_refuses_an_answer_that_is_none() -> None:
    with pytest.raises(ValueError, match="'' is no mathematical expression"):
        score_mathematics(Item("", "", {}), "12")


@pytest.mark.parametrize(("text", "reward"), [("aaaa", 1), ("aabb", 0.5), ("bbbb", 0), ("", 0), ("a\ufffda ", 0.5)])
def test_character_share(text: str, reward: float) -> None:
    assert score_character_share(Item("", "a", {}), text) == reward


@pytest.mark.parametrize(
    ("text", "reward"), [("{}", 1), (" {}\n", 1), ("{}.0", 1), (" {} 1\n", 1 / 3), ("", 0), ("x", 0)]
)
def test_reasoning_gym_scores_the_stripped_answer(text: str, reward: float) -> None:
    data = DataSection()
    entry = open_generator(data, 5)[3]
    scorer = open_scorer(RewardSection(), data)
    assert scorer(Item("", "", {"entry": entry}), text.format(entry["answer"])) == reward


def test_reasoning_gym_scores_entries_with_tuples_after_the_wire() -> None:
    data = DataSection(task="rearc", parameters={})
    entry = open_generator(data, 5)[0]
    item = Item.from_json(Item("", "", {"entry": entry}).to_json())
    assert open_scorer(RewardSection(), data)(item, entry["answer"]) == 1


# --- the pool, with a worker written for the test ---

FAKE_WORKER = r"""
import json, os, subprocess, sys, time
open(f"{sys.argv[1]}/pids/{os.getpid()}", "w").close()
while os.path.exists(sys.argv[1] + "/no more starts"): time.sleep(0.02)
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    text = json.loads(line)["text"]
    if text == "hang":
        while True: pass
    if text == "hang with a child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(sys.argv[1] + "/child", "w") as file: file.write(str(child.pid))
        time.sleep(600)
    if text == "crash": os._exit(1)
    if text == "die later": reply = '{"reward": 0.5}'
    elif text == "flood": reply = "x" * 10_000_000
    elif text == "pid": reply = json.dumps({"reward": os.getpid() / 1e9})
    else: reply = text
    print(reply, flush=True)
    if text == "die later": os._exit(1)
"""


def with_pool(
    tmp_path: Path, use: Callable[[ScoringPool], Awaitable[None]], timeout_s: float = 20.0, processes: int = 1
) -> None:
    """Run `use` with a pool of fake workers, and check that closing leaves none."""
    script = tmp_path / "worker.py"
    script.write_text(FAKE_WORKER)
    (tmp_path / "pids").mkdir()

    async def run() -> None:
        reward = RewardSection(kind="character_share", timeout_s=timeout_s, processes=processes)
        pool = ScoringPool(reward, DataSection(), [sys.executable, str(script), str(tmp_path)])
        try:
            async with asyncio.timeout(60):
                await use(pool)
        finally:
            await pool.close()
        assert not any(group_alive(pid) for pid in started(tmp_path))

    asyncio.run(run())


def started(tmp_path: Path) -> set[int]:
    """Process ids of all fake workers so far."""
    return {int(path.name) for path in (tmp_path / "pids").iterdir()}


async def pid_of_worker(pool: ScoringPool) -> int:
    return round((await pool.score(ITEM, "pid"))[1] * 1e9)


@pytest.mark.parametrize("reply", ['{"reward": 0}', '{"reward": 1}', '{"reward": 0.25}'])
def test_a_reward_is_scored(tmp_path: Path, reply: str) -> None:
    async def use(pool: ScoringPool) -> None:
        assert await pool.score(ITEM, reply) == (Outcome.SCORED, json.loads(reply)["reward"])
        assert pool.counts == {Outcome.SCORED: 1}

    with_pool(tmp_path, use)


NONSENSE = [
    *('{"reward": NaN}', '{"reward": Infinity}', '{"reward": null}', '{"reward": "1"}', '{"reward": true}'),
    *('{"reward": 1.5}', '{"reward": -1}', '{"error": "ValueError"}', "{}", "[]", "null", "not json", "flood", "crash"),
]


def test_nonsense_and_crashes_are_errors_and_the_pool_goes_on(tmp_path: Path) -> None:
    async def use(pool: ScoringPool) -> None:
        for reply in NONSENSE:
            outcome, reward = await pool.score(ITEM, reply)
            assert (outcome, math.isnan(reward)) == (Outcome.ERROR, True), reply
            assert await pool.score(ITEM, '{"reward": 1}') == (Outcome.SCORED, 1.0)
        assert pool.counts == {Outcome.ERROR: len(NONSENSE), Outcome.SCORED: len(NONSENSE)}

    with_pool(tmp_path, use)


def test_a_hanging_scorer_is_killed_and_counted(tmp_path: Path) -> None:
    async def use(pool: ScoringPool) -> None:
        await pool.score(ITEM, "pid")
        await wait_until(lambda: pool._ready.qsize() == 2)  # one, and the spare
        before = started(tmp_path)
        for _ in range(2):
            outcome, reward = await pool.score(ITEM, "hang")
            assert outcome is Outcome.TIMEOUT
            assert math.isnan(reward)
        assert await pid_of_worker(pool) not in before
        await wait_until(lambda: not any(group_alive(pid) for pid in before))
        assert pool.counts == {Outcome.SCORED: 2, Outcome.TIMEOUT: 2}

    with_pool(tmp_path, use, timeout_s=1.0)


def test_the_spare_steps_in_while_the_replacement_starts(tmp_path: Path) -> None:
    async def use(pool: ScoringPool) -> None:
        await wait_until(lambda: pool._ready.qsize() == 2)
        (tmp_path / "no more starts").touch()
        assert (await pool.score(ITEM, "crash"))[0] is Outcome.ERROR
        assert await pool.score(ITEM, '{"reward": 1}') == (Outcome.SCORED, 1.0)

    with_pool(tmp_path, use)


def test_a_hanging_scorer_does_not_hold_up_the_other_process(tmp_path: Path) -> None:
    async def use(pool: ScoringPool) -> None:
        hanging = asyncio.create_task(pool.score(ITEM, "hang"))
        await asyncio.sleep(0)
        assert [await pool.score(ITEM, '{"reward": 1}') for _ in range(20)] == [(Outcome.SCORED, 1.0)] * 20
        assert not hanging.done()
        hanging.cancel()

    with_pool(tmp_path, use, timeout_s=60.0, processes=2)


def test_waiting_for_a_free_process_does_not_count_as_scoring(tmp_path: Path) -> None:
    async def use(pool: ScoringPool) -> None:
        answers = [*["hang"] * 3, *['{"reward": 1}'] * 3]  # the last ones wait three time limits long
        outcomes = [outcome for outcome, _ in await asyncio.gather(*(pool.score(ITEM, text) for text in answers))]
        assert outcomes == [Outcome.TIMEOUT] * 3 + [Outcome.SCORED] * 3

    with_pool(tmp_path, use, timeout_s=1.0)


def test_children_of_a_scorer_are_killed_with_it(tmp_path: Path) -> None:
    async def use(pool: ScoringPool) -> None:
        outcome, _ = await pool.score(ITEM, "hang with a child")
        assert outcome is Outcome.TIMEOUT
        child = int((tmp_path / "child").read_text())
        await wait_until(lambda: not alive(child))

    with_pool(tmp_path, use, timeout_s=3.0)


def test_a_cancelled_answer_is_never_the_reply_to_the_next(tmp_path: Path) -> None:
    async def use(pool: ScoringPool) -> None:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await pool.score(ITEM, "hang")
            assert await pool.score(ITEM, '{"reward": 0.125}') == (Outcome.SCORED, 0.125)
        assert pool.counts == {Outcome.SCORED: 3}

    with_pool(tmp_path, use)


def test_a_worker_that_died_idle_is_no_answers_error(tmp_path: Path) -> None:
    async def use(pool: ScoringPool) -> None:
        assert await pool.score(ITEM, "die later") == (Outcome.SCORED, 0.5)
        await wait_until(lambda: any(not worker.alive for worker in pool._workers))
        assert [await pool.score(ITEM, '{"reward": 1}') for _ in range(3)] == [(Outcome.SCORED, 1.0)] * 3

    with_pool(tmp_path, use)


def test_a_worker_that_cannot_start_fails_every_answer() -> None:
    async def run() -> None:
        pool = ScoringPool(RewardSection(processes=2), DataSection(), [sys.executable, "-c", "raise SystemExit(3)"])
        for _ in range(3):
            with pytest.raises(RuntimeError, match="did not start: the scoring process died"):
                await pool.score(ITEM, "x")
        await pool.close()

    asyncio.run(run())


@pytest.mark.parametrize("ready_first", [False, True])
def test_close_ends_everything_at_any_moment(tmp_path: Path, ready_first: bool) -> None:
    async def use(pool: ScoringPool) -> None:
        if ready_first:
            await pool.score(ITEM, '{"reward": 1}')
        hanging = asyncio.create_task(pool.score(ITEM, "hang"))
        await asyncio.sleep(0.05)
        await pool.close()
        assert not pool._workers
        hanging.cancel()
        with pytest.raises(RuntimeError, match="closed"):
            await pool.score(ITEM, "x")

    with_pool(tmp_path, use)


def test_close_does_not_wait_for_starts_under_way(tmp_path: Path) -> None:
    async def use(pool: ScoringPool) -> None:
        (tmp_path / "no more starts").touch()
        await pool.close()
        assert not pool._workers

    with_pool(tmp_path, use)


# --- the real worker ---


def test_hostile_mathematics_is_killed_and_the_rest_is_scored() -> None:
    async def run() -> None:
        pool = ScoringPool(RewardSection(kind="math_verify", timeout_s=2.0), DataSection())
        try:
            assert await pool.score(ITEM, "12") == (Outcome.SCORED, 1.0)
            outcome, _ = await pool.score(ITEM, "9^{9^{9^{9}}}")
            assert outcome is Outcome.TIMEOUT
            assert await pool.score(ITEM, "\ud800 \x00 \n $\\frac{24}{2}$") == (Outcome.SCORED, 1.0)
            assert await pool.score(Item("q", "", {}), "12") == (Outcome.ERROR, pytest.approx(math.nan, nan_ok=True))
            outcome, _ = await pool.score(ITEM, "(" * 2_000_000)
            assert outcome in (Outcome.TIMEOUT, Outcome.ERROR, Outcome.SCORED)
            assert await pool.score(ITEM, "13") == (Outcome.SCORED, 0.0)
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
from tasks.config.data import DataSection
from tasks.config.rewards import RewardSection
from tasks.data.prompts import Item
from tasks.rewards.pool import ScoringPool

async def main():
    pool = ScoringPool(RewardSection(kind="math_verify", timeout_s=600.0), DataSection())
    await pool.score(Item("q", "12", {}), "12")
    asking = asyncio.create_task(pool.score(Item("q", "12", {}), "9^{9^{9^{9}}}"))
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


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def wait_until(holds: Callable[[], Any], deadline_s: float = 20.0) -> None:
    give_up = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < give_up, "did not happen within the deadline"
        await asyncio.sleep(0.02)
