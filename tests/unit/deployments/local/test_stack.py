"""The stack's parts, with sleeping processes in place of its members."""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from deployments.local import servers, stack
from deployments.local.servers import Member, StackState
from deployments.prefect.versions import local_versions
from deployments.web import answers
from planners.errors import UserError
from tasks.config.settings import Settings
from tasks.machine.discovery import discover_machine
from tasks.machine.processes import ProcessGroup, end_sessions, process_key
from tests.support.places import settings_of
from tests.support.stack import runs, until

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def sleeper(settings: Settings) -> Iterator[Member]:
    """A small process that stands for a member of the stack."""
    member = servers.start_member(settings, "sleeper", SLEEPER, {servers.MARKER: str(settings.local.home)})
    yield member
    if member.alive():
        end_sessions([member.pid], grace_s=0.0)


@pytest.fixture
def free_port() -> int:
    """A loopback port that nobody listens on."""
    return servers.choose_port(0)


def state_with(member: Member | None = None, **identity: str) -> StackState:
    members = {"worker-cpu": member} if member else {}
    return StackState(prefect_url="", mlflow_url="", identity=identity, members=members)


def test_a_recycled_pid_is_not_a_member(sleeper: Member) -> None:
    assert sleeper.alive()
    assert not sleeper.model_copy(update={"key": f"{sleeper.key}0"}).alive()
    end_sessions([sleeper.pid])
    assert not sleeper.alive()


