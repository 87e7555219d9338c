"""The whole stack, for real: it keeps its schedules, starts, heals and ends."""

import os
import signal

import pytest

from deployments.local import servers, stack
from deployments.prefect.api import PrefectApi
from planners.errors import UserError
from tasks.config.settings import Settings
from tests.support.places import DEPLOYMENTS
from tests.support.stack import flow_runs, hexflow, runs, until

pytestmark = pytest.mark.e2e


def test_a_schedule_of_a_minute_starts_runs(stack_settings: Settings) -> None:
    """Those made in the UI run, and complete; with SQLAlchemy 2.1 Prefect schedules none, and only logs it."""
    assert hexflow("up").returncode == 0
    found = stack.find(stack_settings)
    assert found is not None
    api = PrefectApi(found.prefect_url)
    deployment = api.call("GET", "/deployments/name/plan/plan")["id"]
    parameters = {"cluster": {"file": str(DEPLOYMENTS / "clusters" / "laptop.yaml")}}
    every_minute = {"schedule": {"cron": "* * * * *"}, "active": True, "parameters": parameters}
    (schedule,) = api.call("POST", f"/deployments/{deployment}/schedules", [every_minute])

    def scheduled_states() -> set[str]:
        body = {"deployments": {"id": {"any_": [deployment]}}, "flow_runs": {"tags": {"all_": ["auto-scheduled"]}}}
        return {run["state"]["type"] for run in api.call("POST", "/flow_runs/filter", body)}

    try:
        until(lambda: not scheduled_states() <= {"SCHEDULED", "PENDING", "RUNNING"}, 300, "a scheduled run's end")
    finally:
        api.call("DELETE", f"/deployments/{deployment}/schedules/{schedule['id']}")
    assert scheduled_states() <= {"SCHEDULED", "PENDING", "RUNNING", "COMPLETED"}


def test_a_real_stack_starts_heals_and_ends(stack_settings: Settings) -> None:
    """Set-up made what prefect.yaml says; `up` again is a no-op; a killed worker comes back; `down` leaves nothing."""
    up = hexflow("up")
    assert up.returncode == 0, up.stderr
    first = stack.find(stack_settings)
    assert first is not None
    assert set(first.members) == {"prefect", "mlflow", "worker-control", "worker-fast", "worker-slow"}
    api = PrefectApi(first.prefect_url)
    form = api.call("GET", "/deployments/name/rl/rl")["parameter_openapi_schema"]
    assert form["definitions"]["OptimizerSection"]["properties"]["lr"]["description"]
    assert form["definitions"]["Cispo"]["properties"]["weight_cap"]["description"]
    placed = api.call("GET", "/deployments/name/rollout/slow")
    assert (placed["work_pool_name"], placed["work_queue_name"]) == ("slow", "tester")
    with pytest.raises(UserError, match=r"Additional properties are not allowed \('runn' was unexpected\)$"):
        api.create_flow_run("evaluate/slow", {"runn": "tiny-1"})
    with pytest.raises(UserError, match=r"'experiment\.run'.*\('stepps' was unexpected\)$"):
        api.create_flow_run("rl/rl", {"experiment": {"run": {"stepps": 1}}})
    assert hexflow("status").returncode == 0

    assert hexflow("up").returncode == 0
    again = stack.find(stack_settings)
    assert again is not None
    assert again.members == first.members
    until(lambda: not flow_runs(stack_settings), 120, "the end of the processes of earlier tests' flow runs")
    pss = {
        " ".join(process.cmdline()): process.memory_full_info().pss
        for process, _ in servers.marked_processes(stack_settings)
    }
    assert sum(pss.values()) < 1.5 * 2**30, pss

    os.kill(first.members["worker-slow"].pid, signal.SIGKILL)
    assert hexflow("up").returncode == 0
    healed = stack.find(stack_settings)
    assert healed is not None
    assert healed.members["worker-slow"].pid != first.members["worker-slow"].pid
    assert healed.members["prefect"] == first.members["prefect"]

    processes = [process for process, _ in servers.marked_processes(stack_settings)]
    assert len(processes) >= len(healed.members)
    assert hexflow("down").returncode == 0
    assert not [process for process in processes if runs(process)]
    for name in ("worker-control", "worker-fast"):  # the other one may have been starting still
        assert " stopped.\n" in healed.members[name].log.read_text(), f"{name} did not hear SIGTERM and was killed"
    assert hexflow("status").returncode == 1
