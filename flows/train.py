"""Flow `train`: the trainer's ranks on the devices of this worker's machine, until the last step."""

from prefect import flow

from flows.running.children import is_too_late, on_devices
from tasks.config.settings import load_settings
from tasks.exchange.ledger import Actor, Ledger
from tasks.training.launch import run_trainer


@flow(name="train", flow_run_name="train-{run_id}")
def train(
    run_id: str,
    epoch: int,
    machine: str,
    attempt: int,
    master: str | None = None,
) -> None:
    """Train until the run's last step.

    Args:
        run_id: Run to train for.
        epoch: Plan epoch, which has the trainer's devices and layout.
        machine: This machine, as the plan calls it.
        attempt: Attempt of the trainer that was given out to it; it leaves where that is no longer wanted.
        master: HOST:PORT where the ranks of several machines meet; empty: all are here.
    """
    if is_too_late(Actor(run_id, "trainer", 0, attempt)):
        return
    share, _ = Ledger(load_settings().shared.ledger_url).plan(run_id, epoch).trainer.share_of(machine)
    with on_devices(share, f"{run_id} (train 0)"):
        run_trainer(run_id, epoch, machine, attempt, master)
