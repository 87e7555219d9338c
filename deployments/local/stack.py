"""The local stack: Prefect server, MLflow server, and one worker per pool, all on loopback.

`up` starts what is missing and may be repeated, `down` ends everything and verifies that nothing is left. Servers named
by PREFECT_API_URL and MLFLOW_TRACKING_URI are used instead of own ones.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

from filelock import BaseFileLock, FileLock, Timeout

from deployments.local import servers, settling
from deployments.local.secret import fingerprint_of, make_secret, read_pair
from deployments.local.servers import HOST, MLFLOW, PREFECT, Member, StackState
from deployments.local.settling import Say
from deployments.local.sign_in import api_of
from deployments.local.worker import worker_name
from deployments.prefect import setup
from deployments.prefect.api import PrefectApi
from deployments.prefect.versions import local_versions
from deployments.web import answers
from planners.errors import UserError
from planners.hardware.machine import Machine
from tasks.config.passwords import without_password
from tasks.config.settings import Settings
from tasks.machine.discovery import CONTROL, discover_machine
from tasks.machine.private import OWN_FILE, make_private
from tasks.machine.processes import ask_to_end, end_sessions, kill_processes, tail
from tasks.tracking.address import require_trackable

LOCK_DEADLINE_S = 300.0
SERVER_DEADLINE_S = 240.0
SETUP_DEADLINE_S = 300.0
WORKER_DEADLINE_S = 180.0
WORKER_STARTS = 3
PORT_TRIES = 3
WORKER_GRACE_S = 60.0
"""Flow runs end within it on SIGTERM: `rl` ends its actors and closes the run's books first."""
SERVER_GRACE_S = 15.0
SETUP, WORKER = "setup", "worker-"
PORTS = {PREFECT: 4200, MLFLOW: 5000}
_GONE = "Its process was gone when the stack started."


@dataclass(frozen=True)
class Stack:
    """A running stack: the URLs that a person and the commands need."""

    prefect_url: str
    """Of the API; ends in /api."""
    mlflow_url: str
    pair: str = field(default="", repr=False)
    """Signs in at a Prefect server of the stack's own, as `user:secret`; empty: as the environment says."""

    @property
    def api(self) -> PrefectApi:
        """The Prefect server's API, signed in."""
        return PrefectApi(self.prefect_url, self.pair)

    @property
    def prefect_page(self) -> str:
        """The Prefect UI."""
        return without_password(self.prefect_url.removesuffix("/api"))


def up(settings: Settings, say: Say = print, machine: Machine | None = None) -> Stack:
    """Start whatever of the stack is missing on this machine (None: to be discovered), and wait until it serves.

    Raises:
        UserError: a part does not start, a named server does not answer, or the stack runs for other devices, places or
            versions. What was started is left running; `down` ends it.
    """
    machine = machine or discover_machine()
    with _locked(settings, say):
        for tries_left in reversed(range(PORT_TRIES)):
            try:
                return _up(settings, machine, say)
            except _PortTaken as error:
                if not tries_left:
                    raise
                say(f"{error} Trying another port.")
    raise AssertionError("the last try returns or raises")


class _PortTaken(UserError):
    """Another program took a server's port between the look and the start."""


def _up(settings: Settings, machine: Machine, say: Say) -> Stack:
    state = _wanted_state(settings, machine)
    is_served = any(name.startswith(WORKER) for name in state.members)
    own = [name for name in (PREFECT, MLFLOW) if not _named_server(name, state)]
    _require_named_servers(state, own)
    _end_orphans(settings, say)
    for name in own:
        _start_server(settings, state, name, say)
    fingerprint = setup.fingerprint(machine.name, list(machine.count_by_type()))
    has_news = state.deployed != fingerprint
    if has_news:
        _start(settings, state, SETUP, servers.setup_argv(is_ours=PREFECT in own))
    for pool, queue in state.pools.items():
        if _worker(pool) not in state.members:
            _start(settings, state, _worker(pool), servers.worker_argv(pool, queue))
    _wait_for_servers(state, own, say)
    if has_news:
        _wait_for_setup(state, say)
        state.deployed = fingerprint
        servers.save_state(settings, state)
    _wait_for_workers(settings, state, say)
    if not is_served and PREFECT in state.members:
        settling.settle_flow_runs(settings, state, "CRASHED", _GONE, say)
    return Stack(state.prefect_url, state.mlflow_url, read_pair(settings) if PREFECT in own else "")


