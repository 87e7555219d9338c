"""No answer can hold up, crash or outlive the pool; with a worker written for the test."""

import asyncio
import json
import math
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tasks.config.rewards import CharacterShareReward
from tasks.exchange.trajectories import Outcome
from tasks.machine.processes import group_alive
from tasks.rewards.pool import ScoringPool
from tests.support.scoring import SOURCE, alive, outcome_of, wait_until

FAKE_WORKER = r"""
import json, os, subprocess, sys, time
open(f"{sys.argv[1]}/pids/{os.getpid()}", "w").close()
while os.path.exists(sys.argv[1] + "/no more starts"): time.sleep(0.02)
print(json.dumps({"ready": True}), flush=True)
open(f"{sys.argv[1]}/ready/{os.getpid()}", "w").close()
for line in sys.stdin:
    text = json.loads(line)["text"]
    if text == "hang":
        while True: pass
    if text == "hang with a child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(sys.argv[1] + "/child", "w") as file: file.write(str(child.pid))
        time.sleep(600)
    if text == "crash": os._exit(1)
    if text == "die later": reply = '{"value": 0.5}'
    elif text == "flood": reply = "x" * 10_000_000
    elif text == "pid": reply = json.dumps({"value": os.getpid() / 1e9})
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
    for name in ("pids", "ready"):
        (tmp_path / name).mkdir()

    async def run() -> None:
        command = [sys.executable, str(script), str(tmp_path)]
        pool = ScoringPool([CharacterShareReward(timeout_s=timeout_s)], [SOURCE], processes, command)
        try:
            async with asyncio.timeout(60):
                await use(pool)
        finally:
            await pool.close()
        assert not any(group_alive(pid) for pid in started(tmp_path))

    asyncio.run(run())


def started(tmp_path: Path, what: str = "pids") -> set[int]:
    """Process ids of all fake workers so far, or of those that were ready."""
    return {int(path.name) for path in (tmp_path / what).iterdir()}


async def pid_of_worker(pool: ScoringPool) -> int:
    return round((await outcome_of(pool, "pid"))[1] * 1e9)


@pytest.mark.parametrize("reply", ['{"value": 0}', '{"value": 1}', '{"value": 0.25}'])
def test_a_reward_is_scored(tmp_path: Path, reply: str) -> None:
    async def use(pool: ScoringPool) -> None:
        assert await outcome_of(pool, reply) == (Outcome.SCORED, json.loads(reply)["value"])
        assert pool.counts == {Outcome.SCORED: 1}

    with_pool(tmp_path, use)


NONSENSE = [
    *('{"value": NaN}', '{"value": Infinity}', '{"value": null}', '{"value": "1"}', '{"value": true}'),
    *('{"value": 1.5}', '{"value": -1}', '{"error": "ValueError"}', "{}", "[]", "null", "not json", "flood", "crash"),
]


def test_nonsense_and_crashes_are_errors_and_the_pool_goes_on(tmp_path: Path) -> None:
    async def use(pool: ScoringPool) -> None:
        for reply in NONSENSE:
            outcome, reward = await outcome_of(pool, reply)
            assert (outcome, math.isnan(reward)) == (Outcome.ERROR, True), reply
            assert await outcome_of(pool, '{"value": 1}') == (Outcome.SCORED, 1.0)
        assert pool.counts == {Outcome.ERROR: len(NONSENSE), Outcome.SCORED: len(NONSENSE)}

    with_pool(tmp_path, use)


def test_a_hanging_scorer_is_killed_and_counted(tmp_path: Path) -> None:
    async def use(pool: ScoringPool) -> None:
        await outcome_of(pool, "pid")
        await wait_until(lambda: len(started(tmp_path, "ready")) == 2)  # one, and the spare
        before = started(tmp_path)
        for _ in range(2):
            outcome, reward = await outcome_of(pool, "hang")
            assert outcome is Outcome.TIMEOUT
            assert math.isnan(reward)
        assert await pid_of_worker(pool) not in before
        await wait_until(lambda: not any(group_alive(pid) for pid in before))
        assert pool.counts == {Outcome.SCORED: 2, Outcome.TIMEOUT: 2}

    with_pool(tmp_path, use, timeout_s=1.0)


def test_the_spare_steps_in_while_the_replacement_starts(tmp_path: Path) -> None:
    async def use(pool: ScoringPool) -> None:
        await wait_until(lambda: len(started(tmp_path, "ready")) == 2)
        (tmp_path / "no more starts").touch()
        assert (await outcome_of(pool, "crash"))[0] is Outcome.ERROR
        assert await outcome_of(pool, '{"value": 1}') == (Outcome.SCORED, 1.0)

    with_pool(tmp_path, use)


def test_a_hanging_scorer_does_not_hold_up_the_other_process(tmp_path: Path) -> None:
    async def use(pool: ScoringPool) -> None:
        hanging = asyncio.create_task(outcome_of(pool, "hang"))
        await asyncio.sleep(0)
        assert [await outcome_of(pool, '{"value": 1}') for _ in range(20)] == [(Outcome.SCORED, 1.0)] * 20
        assert not hanging.done()
        hanging.cancel()

    with_pool(tmp_path, use, timeout_s=60.0, processes=2)


def test_waiting_for_a_free_process_does_not_count_as_scoring(tmp_path: Path) -> None:
    async def use(pool: ScoringPool) -> None:
        answers = [*["hang"] * 3, *['{"value": 1}'] * 3]  # the last ones wait three time limits long
        outcomes = [outcome for outcome, _ in await asyncio.gather(*(outcome_of(pool, text) for text in answers))]
        assert outcomes == [Outcome.TIMEOUT] * 3 + [Outcome.SCORED] * 3

    with_pool(tmp_path, use, timeout_s=1.0)


def test_children_of_a_scorer_are_killed_with_it(tmp_path: Path) -> None:
    async def use(pool: ScoringPool) -> None:
        outcome, _ = await outcome_of(pool, "hang with a child")
        assert outcome is Outcome.TIMEOUT
        child = int((tmp_path / "child").read_text())
        await wait_until(lambda: not alive(child))

    with_pool(tmp_path, use, timeout_s=3.0)


def test_a_cancelled_answer_is_never_the_reply_to_the_next(tmp_path: Path) -> None:
    async def use(pool: ScoringPool) -> None:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await outcome_of(pool, "hang")
            assert await outcome_of(pool, '{"value": 0.125}') == (Outcome.SCORED, 0.125)
        assert pool.counts == {Outcome.SCORED: 3}

    with_pool(tmp_path, use)


def test_a_worker_that_died_idle_is_no_answers_error(tmp_path: Path) -> None:
    async def use(pool: ScoringPool) -> None:
        assert await outcome_of(pool, "die later") == (Outcome.SCORED, 0.5)
        await wait_until(lambda: any(not worker.alive for worker in pool._workers))
        assert [await outcome_of(pool, '{"value": 1}') for _ in range(3)] == [(Outcome.SCORED, 1.0)] * 3

    with_pool(tmp_path, use)


def test_a_worker_that_cannot_start_fails_every_answer() -> None:
    async def run() -> None:
        pool = ScoringPool([CharacterShareReward()], [SOURCE], 2, [sys.executable, "-c", "raise SystemExit(3)"])
        for _ in range(3):
            with pytest.raises(RuntimeError, match="did not start: the scoring process died"):
                await outcome_of(pool, "x")
        await pool.close()

    asyncio.run(run())


@pytest.mark.parametrize("ready_first", [False, True])
def test_close_ends_everything_at_any_moment(tmp_path: Path, ready_first: bool) -> None:
    async def use(pool: ScoringPool) -> None:
        if ready_first:
            await outcome_of(pool, '{"value": 1}')
        hanging = asyncio.create_task(outcome_of(pool, "hang"))
        await asyncio.sleep(0.05)
        await pool.close()
        assert not any(group_alive(pid) for pid in started(tmp_path))
        hanging.cancel()
        with pytest.raises(RuntimeError, match="closed"):
            await outcome_of(pool, "x")

    with_pool(tmp_path, use)


def test_close_does_not_wait_for_starts_under_way(tmp_path: Path) -> None:
    async def use(pool: ScoringPool) -> None:
        (tmp_path / "no more starts").touch()
        await pool.close()
        assert not any(group_alive(pid) for pid in started(tmp_path))

    with_pool(tmp_path, use)
