"""The few calls that the command line makes to the Prefect server, over plain HTTP.

Importing Prefect costs a command 3-5 s; these endpoints are its public REST API.
"""

import base64
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import unquote, urlsplit, urlunsplit

from planners.errors import UserError

Json = dict[str, Any]
_RETRY_S = 0.5

# The stack is on loopback, where a proxy named in the environment has no business.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

NO_ANSWER = (OSError, ValueError, http.client.HTTPException)
"""What `open_url` and reading its answer raise: nobody answers, it breaks off or is no HTTP, or the URL is none."""


class Unreachable(Exception):
    """The server gave no answer, or said that it is not able to give one now."""


class _Busy(Exception):
    """The server did nothing and asks to be asked again."""


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    return re.sub(r"//[^@/]*@", "//…@", url)


def open_url(
    url: str,
    deadline_s: float,
    *,
    data: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    method: str = "GET",
) -> http.client.HTTPResponse:
    """Open a URL; a user and password in it are sent as the clients of Prefect and MLflow send them.

    Raises:
        OSError, ValueError, http.client.HTTPException: see `NO_ANSWER`.
    """
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    sent = dict(headers or {})
    if user:
        sent.setdefault("Authorization", _basic(unquote(user)))
    request = urllib.request.Request(urlunsplit(parts._replace(netloc=host)), data, sent, method=method)
    return cast(http.client.HTTPResponse, _DIRECT.open(request, timeout=deadline_s))


def answers(url: str, deadline_s: float = 2.0) -> bool:
    """Whether an HTTP server answers `url` with success."""
    try:
        with open_url(url, deadline_s):
            return True
    except NO_ANSWER:
        return False


class PrefectApi:
    """A Prefect server's REST API at `url` (ends in /api). Credentials come from PREFECT_API_KEY or _AUTH_STRING."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def call(self, method: str, path: str, body: Json | list[Json] | None = None, deadline_s: float = 30.0) -> Any:
        """One request; returns the decoded answer, None for an empty one.

        While the server says 503, which on SQLite means that another writer held the database and nothing was done,
        the request is repeated for up to `deadline_s` seconds.

        Raises:
            Unreachable: no connection, a time-out or a server error; asking again may help.
            UserError: the server refused; the message holds its reason.
        """
        give_up = time.monotonic() + deadline_s
        while True:
            try:
                return self._call_once(method, path, body, deadline_s)
            except _Busy as error:
                if time.monotonic() > give_up:
                    raise Unreachable(str(error)) from None
            time.sleep(_RETRY_S)

    def _call_once(self, method: str, path: str, body: Json | list[Json] | None, deadline_s: float) -> Any:
        try:
            return self._answer(method, path, body, deadline_s)
        except NO_ANSWER as error:
            where = without_password(self.url)
            said = f"No answer from the Prefect server at {where}, or none it would give: {_cause(error)}"
            raise Unreachable(said) from None

    def _answer(self, method: str, path: str, body: Json | list[Json] | None, deadline_s: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            with open_url(f"{self.url}{path}", deadline_s, data=data, headers=_headers(), method=method) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            reason = _reason(error.read().decode(errors="replace"))
            if error.code == 503:
                raise _Busy(f"The Prefect server was busy for {deadline_s:.0f} s: {reason}") from None
            if error.code >= 500:
                raise Unreachable(f"The Prefect server failed with {error.code}: {reason}") from None
            raise UserError(f"The Prefect server refused {method} {path} ({error.code}): {reason}") from None
        return json.loads(content) if content else None

    def healthy(self) -> bool:
        """Whether the server serves requests."""
        return answers(f"{self.url}/health")

    def version(self) -> str:
        """The server's version of Prefect."""
        return cast(str, self.call("GET", "/admin/version"))

    def create_flow_run(self, deployment: str, parameters: Json) -> str:
        """Ask for a run of a deployment, given as flow/name; returns the flow run's id."""
        found = self.call("GET", f"/deployments/name/{deployment}")
        created = self.call("POST", f"/deployments/{found['id']}/create_flow_run", {"parameters": parameters})
        return cast(str, created["id"])

    def flow_run(self, flow_run_id: str) -> Json:
        """A flow run with `name` and `state` (`type`, `name`, `message`)."""
        return cast(Json, self.call("GET", f"/flow_runs/{flow_run_id}"))

    def set_state(self, flow_run_id: str, state_type: str, message: str, force: bool = False) -> None:
        """Propose a state such as CANCELLING; `force` skips the server's rules."""
        state = {"type": state_type, "name": state_type.capitalize(), "message": message}
        self.call("POST", f"/flow_runs/{flow_run_id}/set_state", {"state": state, "force": force})

    def flow_runs(self, state_types: list[str]) -> list[Json]:
        """At most 200 flow runs in these states."""
        body = {"flow_runs": {"state": {"type": {"any_": state_types}}}, "limit": 200}
        return cast(list[Json], self.call("POST", "/flow_runs/filter", body))

    def workers(self, pool: str) -> list[Json]:
        """Workers that ever polled a pool, with `name` and `status` (ONLINE or OFFLINE)."""
        return cast(list[Json], self.call("POST", f"/work_pools/{pool}/workers/filter", {}))

    def is_online(self, pool: str, worker: str) -> bool:
        """Whether a worker of this name polls the pool."""
        return any(found["name"] == worker and found["status"] == "ONLINE" for found in self.workers(pool))

    def markdown_artifacts(self, flow_run_id: str) -> list[str]:
        """The markdown artifacts that a flow run made, oldest first."""
        body = {
            "artifacts": {"flow_run_id": {"any_": [flow_run_id]}, "type": {"any_": ["markdown"]}},
            "sort": "CREATED_DESC",
        }
        return [str(artifact["data"]) for artifact in reversed(self.call("POST", "/artifacts/filter", body))]


def _cause(error: Exception) -> str:
    """What went wrong, in the words of the system where it was a connection that urllib has wrapped."""
    cause = getattr(error, "reason", error)
    return str(getattr(cause, "strerror", None) or cause)


def _reason(content: str) -> str:
    """What an error's answer says: its `detail` where the server's code wrote one, else what there is of it."""
    try:
        detail = json.loads(content)["detail"]
    except (ValueError, KeyError, TypeError):
        detail = content
    return str(detail)[:500]


def _headers() -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("PREFECT_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    elif pair := os.environ.get("PREFECT_API_AUTH_STRING"):
        headers["Authorization"] = _basic(pair)
    return headers


def _basic(pair: str) -> str:
    return f"Basic {base64.b64encode(pair.encode()).decode()}"
