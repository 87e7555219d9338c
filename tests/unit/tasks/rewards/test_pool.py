"""Scoring: what an answer is worth, and that no answer can hold up, crash or outlive the pool."""

import asyncio
import json
import logging
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
from pydantic import TypeAdapter

from tasks.config.data import JsonlSource, ReasoningGymSource, ToySource
from tasks.config.rewards import CharacterShareReward, MathVerifyReward, Reward
from tasks.exchange.trajectories import Outcome
from tasks.generators import open_generator
from tasks.machine.processes import group_alive
from tasks.rewards.base import from_line, to_line
from tasks.rewards.builtin import open_reasoning_gym, score_character_share, score_mathematics
from tasks.rewards.pool import ScoringPool, Verdict
from tests.support.data import SUMS

SOURCE = ToySource()


def item_of(question: str, answer: str, source: str = "toy", **metadata: Any) -> dict[str, Any]:
    return {"question": question, "answer": answer, "metadata": metadata, "source": source}


ITEM = item_of("q", "12")

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
    assert score_mathematics("", text, item_of("", answer)) == reward


def test_mathematics_refuses_an_answer_that_is_none() -> None:
    with pytest.raises(ValueError, match="'' is no mathematical expression"):
        score_mathematics("", "12", item_of("", ""))


@pytest.mark.parametrize(("text", "reward"), [("aaaa", 1), ("aabb", 0.5), ("bbbb", 0), ("", 0), ("a\ufffda ", 0.5)])
def test_character_share(text: str, reward: float) -> None:
    assert score_character_share("", text, item_of("", "a")) == reward


@pytest.mark.parametrize(
    ("text", "reward"), [("{}", 1), (" {}\n", 1), ("{}.0", 1), (" {} 1\n", 1 / 3), ("", 0), ("x", 0)]
)
def test_reasoning_gym_scores_the_stripped_answer(text: str, reward: float) -> None:
    source = ReasoningGymSource.model_validate(SUMS)
    entry = open_generator("chain_sum", source.parameters, 5)[3]
    score = open_reasoning_gym([SOURCE, source])
    assert score("", text.format(entry["answer"]), item_of("", "", "chain_sum", entry=entry)) == reward


def test_reasoning_gym_scores_entries_with_tuples_after_the_wire() -> None:
    entry = open_generator("rearc", {}, 5)[0]
    item = from_line(to_line(item_of("", "", "rearc", entry=entry)))
    assert open_reasoning_gym([ReasoningGymSource(task="rearc")])("", entry["answer"], item) == 1


def test_every_item_is_scored_by_the_generator_that_made_it() -> None:
    easy, other = ReasoningGymSource(name="easy"), ReasoningGymSource(task="leg_counting")
    score = open_reasoning_gym([easy, other])
    for source in (easy, other):
        entry = open_generator(source.task, {}, 0)[0]
        assert score("", entry["answer"], item_of("", "", source.label, entry=entry)) == 1


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
    (tmp_path / "pids").mkdir()

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


def started(tmp_path: Path) -> set[int]:
    """Process ids of all fake workers so far."""
    return {int(path.name) for path in (tmp_path / "pids").iterdir()}


async def outcome_of(pool: ScoringPool, text: str, item: dict[str, Any] = ITEM) -> tuple[Outcome, float]:
    verdict = await pool.score("prompt", text, item)
    return verdict.outcome, verdict.reward


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
        await wait_until(lambda: pool._ready.qsize() == 2)  # one, and the spare
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
        await wait_until(lambda: pool._ready.qsize() == 2)
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
        assert not pool._workers
        hanging.cancel()
        with pytest.raises(RuntimeError, match="closed"):
            await outcome_of(pool, "x")

    with_pool(tmp_path, use)


def test_close_does_not_wait_for_starts_under_way(tmp_path: Path) -> None:
    async def use(pool: ScoringPool) -> None:
        (tmp_path / "no more starts").touch()
        await pool.close()
        assert not pool._workers

    with_pool(tmp_path, use)


# --- several rewards ---

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


# --- the real worker ---


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
