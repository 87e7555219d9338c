"""Flow `rollout`: one replica on the devices of this worker's machine, until its run is over."""

import sys

from prefect import flow

from flows.running.children import ProcessFailed, is_too_late, on_devices, run_until_it_ends
from tasks.config.settings import load_settings
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Actor, Ledger
from tasks.lifecycle.scope import say_last_word


@flow(name="rollout", flow_run_name="rollout-{run_id}-{slot}")
def rollout(run_id: str, epoch: int, slot: int, attempt: int) -> None:
    """Serve one rollout replica.

    Args:
        run_id: Run that the replica joins.
        epoch: Plan epoch, which has the replica's devices and concurrency.
        slot: Number of the replica in that plan.
        attempt: Attempt of the slot that was given out to it; it leaves where that is no longer wanted.
    """
    actor = Actor(run_id, "replica", slot, attempt)
    if is_too_late(actor):
        return
    settings = load_settings()
    ledger = Ledger(settings.shared.ledger_url)
    replica = ledger.plan(run_id, epoch).replicas[slot]
    log = RunDirectory(settings.shared.runs / run_id).log_path("replica", slot)
    argv = [sys.executable, "-m", "tasks.rollout.process", "--run", run_id, "--epoch", str(epoch)]
    argv += ["--slot", str(slot), "--attempt", str(attempt)]
    with on_devices(replica, f"{run_id} (rollout {slot})"):
        try:
            run_until_it_ends(argv, replica, f"replica {slot}", log)
        except ProcessFailed as failure:
            if failure.how:  # it could say nothing any more, and this process has seen it
                say_last_word(ledger, actor, "died", failure.how)
            raise