def down(settings: Settings, say: Say = print) -> bool:
    """End the stack and all that its workers started, and verify that nothing of it is left; False: nothing ran.

    Flow runs get SIGTERM and WORKER_GRACE_S to end their actors and close their books, those of runs before those of
    actors; what is left then is killed. Servers go last, so that flow runs can report how they ended.

    Raises:
        RuntimeError: a process survived SIGKILL.
    """
    if not settings.local.home.exists():
        return False
    with _locked(settings, say):
        state = servers.load_state(settings)
        members = state.alive() if state else {}
        hosts = {name: member for name, member in members.items() if name in (PREFECT, MLFLOW)}
        others = {name: member for name, member in members.items() if name not in hosts}
        ran = bool(members)
        if others:
            say("Ending workers and what they run.")
            settling.want_the_end(settings, say)
            _end_workers(others)
        host_pids = [member.pid for member in hosts.values()]
        left = {process for process, _ in servers.marked_processes(settings) if _session(process.pid) not in host_pids}
        ran = ran or bool(left)
        kill_processes(left)
        if state and PREFECT in hosts:
            settling.settle_flow_runs(settings, state, "CANCELLED", "Ended by `hexflow down`.", say)
        if host_pids:
            say("Ending the servers.")
            end_sessions(host_pids, SERVER_GRACE_S)
        kill_processes({process for process, _ in servers.marked_processes(settings)})
        if state:
            servers.save_state(settings, state.model_copy(update={"members": {}}))
    return ran


def _end_workers(members: dict[str, Member]) -> None:
    """End workers and what they run: their flow runs first, since a worker that is told to end kills its own at once.

    A run ends the actors that it has started, so the flow runs of runs go before those of actors.
    """
    workers = [name for name in members if name.startswith(WORKER)]
    for name in sorted(workers, key=lambda name: name != _worker(CONTROL)):
        ask_to_end(members[name].children(), WORKER_GRACE_S)
    end_sessions([member.pid for member in members.values()], WORKER_GRACE_S)


def find(settings: Settings) -> StackState | None:
    """The stack as last started, with the members that are alive now; None where there never was one."""
    state = servers.load_state(settings)
    return state and state.model_copy(update={"members": state.alive()})


