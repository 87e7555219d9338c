"""How the command and a person's browser sign in at the stack's servers: by its secret where they are its own.

The secret is shown to our own servers only: to a member that lives and listens, not to whoever has taken its port.
"""

import os
import time
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from deployments.local.gate import OPEN_PATH, TICKET_PATH, TICKET_S, handing_over
from deployments.local.secret import USER, read_pair, secret_path
from deployments.local.servers import MLFLOW, PREFECT, StackState, credentials, load_state
from deployments.prefect.api import PrefectApi
from deployments.web import NO_ANSWER, answers, basic, open_url
from planners.errors import UserError
from tasks.config.settings import Settings
from tasks.exchange.files import write_atomic
from tasks.machine.private import OWN_FILE

_DEADLINE_S = 10.0
START_DEADLINE_S = 240.0
_POLL_S = 0.5
_SIGNED_PATHS = {PREFECT: "/admin/version", MLFLOW: "/version"}
"""What each server tells to those who are signed in."""


def api_of(settings: Settings, state: StackState) -> PrefectApi:
    """The API of the stack's Prefect server, signed in.

    Raises:
        UserError: there is no secret to sign in with.
    """
    return PrefectApi(state.prefect_url, read_pair(settings) if PREFECT in state.own else "")


@contextmanager
def signed_in(settings: Settings, state: StackState) -> Iterator[None]:
    """Lets clients in this process sign in at the stack's servers: MLflow's knows no way but the environment.

    Raises:
        UserError: there is no secret to sign in with.
    """
    variables = credentials(read_pair(settings), state.own) if state.own else {}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def fault_of(settings: Settings, state: StackState, name: str) -> str:
    """What is wrong with one of the stack's own servers, PREFECT or MLFLOW, as a sentence goes on; empty: nothing.

    Raises:
        UserError: there is no secret to sign in with.
    """
    url = state.own_urls[name]
    if not answers(f"{url}/health"):
        return "does not answer"
    if not _is_at_its_port(state, name):
        return "is another program's now"
    if not answers(url + _SIGNED_PATHS[name], header=basic(read_pair(settings))):
        return "refuses the stack's secret"
    return ""


def wait_for_own_servers(settings: Settings, deadline_s: float = START_DEADLINE_S) -> None:
    """Wait until those servers that are the stack's own listen themselves.

    Their ports stand in their arguments for the seconds that they take to start: whoever else has taken one in that
    time would be told the secret by all who begin with a question.

    Raises:
        UserError: it did not listen in time.
    """
    give_up = time.monotonic() + deadline_s
    while True:
        state = load_state(settings)
        silent = [name for name in sorted(state.own) if not _is_at_its_port(state, name)] if state else []
        if not silent:
            return
        if time.monotonic() > give_up:
            raise UserError(f"The {silent[0]} server did not listen within {deadline_s:.0f} s: see its log.")
        time.sleep(_POLL_S)


def _is_at_its_port(state: StackState, name: str) -> bool:
    member, port = state.members.get(name), urlsplit(state.own_urls[name]).port or 0
    return member is not None and member.alive() and member.listens_on(port)


def open_pages(settings: Settings, state: StackState | None, say: Callable[[str], None]) -> None:
    """Open a page that signs this person's browser in at the stack's own servers; say how to sign in by hand.

    The page posts a ticket to each, one after the other. It is a file that its owner alone can read, since arguments of
    a browser are seen by all users of the machine.

    Raises:
        UserError: no server of the stack's own serves.
    """
    if state is None or not state.members:
        raise UserError(f"No stack runs for {settings.local.home}: start it with `hexflow up`.")
    own = [name for name in (MLFLOW, PREFECT) if name in state.own]  # Prefect's page is the last, and stays
    if not own:
        raise UserError("Both servers are named in the environment: sign in there as you do without hexflow.")
    pair, forms = read_pair(settings), []
    for name in own:
        if fault := fault_of(settings, state, name):
            raise UserError(f"{state.own_urls[name]} {fault}: run `hexflow up`.")
        page = state.own_urls[name].removesuffix("/api")
        forms.append((f"{page}{OPEN_PATH}", _ticket(f"{page}{TICKET_PATH}", pair)))
    (first, ticket), *others = forms
    fields = {"ticket": ticket}
    for after, next_ticket in others:
        fields |= {"next": after, "next_ticket": next_ticket}
    place = settings.local.home / "open.html"
    write_atomic(place, f"<!doctype html><title>hexflow</title>{handing_over(first, fields)}".encode(), OWN_FILE)
    shown = "Opened" if _show(place.as_uri()) else "No browser was found here to open"
    say(f"{shown} {place.as_uri()}, which signs a browser in, once, within {TICKET_S:.0f} s.")
    for name in reversed(own):
        page, asked = state.own_urls[name].removesuffix("/api"), "the user hexflow and the secret as password"
        say(f"By hand: {page} asks for {f'{USER}:SECRET' if name == PREFECT else asked}.")
    say(f"The secret is the content of {secret_path(settings)}.")


def _ticket(url: str, pair: str) -> str:
    try:
        with open_url(url, _DEADLINE_S, basic(pair), b"") as answer:
            return answer.read(200).decode("ascii")
    except NO_ANSWER as error:
        raise UserError(f"{url} gave no ticket ({error}): run `hexflow up`.") from None


def _show(uri: str) -> bool:
    """Whether a browser with a window of its own has taken it; one in this terminal would keep the person there."""
    has_screen = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    return has_screen and webbrowser.open(uri)
