"""The gate before the stack's own servers: whom Prefect's and MLflow's serve.

They listen on loopback, where every user of the machine and every web page in its browsers can knock. Nothing is served
to a request that does not name the very address it came to (a page can make any name lead here), or that a page of
another origin makes. What holds data is served to those who sign in: by the stack's secret, as HTTP's Basic scheme and
the clients of both servers have it, or by a browser's session.

A browser gets its session for a ticket, which `hexflow open` asks for with the secret: it is good once, for a minute.
Sessions end with the server and are good for nothing else, since a browser does not keep them to itself: what it stores
for an address it gives to whoever listens there next, and a cookie to all ports of the host.
"""

import base64
import html
import json
import re
import secrets
import time
from collections.abc import Callable
from hmac import compare_digest
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.local.secret import USER, read_pair
from deployments.web import basic
from tasks.config.settings import load_settings

TICKET_PATH = "/hexflow/ticket"
"""A POST that is signed in by the secret gets a ticket here."""
OPEN_PATH = "/hexflow/open"
"""A POST of `ticket` gets a session here, then is led to the page; with `next` and `next_ticket`, by way of the other
server."""
TICKET_S = 60.0
SESSION_S = 7 * 24 * 3600.0
_FORM_BYTES = 4096
_OTHER_SERVER = re.compile(r"http://127\.0\.0\.1:\d+" + re.escape(OPEN_PATH))
_HOW = "Sign in with `hexflow open`."
_NOT_STORED = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


class Passes:
    """What is handed out for some time: each is a random text, and known only here."""

    def __init__(self, lifetime_s: float, clock: Callable[[], float]) -> None:
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._ends: dict[str, float] = {}

    def give(self) -> str:
        """A new one."""
        now = self._clock()
        self._ends = {known: end for known, end in self._ends.items() if end > now}
        made = secrets.token_urlsafe(32)
        self._ends[made] = now + self._lifetime_s
        return made

    def holds(self, given: str) -> bool:
        """Whether it was given out and its time is not over."""
        return self._ends.get(given, 0.0) > self._clock()

    def take(self, given: str) -> bool:
        """As `holds`, and it is used up."""
        return self.holds(given) and bool(self._ends.pop(given))


