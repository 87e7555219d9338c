"""The whole stack, for real: it keeps its schedules, starts, heals and ends."""

import http.client
import os
import re
import signal
import socket
import subprocess
from typing import Any

import httpx
import psutil
import pytest
from prefect.workers.process import ProcessWorker

from deployments.local import servers, stack
from deployments.local.secret import read_pair
from deployments.local.sign_in import api_of
from deployments.prefect import setup
from deployments.web import basic
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
    api = api_of(stack_settings, found)
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


def status_of(url: str, path: str, body: str | None = None, **headers: str) -> int:
    """What a request is answered with; header names are written with underscores. Upgrade asks for a websocket."""
    connection = http.client.HTTPConnection(url.removeprefix("http://").removesuffix("/api"), timeout=30)
    try:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("GET" if body is None else "POST", path, body, given)
        return connection.getresponse().status
    finally:
        connection.close()


WEBSOCKET = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ==",
    "Sec_WebSocket_Version": "13",
    "Sec_WebSocket_Protocol": "prefect",
}


def test_other_users_and_web_pages_get_nothing_from_a_real_stack(stack_settings: Settings) -> None:
    """Neither server serves who has no secret; a browser gets in by the page of `hexflow open`."""
    assert hexflow("up").returncode == 0
    found = stack.find(stack_settings)
    assert found is not None
    prefect, mlflow, key = found.prefect_url, found.mlflow_url, basic(read_pair(stack_settings))
    data = {prefect: "/api/flow_runs/filter", mlflow: "/api/2.0/mlflow/experiments/search"}
    for url, path in data.items():
        assert status_of(url, path, "{}") == 401
        assert status_of(url, path, '{"max_results": 1}', Authorization=key, Content_Type="application/json") == 200
        assert status_of(url, path, "{}", Authorization=key, Host="evil.example") == 421
        assert status_of(url, path, "{}", Authorization=key, Origin="http://evil.example") == 403
    for path in ("/api/events/out", "/api/logs/out"):
        assert status_of(prefect, path, **WEBSOCKET) == 101, "Prefect asks for the secret in the first message"
        assert status_of(prefect, path, **WEBSOCKET, Host="evil.example") == 421
        assert status_of(prefect, path, **WEBSOCKET, Origin="http://evil.example") == 403
    refused = websocket_answer(prefect, '{"type": "auth", "token": "hexflow:other"}')
    assert b"auth_success" not in refused
    assert b"auth_success" in websocket_answer(prefect, f'{{"type": "auth", "token": "{read_pair(stack_settings)}"}}')

    assert hexflow("open").returncode == 0
    with httpx.Client(trust_env=False) as browser:
        page = (stack_settings.local.home / "open.html").read_text()
        for _ in range(2):  # MLflow's, which leads to Prefect's
            (action,) = re.findall(r'action="([^"]+)"', page)
            fields = dict(re.findall(r'name="([^"]+)" value="([^"]+)"', page))
            page = browser.post(action, data=fields, headers={"Origin": "null"}).raise_for_status().text
        assert browser.post(action, data=fields).status_code == 403, "a ticket is good for once"
        assert browser.get(mlflow).status_code == 200
        (stored,) = re.findall(r"'prefect-password', \"([^\"]+)\"", page)
        signed = {"Authorization": f"Basic {stored}"}
        assert browser.get(f"{prefect}/admin/version", headers=signed).status_code == 200
    secret = read_pair(stack_settings).partition(":")[2].encode()
    files = [file for file in stack_settings.local.home.rglob("*") if file.is_file() and not file.is_symlink()]
    assert [file.name for file in files if secret in file.read_bytes()] == ["secret"]
    commands = [" ".join(process.cmdline()) for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]]
    assert not [command for command in commands if secret.decode() in command]


def websocket_answer(prefect_url: str, said: str) -> bytes:
    """What Prefect says to a first message."""
    host, port = prefect_url.removeprefix("http://").removesuffix("/api").split(":")
    frame = bytes([0x81, 0x80 | 126]) + len(said).to_bytes(2, "big") + bytes(4) + said.encode()  # masked by zeros
    lines = ["GET /api/events/out HTTP/1.1", f"Host: {host}:{port}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in WEBSOCKET.items()]
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        heard = b""
        while b"\r\n\r\n" not in heard:
            heard += connection.recv(4096)
        connection.sendall(frame)
        return connection.recv(4096)


def test_nobody_has_a_command_run_by_the_workers(stack_settings: Settings) -> None:
    """Not even who is signed in; the template of a pool of before is closed by set-up."""
    assert hexflow("up").returncode == 0
    found = stack.find(stack_settings)
    assert found is not None
    api = api_of(stack_settings, found)
    command = {"command": f"touch {stack_settings.local.home / 'owned'}"}
    rl = api.call("GET", "/deployments/name/rl/rl")["id"]

    def states(run_ids: list[str]) -> dict[str, str]:
        runs = [api.flow_run(run_id) for run_id in run_ids]
        return {run["id"]: f"{run['state']['type']} {run['state'].get('message')}" for run in runs}

    asking: dict[str, Any] = {"job_variables": command}
    with pytest.raises(UserError, match="422"):
        api.call("POST", f"/deployments/{rl}/create_flow_run", asking)
    flow = api.call("POST", "/flows/", {"name": "evil"})["id"]
    deployments: dict[str, dict[str, Any]] = {
        "entrypoint": {"entrypoint": "os.system"},
        "steps": {
            "entrypoint": "flows.rl.rl",
            "pull_steps": [{"prefect.deployments.steps.run_shell_script": {"script": "id"}}],
        },
    }
    asked = {}
    for name, what in deployments.items():
        made = api.call("POST", "/deployments/", {"name": name, "flow_id": flow, "work_pool_name": "control", **what})
        asked[api.call("POST", f"/deployments/{made['id']}/create_flow_run", {})["id"]] = name
    open_template = ProcessWorker.get_default_base_job_template()
    api.call("PATCH", "/work_pools/control", {"base_job_template": open_template})
    asked[api.call("POST", f"/deployments/{rl}/create_flow_run", asking)["id"]] = "variables"
    until(lambda: all(state[:7] == "CRASHED" for state in states(list(asked)).values()), 120, "refusals by the worker")
    told = {asked[run_id]: state for run_id, state in states(list(asked)).items()}
    assert "is os.system, which is no flow of hexflow's" in told["entrypoint"]
    assert "has pull steps" in told["steps"]
    assert "job variables (command)" in told["variables"]
    assert not (stack_settings.local.home / "owned").exists()

    variables = servers.environment(stack_settings, found.prefect_url, found.mlflow_url)
    variables |= servers.credentials(read_pair(stack_settings), found.own)
    subprocess.run(servers.setup_argv(is_ours=True), env=os.environ | variables, check=True, timeout=120)
    assert api.call("GET", "/work_pools/control")["base_job_template"] == setup.JOB_TEMPLATE
    with pytest.raises(UserError, match="422"):
        api.call("POST", f"/deployments/{rl}/create_flow_run", asking)


def test_a_real_stack_starts_heals_and_ends(stack_settings: Settings) -> None:
    """Set-up made what prefect.yaml says; `up` again is a no-op; a killed worker comes back; `down` leaves nothing."""
    up = hexflow("up")
    assert up.returncode == 0, up.stderr
    first = stack.find(stack_settings)
    assert first is not None
    assert set(first.members) == {"prefect", "mlflow", "worker-control", "worker-fast", "worker-slow"}
    api = api_of(stack_settings, first)
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
