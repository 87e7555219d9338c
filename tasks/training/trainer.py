"""One rank of the trainer: `python -m tasks.training.trainer --run RUN --epoch 0 --attempt 1`, started by `launch`.

Step i consumes the groups that the ledger chooses, trains policy version i on them and publishes version i + 1. All
ranks walk through the same steps; rank 0 alone speaks to the ledger, and tells the others which groups to load.
"""

import argparse
import logging
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist

from planners.errors import UserError
from tasks.config.experiment import Experiment
from tasks.config.files import read_resolved_experiment
from tasks.config.settings import load_settings
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Actor, GroupRow, Ledger
from tasks.exchange.payloads import DamagedPayload, StoredGroup, open_group
from tasks.lifecycle.scope import ActorScope, this_process
from tasks.machine.processes import apply_device_environment, die_with_parent
from tasks.models.dtypes import torch_dtype
from tasks.models.prepare import find_model
from tasks.tracking.tracker import Status, Tracker, attempt_tags
from tasks.training.checkpoints import load_checkpoint, save_checkpoint
from tasks.training.engine import Engine, StepData, StepResult, load_engine
from tasks.training.groups import permute_advantages, with_advantages
from tasks.training.leader import Goodbye, Leader, batch_metrics
from tasks.training.memory import check_memory
from tasks.training.ranks import Ranks, join_ranks

MAX_SKIPPED_STEPS = 5  # steps in a row with an update that was not finite, before the run is given up
_NOT_YET = -1
TRUNCATION_WARNING = 0.5  # share of answers cut off by the length limit that is worth a warning
_log = logging.getLogger(__name__)


