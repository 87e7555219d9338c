"""Flow `rollout`: one replica on the devices of this worker's machine, until its run is over."""

import sys
from pathlib import Path

from prefect import flow

from flows.running.children import is_too_late, on_devices, run_until_it_ends
from planners.plan.actors import Placement
from tasks.config.settings import load_settings
from tasks.exchange.layout import RunDirectory


@flow(name="rollout", flow_run_name="rollout-{run_id}-{placement.slot}")
def rollout(run_id: str, model_path: str, placement: Placement, supervisor: int) -> None:
    """Serve one rollout replica.

    Args:
        run_id: Run that the replica joins.
        model_path: Prepared model directory.
        placement: Devices and concurrency, as the plan has them.
        supervisor: Attempt of the supervisor that starts it; it leaves where the run has another.
    """
    if is_too_late(run_id, supervisor):
        return
    log = RunDirectory(load_settings().runs / run_id).logs / f"replica-{placement.slot}.log"
    argv = [sys.executable, "-m", "tasks.rollout.process", "--run", run_id]
    argv += ["--model-path", str(Path(model_path)), "--placement", placement.model_dump_json()]
    with on_devices(placement, run_id):
        run_until_it_ends(argv, placement, log)
