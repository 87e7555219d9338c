"""Reconciles what the plan wants with what the ledger's heartbeats say, until the run has its last step.

Heartbeats are the truth: a flow run that Prefect calls Running may be dead, and the other way round. Prefect is only
asked to start and to cancel, so while its server is away the run goes on and only new starts wait.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import psutil
from sqlalchemy.exc import SQLAlchemyError

from flows.running.context import RunContext
from planners.plan.run import MachineShare, RunPlan
from tasks.exchange.ledger import ActorRow, Progress
from tasks.exchange.ledger.fence import ACTIVE
from tasks.machine.processes import end_sessions
from tasks.training.checkpoints import latest_checkpoint

_POLL_S = 1.0
_KILL_GRACE_S = 1.0
_log = logging.getLogger(__name__)


class RunFailed(Exception):
    """The run cannot go on; the message says why, and where to look."""


class Launcher(Protocol):
    """Starts and cancels the flow runs of actors."""

    def start(self, share: MachineShare, resume_step: int | None) -> str:
        """Start the flow of a replica, or of the trainer's share of a machine, on its pool and queue.

        Returns the flow run's id. Raises RunFailed.
        """

    def cancel(self, flow_run_id: str) -> None:
        """Ask for the flow run to be cancelled; one that has ended, or a server that is away, is no error.

        It may be asked for again, since a server that is away or busy may not have heard it.
        """

    def has_ended(self, flow_run_id: str) -> bool:
        """Whether the flow run is over; False while it is not known."""


@dataclass
class _Child:
    """An actor's devices and its attempt under way."""

    role: str
    slot: int
    share: MachineShare
    flow_run_id: str
    last_attempt: int
    """The newest attempt in the ledger when this one was started; its own is higher."""
    started: float = field(default_factory=time.monotonic)
    has_run: bool = False


