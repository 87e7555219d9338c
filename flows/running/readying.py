"""Asks a machine to make itself ready for an experiment, on its own queues, and waits: nothing of it is done here.

What was measured before lies on shared storage, so one flow run does: `prepare` where every device type has a profile,
`profile` for each type that has none, which prepares first.
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.exceptions import PrefectException
from prefect.states import Cancelling

from flows.running.launcher import patiently, without_repeats
from planners.errors import UserError
from planners.hardware.machine import Machine
from planners.hardware.profile import DeviceProfile
from tasks.config.experiment import Experiment
from tasks.config.passwords import without_password
from tasks.config.settings import load_settings
from tasks.models.prepare import LOCK_DEADLINE_S
from tasks.profiling.profile import PART_DEADLINE_S, find_profile
from tasks.wishes import usable_devices

READY_DEADLINE_S = LOCK_DEADLINE_S + 2 * PART_DEADLINE_S
"""The longest that a machine may prepare a model and measure both parts of a device."""
START_DEADLINE_S = 120.0
"""The longest that a queue which a worker polls leaves a flow run waiting."""
POLL_S = 0.5
TELL_EVERY_S = 10.0
_log = logging.getLogger(__name__)


def ready_and_measured(
    experiment: Experiment, machine: Machine, run: str | None = None, tell: Callable[[str], object] = print
) -> dict[str, DeviceProfile]:
    """A profile of each device type that the experiment may use, once the machine has made itself ready.

    Args:
        experiment: what is to be run.
        machine: where.
        run: id of the run that is resumed or begun, whose files take room already.
        tell: is called with what the machine is at, whenever that changes.

    Raises:
        UserError: the machine cannot serve the experiment, or was not ready within a deadline.
    """
    settings = load_settings()
    types = list(usable_devices(experiment, machine).count_by_type())
    missing = [name for name in types if find_profile(experiment, machine, name, settings) is None]
    asked: dict[str, dict[str, Any]] = {f"profile/{name}": {"device_type": name} for name in missing}
    with get_client(sync_client=True) as client:
        flows = asked or {f"prepare/{types[0]}": {}}
        _run_all(client, flows, experiment, machine.name, run, tell)
    profiles = {name: find_profile(experiment, machine, name, settings) for name in types}
    if lost := [name for name, profile in profiles.items() if profile is None]:
        raise UserError(
            f"{machine.name} measured {', '.join(lost)}, but no profile of this model and these versions is in "
            f"{settings.shared.profiles}: install the same versions on every machine, and share HEXFLOW_RUNS."
        )
    return {name: profile for name, profile in profiles.items() if profile is not None}


@dataclass
class _Asked:
    """A flow run on the machine's queue; `state` is what was last heard of it."""

    deployment: str
    flow_run: FlowRun
    state: State[Any] | None = None

    @property
    def is_over(self) -> bool:
        return self.state is not None and self.state.is_final()

    @property
    def has_begun(self) -> bool:
        return self.state is not None and not self.state.is_scheduled() and not self.state.is_pending()


def _run_all(
    client: SyncPrefectClient,
    deployments: Mapping[str, dict[str, Any]],
    experiment: Experiment,
    queue: str,
    run: str | None,
    tell: Callable[[str], object],
) -> None:
    """Run deployments beside each other on a machine's queue; whatever ends this ends those that are not over.

    Raises:
        UserError: one failed, in its own words, or a deadline passed.
        RunFailed: the Prefect server did not come back.
    """
    asked: list[_Asked] = []
    try:
        for deployment, parameters in deployments.items():
            whole = {"experiment": experiment.model_dump(mode="json"), "run": run, **parameters}
            start = partial(_start, deployment, whole, queue)
            asked.append(_Asked(deployment, patiently(start, f"{deployment} on {queue}")))
        with without_repeats():
            _wait_for_all(client, asked, queue, tell)
    finally:
        with without_repeats():
            for flow in asked:
                if not flow.is_over:
                    with suppress(httpx.HTTPError, PrefectException):
                        client.set_flow_run_state(flow.flow_run.id, Cancelling())


def _start(deployment: str, parameters: dict[str, Any], queue: str, key: str) -> FlowRun:
    run = parameters["run"]
    created = run_deployment(
        deployment,
        parameters=parameters,
        work_queue_name=queue,
        tags=["hexflow", *([f"run:{run}"] if run else [])],
        timeout=0,
        idempotency_key=key,
        as_subflow=True,
    )
    return cast(FlowRun, created)  # outside an event loop it is no coroutine


def _wait_for_all(client: SyncPrefectClient, asked: list[_Asked], queue: str, tell: Callable[[str], object]) -> None:
    began = told = time.monotonic()
    known: list[str] = []
    while going := [flow.deployment for flow in asked if not flow.is_over]:
        if going != known:
            known = going
            tell(f"{queue} makes itself ready: {', '.join(going)}")
        for flow in asked:
            try:
                flow.state = client.read_flow_run(flow.flow_run.id).state
            except (httpx.HTTPError, PrefectException) as error:
                _log.warning("the Prefect server is away: %s", without_password(str(error)))
            if flow.state is not None and flow.is_over and not flow.state.is_completed():
                raise UserError(flow.state.message or f"{flow.deployment} on {queue} ended as {flow.state.name}.")
        waited_s = time.monotonic() - began
        late = [flow.deployment for flow in asked if not flow.has_begun]
        if late and waited_s > START_DEADLINE_S:
            raise UserError(
                f"Nobody on {queue} has begun {', '.join(late)} for {waited_s:.0f} s: start its workers with "
                "`hexflow up`."
            )
        late = [flow.deployment for flow in asked if not flow.is_over]
        if waited_s > READY_DEADLINE_S:
            raise UserError(f"{queue} was not through with {', '.join(late)} after {waited_s:.0f} s: see their logs.")
        if late and time.monotonic() - told > TELL_EVERY_S:
            told = time.monotonic()
            print(f"{queue} is still at {', '.join(late)}, {waited_s:.0f} s so far")
        time.sleep(POLL_S)
