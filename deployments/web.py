"""Whether servers answer. Needs the standard library only: the doctor asks before anything is installed."""

import base64
import http.client
import os
import urllib.request
from typing import cast
from urllib.parse import unquote, urlsplit, urlunsplit

# The stack is on loopback, where a proxy named in the environment has no business.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

NO_ANSWER = (OSError, ValueError, http.client.HTTPException)
"""What `open_url` and reading its answer raise: nobody answers, it breaks off or is no HTTP, or the URL is none."""


def basic(pair: str) -> str:
    """The Authorization header of a `user:password`."""
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def prefect_header(user_of_url: str = "") -> str:
    """The header that signs in at a Prefect server which is named in the environment; empty: nothing to sign in with.

    As Prefect's own client has it, the pair comes before the key, and both before the user in the URL.
    """
    if pair := os.environ.get("PREFECT_API_AUTH_STRING"):
        return basic(pair)
    if key := os.environ.get("PREFECT_API_KEY"):
        return f"Bearer {key}"
    return basic(user_of_url) if user_of_url else ""


def mlflow_header() -> str:
    """The same for an MLflow server, as MLflow's client has it; empty: nothing, or what the URL says."""
    user, password = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_PASSWORD")
    if user and password:
        return basic(f"{user}:{password}")
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    return f"Bearer {token}" if token else ""


def open_url(url: str, deadline_s: float, header: str = "", body: bytes | None = None) -> http.client.HTTPResponse:
    """Open a URL; a user and password in it are sent as the clients of Prefect and MLflow send them.

    Args:
        url: what is asked for.
        deadline_s: seconds that the connection and each read may take.
        header: the Authorization to send in place of what the URL says.
        body: what is posted; None asks by GET.

    Raises:
        OSError, ValueError, http.client.HTTPException: see `NO_ANSWER`.
    """
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    signed = header or (basic(unquote(user)) if user else "")
    headers = {"Authorization": signed} if signed else {}
    request = urllib.request.Request(urlunsplit(parts._replace(netloc=host)), body, headers)
    return cast(http.client.HTTPResponse, _DIRECT.open(request, timeout=deadline_s))


def answers(url: str, deadline_s: float = 2.0, header: str = "") -> bool:
    """Whether an HTTP server answers `url` with success, asked with this Authorization."""
    try:
        with open_url(url, deadline_s, header):
            return True
    except NO_ANSWER:
        return False
