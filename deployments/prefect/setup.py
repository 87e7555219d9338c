"""Makes a Prefect server match prefect.yaml: pools, queues, deployments with their forms. Safe to run again.

Run as `python -m deployments.prefect.setup ours` against the stack's own server, `… shared` against another's, with
PREFECT_API_URL set; one process, since each start of Prefect's command line takes seconds.
"""

import asyncio
import contextlib
import hashlib
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from deployments.local.sign_in import wait_for_own_servers
from deployments.local.worker import recorded_versions
from deployments.prefect.api import PrefectApi
from deployments.prefect.versions import VARIABLE, differences, local_versions
from planners.errors import UserError
from planners.sections import parse_yaml
from tasks.config.settings import load_settings
from tasks.machine.discovery import CONTROL, discover_machine

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient

DEFAULT_QUEUE = "default"
FILE = Path(__file__).parent / "prefect.yaml"
SERVER_DEADLINE_S = 240.0
_FORMS = ("flows", "planners", "tasks/config", "tasks/training/algorithms")
"""Rooms whose code decides what the forms of the deployments ask."""
DONE = "set-up is complete"
"""Last line of a successful set-up."""
JOB_TEMPLATE = {
    "job_configuration": {"stream_output": True},
    "variables": {"type": "object", "properties": {}, "additionalProperties": False},
}
"""Of all pools: whoever asks for a flow run has no say in its command, directory and environment, nor in anything else
of its process; what an actor has to know stands in the plan."""


class PoolChoice(BaseModel):
    """Where a deployment's runs go."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    work_queue_name: str


class Entry(BaseModel):
    """A deployment in prefect.yaml; `entrypoint` is module:function, `work_pool` is empty in a template."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    entrypoint: str
    description: str
    tags: list[str]
    work_pool: PoolChoice | None = None


def pools(device_types: list[str]) -> list[str]:
    """The pools of a machine: control and one per device type."""
    return [CONTROL, *device_types]


def queue_of(pool: str, machine: str) -> str:
    """The queue that this machine's worker polls in a pool."""
    return DEFAULT_QUEUE if pool == CONTROL else machine


def entrypoints() -> frozenset[str]:
    """What may run, as the server has it once set-up has deployed it: `module.function`."""
    tree = parse_yaml(FILE.read_text())
    return frozenset(item["entrypoint"].replace(":", ".") for item in tree["deployments"] + tree["per_device_type"])


def entries(text: str, machine: str, device_types: list[str]) -> list[Entry]:
    """The deployments a server must have for this machine: templates become one entry per device type."""
    tree = parse_yaml(text)
    control = [Entry.model_validate(item) for item in tree["deployments"]]
    templates = [Entry.model_validate(item) for item in tree["per_device_type"]]
    placed = [
        template.model_copy(
            update={"name": device_type, "work_pool": PoolChoice(name=device_type, work_queue_name=machine)}
        )
        for template in templates
        for device_type in device_types
    ]
    return control + placed


def form_sources() -> list[Path]:
    """The files that decide what set-up writes."""
    root = FILE.parents[2]
    return [
        FILE,
        Path(__file__),
        root / "tasks/planning.py",
        *(source for room in _FORMS for source in sorted((root / room).rglob("*.py"))),
    ]


def fingerprint(machine: str, device_types: list[str]) -> str:
    """Changes with anything that set-up writes: prefect.yaml, the machine, and the code that decides the forms."""
    digest = hashlib.sha256(repr((machine, device_types, local_versions())).encode())
    for source in form_sources():
        digest.update(source.read_bytes())
    return digest.hexdigest()


def check_versions(api: PrefectApi, is_ours: bool) -> None:
    """Refuse a server of another version of Prefect, and one that others set up with other versions (`is_ours` False).

    Raises:
        UserError: names what differs and the remedy.
    """
    here = local_versions()
    server = api.version()
    if server != here["prefect"]:
        raise UserError(
            f"The Prefect server at {api.url} is version {server}, but {here['prefect']} is installed here: install "
            "the same version on both."
        )
    there = None if is_ours else recorded_versions(api)
    if there is not None and (found := differences(here, there)):
        raise UserError(
            f"The Prefect server at {api.url} was set up by other versions: {', '.join(found)}. Install the same on "
            f"every machine, or, once all are upgraded, delete the Prefect variable {VARIABLE}."
        )


