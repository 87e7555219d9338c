"""The process of one rollout replica: `python -m tasks.rollout.process --run RUN --epoch 0 --slot 0 --attempt 1`.

It joins the run in the ledger, starts the engine with what the plan epoch says of its slot, and serves until the run is
over.
"""

import argparse
import asyncio
import logging
import os
import signal
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from planners.errors import UserError
from planners.plan.run import ReplicaPlan
from tasks.config.experiment import Experiment
from tasks.config.files import read_resolved_experiment
from tasks.config.settings import load_settings
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Actor, Ledger
from tasks.lifecycle.scope import ActorScope, say_last_word, this_process
from tasks.lifecycle.silence import LONGEST_GAP_S, Silence
from tasks.machine.processes import apply_device_environment, die_with_parent
from tasks.models.prepare import find_model
from tasks.rollout.engine import EngineDied
from tasks.rollout.replica import Replica, ReplicaParts
from tasks.rollout.serving import AnsweringSetup, open_answerer
from tasks.rollout.versions import WholeVersions
from tasks.tracking.tracker import Tracker, attempt_tags

LEAVE_S = 25.0
"""Longest time that a replica takes to leave by itself; Prefect kills a cancelled flow 30 s after telling it."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class End:
    """What the ledger wants of a replica that is to end: at once, or when it has handed over what it has begun."""

    leaving: asyncio.Event
    draining: asyncio.Event


def main() -> None:
    """Parse the command line, serve, and tell the ledger how it ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--epoch", required=True, type=int, help="plan epoch that the replica belongs to")
    parser.add_argument("--slot", required=True, type=int, help="number of the replica in the plan")
    parser.add_argument("--attempt", required=True, type=int, help="the slot's attempt, as it was given out")
    args = parser.parse_args()
    die_with_parent()
    apply_device_environment()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    ledger, actor = Ledger(load_settings().shared.ledger_url), Actor(args.run, "replica", args.slot, args.attempt)
    try:
        asyncio.run(join(ledger, actor, ledger.plan(args.run, args.epoch).replicas[args.slot]))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


async def join(ledger: Ledger, actor: Actor, plan: ReplicaPlan) -> None:
    """Be the replica in the ledger for as long as it serves."""
    end, loop = End(asyncio.Event(), asyncio.Event()), asyncio.get_running_loop()

    def leave(reason: str) -> None:
        end_soon()
        loop.call_soon_threadsafe(end.leaving.set)

    def drain() -> None:
        loop.call_soon_threadsafe(end.draining.set)

    with ActorScope(ledger, actor, this_process(plan.machine), leave, on_drain=drain) as scope:
        await serve(ledger, scope, plan, end)


def end_soon() -> None:
    """End this process after LEAVE_S, wherever it is then: starting an engine, or in a ledger that takes no writes.

    Whoever started it ends what it leaves behind, and the ledger gives out again what it held.
    """
    timer = threading.Timer(LEAVE_S, os._exit, [128 + signal.SIGTERM])
    timer.daemon = True
    timer.start()


async def serve(ledger: Ledger, scope: ActorScope, plan: ReplicaPlan, end: End) -> None:
    """Start the replica's parts as planned, serve until `end`, and end them all."""
    settings, actor = load_settings(), scope.actor
    run = RunDirectory(settings.shared.runs / actor.run_id)
    experiment = read_resolved_experiment(run.experiment)
    model_path = find_model(experiment.model, settings)
    scope.report("starting", "waiting for the weights to begin with")
    versions = WholeVersions(ledger, actor, run, scope.say)
    lineage, number, weights_path = await first_weights(ledger, actor, versions, experiment, model_path)
    scope.report("starting", "; ".join([f"starting vLLM with version {number}", *versions.damaged.values()]))
    setup = AnsweringSetup(
        model_path,
        weights_path,
        lineage,
        number,
        replica=f"replica-{actor.slot}.{actor.attempt}",
        kind=plan.kind,
        concurrency=plan.concurrency,
        tensor_parallel=plan.tensor_parallel,
        seed=experiment.run.seed + 1000 * actor.slot + actor.attempt,
        count_work=scope.work.add,
    )
    async with open_answerer(experiment, setup) as (answerer, questions):
        if (lineage, number) != (0, 0):
            await asyncio.to_thread(ledger.set_loaded, actor, lineage, number)
        tracker = Tracker.child(
            os.environ.get("MLFLOW_TRACKING_URI"),
            partial(ledger.mlflow_run, actor.run_id),
            f"replica-{actor.slot}",
            attempt_tags(actor.role, actor.slot, actor.attempt),
        )
        replica = Replica(
            ReplicaParts(
                experiment,
                ledger,
                actor,
                run,
                answerer.engine,
                answerer,
                questions,
                tracker,
                setup.concurrency,
                scope.work,
                scope.say,
                versions,
            )
        )
        scope.report("running")
        try:
            await _serve_until(end, replica)
        except EngineDied as death:
            if death.by_itself:  # said before anything is closed, which may fail as well
                await asyncio.to_thread(say_last_word, ledger, actor, "died", str(death))
            raise
        finally:
            is_asked = end.leaving.is_set() or end.draining.is_set()
            tracker.finish("FINISHED" if is_asked else "FAILED")


async def _serve_until(end: End, replica: Replica) -> None:
    serving = asyncio.create_task(replica.run())
    told_to_drain = asyncio.create_task(_drain_when_told(end, replica))
    told_to_leave = asyncio.create_task(end.leaving.wait())
    await asyncio.wait([serving, told_to_leave], return_when=asyncio.FIRST_COMPLETED)
    told_to_leave.cancel()
    told_to_drain.cancel()
    replica.leave()
    await serving


async def _drain_when_told(end: End, replica: Replica) -> None:
    await end.draining.wait()
    replica.drain()


async def first_weights(
    ledger: Ledger, actor: Actor, versions: WholeVersions, experiment: Experiment, model_path: Path
) -> tuple[int, int, Path]:
    """(lineage, number, directory) to start the engine with.

    The prepared model is version 0 by definition. A run's first lineage begins with it, so that generation does not
    wait for the trainer's start; and whoever comes before the first evaluation is done takes it, or nobody could do
    that evaluation any more. Later the newest version that is whole is taken.

    Raises:
        UserError: no version could be read within `run.start_deadline_s`.
    """
    silence = Silence(LONGEST_GAP_S)
    before = ledger.evaluations(actor.run_id).get("before")
    if before is not None and before.state == "requested":
        return 0, 0, model_path
    while silence.look({"weights": None})["weights"] < experiment.run.start_deadline_s:
        latest = ledger.latest_version(actor.run_id)
        row = ledger.find_run(run_id=actor.run_id)
        if latest is None and row is not None and row.lineage == 0:
            return 0, 0, model_path
        if (found := versions.claim_newest()) is not None:
            return (*found[0], found[1])
        await asyncio.sleep(0.5)
    raise UserError(
        f"The trainer of run {actor.run_id} published no weights that can be read within run.start_deadline_s "
        f"({experiment.run.start_deadline_s:.0f} s): {'; '.join(versions.damaged.values()) or 'see its log'}."
    )


if __name__ == "__main__":
    main()
