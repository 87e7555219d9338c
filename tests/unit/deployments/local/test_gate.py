"""Whom the stack's own servers serve: the gate before an app that would tell everything to all."""

import asyncio
import re
from collections.abc import Mapping

import pytest

from deployments.local.gate import OPEN_PATH, TICKET_PATH, TICKET_S, Gate, MlflowGate, PrefectGate
from deployments.web import basic
from tests.support.asgi import ADDRESS, Answer, Served, ask

PAIR = "hexflow:secret-of-thirty-two-characters"
KEY = {"Authorization": basic(PAIR)}
DATA = {PrefectGate: "/api/flow_runs/filter", MlflowGate: "/api/2.0/mlflow/runs/search"}
BOTH = pytest.mark.parametrize("kind", [PrefectGate, MlflowGate], ids=["prefect", "mlflow"])


class Place:
    """A gate with an app behind it, and a clock that a test moves."""

    def __init__(self, kind: type[Gate]) -> None:
        self.now_s = 1000.0
        self.app = Served()
        self.gate = kind(self.app, PAIR, lambda: self.now_s)
        self.data = DATA[kind]

    def ask(
        self, path: str = "", headers: Mapping[str, str] | None = None, body: bytes | None = None, kind: str = "http"
    ) -> Answer:
        return asyncio.run(ask(self.gate, path or self.data, headers, body, kind))

    def ticket(self) -> str:
        given = self.ask(TICKET_PATH, KEY, b"")
        assert given.status == 200
        return given.body

    def open(self, ticket: str, more: str = "") -> Answer:
        """As the page does that `hexflow open` has opened from a file."""
        from_a_file = {"Origin": "null", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
        return self.ask(OPEN_PATH, from_a_file, f"ticket={ticket}{more}".encode())

    def signs_in_with(self, opened: Answer) -> dict[str, str]:
        """The header that the browser sends from then on."""
        if isinstance(self.gate, MlflowGate):
            return {"Cookie": opened.headers["set-cookie"].split(";")[0]}
        stored = re.search(r"localStorage\.setItem\('prefect-password', \"([^\"]+)\"\)", opened.body)
        assert stored
        return {"Authorization": f"Basic {stored[1]}"}


@BOTH
def test_data_is_for_those_who_have_the_secret(kind: type[Gate]) -> None:
    place = Place(kind)
    others = ["", "Basic", "Basic ?", basic("hexflow:"), basic("hexflow:other"), basic(PAIR + "x"), f"Bearer {PAIR}"]
    for given in others:
        refused = place.ask(headers={"Authorization": given})
        assert (refused.status, refused.body) == (401, "Sign in with `hexflow open`."), given
        assert place.ask(headers={"Authorization": given}, body=b"{}").status == 401, given
    assert place.app.scopes == []
    assert place.ask(headers=KEY).body == place.ask(headers=KEY, body=b"{}").body == "data"


@BOTH
def test_a_name_that_leads_here_gets_nothing(kind: type[Gate]) -> None:
    """A page can make its own host name lead to loopback; `localhost` is the name of others' servers as well."""
    place = Place(kind)
    health = "/api/health" if kind is PrefectGate else "/health"
    for host in ("evil.example", "evil.example:4200", "localhost:4200", "127.0.0.1", "127.0.0.1:4201", ""):
        for path in (place.data, "/", health, TICKET_PATH, OPEN_PATH):
            for way, body in (("http", None), ("http", b"{}"), ("websocket", None)):
                refused = place.ask(path, {"Host": host, **KEY}, body, way)
                assert (refused.status, refused.body) == (421, "This server answers to http://127.0.0.1:4200 only.")
    assert place.app.scopes == []


FOREIGN = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://localhost:4200"},
    {"Origin": "http://127.0.0.1:5000"},
    {"Origin": "https://127.0.0.1:4200"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"},
    {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"},
    {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
]


@BOTH
@pytest.mark.parametrize("headers", FOREIGN, ids=lambda headers: " ".join(headers.values()))
def test_pages_of_other_origins_get_nothing(kind: type[Gate], headers: dict[str, str]) -> None:
    """Whatever the browser sends along, and not even that it may ask: no answer allows an origin."""
    place = Place(kind)
    health = "/api/health" if kind is PrefectGate else "/health"
    for path in (place.data, "/", health, TICKET_PATH):
        for way, body in (("http", None), ("http", b"{}"), ("websocket", None)):
            refused = place.ask(path, headers | KEY, body, way)
            assert (refused.status, refused.body) == (403, "Pages of other origins are not served.")
            assert not any(name.startswith("access-control") for name in refused.headers)
    assert place.app.scopes == []


@BOTH
def test_a_page_of_our_own_and_a_link_to_it_are_served(kind: type[Gate]) -> None:
    place = Place(kind)
    for headers in (
        {"Origin": f"http://{ADDRESS}", "Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"},
        {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
    ):
        assert place.ask(headers=headers | KEY).status == 200


@BOTH
def test_a_ticket_signs_a_browser_in_once(kind: type[Gate]) -> None:
    place = Place(kind)
    ticket = place.ticket()
    opened = place.open(ticket)
    assert opened.status == 200
    assert 'location.replace("/")' in opened.body
    assert opened.headers["cache-control"] == "no-store"
    assert "secret-of" not in str(opened), "a browser keeps what it gets, for whoever takes the port"
    assert place.ask(headers=place.signs_in_with(opened)).body == "data"
    again = place.open(ticket)
    assert (again.status, "set-cookie" in again.headers) == (403, False)
    assert "hexflow open" in again.body


@BOTH
def test_a_ticket_and_a_session_end(kind: type[Gate]) -> None:
    place = Place(kind)
    late, in_time = place.ticket(), place.ticket()
    place.now_s += TICKET_S - 0.1
    session = place.signs_in_with(place.open(in_time))
    place.now_s += 0.2
    assert place.open(late).status == 403
    assert place.ask(headers=session).status == 200
    place.now_s += 8 * 24 * 3600
    assert place.ask(headers=session).status == 401


@BOTH
def test_tickets_are_for_those_who_have_the_secret(kind: type[Gate]) -> None:
    """A session is no secret: nobody gets a new one by it."""
    place = Place(kind)
    session = place.signs_in_with(place.open(place.ticket()))
    for headers in ({}, session, {"Authorization": basic("hexflow:other")}):
        assert place.ask(TICKET_PATH, headers, b"").status == 401
    for given in ("", "guess", "&ticket="):
        assert place.open(given).status == 403
    assert place.ask(OPEN_PATH, body=b"ticket=" + b"x" * 10_000).status == 403


@BOTH
def test_a_session_is_of_one_server(kind: type[Gate]) -> None:
    """One that was started anew, or the other one, does not know it."""
    place, other = Place(kind), Place(kind)
    session = place.signs_in_with(place.open(place.ticket()))
    assert other.ask(headers=session).status == 401


@BOTH
def test_the_way_to_the_other_server_leads_nowhere_else(kind: type[Gate]) -> None:
    place = Place(kind)
    onward = place.open(
        place.ticket(), "&next=http%3A%2F%2F127.0.0.1%3A5000%2Fhexflow%2Fopen&next_ticket=%22%3E%3Cb%3E"
    )
    assert 'action="http://127.0.0.1:5000/hexflow/open"' in onward.body
    assert 'name="ticket" value="&quot;&gt;&lt;b&gt;"' in onward.body
    for elsewhere in (
        "http://evil.example/hexflow/open",
        "http://127.0.0.1:5000/hexflow/open/..",
        "javascript:alert()",
    ):
        assert "<form" not in place.open(place.ticket(), f"&next={elsewhere}&next_ticket=t").body


def test_the_cookie_is_no_page_s_to_read_or_to_send_from_elsewhere() -> None:
    place = Place(MlflowGate)
    cookie = place.open(place.ticket()).headers["set-cookie"]
    assert cookie.startswith("hexflow-4200=")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert place.ask("/api/2.0/mlflow/x", {"Cookie": "hexflow-4200=; a=b"}).status == 401
    assert place.ask("/api/2.0/mlflow/x", {"Cookie": '"=;;\\'}).status == 401


def test_what_holds_no_data_is_open() -> None:
    """Probes, and Prefect's page, which asks the API for all it shows; MLflow asks a browser for user and password."""
    prefect, mlflow = Place(PrefectGate), Place(MlflowGate)
    for path in ("/", "/api/health", "/api/ready", "/assets/index.js", "/runs/flow-run/1"):
        assert prefect.ask(path).status == 200
    assert mlflow.ask("/health").status == 200
    for path in ("/api", "/api/", "/api/healthy", "/api/admin/version"):
        assert prefect.ask(path).status == 401
    assert prefect.ask("/api/health", body=b"").status == 401
    for path in ("/", "/healthy", "/health/", "/version", "/static-files/x"):
        assert mlflow.ask(path).headers["www-authenticate"] == 'Basic realm="hexflow"'
    assert "www-authenticate" not in prefect.ask().headers, "its own form would never be seen"


def test_a_session_is_the_secret_to_prefect_itself() -> None:
    """Which checks once more what the gate lets through."""
    place = Place(PrefectGate)
    place.ask(headers=place.signs_in_with(place.open(place.ticket())))
    (asked,) = place.app.scopes
    assert [value for name, value in asked["headers"] if name == b"authorization"] == [basic(PAIR).encode()]


def test_websockets_sign_in_as_well() -> None:
    """Prefect's by their first message, which Prefect looks at; MLflow's, if it ever has any, like all."""
    prefect, mlflow = Place(PrefectGate), Place(MlflowGate)
    assert prefect.ask("/api/events/out", kind="websocket").status == 101
    assert mlflow.ask("/x", kind="websocket").status == 401
    assert mlflow.ask("/x", KEY, kind="websocket").status == 101