def test_a_clock_that_is_set_makes_nobody_another_process(sleeper: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start times in seconds since 1970 are boot time plus ticks, and the boot time follows the clock."""
    boot_time = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_time + 3600)
    assert psutil.Process(sleeper.pid).create_time() > time.time() + 1800
    assert sleeper.alive()


def test_state_survives_a_round_trip(settings: Settings, sleeper: Member) -> None:
    assert servers.load_state(settings) is None
    state = state_with(sleeper, prefect="3.7.7")
    servers.save_state(settings, state)
    assert servers.load_state(settings) == state


def test_state_is_closed_to_other_users(settings: Settings, sleeper: Member) -> None:
    """Also in a home of before, which others could enter, and whatever the umask is."""
    settings.local.home.chmod(0o755)
    before = os.umask(0)
    try:
        servers.save_state(settings, state_with(sleeper))
        assert stack.down(settings, lambda _: None)
    finally:
        os.umask(before)
    assert sleeper.log.exists()
    home = settings.local.home
    places = (home, *home.iterdir(), *settings.local.logs.iterdir())
    assert [path.name for path in places if path.stat().st_mode & 0o077 and not path.is_symlink()] == []


def test_a_damaged_state_file_is_told(settings: Settings) -> None:
    servers.state_path(settings).write_text('{"prefect_url": ')
    with pytest.raises(UserError, match="damaged"):
        servers.load_state(settings)


def test_marked_processes_are_those_of_this_home(settings: Settings, sleeper: Member) -> None:
    other = settings.local.home.parent / "other"
    elsewhere = settings_of(home=other, runs=settings.shared.runs, ledger_url=settings.shared.ledger_url)
    assert [process.pid for process, _ in servers.marked_processes(settings)] == [sleeper.pid]
    assert list(servers.marked_processes(elsewhere)) == []


def test_down_ends_what_the_state_file_does_not_know(settings: Settings, sleeper: Member) -> None:
    assert stack.down(settings, lambda _: None)
    assert not sleeper.alive()
    assert not stack.down(settings, lambda _: None)


FLOW_RUN = """
import pathlib, signal, sys, time
def leave(*_):
    left = pathlib.Path(sys.argv[1])
    earlier = sorted(other.name for other in left.parent.glob("*.left"))
    time.sleep(0.2)  # a kill by the worker comes at once
    left.write_text(" ".join(earlier))
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
time.sleep(600)
"""
WORKER = f"""
import signal, subprocess, sys, time
flow_run = subprocess.Popen([sys.executable, "-c", {FLOW_RUN!r}, sys.argv[1]])
def leave(*_):
    flow_run.kill()
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
while True:
    time.sleep(0.05)
    flow_run.poll()
"""
"""A worker as Prefect's is: it kills its flow run when it is told to end."""


def test_down_lets_flow_runs_close_their_books_those_of_runs_first(settings: Settings, tmp_path: Path) -> None:
    members = {}
    for name in ("worker-cpu", "worker-control"):
        argv = [sys.executable, "-c", WORKER, str(tmp_path / f"{name}.left")]
        members[name] = servers.start_member(settings, name, argv, {servers.MARKER: str(settings.local.home)})
    until(lambda: all(member.log.read_text() == "ready\n" for member in members.values()), 30, "the flow runs")
    state = state_with()
    state.members = members
    servers.save_state(settings, state)
    assert stack.down(settings, lambda _: None)
    assert not any(member.alive() for member in members.values())
    assert (tmp_path / "worker-control.left").read_text() == ""
    assert (tmp_path / "worker-cpu.left").read_text() == "worker-control.left"


def test_what_a_killed_server_leaves_is_ended_and_nothing_else(settings: Settings, sleeper: Member) -> None:
    """The child of MLflow's server serves on, and would keep the port."""
    code = (
        "import subprocess, sys, time\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, flush=True)\n"
        "time.sleep(600)"
    )
    members, children = {"sleeper": sleeper}, {}
    for name, home in (("mlflow", settings.local.home), ("prefect", "another"), ("worker-cpu", settings.local.home)):
        members[name] = servers.start_member(settings, name, [sys.executable, "-c", code], {servers.MARKER: str(home)})
    try:
        leaders = [name for name in members if name != "sleeper"]
        until(lambda: all(members[name].log.read_text().endswith("\n") for name in leaders), 30, "the children")
        for name in leaders:
            children[name] = psutil.Process(int(members[name].log.read_text()))
            os.kill(members[name].pid, signal.SIGKILL)
        until(lambda: not any(members[name].alive() for name in leaders), 30, "the leaders' end")
        state = state_with()
        state.members = members
        servers.save_state(settings, state)
        said: list[str] = []
        stack._end_orphans(settings, said.append)
        assert {name: runs(child) for name, child in children.items()} == {
            "mlflow": False,
            "prefect": True,
            "worker-cpu": True,
        }
        assert sleeper.alive()
        assert said == ["The mlflow server was killed; ending what is left of it."]
    finally:
        end_sessions([member.pid for member in members.values()], grace_s=0.0)


def test_workers_stay_when_a_server_comes_back_on_its_port(
    settings: Settings, sleeper: Member, free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have nothing to do with MLflow's; of Prefect's, those that run nothing start anew."""
    monkeypatch.setattr(servers, "prefect_server_argv", lambda port: SLEEPER)
    monkeypatch.setattr(servers, "mlflow_server_argv", lambda settings, port: SLEEPER)
    state = state_with(sleeper)
    argv = [sys.executable, "-c", WORKER, str(tmp_path / "left")]
    state.members["worker-busy"] = servers.start_member(settings, "worker-busy", argv, {})
    until(lambda: bool(state.members["worker-busy"].log.read_text()), 30, "its flow run")
    state.own_urls = {
        name: f"http://127.0.0.1:{free_port}{path}" for name, path in (("mlflow", ""), ("prefect", "/api"))
    }
    try:
        stack._start_server(settings, state, "mlflow", print)
        assert set(state.members) == {"worker-cpu", "worker-busy", "mlflow"}
        assert sleeper.alive()
        stack._start_server(settings, state, "prefect", print)
        assert set(state.members) == {"worker-busy", "prefect", "mlflow"}
    finally:
        end_sessions([member.pid for member in state.members.values()], grace_s=0.0)


def test_down_without_a_home_makes_none(tmp_path: Path) -> None:
    home = tmp_path / "none"
    assert not stack.down(settings_of(home=home, runs=tmp_path, ledger_url=""), lambda _: None)
    assert not home.exists()


def test_up_refuses_a_stack_of_other_devices(
    settings: Settings, sleeper: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEXFLOW_DEVICES", f"fast={min(os.sched_getaffinity(0))}")
    known = state_with(sleeper, **local_versions(), machine="elsewhere")
    servers.save_state(settings, known)
    with pytest.raises(UserError, match=r"another machine.*elsewhere.*hexflow down"):
        stack.up(settings, lambda _: None)


def test_up_refuses_workers_of_older_code(settings: Settings, sleeper: Member) -> None:
    """As `git pull` leaves them. Of the ledger it is remembered which one it is, and no password."""
    settings = replace(settings, shared=replace(settings.shared, ledger_url="postgresql://me:hush@db/hexflow"))
    state = stack._wanted_state(settings, discover_machine())
    state.members = {"worker-cpu": sleeper}
    servers.save_state(settings, state)
    assert stack._wanted_state(settings, discover_machine()).members == state.members
    state.identity["stack code"] = "older"
    servers.save_state(settings, state)
    assert "postgresql://…@db/hexflow" in servers.state_path(settings).read_text()
    assert "hush" not in servers.state_path(settings).read_text() + repr(settings)
    with pytest.raises(UserError, match=r"another stack code runs \(older, .*hexflow down"):
        stack.up(settings, lambda _: None)


def test_what_a_named_server_was_set_up_with_is_not_taken_for_our_own(settings: Settings) -> None:
    for server, deployed in (("own", "fingerprint"), ("http://elsewhere/api", "")):
        known = state_with()
        known.identity = {"Prefect server": server}
        known.deployed = "fingerprint"
        servers.save_state(settings, known)
        assert stack._wanted_state(settings, discover_machine()).deployed == deployed


def test_up_refuses_a_named_server_that_is_not_there(
    settings: Settings, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_with()
    state.prefect_url = state.mlflow_url = f"http://127.0.0.1:{free_port}/api"
    with pytest.raises(UserError, match="PREFECT_API_URL is set"):
        stack._require_named_servers(state, own=[servers.MLFLOW])


def test_a_home_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    blocked = settings_of(home=tmp_path / "file" / "home", runs=tmp_path, ledger_url="")
    with pytest.raises(UserError, match="HEXFLOW_HOME"), stack._locked(blocked, print):
        pass


def test_a_member_that_ends_early_is_told_with_its_log(settings: Settings) -> None:
    argv = [sys.executable, "-c", "print('port taken')"]
    member = servers.start_member(settings, "short", argv, {})
    with pytest.raises(UserError, match=r"short server ended.*port taken.*short\.log"):
        stack._wait("short server", lambda: False, member, 30.0, lambda _: None)


def test_a_wait_ends_at_its_deadline(settings: Settings, sleeper: Member) -> None:
    with pytest.raises(UserError, match="did not answer within 0 s"):
        stack._wait("sleeper", lambda: False, sleeper, 0.3, lambda _: None)


def test_a_taken_port_is_not_chosen() -> None:
    with socket.socket() as holder:
        holder.bind((servers.HOST, 0))
        holder.listen()
        taken = int(holder.getsockname()[1])
        chosen = servers.choose_port(taken)
    assert chosen != taken
    assert servers.choose_port(chosen) == chosen


def test_children_resolve_to_the_same_stack(settings: Settings) -> None:
    env = servers.environment(settings, "http://127.0.0.1:1/api", "http://127.0.0.1:2")
    assert settings.environment().items() <= env.items()
    assert env["PREFECT_API_URL"] == "http://127.0.0.1:1/api"
    assert env["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:2"


def test_a_server_is_known_by_the_process_that_listens(tmp_path: Path, free_port: int) -> None:
    """Another program's server on our port answers as well, and must not be taken for ours."""
    command = [sys.executable, "-m", "http.server", str(free_port), "--bind", "127.0.0.1"]
    foreign = ProcessGroup.start(command, {}, tmp_path / "foreign.log")
    idle = ProcessGroup.start([sys.executable, "-c", "import time; time.sleep(60)"], {}, tmp_path / "idle.log")
    try:
        url = f"http://127.0.0.1:{free_port}/"
        until(lambda: answers(url), 20, "the server's start")
        listening, silent = (
            servers.Member(pid=group.pid, key=process_key(group.pid), log=group.log) for group in (foreign, idle)
        )
        assert stack._serves(listening, url)
        assert not stack._serves(silent, url)
        assert servers.is_taken(free_port)
        assert listening.children() == []
    finally:
        foreign.stop()
        idle.stop()


def test_a_port_taken_meanwhile_is_replaced(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another program does between the look at a port and a server's start must not end a person's command."""
    said: list[str] = []
    outcomes: Iterator[stack._PortTaken | stack.Stack] = iter(
        [stack._PortTaken("Port 4200 was taken."), stack.Stack("http://127.0.0.1:1/api", "http://127.0.0.1:2")]
    )

    def up_once(*_: object) -> stack.Stack:
        outcome = next(outcomes)
        if isinstance(outcome, stack.Stack):
            return outcome
        raise outcome

    monkeypatch.setattr(stack, "_up", up_once)
    assert stack.up(settings, said.append).prefect_page == "http://127.0.0.1:1"
    assert said == ["Port 4200 was taken. Trying another port."]