class Trainer:
    """The training loop of one rank; `leader` is None on all ranks but the first."""

    def __init__(
        self, run: RunDirectory, experiment: Experiment, engine: Engine, ranks: Ranks, leader: Leader | None
    ) -> None:
        self._run = run
        self._experiment = experiment
        self._engine = engine
        self._ranks = ranks
        self._leader = leader
        (self._lineage,) = ranks.share([leader.lineage if leader else 0])
        self._skipped_steps = 0

    def train(self, first_step: int) -> None:
        """Train from `first_step` to the run's last step.

        Raises:
            UserError: the rollout side is silent, or updates are not finite any more.
            Fenced: another trainer has taken over.
        """
        self._publish(first_step)
        if self._leader:
            self._leader.require_newest(first_step)
            self._leader.delete_checkpoints()
        self._ranks.barrier()
        for step in range(first_step, self._experiment.run.steps):
            self._step(step)

    def _step(self, step: int) -> None:
        started = time.monotonic()
        rows, groups, read, wait_s = self._take(step)
        with self._in_hand(self._experiment.run.work_deadline_s):
            self._work_on(step, rows, groups, read, started, wait_s)

    def _work_on(
        self,
        step: int,
        rows: list[GroupRow],
        groups: list[StoredGroup],
        read: StepData,
        started: float,
        wait_s: float,
    ) -> None:
        result = self._update(read, step)
        train_s = time.monotonic() - started - wait_s
        if self._leader:
            self._leader.ledger.record_span(self._leader.actor, "busy", f"step {step}", train_s)
        publish_s = self._publish(step + 1)
        checkpoint_s = self._checkpoint(step + 1)
        if self._leader:
            step_s = time.monotonic() - started
            times = {"step_s": step_s, "wait_s": wait_s, "train_s": train_s, "publish_s": publish_s}
            data = batch_metrics(rows, [group.outline for group in groups], step)
            rates = {"throughput/response_tokens_per_s": data["response_tokens"] / step_s}
            rates["wait/trainer_for_rollouts"] = wait_s / step_s
            updates = {"updates": float(result.updates), "nonfinite/updates": float(result.skipped)}
            checkpoint = {"checkpoint_s": checkpoint_s} if checkpoint_s else {}
            self._leader.report(step, {**data, **result.metrics, **updates, **times, **checkpoint, **rates})
            truncated = data["response/truncated_share"]
            if truncated > TRUNCATION_WARNING:
                _log.warning(
                    "step %d: %.0f %% of the answers hit workload.max_new_tokens, raise it", step, 100 * truncated
                )
            _log.info("step %d: reward %.3f, %.1f s, waited %.1f s", step, data["reward/mean"], step_s, wait_s)

    def _take(self, step: int) -> tuple[list[GroupRow], list[StoredGroup], StepData, float]:
        """The step's groups in the ledger (on rank 0) and on storage, what this rank trains on, and seconds of waiting.

        Payloads that some rank finds damaged or gone are dropped, and the step is decided anew, before any computing.
        """
        rows, wait_s = self._leader.take_groups(step, self._say_not_yet) if self._leader else ([], 0.0)
        while True:
            groups, damaged = self._open(self._share_ids(rows))
            if not damaged:
                self._check_staleness(groups, step)
                read, damaged = self._read(groups, step)
                if read is not None and not damaged:
                    return rows, groups, read, wait_s
            if self._leader:
                _log.warning("step %d is decided anew without the damaged groups %s", step, damaged)
                rows, more_s = self._leader.take_groups(step, self._say_not_yet, damaged)
                wait_s += more_s

    def _share_ids(self, rows: list[GroupRow]) -> list[int]:
        """The step's groups, on every rank; rank 0 knows which, once it has waited for them."""
        count = self._experiment.workload.prompts_per_step
        while (ids := self._ranks.share([row.group_id for row in rows] or [0] * count)) == [_NOT_YET] * count:
            pass
        return ids

    def _open(self, ids: list[int]) -> tuple[list[StoredGroup], list[int]]:
        """The groups' outlines, whose tokens stay on storage, and those groups that some rank cannot open.

        From the outlines every rank knows which groups teach something and which answers are its own.
        """
        groups, damaged = [], []
        for group_id in ids:
            try:
                groups.append(open_group(self._run.group_path(group_id)))
            except DamagedPayload as error:
                _log.warning("%s", error)
                damaged.append(group_id)
        return groups, self._told_by_any(ids, damaged)

    def _read(self, groups: list[StoredGroup], step: int) -> tuple[StepData | None, list[int]]:
        """What this rank trains on, and those groups that some rank cannot read."""
        batch = with_advantages(groups, self._experiment.algorithm)
        if self._experiment.algorithm.permute_advantages:
            batch = permute_advantages(batch, self._experiment.run.seed, step)
        read, bad = None, None
        try:
            read = self._engine.read(batch)
        except DamagedPayload as error:
            _log.warning("%s", error)
            bad = error.path
        ids = [group.outline.group_id for group in groups]
        return read, self._told_by_any(ids, [group.outline.group_id for group in groups if group.path == bad])

    def _told_by_any(self, ids: list[int], own: list[int]) -> list[int]:
        """Those of the groups that this rank or another has named."""
        marks = self._ranks.gather(torch.tensor([group_id in own for group_id in ids], dtype=torch.int64)).amax(dim=0)
        return [group_id for group_id, is_named in zip(ids, marks.tolist(), strict=True) if is_named]

    def _check_staleness(self, groups: list[StoredGroup], step: int) -> None:
        bound = self._experiment.workload.max_staleness
        for group in groups:
            # The ledger has the version that the replica reported; the tokens themselves are the proof.
            oldest = group.outline.oldest_version
            if step - oldest > bound:
                raise RuntimeError(
                    f"group {group.outline.group_id} has a token of version {oldest}, more than {bound} versions "
                    f"older than step {step}"
                )

    def _say_not_yet(self) -> None:
        """Let the other ranks, which wait for the step's groups in a collective with a deadline, begin another one."""
        self._ranks.share([_NOT_YET] * self._experiment.workload.prompts_per_step)

    def _update(self, read: StepData, step: int) -> StepResult:
        result = self._engine.train(read, step)
        self._skipped_steps = self._skipped_steps + 1 if result.skipped else 0
        if self._skipped_steps == MAX_SKIPPED_STEPS:
            raise UserError(
                f"The gradient was not finite in {MAX_SKIPPED_STEPS} steps in a row, the last being step {step}: lower "
                "optimizer.lr and continue from the last checkpoint."
            )
        return result

    def _publish(self, number: int) -> float:
        """Publish the policy as version `number`; returns the seconds it took."""
        started = time.monotonic()
        with self._in_hand(self._experiment.run.step_deadline_s / 2):
            weights = self._engine.state_dict(torch_dtype(self._experiment.model.dtype))
            if self._leader:
                self._leader.publish(number, weights)
        if self._leader:
            self._leader.ledger.record_span(
                self._leader.actor, "publish", f"version {number}", time.monotonic() - started
            )
        return time.monotonic() - started

    def _checkpoint(self, step: int) -> float:
        """Write the checkpoint of `step` if it is due; returns the seconds it took, 0 if it is not."""
        settings = self._experiment.run
        if step % settings.checkpoint_every and step != settings.steps:
            return 0.0
        started = time.monotonic()
        confirm = self._leader.confirm if self._leader else _nothing
        with self._in_hand(settings.step_deadline_s / 2):
            save_checkpoint(self._run, step, self._lineage, self._engine, self._ranks, confirm)
        if self._leader:
            self._leader.delete_checkpoints()
            self._leader.delete_payloads()
            self._leader.ledger.record_span(
                self._leader.actor, "publish", f"checkpoint {step}", time.monotonic() - started
            )
        return time.monotonic() - started

    def _in_hand(self, may_rest_s: float) -> AbstractContextManager[None]:
        """The leader has work in hand; it is the one whose beats tell."""
        return self._leader.scope.work.in_hand(may_rest_s) if self._leader else nullcontext()