def _set_up_patiently(machine: str, device_types: list[str], wanted: list[Entry]) -> None:
    """Set up; again while the server says that its database is busy, as SQLite's is now and then. All of it may repeat.

    Raises:
        UserError: the server stayed busy.
    """
    from prefect.deployments.runner import DeploymentApplyError
    from prefect.exceptions import PrefectHTTPStatusError

    deadline = time.monotonic() + SERVER_DEADLINE_S
    while True:
        try:
            asyncio.run(set_up(machine, device_types, wanted))
            return
        except (PrefectHTTPStatusError, DeploymentApplyError) as error:
            if not _is_busy(error):
                raise
            if time.monotonic() > deadline:
                raise UserError(f"The Prefect server stayed busy for {SERVER_DEADLINE_S:.0f} s.") from None
            print("the server is busy: trying again", flush=True)
        time.sleep(2.0)


async def set_up(machine: str, device_types: list[str], wanted: list[Entry]) -> None:
    """Create or update pools, queues and deployments, then record the versions, which workers wait for."""
    from prefect.client.orchestration import get_client
    from prefect.variables import Variable

    async with get_client() as client:
        for pool in pools(device_types):
            await _ensure_pool(client, pool, queue_of(pool, machine))
        for entry in wanted:
            await _deploy(client, entry)
            print(f"deployed {entry.entrypoint} as {entry.name}", flush=True)
    await Variable.aset(VARIABLE, dict(local_versions()), overwrite=True)


async def _ensure_pool(client: "PrefectClient", pool: str, queue: str) -> None:
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectAlreadyExists

    description = (
        "Flows that decide and supervise." if pool == CONTROL else f"Devices of type {pool}; one queue per machine."
    )
    wanted = WorkPoolCreate(name=pool, type="process", description=description, base_job_template=JOB_TEMPLATE)
    try:
        await client.create_work_pool(wanted)
    except ObjectAlreadyExists:  # one of before may have an open template
        await client.update_work_pool(pool, WorkPoolUpdate(base_job_template=JOB_TEMPLATE))
    if queue != DEFAULT_QUEUE:
        with contextlib.suppress(ObjectAlreadyExists):
            await client.create_work_queue(name=queue, work_pool_name=pool, description=f"Runs placed on {queue}.")


async def _deploy(client: "PrefectClient", entry: Entry) -> None:
    """Create or update one deployment; the server matches it by flow and name."""
    from prefect.client.schemas.actions import DeploymentUpdate
    from prefect.types.entrypoint import EntrypointType
    from prefect.utilities.callables import parameter_schema

    assert entry.work_pool is not None
    module, _, function = entry.entrypoint.partition(":")
    flow: Any = vars(import_module(module))[function]
    deployment = await flow.ato_deployment(
        entry.name,
        entrypoint_type=EntrypointType.MODULE_PATH,  # imported from the environment: Prefect is to look for no file
        description=entry.description,
        tags=entry.tags,
        work_pool_name=entry.work_pool.name,
        work_queue_name=entry.work_pool.work_queue_name,
        version=local_versions()["hexflow"],
        version_type="prefect:simple",  # else each deployment asks git for more
    )
    made = await deployment.aapply()
    if (await client.read_deployment(made)).job_variables:  # the server keeps them at every update
        await client.delete_deployment(made)
        made = await deployment.aapply()
    # A misspelt parameter is refused with its name when the run is asked for, not when a worker has started it.
    closed = {**parameter_schema(flow).model_dump(exclude_unset=True), "additionalProperties": False}
    await client.update_deployment(made, DeploymentUpdate(parameter_openapi_schema=closed))


def _is_busy(error: Exception) -> bool:
    """Whether the server said so, itself or as the cause of what Prefect raised."""
    from prefect.exceptions import PrefectHTTPStatusError

    said = error if isinstance(error, PrefectHTTPStatusError) else error.__cause__
    return isinstance(said, PrefectHTTPStatusError) and said.response.status_code == 503


def main() -> None:
    """Wait for the server, check versions, set up this machine."""
    api, is_ours = PrefectApi(os.environ["PREFECT_API_URL"]), sys.argv[1:] == ["ours"]
    try:
        machine = discover_machine()
        device_types = list(machine.count_by_type())
        wanted = entries(FILE.read_text(), machine.name, device_types)
        for entry in wanted:
            import_module(entry.entrypoint.partition(":")[0])
        if is_ours:
            wait_for_own_servers(load_settings(), SERVER_DEADLINE_S)
        deadline = time.monotonic() + SERVER_DEADLINE_S
        while not api.healthy():
            if time.monotonic() > deadline:
                raise UserError(f"The Prefect server at {api.url} did not answer within {SERVER_DEADLINE_S:.0f} s.")
            time.sleep(0.5)
        check_versions(api, is_ours)
        _set_up_patiently(machine.name, device_types, wanted)
    except UserError as error:
        sys.exit(str(error))
    print(DONE)


if __name__ == "__main__":
    main()
