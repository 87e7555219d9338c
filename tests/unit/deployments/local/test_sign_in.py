"""How the command signs in, and hands a browser its tickets, at servers that stand for the stack's."""

import http.server
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from deployments.local import sign_in
from deployments.local.gate import OPEN_PATH, TICKET_PATH
from deployments.local.secret import make_secret, secret_path
from deployments.local.servers import MLFLOW, PREFECT, Member, StackState, save_state
from deployments.web import basic
from planners.errors import UserError
from tasks.config.settings import Settings
from tasks.machine.processes import process_key


class Gated(http.server.ThreadingHTTPServer):
    """Tells everything but its health, and gives tickets, to those only who give `key`; remembers what it was given."""

    def __init__(self, key: str) -> None:
        self.given: list[tuple[str, str | None]] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            server: Gated

            def do_GET(self) -> None:
                given = self.headers.get("Authorization")
                self.server.given.append((self.path, given))
                self.send_response(200 if self.path.endswith("/health") or given == key else 401)
                self.end_headers()
                self.wfile.write(b"a-ticket" if self.path == TICKET_PATH else b"")

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


@contextmanager
def gated(key: str) -> Iterator[Gated]:
    with Gated(key) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def pair(settings: Settings) -> str:
    return make_secret(settings)


@pytest.fixture
def prefect(pair: str) -> Iterator[Gated]:
    with gated(basic(pair)) as server:
        yield server


@pytest.fixture
def mlflow(pair: str) -> Iterator[Gated]:
    with gated(basic(pair)) as server:
        yield server


@pytest.fixture
def idle() -> Iterator[int]:
    """Pid of a process that listens nowhere."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def state_of(settings: Settings, prefect: Gated, mlflow: Gated, pid: int = os.getpid()) -> StackState:
    """A stack with these two servers, which listen in this process."""
    urls = {PREFECT: f"{prefect.url}/api", MLFLOW: mlflow.url}
    member = Member(pid=pid, key=process_key(pid), log=settings.local.logs / "log")
    return StackState(
        prefect_url=urls[PREFECT],
        mlflow_url=urls[MLFLOW],
        identity={},
        own_urls=urls,
        members={PREFECT: member, MLFLOW: member},
    )


def test_the_page_hands_both_servers_their_tickets_and_no_secret(
    settings: Settings, pair: str, prefect: Gated, mlflow: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    said: list[str] = []
    sign_in.open_pages(settings, state_of(settings, prefect, mlflow), said.append)
    place = settings.local.home / "open.html"
    page = place.read_text()
    assert place.stat().st_mode & 0o777 == 0o600
    assert f'action="{mlflow.url}{OPEN_PATH}"' in page
    assert f'name="next" value="{prefect.url}{OPEN_PATH}"' in page
    assert page.count('value="a-ticket"') == 2
    assert [given for path, given in prefect.given + mlflow.given if path == TICKET_PATH] == [basic(pair)] * 2
    told, secret = " ".join(said), pair.partition(":")[2]
    assert secret not in page + told
    assert place.as_uri() in told
    assert str(secret_path(settings)) in told
    assert f"{prefect.url} asks for hexflow:SECRET" in told


def test_a_server_of_somebody_else_s_is_not_opened_and_is_told_no_secret(
    settings: Settings, pair: str, prefect: Gated, mlflow: Gated
) -> None:
    state = state_of(settings, prefect, mlflow).model_copy(update={"own_urls": {PREFECT: f"{prefect.url}/api"}})
    sign_in.open_pages(settings, state, print)
    assert "next" not in (settings.local.home / "open.html").read_text()
    assert mlflow.given == []
    with pytest.raises(UserError, match="Both servers are named in the environment"):
        sign_in.open_pages(settings, state.model_copy(update={"own_urls": {}}), print)


def test_who_has_taken_the_port_is_not_told_the_secret(
    settings: Settings, pair: str, prefect: Gated, mlflow: Gated, idle: int
) -> None:
    """Our server was killed, and another user's program listens where it was."""
    state = state_of(settings, prefect, mlflow, pid=idle)
    assert sign_in.fault_of(settings, state, PREFECT) == "is another program's now"
    with pytest.raises(UserError, match="is another program's now: run `hexflow up`"):
        sign_in.open_pages(settings, state, print)
    gone = state.model_copy(update={"members": {"worker-cpu": state.members[PREFECT]}})
    assert sign_in.fault_of(settings, gone, MLFLOW) == "is another program's now"
    assert [given for _, given in prefect.given + mlflow.given if given] == []


def test_nobody_begins_with_a_question_to_a_server_that_is_not_ours(
    settings: Settings, pair: str, prefect: Gated, mlflow: Gated, idle: int
) -> None:
    """Ours takes seconds to listen, and its arguments tell all users where it will."""
    ours = state_of(settings, prefect, mlflow)
    theirs = state_of(settings, prefect, mlflow, pid=idle)
    elsewhere = theirs.model_copy(update={"own_urls": {}})
    for state in (ours, elsewhere):
        save_state(settings, state)
        sign_in.wait_for_own_servers(settings, deadline_s=0.0)
    save_state(settings, theirs)
    with pytest.raises(UserError, match="did not listen within 0 s"):
        sign_in.wait_for_own_servers(settings, deadline_s=0.0)
    assert prefect.given + mlflow.given == []


def test_a_secret_that_was_changed_under_a_stack_is_told(settings: Settings, prefect: Gated, mlflow: Gated) -> None:
    state = state_of(settings, prefect, mlflow)
    assert sign_in.fault_of(settings, state, PREFECT) == sign_in.fault_of(settings, state, MLFLOW) == ""
    secret_path(settings).unlink()
    with pytest.raises(UserError, match="is not there"):
        sign_in.fault_of(settings, state, PREFECT)
    make_secret(settings)
    for name in (PREFECT, MLFLOW):
        assert sign_in.fault_of(settings, state, name) == "refuses the stack's secret"
    with pytest.raises(UserError, match=r"wants other credentials: its secret is another one .*`hexflow down`"):
        sign_in.api_of(settings, state).version()


def test_without_a_stack_there_is_nothing_to_open(settings: Settings) -> None:
    with pytest.raises(UserError, match="start it with `hexflow up`"):
        sign_in.open_pages(settings, None, print)


def test_clients_in_this_process_sign_in_for_as_long_as_they_need(
    settings: Settings, pair: str, prefect: Gated, mlflow: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the stack's own servers; at others the person's variables stay."""
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.delenv("MLFLOW_TRACKING_PASSWORD", raising=False)
    state = state_of(settings, prefect, mlflow)
    with sign_in.signed_in(settings, state):
        assert f"{os.environ['MLFLOW_TRACKING_USERNAME']}:{os.environ['MLFLOW_TRACKING_PASSWORD']}" == pair
    with sign_in.signed_in(settings, state.model_copy(update={"own_urls": {}})):
        assert os.environ["MLFLOW_TRACKING_USERNAME"] == "me"
    assert "MLFLOW_TRACKING_PASSWORD" not in os.environ
    assert "PREFECT_API_AUTH_STRING" not in os.environ
