"""One rollout replica: leases prompts within the staleness gate, answers and scores them, and follows new weights.

Invariants: a group is leased only under the version the engine has loaded; its payload lies complete on shared storage
before the ledger calls it scored; an aborted or unusable group is dropped in the ledger, so that its place is given
out again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from planners.errors import UserError
from tasks.config.experiment import Experiment
from tasks.data.item import Item
from tasks.data.split import Questions
from tasks.evaluation.examine import EvaluationResult, as_json, evaluate
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Actor, Evaluation, Lease, Ledger
from tasks.exchange.ledger.drops import TOO_FEW_SCORED
from tasks.exchange.payloads import save_group
from tasks.exchange.trajectories import Group, Trajectory
from tasks.lifecycle.work import Work
from tasks.rollout.answering import Answerer, ItemFailed, blaming_the_item
from tasks.rollout.engine import LOAD_DEADLINE_S, Engine, EngineDied
from tasks.rollout.versions import WholeVersions
from tasks.tracking.tracker import Tracker

_MANY_FAILED = 4
"""So many different questions that fail, with none answered between them, are not at fault themselves."""
_POLL_S = 0.2
_log = logging.getLogger(__name__)


@dataclass
class ReplicaParts:
    """What a replica works with.

    `concurrency` is the number of answers in flight that the plan allows; `work` hears of every group and load,
    `say` of what the replica does besides answering, and with "" that it answers again.
    """

    experiment: Experiment
    ledger: Ledger
    actor: Actor
    run: RunDirectory
    engine: Engine
    answerer: Answerer
    questions: Questions
    tracker: Tracker
    concurrency: int
    work: Work
    say: Callable[[str], object]
    versions: WholeVersions


@dataclass
class _Activity:
    """What the replica did since it last reported: for the overlap and wait shares."""

    busy_since: float | None = None
    idle_since: float | None = field(default_factory=time.monotonic)
    response_tokens: int = 0
    reported: float = field(default_factory=time.monotonic)
    wait_s: float = 0.0
    spans: int = 0


class Replica:
    """Runs until `leave` or `drain` is called.

    What goes wrong with one question drops its group; any other error ends the replica, and the supervisor starts
    another attempt.
    """

    def __init__(self, parts: ReplicaParts) -> None:
        self._p = parts
        self._workload = parts.experiment.workload
        # Between two answers that are scored lies the scoring of one, which nothing else may accompany.
        self._may_rest_s = parts.experiment.run.work_deadline_s + sum(r.timeout_s for r in parts.experiment.rewards)
        self._in_flight: dict[int, Lease] = {}
        self._failed: set[int] = set()
        self._leases = 0
        self._changed = asyncio.Event()
        self._leaving = asyncio.Event()
        self._weights_stay = asyncio.Lock()
        self._draining = False
        self._told_unscored = False
        self._drains = False
        self._activity = _Activity()

    def leave(self) -> None:
        """Stop leasing and let `run` return; groups in flight are dropped."""
        self._leaving.set()
        self._changed.set()

    def drain(self) -> None:
        """Begin nothing new, and let `run` return once the groups in flight are handed over."""
        self._drains = True
        self._changed.set()

    async def run(self) -> None:
        """Serve until `leave`, or until `drain` has nothing left to hand over."""
        try:
            await self._serve()
        except ExceptionGroup as group:
            # The engine's death is the cause of what it comes with, else the first error: the others came of ending the
            # rest.
            raise min(group.exceptions, key=lambda error: not isinstance(error, EngineDied)) from None
        self._flush_activity()

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._follow_versions()), tasks.create_task(self._report_activity())]
            groups: set[asyncio.Task[None]] = set()
            while not self._leaving.is_set() and (self._in_flight or not self._drains):
                if await self._evaluate_if_asked():
                    continue
                lease = await self._lease()
                if lease is None:
                    await self._wait_for_change()
                    continue
                self._begin(lease)
                task = tasks.create_task(self._hold(lease))
                groups.add(task)
                task.add_done_callback(groups.discard)
            await self._abort([*self._in_flight])
            if groups:
                await asyncio.wait(groups)
            for task in background:
                task.cancel()

    # Leasing and answering

    async def _lease(self) -> Lease | None:
        answers = len(self._in_flight) * self._workload.group_size
        if self._draining or (self._in_flight and answers + self._workload.group_size > self._p.concurrency):
            return None
        async with self._weights_stay:
            # The key stays until it has brought a lease, so that one whose answer was lost comes back.
            lease = await asyncio.to_thread(
                self._p.ledger.lease_group, self._p.actor, self._p.engine.loaded[1], f"lease-{self._leases}"
            )
        self._leases += lease is not None
        return lease

    def _begin(self, lease: Lease) -> None:
        if not self._in_flight:
            self._mark_busy()
        self._in_flight[lease.group_id] = lease

    async def _hold(self, lease: Lease) -> None:
        with self._p.work.in_hand(self._may_rest_s, lease.group_id):
            await self._answer(lease)

    async def _answer(self, lease: Lease) -> None:
        try:
            await self._answer_question(lease)
        except ItemFailed as error:
            self._failed.add(lease.prompt_index)
            if len(self._failed) == _MANY_FAILED:
                raise error.__cause__ or error from None
            _log.warning("the question of prompt %d failed: %s", lease.prompt_index, error, exc_info=True)
            await asyncio.to_thread(self._p.ledger.drop_group, self._p.actor, lease.group_id, "failed")
        del self._in_flight[lease.group_id]
        if not self._in_flight:
            self._mark_idle()
        self._changed.set()

    async def _answer_question(self, lease: Lease) -> None:
        ledger, actor = self._p.ledger, self._p.actor
        with blaming_the_item():
            item = self._p.questions.item(lease.prompt_index)
            key = item.key
        if not await asyncio.to_thread(ledger.name_question, actor, lease.group_id, key):
            return
        prompt_ids = self._prompt(item)
        if prompt_ids is None:
            await asyncio.to_thread(ledger.drop_group, actor, lease.group_id, "prompt_too_long")
            return
        trajectories = await self._p.answerer.answer_group(_name(lease.group_id), item, self._workload.group_size)
        if trajectories is not None:
            self._failed.clear()
        await asyncio.to_thread(self._hand_over, lease, prompt_ids, trajectories)

    def _prompt(self, item: Item) -> list[int] | None:
        """Its token ids, or None where they are too many."""
        with blaming_the_item():
            try:
                return self._p.answerer.environment.prompt(item)
            except UserError as error:
                _log.warning("%s", error)
                return None

    def _hand_over(self, lease: Lease, prompt_ids: Sequence[int], trajectories: tuple[Trajectory, ...] | None) -> None:
        ledger, actor = self._p.ledger, self._p.actor
        if trajectories is None:
            ledger.drop_group(actor, lease.group_id, "aborted")
            return
        names = self._p.answerer.environment.reward_names
        group = Group(lease.group_id, lease.prompt_index, prompt_ids, trajectories, names)
        if not group.usable:
            self._told_unscored = True
            self._p.say(f"no two answers of a group could be scored: {self._p.answerer.environment.fault}")
            ledger.drop_group(actor, lease.group_id, TOO_FEW_SCORED)
            return
        if self._told_unscored:
            self._told_unscored = False
            self._p.say("")
        save_group(self._p.run.group_path(lease.group_id), group)
        outcomes = [trajectory.outcome.value for trajectory in trajectories]
        tokens = sum(trajectory.tokens for trajectory in trajectories)
        ledger.complete_group(
            actor,
            lease.group_id,
            oldest_version=group.oldest_version,
            newest_version=group.newest_version,
            reward_mean=fmean([trajectory.reward for trajectory in group.trained]),
            counts={outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
            response_tokens=tokens,
        )
        self._activity.response_tokens += tokens

    async def _abort(self, group_ids: list[int]) -> None:
        await self._p.engine.abort(
            [f"{_name(group_id)}-{number}" for group_id in group_ids for number in range(self._workload.group_size)]
        )

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), timeout=_POLL_S)
        except TimeoutError:
            return

    # Weights

    async def _follow_versions(self) -> None:
        while True:
            found = await asyncio.to_thread(self._p.versions.claim_newest, self._p.engine.loaded)
            if found is not None:
                (lineage, number), path = found
                # The engine's own deadline comes first; this is for one that is past keeping it.
                with self._p.work.in_hand(LOAD_DEADLINE_S + self._may_rest_s):
                    await self._load(lineage, number, path)
                self._changed.set()
            await asyncio.sleep(_POLL_S)

    async def _load(self, lineage: int, number: int, path: Path) -> None:
        ledger, actor = self._p.ledger, self._p.actor
        if lineage != self._p.engine.loaded[0]:
            # The trainer went back to a checkpoint: tokens of versions above it come from a policy that is no more.
            await self._abort([*self._in_flight])
        in_flight = self._p.experiment.rollout.on_new_version
        self._draining = in_flight == "drain"
        started = time.monotonic()
        async with self._weights_stay:
            await self._p.engine.load(lineage, number, path, in_flight)
            await asyncio.to_thread(ledger.set_loaded, actor, lineage, number)
        self._draining = False
        load_s = time.monotonic() - started
        self._p.work.add()
        await asyncio.to_thread(ledger.record_span, actor, "load", f"version {lineage} {number}", load_s)
        await self._abort([lease.group_id for lease in self._in_flight.values() if self._is_late(lease, number)])
        self._track(number, load_s)

    def _is_late(self, lease: Lease, number: int) -> bool:
        return number > lease.version + self._workload.max_staleness

    # Evaluation

    async def _evaluate_if_asked(self) -> bool:
        async with self._weights_stay:
            request = await asyncio.to_thread(self._p.ledger.claim_evaluation, self._p.actor, self._p.engine.loaded[1])
            if request is None:
                return False
            _log.info("evaluating version %d (%s)", request.version, request.purpose)
            self._p.say(f"evaluating version {request.version}, {request.purpose} training")
            with self._p.work.in_hand(self._may_rest_s):
                result = await self._evaluate(request)
            await asyncio.to_thread(self._p.ledger.record_evaluation, self._p.actor, request.purpose, as_json(result))
            self._p.say("")
        # The time went into the evaluation, not into waiting for the trainer.
        self._activity.idle_since = time.monotonic() if not self._in_flight else None
        return True

    async def _evaluate(self, request: Evaluation) -> dict[str, EvaluationResult]:
        """Ask all questions, or, where engines have died of them, one by one beside nothing else."""
        examinations = self._p.questions.examinations
        if not request.is_careful:
            return await evaluate(self._p.answerer, examinations, self._p.concurrency, request.given_up)

        async def name(key: str) -> None:
            await asyncio.to_thread(self._p.ledger.try_question, self._p.actor, request.purpose, key)

        while self._in_flight:
            await self._wait_for_change()
        return await evaluate(self._p.answerer, examinations, 1, request.given_up, name)

    # Activity

    def _mark_busy(self) -> None:
        now = time.monotonic()
        if self._activity.idle_since is not None:
            self._record("wait", now - self._activity.idle_since)
            self._activity.wait_s += now - self._activity.idle_since
        self._activity.idle_since, self._activity.busy_since = None, now

    def _mark_idle(self) -> None:
        now = time.monotonic()
        if self._activity.busy_since is not None:
            self._record("busy", now - self._activity.busy_since)
        self._activity.busy_since, self._activity.idle_since = None, now

    def _flush_activity(self) -> None:
        """Close the span under way and open the next of its kind, so that a crash loses little of the record."""
        if self._activity.busy_since is not None:
            self._mark_idle()
            self._mark_busy()

    def _record(self, kind: str, seconds: float) -> None:
        if seconds > 0.01:
            self._p.ledger.record_span(self._p.actor, kind, f"{self._activity.spans}", seconds)
            self._activity.spans += 1

    async def _report_activity(self) -> None:
        while True:
            await asyncio.sleep(5.0)
            self._flush_activity()

    def _track(self, version: int, load_s: float) -> None:
        now = time.monotonic()
        elapsed_s = now - self._activity.reported
        self._p.tracker.log(
            {
                "throughput/response_tokens_per_s": self._activity.response_tokens / elapsed_s,
                "wait/rollouts_for_trainer": self._activity.wait_s / elapsed_s,
                "weights/load_s": load_s,
                "rollout/groups_in_flight": float(len(self._in_flight)),
            },
            step=version,
        )
        self._activity.response_tokens, self._activity.wait_s, self._activity.reported = 0, 0.0, now


def _name(group_id: int) -> str:
    return f"group-{group_id}"
