"""What only rank 0 of the trainer does: speak to the ledger, publish weights, report.

A version is published before the checkpoint of the same step is written, because replicas should not wait for a
checkpoint. Dying in between loses nothing: a resume goes back to the older checkpoint and abandons the version.
"""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from planners.errors import UserError
from tasks.config.experiment import Experiment
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Actor, GroupRow, Ledger
from tasks.exchange.payloads import delete_payloads, found_payloads
from tasks.exchange.trajectories import GroupOutline, Outcome
from tasks.exchange.weights import delete_unused, found_versions, publish_weights
from tasks.lifecycle.scope import ActorScope, say_last_word
from tasks.lifecycle.stall import Stall
from tasks.tracking.tracker import Tracker
from tasks.training.checkpoints import delete_checkpoints, found_checkpoints
from tasks.training.export import write_weights

TELL_EVERY_S = 5.0
_POLL_S = 0.1
_LEDGER_S, _MLFLOW_S = 5.0, 1.0  # longest times that telling them holds up a process that was told to end
_SIGTERM_STATUS = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Leader:
    """The trainer as the rest of the run sees it.

    `lineage` is the one it registered in: a resume starts another trainer, and this one may not know of it yet.
    """

    run: RunDirectory
    experiment: Experiment
    model_path: Path
    ledger: Ledger
    actor: Actor
    lineage: int
    scope: ActorScope
    tracker: Tracker
    undeleted: dict[str, list[Path]] = field(default_factory=dict)
    """What storage did not let go when it was last tidied, by kind."""

    def confirm(self) -> None:
        """Raise Fenced if another trainer has taken over."""
        self.ledger.confirm(self.actor)

    def take_groups(
        self, step: int, meanwhile: Callable[[], object], damaged: Collection[int] = ()
    ) -> tuple[list[GroupRow], float]:
        """The groups of `step` in the ledger's order, and the seconds spent waiting for them.

        Args:
            step: the step.
            meanwhile: called every TELL_EVERY_S of the wait: other ranks may not wait for longer in one collective.
            damaged: groups that it has taken and whose payloads cannot be read: they are dropped, and it is decided
                anew.

        Raises:
            UserError: they did not come within the deadline, in which nothing else moved either; the message names who
                is silent.
        """
        deadline_s, started = self.experiment.run.step_deadline_s, time.monotonic()
        told = started
        stall = Stall(self.ledger, self.actor.run_id)
        self.scope.report("running", f"waiting for the groups of step {step}")
        rows = self.ledger.drop_damaged(self.actor, step, damaged) if damaged else None
        while rows is None and (rows := self.ledger.take_groups(self.actor, step)) is None:
            if stall.look() > deadline_s:
                raise UserError(self._describe_silence(step, deadline_s))
            if time.monotonic() - told > TELL_EVERY_S:
                told = time.monotonic()
                meanwhile()
            time.sleep(_POLL_S)
        wait_s = time.monotonic() - started
        anew = f" without {sorted(damaged)}" if damaged else ""
        self.ledger.record_span(self.actor, "wait", f"step {step}{anew}", wait_s)
        self.scope.report("running", f"training step {step}")
        return rows, wait_s

    def publish(self, number: int, weights: dict[str, Tensor]) -> None:
        """Publish policy version `number` unless it is recorded, announce it, and delete what nobody needs.

        Raises:
            Fenced: another trainer has taken over; nothing was published.
            FileExistsError: there are files under the version's name that the ledger does not know.
        """

        def fill(directory: Path) -> None:
            write_weights(directory, self.model_path, weights)
            self.confirm()

        if not self.ledger.has_version(self.actor.run_id, self.lineage, number):
            path = publish_weights(self.run, self.lineage, number, fill)
            self.ledger.record_version(self.actor, number, str(path))
        keep_versions = self.experiment.storage.keep_versions
        unused = self.ledger.retire_versions(self.actor, keep_versions, found_versions(self.run))
        self.undeleted["weights"] = delete_unused(self.run, self.lineage, unused)

    def require_newest(self, step: int) -> None:
        """Refuse to train `step` while the run is further.

        Raises:
            UserError: a newer version is live, so this run has to be resumed.
        """
        latest = self.ledger.latest_version(self.actor.run_id)
        if latest != (self.lineage, step):
            raise UserError(
                f"Run {self.actor.run_id} is at version {latest}, but the trainer was started at step {step}: "
                f"continue it with `hexflow resume {self.actor.run_id}`."
            )

    def first_step(self) -> int:
        """The step to begin with: 0 in a new run, else that of the checkpoint that the run was taken back to."""
        return self.ledger.progress(self.actor.run_id).step

    def checkpoint_lineage(self, step: int) -> int:
        """The lineage in which the checkpoint of `step` was written.

        Raises:
            UserError: there is no such checkpoint in the run's history.
        """
        proven = self.ledger.proven_checkpoints(self.actor.run_id, found_checkpoints(self.run))
        lineages = {of_step: lineage for lineage, of_step in proven}
        if step not in lineages:
            raise UserError(
                f"Run {self.actor.run_id} has no checkpoint of step {step}, it has {sorted(lineages)}: continue with "
                f"`hexflow resume {self.actor.run_id}`."
            )
        return lineages[step]

    def delete_checkpoints(self) -> None:
        """Delete the checkpoints that retention does not keep, and those of abandoned futures.

        Raises:
            Fenced: another trainer has taken over; nothing was deleted.
        """
        found = found_checkpoints(self.run)
        keep = self.ledger.proven_checkpoints(self.actor.run_id, found)[-self.experiment.storage.keep_checkpoints :]
        self.confirm()  # so this trainer was current when it decided: what it deletes now is nobody's newest
        self.undeleted["checkpoints"] = delete_checkpoints(self.run, self.lineage, keep, found)

    def delete_payloads(self) -> None:
        """Delete consumed trajectories that retention does not keep and every checkpoint includes."""
        proven = self.ledger.proven_checkpoints(self.actor.run_id, found_checkpoints(self.run))
        oldest = proven[0][1] if proven else 0
        keep_steps = self.experiment.storage.keep_steps
        found = found_payloads(self.run)
        disposable = self.ledger.disposable_groups(self.actor.run_id, found, keep_steps, oldest)
        self.undeleted["trajectories"] = delete_payloads(self.run, disposable)

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Record the finished step in the ledger and in MLflow; values that are not finite are counted, not stored."""
        metrics = {**metrics, "storage/undeleted": float(sum(map(len, self.undeleted.values())))}
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        finite["nonfinite/metrics"] = float(len(metrics) - len(finite))
        self.ledger.record_step(self.actor, step, json.dumps(finite))
        self.scope.work.add()
        self.tracker.log(metrics, step)

    def _describe_silence(self, step: int, deadline_s: float) -> str:
        progress = self.ledger.progress(self.actor.run_id)
        replicas = [actor for actor in self.ledger.actors(self.actor.run_id) if actor.role == "replica"]
        described = "; ".join(
            f"replica {r.slot} on {r.machine} is {r.state}{f' ({r.message})' if r.message else ''}, last heard "
            f"{r.silent_s:.0f} s ago"
            for r in replicas
        )
        return (
            f"The rollout side did not deliver the groups of step {step} within {deadline_s:.0f} s "
            f"(run.step_deadline_s): {progress.groups['leased']} groups are being generated, "
            f"{progress.groups['scored']} are scored, {self.experiment.workload.prompts_per_step} are needed; "
            f"{described or 'no replica has joined'}. See the logs in {self.run.logs}."
        )


def batch_metrics(rows: Sequence[GroupRow], groups: Sequence[GroupOutline], step: int) -> dict[str, float]:
    """What the data of a step looks like: rewards, lengths, outcomes and staleness, by metric name."""
    answers = [answer for group in groups for answer in group.trajectories]
    trained = [answer for group in groups for answer in group.trained]
    rewards = [answer.reward for answer in trained]
    mean = math.fsum(rewards) / len(rewards)
    staleness = [step - answer.oldest_version for answer in trained]
    tokens = [answer.tokens for answer in answers]
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
        **_reward_parts(groups),
        "reward/zero_variance_groups": float(sum(len({a.reward for a in group.trained}) <= 1 for group in groups)),
        "reward/masked_share": 1 - len(trained) / len(answers),
        "response/tokens_mean": sum(tokens) / len(tokens),
        "response/truncated_share": sum(a.outcome is Outcome.TRUNCATED for a in answers) / len(answers),
        "response_tokens": float(sum(row.response_tokens or 0 for row in rows)),
        "staleness/mean": sum(staleness) / len(staleness),
        "staleness/max": float(max(staleness)),
    }


def _reward_parts(groups: Sequence[GroupOutline]) -> dict[str, float]:
    """What each reward said in the mean, unweighted, over the trained answers that it was asked about."""
    said: dict[str, list[float]] = {}
    for group in groups:
        for number, name in enumerate(group.reward_names):
            parts = [answer.parts[number] for answer in group.trained]
            said.setdefault(f"reward/{name}", []).extend(part for part in parts if not math.isnan(part))
    return {name: math.fsum(parts) / len(parts) for name, parts in said.items() if parts}


@dataclass
class Goodbye:
    """What ends this process when it is told to leave: within about a second, telling the ledger and MLflow.

    It is called by a thread of the actor's scope while the main thread may compute. Leaving at any instant is safe:
    what is on the disk is whole or unnamed. A ledger that takes no writes, or hangs, keeps nobody. The exit status is 0
    if the run is over anyway.
    """

    ledger: Ledger
    actor: Actor
    tracker: Tracker | None = None
    _status: int = _SIGTERM_STATUS

    def __call__(self, reason: str) -> None:
        """Leave for this reason."""
        threads = [threading.Thread(target=self._tell_ledger, args=(reason,), daemon=True)]
        if self.tracker:
            threads.append(threading.Thread(target=self.tracker.finish, args=("KILLED",), daemon=True))
        for thread in threads:
            thread.start()
        for thread, patience_s in zip(threads, (_LEDGER_S, _MLFLOW_S), strict=False):
            thread.join(patience_s)
        os._exit(self._status)

    def _tell_ledger(self, reason: str) -> None:
        say_last_word(self.ledger, self.actor, "failed", reason)
        row = self.ledger.find_run(run_id=self.actor.run_id)
        if row is None or row.state != "running":
            self._status = 0
