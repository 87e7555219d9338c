"""Scoring of answers in processes that can be killed.

Invariants: no answer, however hostile, holds a process for longer than the reward's time limit; every answer gets
exactly one outcome; after `close` no scoring process is left.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tasks.config.data import DataSection
from tasks.config.rewards import RewardSection
from tasks.data.prompts import Item
from tasks.exchange.trajectories import Outcome
from tasks.machine.processes import group_alive

START_DEADLINE_S = 120.0
"""Longest start of a scoring process: imports take seconds, more on a busy machine."""
KILL_DEADLINE_S = 10.0
_log = logging.getLogger(__name__)


class ScoringPool:
    """`reward.processes` scoring processes and a spare, which steps in at once when one is killed.

    Must be made inside a running event loop, whose thread the processes do not outlive.
    """

    def __init__(self, reward: RewardSection, data: DataSection, command: Sequence[str] | None = None) -> None:
        """`command` starts one scoring process; by default `tasks.rewards.worker`, whose protocol it speaks."""
        self.counts: Counter[Outcome] = Counter()
        """Answers by outcome so far."""
        self._timeout_s = reward.timeout_s
        self._command = list(command) if command is not None else _worker_command(reward, data)
        self._free = asyncio.Semaphore(reward.processes)
        self._ready: asyncio.Queue[_Worker | RuntimeError] = asyncio.Queue()
        self._workers: set[_Worker] = set()
        self._changes: set[asyncio.Task[None]] = set()
        self._closed = False
        for _ in range(reward.processes + 1):
            self._spawn()

    async def score(self, item: Item, answer_text: str) -> tuple[Outcome, float]:
        """Outcome and reward of an answer: SCORED with a reward in [0, 1], or TIMEOUT or ERROR with NaN.

        The time limit covers scoring alone, neither the wait for a free process nor its start.

        Raises:
            RuntimeError: a scoring process cannot be started, or the pool is closed.
        """
        async with self._free:
            worker = await self._next_worker()
            usable = False
            try:
                async with asyncio.timeout(self._timeout_s):
                    reply = await worker.ask({"item": item.to_json(), "text": answer_text})
                usable = True
                reward = _reward(reply)
            except TimeoutError:
                reward, outcome = math.nan, Outcome.TIMEOUT
                _log.warning("scoring took over %g s and was killed; question: %.80s", self._timeout_s, item.question)
            except _WorkerFailed as error:
                reward, outcome = math.nan, Outcome.ERROR
                _log.warning("%s; question: %.80s", error, item.question)
            else:
                outcome = Outcome.ERROR if math.isnan(reward) else Outcome.SCORED
                if outcome is Outcome.ERROR:
                    _log.warning("scoring failed: %s; question: %.80s", reply, item.question)
            finally:
                # Also when cancelled: a process whose reply nobody read would answer the next question with it.
                if usable:
                    self._ready.put_nowait(worker)
                else:
                    self._replace(worker)
        self.counts[outcome] += 1
        return outcome, reward

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
            if isinstance(worker, RuntimeError):
                self._ready.put_nowait(worker)  # for all who wait
                raise worker
            if worker.alive:
                return worker
            self._replace(worker)  # it died while idle, which is no answer's fault
        raise RuntimeError("the scoring pool is closed")

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
        worker = _Worker(await _open_process(self._command))
        self._workers.add(worker)
        if self._closed:
            worker.kill()
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                await worker.read()
        except (TimeoutError, _WorkerFailed) as error:
            await self._end(worker)
            reason = str(error) or f"it was not ready within {START_DEADLINE_S:.0f} s"
            self._ready.put_nowait(RuntimeError(f"A scoring process did not start: {reason}; see this process's log."))
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

    async def ask(self, request: dict[str, str]) -> dict[str, object]:
        """The reply to a request. Raises _WorkerFailed."""
        try:
            self._stdin.write(json.dumps(request).encode() + b"\n")
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


def _worker_command(reward: RewardSection, data: DataSection) -> list[str]:
    config = {"reward": reward.model_dump(), "data": data.model_dump(), "parent_pid": os.getpid()}
    return [sys.executable, "-m", "tasks.rewards.worker", json.dumps(config)]


async def _open_process(command: Sequence[str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
        # No accelerator, and no idle threads whose stacks would count as address space.
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )


def _reward(reply: dict[str, object]) -> float:
    """The reward in a reply, NaN where there is none that makes sense."""
    reward = reply.get("reward")
    if isinstance(reward, int | float) and not isinstance(reward, bool) and 0.0 <= reward <= 1.0:
        return float(reward)
    return math.nan
