"""Reconciles what the plan wants with what the ledger's heartbeats say, until the run has its last step.

Heartbeats are the truth: a flow run that Prefect calls Running may be dead, and the other way round. Prefect is only
asked to start and to cancel, so while its server is away the run goes on and only new starts wait.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sqlalchemy.exc import SQLAlchemyError

from flows.running.context import RunContext
from flows.running.deaths import Deaths
from flows.running.unscored import Unscored
from planners.plan.run import MachineShare, RunPlan
from tasks.exchange.ledger import Actor, ActorRow, Ledger, Progress
from tasks.exchange.ledger.fence import ACTIVE
from tasks.lifecycle.silence import Silence, steady_s
from tasks.lifecycle.stall import Stall
from tasks.machine.processes import end_sessions, is_alive
from tasks.training.checkpoints import resume_point

HURRY_S = 12.0
"""Longest time for actors to end when it presses: Prefect kills a cancelled flow 30 s after telling it."""
POLL_S = 1.0
"""Between two looks."""
_LONGEST_GAP_S = 3.0  # between two looks of the loop, where a quarter of the deadline for beats is not longer
_UNHEARD_S = 15.0  # without a beat, after which nothing is known of an actor's work
_KILL_GRACE_S = 1.0
_log = logging.getLogger(__name__)


class RunFailed(Exception):
    """The run cannot go on; the message says why, and where to look."""


class Launcher(Protocol):
    """Starts and cancels the flow runs of actors."""

    def start(self, actor: Actor, share: MachineShare) -> str:
        """Start the flow of a replica, or of the trainer's share of a machine, on its pool and queue.

        It registers as `actor`, or, where that is no longer wanted, does nothing. Returns the flow run's id. Raises
        RunFailed.
        """

    def cancel(self, flow_run_id: str) -> None:
        """Ask for the flow run to be cancelled; one that has ended, or a server that is away, is no error.

        It may be asked for again, since a server that is away or busy may not have heard it.
        """

    def has_ended(self, flow_run_id: str) -> bool:
        """Whether the flow run is over; False while it is not known."""


@dataclass
class _Child:
    """An attempt that this supervisor has given out, and its flow runs: one on each of its machines."""

    actor: Actor
    shares: Sequence[MachineShare]
    flow_run_ids: list[str] = field(default_factory=list)
    has_run: bool = False
    is_first: bool = False
    row: ActorRow | None = None
    """As last seen in the ledger."""


class Supervisor:
    """Starts the planned actors, restarts dead ones within the budget, and sees the run to its end."""

    def __init__(
        self,
        run: RunContext,
        epoch: int,
        plan: RunPlan,
        launcher: Launcher,
        on_progress: Callable[[Progress], None],
        on_replaced: Callable[[Sequence[str]], object] = lambda lines: None,
        clock: Callable[[], float] = steady_s,
    ) -> None:
        """`on_replaced` hears, whenever an actor is started again, of all that were so far, and why; `clock` measures
        how long actors are silent, stand still or start.
        """
        self._run = run
        self._epoch = epoch
        self._plan = plan
        self._machine = run.machine.name
        self._launcher = launcher
        self._on_progress = on_progress
        self._on_replaced = on_replaced
        self._settings = run.experiment.run
        self._children: dict[tuple[str, int], _Child] = {}
        self._replaced: list[_Child] = []
        self._gap_s = max(_LONGEST_GAP_S, self._settings.heartbeat_deadline_s / 4)
        self._silence, self._rest, self._age = (Silence(self._gap_s, clock) for _ in range(3))
        self._restarts = 0
        progress = run.ledger.progress(run.run_id)
        self._deaths, self._deadly = Deaths(self._settings.restarts, progress), progress.deadly_prompts
        self._told: list[str] = []
        self._unscored = Unscored(run.experiment.workload.prompts_per_step, progress)
        self._stall = Stall(run.ledger, run.run_id)

    def run(self) -> None:
        """Return when every step is trained and both evaluations are recorded.

        Raises:
            RunFailed: the restart budget is spent, an actor cannot start, or nothing moves any more.
            Fenced: the run was ended or taken over elsewhere.
        """
        self._start("trainer", 0, self._plan.trainer.machines)
        for replica in self._plan.replicas:
            self._start("replica", replica.slot, [replica])
        while not self._is_complete():
            self._run.ledger.confirm(self._run.supervisor)
            self._reconcile()
            time.sleep(POLL_S)

    def end_children(self, patience_s: float, deadline_s: float, hurry: threading.Event) -> None:
        """End every actor of a run that is over.

        They leave by themselves within seconds of the ledger saying so. After `patience_s` their flow runs are
        cancelled as well; after `deadline_s` what is left is killed on this machine, and fenced. `hurry` leaves no more
        patience and HURRY_S from the moment it is set.

        Raises:
            RunFailed: an actor on another machine was still there at the deadline.
            Fenced: another supervisor has taken over.
        """
        started, hurries = time.monotonic(), False
        children = [*self._replaced, *self._children.values()]
        while left := [child for child in children if not all(map(self._launcher.has_ended, child.flow_run_ids))]:
            if hurry.is_set() and not hurries:
                started, patience_s, deadline_s, hurries = time.monotonic(), 0.0, min(deadline_s, HURRY_S), True
            waited_s = time.monotonic() - started
            if waited_s > patience_s:
                for child in left:
                    self._cancel(child)
            if waited_s > deadline_s:
                self._give_up(left)
                return
            time.sleep(POLL_S / 2)

    def _give_up(self, left: list[_Child]) -> None:
        ledger = self._run.ledger.at_once()  # they have had their time
        try:
            self._see(left, ledger)
        except SQLAlchemyError as error:
            _log.warning("the ledger cannot be read, so actors are ended as they were seen last: %s", error)
        # First: a ledger that takes no writes, as on a full disk, must keep nobody alive. They are this supervisor's,
        # whoever supervises now.
        self._kill([child.row for child in left if child.row])
        for child in left:
            self._try_to_fence(child, ledger)
        if away := [(c, share) for c in left for share in c.shares if share.machine != self._machine]:
            named = ", ".join(f"{_name(child.actor)} on {share.machine}" for child, share in away)
            raise RunFailed(f"{named} did not end: stop the worker there with `hexflow down`.")

    def _try_to_fence(self, child: _Child, ledger: Ledger) -> None:
        """Each for itself; where the ledger takes none, a resume does it, which fences all that it finds."""
        try:
            ledger.fence(self._run.supervisor, child.actor)
        except SQLAlchemyError as error:
            _log.warning("%s could not be fenced: %s", _name(child.actor), error)

    def _kill(self, rows: Iterable[ActorRow]) -> None:
        """End the processes on this machine that have registered as these attempts."""
        living = [row.pid for row in rows if row.pid and row.process_key and is_alive(row.process_key)]
        end_sessions(living, _KILL_GRACE_S)

    def _cancel(self, child: _Child) -> None:
        for flow_run_id in child.flow_run_ids:
            self._launcher.cancel(flow_run_id)

    def _start(self, role: str, slot: int, shares: Sequence[MachineShare]) -> None:
        """Give out the slot's next attempt and start it on its machines."""
        rows = self._run.ledger.actors(self._run.run_id)
        after = max((row.attempt for row in rows if (row.role, row.slot) == (role, slot)), default=0)
        machines = [share.machine for share in shares]
        actor = self._run.ledger.assign(self._run.supervisor, role, slot, after, self._epoch, machines)
        child = _Child(actor, shares, is_first=(role, slot) not in self._children)
        self._children[role, slot] = child
        for share in shares:
            child.flow_run_ids.append(self._launcher.start(actor, share))

    def _see(self, children: Iterable[_Child], ledger: Ledger) -> None:
        """Look at the rows of these attempts; those of others in their slots are not theirs."""
        rows = {(row.role, row.slot, row.attempt): row for row in ledger.actors(self._run.run_id)}
        for child in children:
            actor = child.actor
            child.row = rows.get((actor.role, actor.slot, actor.attempt), child.row)

    # Progress

    def _is_complete(self) -> bool:
        ledger, run_id = self._run.ledger, self._run.run_id
        progress = ledger.progress(run_id)
        self._on_progress(progress)
        self._pay(self._deaths.to_pay(progress), "Engines died, and no question is to blame")
        self._raise_if_unscored(progress)
        self._tell_of_skipped(progress)
        self._raise_if_stalled(progress)
        if progress.step < progress.steps:
            return False
        ledger.request_evaluation(self._run.supervisor, "after", progress.steps)
        return all(evaluation.state == "done" for evaluation in ledger.evaluations(run_id).values())

    def _raise_if_unscored(self, progress: Progress) -> None:
        groups = self._unscored.in_a_row(progress)
        if groups >= self._unscored.most:
            raise RunFailed(
                f"In the last {groups} groups no two answers could be scored, so nothing is learned: "
                f"{self._describe_actors()}. Mend the rewards or the data, see {self._run.directory.logs}."
            )

    def _tell_of_skipped(self, progress: Progress) -> None:
        if progress.deadly_prompts > self._deadly:
            self._deadly = progress.deadly_prompts
            self._told.append("a question that ended two engines when it was asked alone is skipped from now on")
            print(self._told[-1])
            self._on_replaced(self._told)

    def _raise_if_stalled(self, progress: Progress) -> None:
        still_s = self._stall.look(progress.step)
        if still_s > self._settings.step_deadline_s:
            what = "No step was finished" if progress.step < progress.steps else "The last evaluation did not get on"
            raise RunFailed(
                f"{what} for {still_s:.0f} s (run.step_deadline_s): step {progress.step} of {progress.steps}; "
                f"{self._describe_actors()}."
            )

    def _describe_actors(self) -> str:
        return "; ".join(
            f"{row.role} {row.slot} {row.state} {row.message or 'without a message'}, last heard "
            f"{row.silent_s:.0f} s ago"
            for row in self._run.ledger.actors(self._run.run_id)
        )

    # Health

    def _reconcile(self) -> None:
        children = list(self._children.values())
        self._see(children, self._run.ledger)
        rows = {child.actor: child.row for child in children if child.row is not None}
        silent_s = self._silence.look({actor: row.serial for actor, row in rows.items()})
        # Of who is not heard it is not known whether it rests.
        heard = {actor: row for actor, row in rows.items() if silent_s[actor] <= _UNHEARD_S}
        rested_s = self._rest.look({actor: (row.work, row.may_rest_s) for actor, row in heard.items()})
        age_s = self._age.look({child.actor: child.has_run for child in children})
        for child in children:
            actor, row = child.actor, child.row
            if (fault := self._fault(child, age_s[actor])) is not None:
                self._replace(child, fault)
            elif row is None or row.state not in ACTIVE:
                continue
            elif (fault := self._silent(silent_s[actor])) is not None:
                self._replace(child, fault, seen_serial=row.serial)
            elif (fault := _stuck(row, rested_s.get(actor, 0.0))) is not None:
                self._replace(child, fault, seen_work=row.work)

    def _fault(self, child: _Child, age_s: float) -> str | None:
        """Why this child, whose start has been watched for so long, is dead, or None; silence is another matter."""
        row = child.row
        has_ended = any(map(self._launcher.has_ended, child.flow_run_ids))
        if row is None or row.state == "assigned":
            if has_ended:
                return "its flow run ended before it joined the run"
            if age_s > self._settings.start_deadline_s:
                return f"it did not join the run within run.start_deadline_s ({self._settings.start_deadline_s:.0f} s)"
            return None
        child.has_run = child.has_run or row.state == "running"
        if row.state in ("failed", "died", "fenced"):
            return row.message or row.state
        if row.state == "done":
            return None if row.role == "trainer" else "it left before the run was over"
        if row.state == "starting" and age_s > self._settings.start_deadline_s:
            return f"it was still '{row.message}' after run.start_deadline_s ({age_s:.0f} s)"
        return "its flow run ended while it was at work" if has_ended else None

    def _silent(self, silent_s: float) -> str | None:
        deadline_s = self._settings.heartbeat_deadline_s
        return f"it was silent for {silent_s:.0f} s (run.heartbeat_deadline_s)" if silent_s > deadline_s else None

    def _replace(
        self, child: _Child, fault: str, *, seen_serial: int | None = None, seen_work: int | None = None
    ) -> None:
        """Fence the attempt, unless it was silent or at rest and is no more; then start the next one."""
        actor, ledger = child.actor, self._run.ledger
        seen = {"seen_serial": seen_serial, "seen_work": seen_work}
        left = ledger.fence(self._run.supervisor, actor, reason=fault, **seen)
        if left is None:
            return
        if left.wanted != "run":  # it was to leave: nobody takes its place
            self._replaced.append(self._children.pop((actor.role, actor.slot)))
            if left.state == "fenced":
                self._kill([left])
                self._cancel(child)
            return
        log = self._run.directory.log_path(actor.role, actor.slot)
        if child.is_first and not child.has_run and left.state == "failed":
            # What failed before it ever worked would fail again: bad input, missing memory. One that has worked before
            # may meet what passes: devices not free yet, a file that a next attempt does without.
            raise RunFailed(f"The {_name(actor)} could not start: {fault} (log: {log})")
        again = "starting it again, and trying what it was answering"
        if left.state != "died":
            self._pay(1, f"The {_name(actor)} died: {fault} (log: {log})")
            again = f"starting it again ({self._restarts} of {self._settings.restarts})"
        self._told.append(f"{_name(actor)}, attempt {actor.attempt}, died: {fault}; {again}")
        print(self._told[-1])
        if left.state == "fenced":
            self._kill([left])  # Prefect's server may be away, and its flow run holds the devices as long as it lives
        self._cancel(child)
        self._replaced.append(child)
        if actor.role == "trainer":
            step = resume_point(self._run.directory, ledger, self._run.run_id, self._settings)
            ledger.resume_from(self._run.supervisor, step, f"after trainer {actor.attempt}")
        self._start(actor.role, actor.slot, child.shares)
        self._on_replaced(self._told)

    def _pay(self, restarts: int, why: str) -> None:
        self._restarts += restarts
        if self._restarts > self._settings.restarts:
            raise RunFailed(f"{why}. The budget run.restarts is spent.")


def _stuck(row: ActorRow, rested_s: float) -> str | None:
    """That an actor beats and does not get on with what it has in hand, or None."""
    if row.state != "running" or row.may_rest_s is None or rested_s <= row.may_rest_s:
        return None
    return (
        f"it beat, but its count of work stood still at {row.work} for {rested_s:.0f} s with work in hand "
        f"(run.work_deadline_s; last it said '{row.message}')"
    )


def _name(actor: Actor) -> str:
    return f"{actor.role} {actor.slot}"
