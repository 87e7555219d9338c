"""A Prefect process worker for one queue of one pool, that serves only a server of its own versions.

Run as `python -m deployments.local.worker POOL QUEUE`.
"""

import asyncio
import json
import os
import signal
import sys
import time

from deployments.local.sign_in import wait_for_own_servers
from deployments.prefect.api import PrefectApi, Unreachable
from deployments.prefect.versions import VARIABLE, differences, local_versions
from planners.errors import UserError
from tasks.config.settings import load_settings

SETUP_DEADLINE_S = 300.0


def wait_for_setup(api: PrefectApi, deadline_s: float = SETUP_DEADLINE_S) -> None:
    """Wait until set-up has recorded the versions that are installed here; it runs while workers start.

    Raises:
        UserError: nothing was recorded in time, or other versions were.
    """
    deadline = time.monotonic() + deadline_s
    here = local_versions()
    while (there := recorded_versions(api)) != here:
        if time.monotonic() > deadline:
            if there is None:
                raise UserError(f"{api.url} was not set up within {deadline_s:.0f} s: see logs/setup.log.")
            raise UserError(
                f"This worker cannot serve {api.url}: {', '.join(differences(here, there))}. Install the same versions "
                "on both, then run `hexflow down` and `hexflow up`."
            )
        time.sleep(0.5)


def recorded_versions(api: PrefectApi) -> dict[str, str] | None:
    """The versions that set-up recorded on the server; None before set-up, or while the server does not answer."""
    try:
        found = api.call("POST", "/variables/filter", {"variables": {"name": {"any_": [VARIABLE]}}})
    except Unreachable:
        return None
    if not found:
        return None
    recorded = found[0]["value"]
    return dict(json.loads(recorded)) if isinstance(recorded, str) else dict(recorded)


def worker_name(pool: str, queue: str) -> str:
    """Name by which the server lists the worker."""
    return f"{pool}-{queue}"


async def serve(pool: str, queue: str) -> None:
    """Poll the queue until SIGTERM, which kills flow runs in progress: `hexflow down` ends these first."""
    from deployments.local.process_worker import OwnFlowsWorker

    serving = asyncio.current_task()
    assert serving is not None
    # Prefect's own handler turns SIGTERM into Ctrl-C, which a process that a script started in the background ignores.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    worker = OwnFlowsWorker(
        name=worker_name(pool, queue),
        work_pool_name=pool,
        work_queues=[queue],
        create_pool_if_not_found=False,
        heartbeat_interval_seconds=5,
    )
    try:
        await worker.start()
    except asyncio.CancelledError:
        print(f"Worker {worker.name} stopped.")


def main() -> None:
    """Look whose server it is and which versions it has, then serve."""
    pool, queue = sys.argv[1:]
    try:
        wait_for_own_servers(load_settings())
        wait_for_setup(PrefectApi(os.environ["PREFECT_API_URL"]))
    except UserError as error:
        sys.exit(str(error))
    asyncio.run(serve(pool, queue))


if __name__ == "__main__":
    main()
