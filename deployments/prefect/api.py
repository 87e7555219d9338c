"""The few calls that the command line makes to the Prefect server, over plain HTTP.

Importing Prefect costs a command 3-5 s; these endpoints are its public REST API.
"""

import ssl
from typing import Any, cast

import httpx
import tenacity

from deployments.web import answers, basic, prefect_header
from planners.errors import UserError
from tasks.config.passwords import without_password

Json = dict[str, Any]
_RETRY_S = 0.5


class Unreachable(Exception):
    """The server gave no answer, or said that it is not able to give one now."""


class _Busy(Unreachable):
    """The server did nothing and asks to be asked again."""


class PrefectApi:
    """A Prefect server's REST API at `url` (ends in /api).

    `pair` is the `user:password` to sign in with; without it, the variables of Prefect's own client are, else the user
    in the URL.
    """

    def __init__(self, url: str, pair: str = "") -> None:
        self.url = url.rstrip("/")
        self._pair = pair

    def call(self, method: str, path: str, body: Json | list[Json] | None = None, deadline_s: float = 30.0) -> Any:
        """One request; returns the decoded answer, None for an empty one.

        While the server says 503, which on SQLite means that another writer held the database and nothing was done,
        the request is repeated for up to `deadline_s` seconds.

        Raises:
            Unreachable: no connection, a time-out or a server error; asking again may help.
            UserError: the server refused; the message holds its reason.
        """
        asking = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_Busy),
            stop=tenacity.stop_after_delay(deadline_s),
            wait=tenacity.wait_fixed(_RETRY_S),
            reraise=True,
        )
        return asking(self._call_once, method, path, body, deadline_s)

    def _call_once(self, method: str, path: str, body: Json | list[Json] | None, deadline_s: float) -> Any:
        try:
            answer = self._send(method, path, body, deadline_s)
            found = answer.json() if answer.is_success and answer.content else None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            where = without_password(self.url)
            said = f"No answer from the Prefect server at {where}, or none it would give: {_cause(error)}"
            raise Unreachable(said) from None
        if answer.is_success:
            return found
        reason = _reason(answer)
        if answer.status_code == 503:
            raise _Busy(f"The Prefect server was busy for {deadline_s:.0f} s: {reason}")
        if answer.status_code == 401:
            raise UserError(
                f"The Prefect server at {without_password(self.url)} wants other credentials: {self._remedy()}"
            )
        if answer.is_server_error:
            raise Unreachable(f"The Prefect server failed with {answer.status_code}: {reason}")
        raise UserError(f"The Prefect server refused {method} {path} ({answer.status_code}): {reason}")

    def _send(self, method: str, path: str, body: Json | list[Json] | None, deadline_s: float) -> httpx.Response:
        """On a connection of its own, which a server that came back does not know; proxies are not for a stack."""
        url = httpx.URL(f"{self.url}{path}")
        verify: ssl.SSLContext | bool = ssl.create_default_context() if url.scheme == "https" else False
        with httpx.Client(trust_env=False, verify=verify, timeout=deadline_s) as client:
            return client.request(method, url.copy_with(userinfo=b""), json=body, headers=self._headers(url))

    def _headers(self, url: httpx.URL) -> dict[str, str]:
        user = f"{url.username}:{url.password}" if url.userinfo else ""
        signed = basic(self._pair) if self._pair else prefect_header(user)
        return {"Authorization": signed} if signed else {}

    def _remedy(self) -> str:
        if self._pair:
            return "its secret is another one than now lies in the home. Run `hexflow down`, then `hexflow up`."
        return "set PREFECT_API_AUTH_STRING (user:password) or PREFECT_API_KEY."

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
    """What went wrong, in the words of the system where it was a connection that httpx has wrapped."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


def _reason(answer: httpx.Response) -> str:
    """What an error's answer says: its `detail` where the server's code wrote one, else what there is of it."""
    try:
        detail = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        detail = answer.text
    return str(detail)[:500]