@contextmanager
def _locked(settings: Settings, say: Say) -> Iterator[None]:
    """One `up` or `down` at a time per home."""
    try:
        make_private(settings.local.home, "HEXFLOW_HOME")
        make_private(settings.local.logs, "HEXFLOW_HOME")
    except OSError as error:
        raise UserError(
            f"The state directory {settings.local.home} cannot be made ({error.strerror}): set HEXFLOW_HOME to a "
            "directory that can be written."
        ) from None
    lock = FileLock(settings.local.home / "stack.lock", mode=OWN_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say("Another `hexflow up` or `down` is at work here; waiting for it.")
        _acquire_patiently(lock)
    try:
        yield
    finally:
        lock.release()


def _acquire_patiently(lock: BaseFileLock) -> None:
    try:
        lock.acquire(timeout=LOCK_DEADLINE_S)
    except Timeout:
        raise UserError(
            f"Another `hexflow up` or `down` has held {lock.lock_file} for {LOCK_DEADLINE_S:.0f} s: wait for it, or "
            "end it."
        ) from None


def _worker(pool: str) -> str:
    return f"{WORKER}{pool}"


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def _named_server(name: str, state: StackState | None) -> str | None:
    """URL of a server named in the environment that is not this stack's own (whose URL a person may have exported)."""
    url = os.environ.get("PREFECT_API_URL" if name == PREFECT else "MLFLOW_TRACKING_URI")
    if not url or (state is not None and state.own_urls.get(name) == url):
        return None
    return url.rstrip("/")


def _wanted_state(settings: Settings, machine: Machine) -> StackState:
    """The remembered state without its dead members, made for the present identity.

    Raises:
        UserError: workers run for another identity.
    """
    known = servers.load_state(settings)
    named = {name: _named_server(name, known) for name in (PREFECT, MLFLOW)}
    identity = {
        **local_versions(),
        "machine": machine.name,
        "devices": ", ".join(f"{device.index} {device.device_type}" for device in machine.devices),
        "runs": str(settings.shared.runs),
        "ledger": without_password(settings.shared.ledger_url),
        "Prefect server": named[PREFECT] or "own",
        "MLflow server": named[MLFLOW] or "own",
        "stack code": servers.stack_code(),
        "secret": fingerprint_of(make_secret(settings)),
    }
    alive = known.alive() if known else {}
    if known and alive and (changed := [key for key in identity if identity[key] != known.identity.get(key)]):
        key = changed[0]
        raise UserError(
            f"A stack with another {key} runs ({without_password(known.identity.get(key, 'none'))}, now "
            f"{without_password(identity[key])}): run `hexflow down` first, or go back to its settings."
        )
    own_urls = known.own_urls if known else {}
    # What was deployed on a server of somebody else's says nothing of our own.
    has_own = known is not None and known.identity.get("Prefect server") == identity["Prefect server"] == "own"
    return StackState(
        prefect_url=named[PREFECT] or own_urls.get(PREFECT, ""),
        mlflow_url=named[MLFLOW] or own_urls.get(MLFLOW, ""),
        pools={pool: setup.queue_of(pool, machine.name) for pool in setup.pools(list(machine.count_by_type()))},
        own_urls=own_urls,
        identity=identity,
        deployed=known.deployed if known and has_own else "",
        members=alive,
    )


def _end_orphans(settings: Settings, say: Say) -> None:
    """End what is left of a server of ours that was killed: a part of it that still serves keeps the port.

    The mark in its environment tells that a process in the dead leader's session is not somebody else's. Flow runs that
    are left of a worker go on.
    """
    known = servers.load_state(settings)
    members = known.members if known else {}
    dead = {member.pid: name for name, member in members.items() if name in PORTS and not member.alive()}
    left = {_session(process.pid) for process, _ in servers.marked_processes(settings)} & set(dead) if dead else set()
    for leader in left:
        say(f"The {dead[leader]} server was killed; ending what is left of it.")
    end_sessions(list(left), SERVER_GRACE_S)


def _start_server(settings: Settings, state: StackState, name: str, say: Say) -> None:
    """Start a server that does not run, on the port it had before if that is free: workers and browsers know it."""
    if name in state.members:
        return
    known = state.own_urls.get(name)
    port = servers.choose_port(int(known.split(":")[2].split("/")[0]) if known else PORTS[name])
    url = f"http://{HOST}:{port}/api" if name == PREFECT else f"http://{HOST}:{port}"
    others = {other: member for other, member in state.members.items() if other == SETUP or other.startswith(WORKER)}
    if known != url and others:
        say(f"The port of the {name} server was taken meanwhile; starting the workers again for its new one.")
    elif name == PREFECT:
        # Prefect's workers never hear of a cancellation again once their server was away; those at work stay.
        others = {other: member for other, member in others.items() if not member.children()}
    else:
        others = {}
    _end_workers(others)
    state.members = state.alive()
    state.own_urls = {**state.own_urls, name: url}
    if name == PREFECT:
        state.prefect_url = url
        _start(settings, state, name, servers.prefect_server_argv(port))
    else:
        state.mlflow_url = url
        _start(settings, state, name, servers.mlflow_server_argv(settings, port))


def _start(settings: Settings, state: StackState, name: str, argv: list[str]) -> None:
    """Start a member and remember it at once, so that a crash of `up` loses none."""
    pair = make_secret(settings)
    env = servers.environment(settings, state.prefect_url, state.mlflow_url) | servers.credentials(pair, state.own)
    if name == PREFECT:
        env |= servers.prefect_server_environment(pair, state.prefect_url)
    member = servers.start_member(settings, name, argv, env)
    state.members = {**state.members, name: member}
    servers.save_state(settings, state)


def _wait(what: str, done: Callable[[], bool], member: Member | None, deadline_s: float, say: Say) -> None:
    """Wait until `done`; says so when it takes a while.

    Raises:
        UserError: the member ended first, or the deadline passed.
    """
    started = time.monotonic()
    has_said = False
    where = f" Its log is {member.log}." if member else ""
    while not done():
        waited_s = time.monotonic() - started
        if member and not member.alive() and not done():
            last = tail(member.log, 3).strip() or "it wrote nothing"
            raise UserError(f"The {what} ended while it was awaited: {last}{'' if last.endswith('.') else '.'}{where}")
        if waited_s > deadline_s:
            raise UserError(f"The {what} did not answer within {deadline_s:.0f} s.{where}")
        if waited_s > 1.0 and not has_said:
            say(f"Waiting for the {what}.{where}")
            has_said = True
        time.sleep(0.2)


def _health_urls(state: StackState) -> dict[str, str]:
    return {PREFECT: f"{state.prefect_url}/health", MLFLOW: f"{state.mlflow_url}/health"}


def _require_named_servers(state: StackState, own: list[str]) -> None:
    if PREFECT not in own and not state.prefect_url.startswith(("http://", "https://")):
        shown = without_password(state.prefect_url)
        raise UserError(f"PREFECT_API_URL is {shown}: write http:// or https:// before it, or unset it.")
    if MLFLOW not in own:
        require_trackable(state.mlflow_url)
    for name, url in _health_urls(state).items():
        if name not in own and url.startswith("http") and not answers(url, deadline_s=10.0):
            variable = "PREFECT_API_URL" if name == PREFECT else "MLFLOW_TRACKING_URI"
            shown = without_password(url)
            raise UserError(f"{variable} is set, but {shown} does not answer: start that server, or unset {variable}.")


def _wait_for_servers(state: StackState, own: list[str], say: Say) -> None:
    for name in own:
        member, url = state.members[name], _health_urls(state)[name]
        try:
            _wait(f"{name} server", partial(_serves, member, url), member, SERVER_DEADLINE_S, say)
        except UserError as error:
            if not member.alive() and servers.is_taken(_port(url)):
                raise _PortTaken(f"Port {_port(url)} of the {name} server was taken by another program.") from error
            raise


def _serves(member: Member, url: str) -> bool:
    """Whether this very member answers: another program may have taken the port since it was found free."""
    return answers(url) and member.listens_on(_port(url))


def _port(url: str) -> int:
    return urlsplit(url).port or 0


def _wait_for_setup(state: StackState, say: Say) -> None:
    member = state.members[SETUP]
    _wait("set-up of pools and deployments", lambda: not member.alive(), None, SETUP_DEADLINE_S, say)
    if not tail(member.log, 1).startswith(setup.DONE):
        raise UserError(f"Set-up of pools and deployments failed: {tail(member.log, 1)} (log: {member.log})")


def _wait_for_workers(settings: Settings, state: StackState, say: Say) -> None:
    api = api_of(settings, state)
    for pool, queue in state.pools.items():
        is_online = partial(api.is_online, pool, worker_name(pool, queue))
        for starts_left in reversed(range(WORKER_STARTS)):
            member = state.members[_worker(pool)]
            try:
                _wait(f"worker of pool {pool}", is_online, member, WORKER_DEADLINE_S, say)
                break
            except UserError:
                # Prefect's worker ends if its first calls meet a busy database; later it bears them.
                if member.alive() or not starts_left:
                    raise
                say(f"The worker of pool {pool} ended while it started; starting it again.")
                _start(settings, state, _worker(pool), servers.worker_argv(pool, queue))
