"""Whether servers answer. Needs the standard library only: the doctor asks before anything is installed."""

import base64
import http.client
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


def open_url(url: str, deadline_s: float) -> http.client.HTTPResponse:
    """Open a URL; a user and password in it are sent as the clients of Prefect and MLflow send them.

    Raises:
        OSError, ValueError, http.client.HTTPException: see `NO_ANSWER`.
    """
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    headers = {"Authorization": basic(unquote(user))} if user else {}
    request = urllib.request.Request(urlunsplit(parts._replace(netloc=host)), headers=headers)
    return cast(http.client.HTTPResponse, _DIRECT.open(request, timeout=deadline_s))


def answers(url: str, deadline_s: float = 2.0) -> bool:
    """Whether an HTTP server answers `url` with success."""
    try:
        with open_url(url, deadline_s):
            return True
    except NO_ANSWER:
        return False
