"""Tests of the calls to a Prefect server, against servers that misbehave."""

import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from deployments.prefect.api import PrefectApi, Unreachable
from deployments.web import answers, mlflow_header
from planners.errors import UserError

Handler = http.server.BaseHTTPRequestHandler


@contextmanager
def serving(answer: Callable[[Handler], None]) -> Iterator[str]:
    """host:port of a server that answers every request so."""

    class Answering(Handler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            """Keep the output clean."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def say(handler: Handler, content: bytes, status: int = 200, promised: int | None = None) -> None:
    """An answer that promises more bytes than it has where `promised` says so."""
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(content) if promised is None else promised))
    handler.end_headers()
    handler.wfile.write(content)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(lambda handler: say(handler, b'{"state"', promised=100), id="breaks off"),
        pytest.param(lambda handler: say(handler, b"{", status=500, promised=100), id="breaks off in its error"),
        pytest.param(lambda handler: handler.wfile.write(b"who is there?\r\n\r\n"), id="no HTTP"),
        pytest.param(lambda handler: say(handler, b"<html>Sign in</html>"), id="no JSON"),
        pytest.param(lambda handler: None, id="nothing"),
    ],
)
def test_a_server_that_dies_in_its_answer_is_unreachable(answer: Callable[[Handler], None]) -> None:
    with serving(answer) as address, pytest.raises(Unreachable, match="No answer from the Prefect server"):
        PrefectApi(f"http://me:secret@{address}/api").flow_run("f")


def test_an_unreachable_server_is_named_without_its_password() -> None:
    with pytest.raises(Unreachable) as told:
        PrefectApi("http://me:secret@127.0.0.1:abc/api").flow_run("f")
    assert "secret" not in str(told.value)


def test_a_refused_connection_is_told_in_words() -> None:
    with socket.socket() as holder:  # bound, and not listening
        holder.bind(("127.0.0.1", 0))
        with pytest.raises(Unreachable) as told:
            PrefectApi(f"http://127.0.0.1:{holder.getsockname()[1]}/api").flow_run("f")
    assert str(told.value).endswith("none it would give: Connection refused")


@pytest.mark.parametrize("url", ["http://127.0.0.1:abc", "http://[::1", "nonsense"])
def test_a_url_that_is_none_has_no_answer(url: str) -> None:
    assert not answers(url)


def test_the_user_in_a_url_is_sent_as_a_header() -> None:
    def echo(handler: Handler) -> None:
        say(handler, json.dumps(handler.headers.get("Authorization")).encode())

    with serving(echo) as address:
        assert answers(f"http://me:secret@{address}/health")
        assert PrefectApi(f"http://me:sec%40ret@{address}/api").call("GET", "/x") == "Basic bWU6c2VjQHJldA=="


def test_a_server_that_is_busy_is_asked_again() -> None:
    """SQLite's other writer is gone in a moment; one that stays is told as no answer."""
    asked: list[int] = []

    def busy_once(handler: Handler) -> None:
        asked.append(1)
        say(handler, b'{"detail": "locked"}' if len(asked) == 1 else b"7", status=503 if len(asked) == 1 else 200)

    with serving(busy_once) as address:
        assert PrefectApi(f"http://{address}/api").call("GET", "/x") == 7
    with (
        serving(lambda handler: say(handler, b'{"detail": "locked"}', status=503)) as address,
        pytest.raises(Unreachable, match="was busy for 0 s: locked"),
    ):
        PrefectApi(f"http://{address}/api").call("GET", "/x", deadline_s=0.2)


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"])
def test_no_proxy_stands_between_a_command_and_its_server(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    with serving(lambda handler: say(handler, b"7")) as address:
        assert PrefectApi(f"http://{address}/api").call("GET", "/x") == 7
        assert answers(f"http://{address}/health")


def test_a_pair_or_a_key_in_the_environment_goes_before_the_user_in_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Prefect's own client has it."""

    def echo(handler: Handler) -> None:
        say(handler, json.dumps(handler.headers.get("Authorization")).encode())

    with serving(echo) as address:
        api = PrefectApi(f"http://me:secret@{address}/api")
        monkeypatch.setenv("PREFECT_API_KEY", "key")
        assert api.call("GET", "/x") == "Bearer key"
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", "you:other")
        assert api.call("GET", "/x") == "Basic eW91Om90aGVy"


def test_the_stacks_own_secret_goes_before_what_the_environment_has_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither server is shown the credentials of the other."""

    def refuse(handler: Handler) -> None:
        given.append(handler.headers["Authorization"])
        say(handler, b"Sign in", status=401)

    given: list[str] = []
    monkeypatch.setenv("PREFECT_API_KEY", "key")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "you:other")
    with serving(refuse) as address:
        with pytest.raises(
            UserError, match=r"wants other credentials: its secret .* `hexflow down`, then `hexflow up`"
        ):
            PrefectApi(f"http://{address}/api", "me:secret").call("GET", "/x")
        with pytest.raises(UserError, match="wants other credentials: set PREFECT_API_AUTH_STRING"):
            PrefectApi(f"http://{address}/api").call("GET", "/x")
    assert given == ["Basic bWU6c2VjcmV0", "Basic eW91Om90aGVy"]


def test_doctor_asks_a_named_mlflow_server_as_its_client_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mlflow_header() == ""
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "token")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    assert mlflow_header() == "Bearer token"
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    assert mlflow_header() == "Basic bWU6c2VjcmV0"
