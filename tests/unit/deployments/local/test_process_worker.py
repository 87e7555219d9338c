"""What a worker of ours runs: hexflow's flows, as set-up deploys them, and in its own environment."""

import asyncio
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.types.entrypoint import EntrypointType
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker

from deployments.local.process_worker import OwnFlowsWorker, OwnJob, own_entrypoint
from deployments.prefect import setup
from planners.errors import UserError

OPEN_TEMPLATE = ProcessWorker.get_default_base_job_template()
"""As pools of before have it, and as somebody may write it anew."""


def flow_run(**job_variables: Any) -> FlowRun:
    return FlowRun(flow_id=uuid4(), name="asked-for", job_variables=job_variables)


def deployment(entrypoint: str | None, pull_steps: Any = None, **job_variables: Any) -> DeploymentResponse:
    facts = {"name": "cpu", "entrypoint": entrypoint, "pull_steps": pull_steps, "job_variables": job_variables}
    return cast(DeploymentResponse, SimpleNamespace(**facts))


def test_what_set_up_deploys_is_run() -> None:
    for entry in setup.entries(setup.FILE.read_text(), "here", ["cpu"]):
        module, _, function = entry.entrypoint.partition(":")
        flow = getattr(import_module(module), function)
        made = flow.to_deployment(entry.name, entrypoint_type=EntrypointType.MODULE_PATH)
        assert own_entrypoint(flow_run(), deployment(made.entrypoint, [])) == f"{module}.{function}"


@pytest.mark.parametrize(
    "entrypoint", ["os.system", "flows/rl.py:rl", "/tmp/flows/rl.py:rl", "flows.rl:rl", "flows.rl.rl ", "", None]
)
def test_an_entrypoint_that_is_not_ours_is_refused(entrypoint: str | None) -> None:
    with pytest.raises(UserError, match=r"is no flow of hexflow's"):
        own_entrypoint(flow_run(), deployment(entrypoint))


def test_steps_before_the_flow_are_refused() -> None:
    steps = [{"prefect.deployments.steps.run_shell_script": {"script": "id"}}]
    with pytest.raises(UserError, match="has pull steps"):
        own_entrypoint(flow_run(), deployment("flows.rl.rl", steps))


def test_a_flow_run_without_a_deployment_is_refused() -> None:
    """Before a process is started for it: nothing but the deployment says what that would load."""
    worker = OwnFlowsWorker(work_pool_name="cpu")
    with pytest.raises(UserError, match="belongs to no deployment"):
        asyncio.run(worker.run(flow_run(), OwnJob()))


@pytest.mark.parametrize(
    "variables", [{"command": "id"}, {"env": {"A": "1"}}, {"env.A": "1"}, {"working_dir": "/tmp"}, {"labels": {}}]
)
def test_job_variables_are_refused(variables: dict[str, Any]) -> None:
    (name,) = variables
    for asked, deployed in (
        (flow_run(**variables), deployment("flows.rl.rl")),
        (flow_run(), deployment("flows.rl.rl", **variables)),
    ):
        with pytest.raises(UserError, match=rf"job variables \({name}\)"):
            own_entrypoint(asked, deployed)


@pytest.mark.parametrize("values", [{}, {"command": "id", "working_dir": "/tmp", "env": {"A": "1"}, "env.B": "2"}])
def test_neither_a_template_nor_variables_reach_a_process(values: dict[str, Any]) -> None:
    """Of pools of before, of one that somebody wrote anew since set-up closed it, or of ours."""
    evil: dict[str, Any] = {
        "job_configuration": {"command": "id", "working_dir": "/tmp", "env": {"LD_PRELOAD": "/tmp/x.so"}},
        "variables": {"properties": {"env": {"default": {"LD_PRELOAD": "/tmp/x.so"}}, "command": {"default": "id"}}},
    }
    for template in (OPEN_TEMPLATE, evil, setup.JOB_TEMPLATE):
        job = asyncio.run(OwnJob.from_template_and_values(template, values))
        assert (job.command, job.working_dir, job.env) == (None, None, {})


def test_the_template_of_our_pools_takes_nothing() -> None:
    """So that Prefect's server refuses what the worker would, when it is asked for."""
    asked = {"command": "id", "working_dir": "/tmp", "env": {"A": "1"}, "env.B": "2"}
    fill: Any = ProcessJobConfiguration.from_template_and_values
    taken = asyncio.run(fill(setup.JOB_TEMPLATE, asked, client=object()))
    assert (taken.command, taken.working_dir, taken.env) == (None, None, {})
    assert setup.JOB_TEMPLATE["variables"] == {"type": "object", "properties": {}, "additionalProperties": False}