class Supervisor:
    """Starts the planned actors, restarts dead ones within the budget, and sees the run to its end."""

    def __init__(
        self,
        run: RunContext,
        plan: RunPlan,
        launcher: Launcher,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._run = run
        self._plan = plan
        (self._trains, *_) = plan.trainer.machines
        self._machine = self._trains.machine
        self._launcher = launcher
        self._on_progress = on_progress
        self._settings = run.experiment.run
        self._children: dict[tuple[str, int], _Child] = {}
        self._replaced: list[_Child] = []
        self._restarts = 0
        self._last_step = -1
        self._last_step_at = time.monotonic()

    def run(self) -> None:
        """Return when every step is trained and both evaluations are recorded.

        Raises:
            RunFailed: the restart budget is spent, an actor cannot start, or nothing moves any more.
        """
        self._start("trainer", 0, self._trains, self._run.resume_step)
        for replica in self._plan.replicas:
            self._start("replica", replica.slot, replica, None)
        while not self._is_complete():
            self._require_running()
            self._reconcile()
            time.sleep(_POLL_S)

    def _require_running(self) -> None:
        row = self._run.ledger.find_run(run_id=self._run.run_id)
        if row is None or row.state != "running":
            raise RunFailed(f"The run was ended elsewhere: the ledger says {row.state if row else 'nothing'} of it.")

    def end_children(self, patience_s: float, deadline_s: float) -> None:
        """End every actor of a run that is over.

        They leave by themselves within seconds of the ledger saying so. After `patience_s` their flow runs are
        cancelled as well; after `deadline_s` what is left is killed on this machine, and fenced.

        Raises:
            RunFailed: an actor on another machine was still there at the deadline.
        """
        started = time.monotonic()
        children = [*self._replaced, *self._children.values()]
        while left := [child for child in children if not self._launcher.has_ended(child.flow_run_id)]:
            waited_s = time.monotonic() - started
            if waited_s > patience_s:
                for child in left:
                    self._launcher.cancel(child.flow_run_id)
            if waited_s > deadline_s:
                self._give_up(left)
                return
            time.sleep(_POLL_S / 2)

    def _give_up(self, children: list[_Child]) -> None:
        actors = [actor for actor in self._actors().values() if actor.role != "supervisor"]
        try:
            self._kill(actors)  # first: a ledger that takes no writes, as on a full disk, must keep nobody alive
        finally:
            for actor in actors:
                self._try_to_fence(actor)
        away = [child for child in children if child.share.machine != self._machine]
        if away:
            named = ", ".join(f"{child.role} {child.slot} on {child.share.machine}" for child in away)
            raise RunFailed(f"{named} did not end: stop the worker there with `hexflow down`.")

    def _try_to_fence(self, actor: ActorRow) -> None:
        """Each for itself; where the ledger takes none, a resume does it, which fences all that it finds."""
        try:
            self._run.ledger.fence(self._run.run_id, actor.role, actor.slot)
        except SQLAlchemyError as error:
            _log.warning("%s %d could not be fenced: %s", actor.role, actor.slot, error)

    def _kill(self, actors: Iterable[ActorRow]) -> None:
        """End the processes on this machine of actors that were at work when these rows were read."""
        own = [actor for actor in actors if actor.state in ACTIVE and actor.machine == self._machine]
        end_sessions([actor.pid for actor in own if _is_same_process(actor)], _KILL_GRACE_S)

    def _start(self, role: str, slot: int, share: MachineShare, resume_step: int | None) -> None:
        actor = self._actors().get((role, slot))
        flow_run_id = self._launcher.start(share, resume_step)
        self._children[role, slot] = _Child(role, slot, share, flow_run_id, actor.attempt if actor else 0)

    def _actors(self) -> dict[tuple[str, int], ActorRow]:
        return {(actor.role, actor.slot): actor for actor in self._run.ledger.actors(self._run.run_id)}

    # Progress

    def _is_complete(self) -> bool:
        ledger, run_id = self._run.ledger, self._run.run_id
        progress = ledger.progress(run_id)
        self._on_progress(progress)
        if progress.step != self._last_step:
            self._last_step, self._last_step_at = progress.step, time.monotonic()
        self._raise_if_stalled(progress)
        if progress.step < progress.steps:
            return False
        ledger.request_evaluation(run_id, "after", progress.steps)
        return all(evaluation.state == "done" for evaluation in ledger.evaluations(run_id).values())

    def _raise_if_stalled(self, progress: Progress) -> None:
        silence_s = time.monotonic() - self._last_step_at
        # The first step also waits for both sides to start.
        allowed_s = self._settings.step_deadline_s + (self._settings.start_deadline_s if progress.step == 0 else 0.0)
        if silence_s > allowed_s:
            raise RunFailed(
                f"No step was finished for {silence_s:.0f} s (run.step_deadline_s): step {progress.step} of "
                f"{progress.steps}; {self._describe_actors()}."
            )

    def _describe_actors(self) -> str:
        return "; ".join(
            f"{role} {slot} {actor.state} {actor.message or 'without a message'}, last heard {actor.silent_s:.0f} s ago"
            for (role, slot), actor in sorted(self._actors().items())
        )

    # Health

    def _reconcile(self) -> None:
        actors = self._actors()
        for key, child in list(self._children.items()):
            actor = actors.get(key)
            if actor is not None and actor.attempt <= child.last_attempt:
                actor = None
            fault = self._fault(child, actor)
            if fault is not None:
                self._replace(key, child, actor, fault)

    def _fault(self, child: _Child, actor: ActorRow | None) -> str | None:
        """Why this child is dead, or None."""
        age_s = time.monotonic() - child.started
        if actor is None:
            if self._launcher.has_ended(child.flow_run_id):
                return "its flow run ended before it joined the run"
            if age_s > self._settings.start_deadline_s:
                return f"it did not join the run within run.start_deadline_s ({self._settings.start_deadline_s:.0f} s)"
            return None
        child.has_run = child.has_run or actor.state == "running"
        if actor.state in ("failed", "fenced"):
            return actor.message or actor.state
        if actor.state == "done":
            return None if child.role == "trainer" else "it left before the run was over"
        if actor.silent_s > self._settings.heartbeat_deadline_s:
            return f"it was silent for {actor.silent_s:.0f} s (run.heartbeat_deadline_s)"
        if actor.state == "starting" and age_s > self._settings.start_deadline_s:
            return f"it was still '{actor.message}' after run.start_deadline_s ({age_s:.0f} s)"
        if self._launcher.has_ended(child.flow_run_id):
            return "its flow run ended while it was at work"
        return None

    def _replace(self, key: tuple[str, int], child: _Child, actor: ActorRow | None, fault: str) -> None:
        role, slot = key
        log = self._run.directory.logs / f"{role}-{slot}.log"
        if not child.has_run and actor is not None and actor.state == "failed":
            # What failed before it ever worked would fail again: bad input, missing memory.
            raise RunFailed(f"The {role} {slot} could not start: {fault} (log: {log})")
        if self._restarts >= self._settings.restarts:
            raise RunFailed(f"The {role} {slot} died: {fault}. The budget run.restarts is spent (log: {log})")
        self._restarts += 1
        print(f"{role} {slot} died: {fault}; starting it again ({self._restarts} of {self._settings.restarts})")
        self._run.ledger.fence(self._run.run_id, role, slot)
        if actor is not None:
            self._kill([actor])  # Prefect's server may be away, and its flow run holds the devices as long as it lives
        self._launcher.cancel(child.flow_run_id)
        self._replaced.append(child)
        resume_step = None
        if role == "trainer":
            resume_step = latest_checkpoint(self._run.directory, self._run.ledger, self._run.run_id) or 0
            self._run.ledger.resume_from(self._run.run_id, resume_step, self._run.supervisor)
        self._start(role, slot, child.share, resume_step)


def _is_same_process(actor: ActorRow) -> bool:
    """Whether the actor's pid was its own when it was last heard: a recycled pid belongs to a younger process."""
    try:
        return psutil.Process(actor.pid).create_time() < time.time() - actor.silent_s
    except psutil.NoSuchProcess:
        return False