class Gate:
    """What both servers have before them; `clock` counts seconds."""

    def __init__(self, app: ASGIApp, pair: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._key = basic(pair)
        self._tickets = Passes(TICKET_S, clock)
        self.sessions = Passes(SESSION_S, clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The server's answer, or the gate's own."""
        answer = None
        if scope["type"] != "lifespan":
            answer = await self._answer(scope, Headers(scope=scope), receive)
        await (answer or self._app)(scope, receive, send)

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive) -> Response | None:
        """What is answered in place of the server; None: it may serve this."""
        own = "{}:{}".format(*scope["server"])
        if headers.getlist("host") != [own]:
            return PlainTextResponse(f"This server answers to http://{own} only.", 421)
        asked = scope["path"] if scope.get("method") == "POST" else None
        if asked == OPEN_PATH:  # from a file's page or the other server's: what counts is the ticket
            return await self._open(receive, own)
        if is_foreign(headers, own):
            return PlainTextResponse("Pages of other origins are not served.", 403)
        if asked == TICKET_PATH:
            signed_in = self.has_key(headers)
            return PlainTextResponse(self._tickets.give(), headers=_NOT_STORED) if signed_in else self.refusal()
        return None if self.admits(scope, headers) else self.refusal()

    def has_key(self, headers: Headers) -> bool:
        """Whether the request is signed in by the secret."""
        return compare_digest(headers.get("authorization", "").encode(), self._key.encode())

    async def _open(self, receive: Receive, own: str) -> Response:
        form = await _read_form(receive)
        if not self._tickets.take(form.get("ticket", "")):
            return PlainTextResponse("This sign-in was used, or is over a minute old: run `hexflow open` again.", 403)
        after = form.get("next", "")
        if _OTHER_SERVER.fullmatch(after):
            leading = handing_over(after, {"ticket": form.get("next_ticket", "")})
        else:
            leading = '<script>location.replace("/")</script>'
        return self.welcome(self.sessions.give(), leading, own)

    def admits(self, scope: Scope, headers: Headers) -> bool:
        """Whether this may be served: it holds no data, or is signed in; may change the scope for the server."""
        raise NotImplementedError

    def refusal(self) -> Response:
        """What those are told who are not signed in."""
        raise NotImplementedError

    def welcome(self, session: str, leading: str, own: str) -> Response:
        """Hands a browser its session, at the address `own`; `leading` is HTML that leads it on."""
        raise NotImplementedError


class PrefectGate(Gate):
    """Before Prefect's server, whose page keeps what it signs in with in the storage of its origin, port included.

    Websockets tell Prefect itself the secret, in their first message; its page uses none.
    """

    def admits(self, scope: Scope, headers: Headers) -> bool:
        """Prefect's page is files without data; it asks the API for all that it shows."""
        path = scope["path"]
        if scope["type"] == "websocket" or not (path == "/api" or path.startswith("/api/")):
            return True
        if path in ("/api/health", "/api/ready") and scope["method"] == "GET":
            return True
        if self.has_key(headers):
            return True
        if self.sessions.holds(_password(headers)):
            signed = MutableHeaders(raw=headers.raw)
            signed["authorization"] = self._key
            scope["headers"] = signed.raw
            return True
        return False

    def refusal(self) -> Response:
        """Without a challenge: the page has a form of its own."""
        return PlainTextResponse(_HOW, 401)

    def welcome(self, session: str, leading: str, own: str) -> Response:
        """Where Prefect's page looks for what was typed into its form."""
        kept = json.dumps(basic(f"{USER}:{session}").partition(" ")[2])
        page = f"<script>localStorage.setItem('prefect-password', {kept})</script>{leading}"
        return HTMLResponse(page, headers=_NOT_STORED)


class MlflowGate(Gate):
    """Before MLflow's server, which knows no users: all but its health is for those who are signed in."""

    def admits(self, scope: Scope, headers: Headers) -> bool:
        """By the secret or by the session's cookie."""
        is_probe = scope["type"] == "http" and scope["path"] == "/health" and scope["method"] == "GET"
        return (
            is_probe or self.has_key(headers) or self.sessions.holds(_cookie(headers, "{}:{}".format(*scope["server"])))
        )

    def refusal(self) -> Response:
        """The challenge makes a browser ask for user and password."""
        return PlainTextResponse(_HOW, 401, {"WWW-Authenticate": 'Basic realm="hexflow"'})

    def welcome(self, session: str, leading: str, own: str) -> Response:
        """A cookie, which pages elsewhere do not make the browser send."""
        answer = HTMLResponse(leading, headers=_NOT_STORED)
        answer.set_cookie(_cookie_name(own), session, max_age=int(SESSION_S), httponly=True, samesite="strict")
        return answer


def is_foreign(headers: Headers, own: str) -> bool:
    """Whether a page of another origin than the server's makes this request; a link to a page of ours may be anywhere.

    What is no browser sends none of these headers, and has to sign in like all.
    """
    if any(origin != f"http://{own}" for origin in headers.getlist("origin")):
        return True
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return False
    return headers.get("sec-fetch-mode") != "navigate" or headers.get("sec-fetch-dest") != "document"


def handing_over(url: str, fields: dict[str, str]) -> str:
    """HTML that posts the fields to `url` by itself, with a button where scripts are off; they are in no URL so."""
    inputs = "".join(
        f'<input type="hidden" name="{html.escape(name)}" value="{html.escape(value)}">'
        for name, value in fields.items()
    )
    return (
        f'<form method="post" action="{html.escape(url)}">{inputs}<noscript><button>Sign in</button></noscript></form>'
        "<script>document.forms[0].submit()</script>"
    )


async def _read_form(receive: Receive) -> dict[str, str]:
    """The fields of a posted form; those of a longer one than ours are lost."""
    body, more = b"", True
    while more and len(body) <= _FORM_BYTES:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return {name: values[0] for name, values in parse_qs(body[:_FORM_BYTES].decode("latin-1")).items()}


def _password(headers: Headers) -> str:
    """What is given as the password, in the scheme of the key."""
    try:
        given = base64.b64decode(headers.get("authorization", "").partition(" ")[2], validate=True).decode()
    except ValueError:
        return ""
    return given.partition(":")[2]


def _cookie_name(own: str) -> str:
    """Each server of each stack has its own: cookies of one port reach all others of the host."""
    return f"hexflow-{own.rpartition(':')[2]}"


def _cookie(headers: Headers, own: str) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(_cookie_name(own))
    except CookieError:
        return ""
    return found.value if found else ""


def prefect_app() -> ASGIApp:
    """Prefect's server behind its gate, for `uvicorn --factory`."""
    from prefect.server.api.server import create_app

    return PrefectGate(create_app(final=True), read_pair(load_settings()))


def mlflow_app() -> ASGIApp:
    """MLflow's server behind its gate, for `mlflow server --app-name hexflow`."""
    from mlflow.server.fastapi_app import app

    return MlflowGate(app, read_pair(load_settings()))