def _nothing() -> None:
    """Followers have no attempt of their own to confirm."""


def _count_for_nobody(amount: int) -> None:
    """Followers do not beat: where one stands still, its leader does."""


def train(args: argparse.Namespace, experiment: Experiment, leader: Leader | None) -> None:
    """Join the other ranks, load the model and train to the end."""
    settings = load_settings()
    run, plan = (
        RunDirectory(settings.shared.runs / args.run),
        Ledger(settings.shared.ledger_url).plan(args.run, args.epoch).trainer,
    )
    model_path = find_model(experiment.model, settings)
    wait_s = experiment.run.start_deadline_s + experiment.run.step_deadline_s
    ranks = join_ranks(experiment.run.start_deadline_s, wait_s)
    needs_reference = experiment.algorithm.needs_reference
    check_memory(model_path, experiment.model.dtype, plan.zero_stage, ranks, with_reference=needs_reference)
    torch.manual_seed(experiment.run.seed)
    sizes = {"zero_stage": plan.zero_stage, "micro_batch_tokens": plan.micro_batch_tokens}
    count_work = leader.scope.work.add if leader else _count_for_nobody
    engine = load_engine(model_path, experiment, ranks, **sizes, count_work=count_work)
    (step,) = ranks.share([leader.first_step() if leader else 0])
    if step:
        (lineage,) = ranks.share([leader.checkpoint_lineage(step) if leader else 0])
        load_checkpoint(run, lineage, step, engine, ranks)
    Trainer(run, experiment, engine, ranks, leader).train(step)
    ranks.barrier()
    dist.destroy_process_group()


def lead(args: argparse.Namespace, experiment: Experiment) -> None:
    """Train as rank 0: be the trainer in the ledger, and say there and in MLflow how it ended."""
    settings = load_settings()
    ledger, actor = Ledger(settings.shared.ledger_url), Actor(args.run, "trainer", 0, args.attempt)
    (first, *_) = ledger.plan(args.run, args.epoch).trainer.machines
    run, model_path = RunDirectory(settings.shared.runs / args.run), find_model(experiment.model, settings)
    goodbye = Goodbye(ledger, actor)
    status: Status = "FAILED"
    try:
        with ActorScope(ledger, actor, this_process(first.machine), goodbye) as scope:
            lineage = ledger.lineage_of(actor)
            scope.report("starting", "loading the model")
            goodbye.tracker = tracker = Tracker.child(
                os.environ.get("MLFLOW_TRACKING_URI"),
                partial(ledger.mlflow_run, args.run),
                "trainer",
                attempt_tags(actor.role, actor.slot, actor.attempt),
            )
            train(args, experiment, Leader(run, experiment, model_path, ledger, actor, lineage, scope, tracker))
        status = "FINISHED"
    except SystemExit:
        status = "KILLED"
        raise
    finally:
        if goodbye.tracker:
            goodbye.tracker.finish(status)


def main() -> None:
    """Parse the command line and train as the rank that RANK says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, help="run id in the ledger")
    parser.add_argument("--epoch", required=True, type=int, help="plan epoch that the trainer belongs to")
    parser.add_argument("--attempt", required=True, type=int, help="the trainer's attempt, as it was given out")
    args = parser.parse_args()
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        apply_device_environment()
        run = RunDirectory(load_settings().shared.runs / args.run)
        experiment = read_resolved_experiment(run.experiment)
        if os.environ["RANK"] == "0":
            lead(args, experiment)
        else:
            train(args, experiment, None)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
