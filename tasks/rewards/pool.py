"""Scoring of answers in processes that can be killed.

Invariants: no answer, however hostile, holds a process for longer than a reward's time limit; every answer gets
exactly one outcome; after `close` no scoring process is left.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.config.data import DataSource
from tasks.config.rewards import PythonReward, Reward
from tasks.exchange.trajectories import Outcome
from tasks.machine.processes import group_alive
from tasks.rewards.base import to_line
from tasks.rewards.process import scoring_environment, worker_command

START_DEADLINE_S = 120.0
"""Longest start of a scoring process: imports take seconds, more on a busy machine."""
KILL_DEADLINE_S = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """What an answer is worth.

    Attributes:
        outcome: SCORED, TIMEOUT or ERROR.
        reward: the sum by weight over the rewards that score the item's source; NaN unless it was scored.
        parts: what each reward said, in the experiment's order, unweighted; NaN where it was not asked, or failed.
        reason: a sentence about what went wrong; empty if it was scored.
    """

    outcome: Outcome
    reward: float
    parts: tuple[float, ...]
    reason: str = ""


class ScoringFailed(RuntimeError):
    """There are no scoring processes to be had, which is no answer's fault."""


class ScoringPool:
    """Scoring processes and a spare, which steps in at once when one is killed.

    Must be made inside a running event loop, whose thread the processes do not outlive.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        sources: Sequence[DataSource],
        processes: int,
        command: Sequence[str] | None = None,
        *,
        tells: bool = True,
    ) -> None:
        """Start the processes.

        Args:
            rewards: the experiment's.
            sources: all sources of the items that will be scored.
            processes: how many answers are scored at once.
            command: starts one scoring process; by default `tasks.rewards.worker`, whose protocol it speaks.
            tells: whether answers that could not be scored are logged, besides the reason in their verdicts.
        """
        self.names = tuple(reward.label for reward in rewards)
        self.counts: Counter[Outcome] = Counter()
        """Answers by outcome so far."""
        self.fault = ""
        """Why an answer could not be scored, the last time."""
        self._rewards = list(rewards)
        self._asked = {
            source.label: [n for n, reward in enumerate(rewards) if reward.applies(source.label, source.kind)]
            for source in sources
        }
        self._command = list(command) if command is not None else worker_command(rewards, sources)
        self._shown: set[str] = set()
        self._tells = tells
        self._free = asyncio.Semaphore(processes)
        self._ready: asyncio.Queue[_Worker | ScoringFailed] = asyncio.Queue()
        self._workers: set[_Worker] = set()
        self._changes: set[asyncio.Task[None]] = set()
        self._closed = False
        for _ in range(processes + 1):
            self._spawn()

    async def score(self, prompt: str, answer_text: str, item: Mapping[str, Any]) -> Verdict:
        """What an answer is worth; `item` holds question, answer, metadata and source.

        Each reward's time limit covers its scoring alone, neither the wait for a free process nor its start. The first
        that fails decides the outcome, and the others are not asked.

        Raises:
            ScoringFailed: a scoring process cannot be started, or the pool is closed.
        """
        parts = [math.nan] * len(self._rewards)
        outcome, reason = Outcome.SCORED, ""
        async with self._free:
            for number in self._asked[item["source"]]:
                outcome, parts[number], reason = await self._ask(number, prompt, answer_text, item)
                if outcome is not Outcome.SCORED:
                    break
        self.counts[outcome] += 1
        if outcome is not Outcome.SCORED:
            self.fault = reason
            return Verdict(outcome, math.nan, tuple(parts), reason)
        total = math.fsum(self._rewards[n].weight * parts[n] for n in self._asked[item["source"]])
        return Verdict(outcome, total, tuple(parts))

    async def _ask(
        self, number: int, prompt: str, answer_text: str, item: Mapping[str, Any]
    ) -> tuple[Outcome, float, str]:
        """Outcome of one reward, its number or NaN, and what went wrong."""
        reward = self._rewards[number]
        about = f"reward {reward.label}; question: {item['question']:.80}"
        worker = await self._next_worker()
        usable = False
        try:
            async with asyncio.timeout(reward.timeout_s):
                request = {"reward": number, "prompt": prompt, "text": answer_text, "item": item}
                reply = await worker.ask(to_line(request))
            usable = True
        except TimeoutError:
            self._tell(f"it took over {reward.timeout_s:g} s and was killed", reward, about)
            return Outcome.TIMEOUT, math.nan, f"{reward.label} took over {reward.timeout_s:g} s."
        except _WorkerFailed as error:
            self._tell(str(error), reward, about)
            return Outcome.ERROR, math.nan, f"{reward.label}: {error}."
        finally:
            # Also when cancelled: a process whose reply nobody read would answer the next question with it.
            if usable:
                self._ready.put_nowait(worker)
            else:
                self._replace(worker)
        value = _value(reply, reward)
        if math.isnan(value):
            self._tell(str(reply.get("error", reply)), reward, about, str(reply.get("traceback", "")))
            return Outcome.ERROR, value, f"{reward.label}: {reply.get('error', reply)}."
        return Outcome.SCORED, value, ""

    def _tell(self, fault: str, reward: Reward, about: str, traceback: str = "") -> None:
        """Log what went wrong, the first traceback of a reward with it."""
        if not self._tells:
            return
        where = f"\n{traceback}" if traceback and reward.label not in self._shown else ""
        self._shown |= {reward.label} if traceback else set()
        _log.warning("scoring failed: %s; %s%s", fault, about, where)

    async def close(self) -> None:
        """End all scoring processes and verify that they are gone.

        Raises:
            RuntimeError: one survived SIGKILL.
        """
        self._closed = True
        for worker in self._workers:
            worker.kill()
        # A start under way ends by itself when its process is killed or finds the pool closed.
        await asyncio.gather(*self._changes)
        for worker in list(self._workers):
            await self._end(worker)

    async def _next_worker(self) -> "_Worker":
        while not self._closed:
            worker = await self._ready.get()
            if isinstance(worker, ScoringFailed):
                self._ready.put_nowait(worker)  # for all who wait
                raise worker
            if worker.alive:
                return worker
            self._replace(worker)  # it died while idle, which is no answer's fault
        raise ScoringFailed("the scoring pool is closed")

    def _spawn(self) -> None:
        self._keep(asyncio.create_task(self._start()))

    def _replace(self, worker: "_Worker") -> None:
        worker.kill()
        self._keep(asyncio.create_task(self._end(worker)))
        if not self._closed:
            self._spawn()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)

    async def _start(self) -> None:
        try:
            worker = _Worker(await _open_process(self._command))
        except OSError as error:  # no process or memory to be had
            self._ready.put_nowait(ScoringFailed(f"A scoring process cannot be started: {error}."))
            return
        self._workers.add(worker)
        if self._closed:
            worker.kill()
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                if "error" in (greeting := await worker.read()):
                    raise _WorkerFailed(str(greeting["error"]))
        except (TimeoutError, _WorkerFailed) as error:
            await self._end(worker)
            reason = str(error) or f"it was not ready within {START_DEADLINE_S:.0f} s"
            self._ready.put_nowait(ScoringFailed(f"A scoring process did not start: {reason}; see this process's log."))
        else:
            self._ready.put_nowait(worker)

    async def _end(self, worker: "_Worker") -> None:
        worker.kill()
        await worker.gone()
        self._workers.discard(worker)


class _WorkerFailed(Exception):
    """The process died or answered what is no reply."""


class _Worker:
    """One scoring process, leader of its own session."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, request: str) -> dict[str, object]:
        """The reply to a request, a line. Raises _WorkerFailed."""
        try:
            self._stdin.write(request.encode() + b"\n")
            await self._stdin.drain()
        except ConnectionError:
            raise _WorkerFailed("the scoring process died") from None
        return await self.read()

    async def read(self) -> dict[str, object]:
        """The next line, a JSON object. Raises _WorkerFailed."""
        try:
            line = await self._stdout.readline()
            reply = json.loads(line) if line else None
        except (ValueError, ConnectionError):  # not JSON, or a line beyond the reader's limit
            raise _WorkerFailed("the scoring process answered nonsense") from None
        if reply is None:
            raise _WorkerFailed("the scoring process died")
        if not isinstance(reply, dict):
            raise _WorkerFailed("the scoring process answered nonsense")
        return reply

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def gone(self) -> None:
        """Wait for the whole killed group to vanish."""
        deadline = time.monotonic() + KILL_DEADLINE_S
        while await asyncio.to_thread(group_alive, self._process.pid):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"Scoring process {self._process.pid} is still there {KILL_DEADLINE_S:.0f} s after SIGKILL."
                )
            await asyncio.sleep(0.02)
        await self._process.wait()


async def _open_process(command: Sequence[str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
        env=scoring_environment(),
    )


def _value(reply: Mapping[str, object], reward: Reward) -> float:
    """The number in a reply, NaN where there is none that makes sense; only a person's function may leave [0, 1]."""
    value = reply.get("value")
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return math.nan
    return float(value) if isinstance(reward, PythonReward) or 0.0 <= value <= 1.0 else math.nan
