"""What a server is set up with, and which workers may serve it."""

import inspect
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from pydantic import BaseModel

from deployments.local import servers
from deployments.local.worker import wait_for_setup
from deployments.prefect import setup
from deployments.prefect.api import PrefectApi, Unreachable
from deployments.prefect.versions import differences, local_versions
from planners.errors import UserError
from planners.sections import parse_yaml

ROOMS = ("planners", "tasks", "flows", "deployments")


class FakeServer:
    """Answers every request with the JSON that was set for its path, 404 without one."""

    def __init__(self) -> None:
        self.answers: dict[str, object] = {}
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                found = self.path in fake.answers
                self.send_response(200 if found else 404)
                self.end_headers()
                self.wfile.write(json.dumps(fake.answers.get(self.path, {"detail": "none such"})).encode())

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/api"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


ACTED = ("train", "rollout", "prepare", "profile", "evaluate")
"""What a machine does, on the pools of its device types."""


def test_prefect_yaml_places_every_deployment() -> None:
    placed = setup.entries(setup.FILE.read_text(), "here", ["fast", "slow"])
    where = {(entry.entrypoint.split(":")[1], entry.name): entry.work_pool for entry in placed}
    assert {key for key in where if key[0] in ACTED} == {(flow, name) for flow in ACTED for name in ("fast", "slow")}
    assert where["rollout", "slow"] == setup.PoolChoice(name="slow", work_queue_name="here")
    for name in ("rl", "plan"):
        assert where[name, name] == setup.PoolChoice(name="control", work_queue_name="default")


def test_prefect_yaml_names_flows_that_exist() -> None:
    tree = parse_yaml(setup.FILE.read_text())
    root = setup.FILE.parents[2]
    for item in tree["deployments"] + tree["per_device_type"]:
        module, function = item["entrypoint"].split(":")
        assert f"def {function}(" in (root / f"{module.replace('.', '/')}.py").read_text()


def reachable_models(annotation: Any, found: set[type[BaseModel]]) -> None:
    """The models that a form asks, however deep in lists, unions and other models."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation not in found:
        found.add(annotation)
        for field in annotation.model_fields.values():
            reachable_models(field.annotation, found)
    for part in get_args(annotation):
        reachable_models(part, found)


def test_a_change_of_any_form_sets_up_anew() -> None:
    """Each model that a deployment's parameters reach lies in a file that the fingerprint reads."""
    sources, models = set(setup.form_sources()), set[type[BaseModel]]()
    for entry in setup.entries(setup.FILE.read_text(), "here", ["cpu"]):
        module, function = entry.entrypoint.split(":")
        flow = getattr(import_module(module), function)
        for annotation in get_type_hints(flow.fn, include_extras=True).values():
            reachable_models(annotation, models)
    files = {Path(inspect.getfile(model)) for model in models if model.__module__.split(".")[0] in ROOMS}
    assert {file.name for file in files} >= {"cispo.py", "data.py", "sections.py"}
    assert files - sources == set()


def test_differences_of_versions() -> None:
    assert differences({"prefect": "3.7.7"}, {"prefect": "3.7.7"}) == []
    assert differences({"prefect": "3.7.7"}, {"prefect": "3.9.1"}) == ["prefect is 3.7.7 here and 3.9.1 there"]


def test_a_worker_refuses_other_versions(server: FakeServer) -> None:
    server.answers["/api/variables/filter"] = [{"value": {**local_versions(), "prefect": "3.9.1"}}]
    with pytest.raises(UserError, match=r"prefect is .* here and 3\.9\.1 there"):
        wait_for_setup(PrefectApi(server.url), deadline_s=0.0)
    server.answers["/api/variables/filter"] = [{"value": json.dumps(local_versions())}]
    wait_for_setup(PrefectApi(server.url), deadline_s=0.0)


def test_set_up_refuses_another_prefect(server: FakeServer) -> None:
    server.answers["/api/admin/version"] = "2.0.0"
    with pytest.raises(UserError, match=r"is version 2\.0\.0"):
        setup.check_versions(PrefectApi(server.url), is_ours=True)


def test_set_up_refuses_a_shared_server_of_other_versions(server: FakeServer) -> None:
    server.answers["/api/admin/version"] = local_versions()["prefect"]
    server.answers["/api/variables/filter"] = [{"value": {**local_versions(), "wire_schema": "0"}}]
    with pytest.raises(UserError, match="wire_schema"):
        setup.check_versions(PrefectApi(server.url), is_ours=False)
    setup.check_versions(PrefectApi(server.url), is_ours=True)


def test_refusals_and_outages_are_told_apart(server: FakeServer) -> None:
    with pytest.raises(UserError, match=r"refused GET /flow_runs/1 \(404\): none such$"):
        PrefectApi(server.url).flow_run("1")
    with pytest.raises(Unreachable):
        PrefectApi(f"http://127.0.0.1:{servers.choose_port(0)}/api").flow_run("1")
