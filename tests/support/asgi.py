"""ASGI without a server: what an app is sent, and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

ADDRESS = "127.0.0.1:4200"
"""Where the app listens."""


@dataclass
class Served:
    """An app that answers all with `data`, and keeps what it was asked."""

    scopes: list[Scope] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"data"})


@dataclass(frozen=True)
class Answer:
    """What came back: of a websocket, 101 or what its handshake was refused with."""

    status: int
    headers: Mapping[str, str]
    body: str


async def ask(
    app: ASGIApp, path: str, headers: Mapping[str, str] | None = None, body: bytes | None = None, kind: str = "http"
) -> Answer:
    """One request of a client at ADDRESS: a GET, or a POST where there is a body; `kind` may be websocket."""
    host, port = ADDRESS.split(":")
    wanted = {"host": ADDRESS} | {name.lower(): value for name, value in (headers or {}).items()}
    scope: dict[str, Any] = {
        "type": kind,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "ws" if kind == "websocket" else "http",
        "server": (host, int(port)),
        "client": (host, 1),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in wanted.items() if value],
        "extensions": {"websocket.http.response": {}},
    }
    if kind == "http":
        scope |= {"method": "GET" if body is None else "POST", "http_version": "1.1"}
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body or b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    if sent[0]["type"] == "websocket.accept":
        return Answer(101, {}, "")
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], found, b"".join(part.get("body", b"") for part in sent[1:]).decode())
