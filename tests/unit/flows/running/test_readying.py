"""A machine is asked to make itself ready on its own queues, and waited for with deadlines."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES
from prefect.states import Completed, Failed, Pending, Running

from flows.running import launcher, readying
from planners.errors import UserError
from planners.hardware.machine import Device, Machine
from planners.hardware.profile import DeviceProfile
from tasks.config.experiment import Experiment
from tasks.config.settings import Settings
from tests.support.plan import profile_of

HERE = Machine(
    name="here",
    devices=tuple(Device(index=i, device_type=t, kind="cpu", memory_bytes=2**30) for i, t in enumerate(("a", "b"))),
)


class FakeServer:
    """Flow runs go through `states`, one a look, and stay in the last; what completed has left a profile."""

    def __init__(self) -> None:
        self.states: dict[str, list[State[Any]]] = {}
        self.asked: dict[str, dict[str, Any]] = {}
        self.cancelled: list[str] = []
        self.known: set[str] = set()
        self.away: list[str] = []
        """Keys of the requests that the server, which is away, does not answer; "" stands for the next."""
        self._names: dict[UUID, str] = {}

    def run_deployment(self, name: str, **options: Any) -> SimpleNamespace:
        if "" in self.away:
            self.away[self.away.index("")] = options["idempotency_key"]
            raise httpx.ConnectError("refused")
        self.asked[name] = options
        flow_run = SimpleNamespace(id=uuid4())
        self._names[flow_run.id] = name
        return flow_run

    def read_flow_run(self, flow_run_id: UUID) -> SimpleNamespace:
        assert PREFECT_CLIENT_MAX_RETRIES.value() == 0, "a server that is away would hold up who is told to end"
        name = self._names[flow_run_id]
        states = self.states.setdefault(name, [Running(), Completed()])
        state = states.pop(0) if len(states) > 1 else states[0]
        if state.is_completed():
            self.known |= {str(self.asked[name]["parameters"].get("device_type"))}
        return SimpleNamespace(state=state)

    def set_flow_run_state(self, flow_run_id: UUID, state: State[Any]) -> None:
        assert state.is_cancelling()
        assert PREFECT_CLIENT_MAX_RETRIES.value() == 0, "a server that is away would hold up who is told to end"
        self.cancelled.append(self._names[flow_run_id])

    def find_profile(
        self, experiment: Experiment, machine: Machine, device_type: str, settings: Settings
    ) -> DeviceProfile | None:
        return profile_of(device_type, {1: 1.0}, 1.0) if device_type in self.known else None


@pytest.fixture
def server(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    fake = FakeServer()

    @contextmanager
    def client(**_: object) -> Iterator[FakeServer]:
        yield fake

    monkeypatch.setattr(readying, "get_client", client)
    monkeypatch.setattr(readying, "run_deployment", fake.run_deployment)
    monkeypatch.setattr(readying, "find_profile", fake.find_profile)
    monkeypatch.setattr(readying, "POLL_S", 0.0)
    return fake


def test_types_that_nobody_has_measured_are_measured_on_their_own_pools(server: FakeServer) -> None:
    """A type that is known is not measured again; the others' flow runs prepare first, so nothing else is started."""
    server.known = {"a"}
    profiles = readying.ready_and_measured(Experiment(), HERE, "run-1")
    assert set(profiles) == {"a", "b"}
    ((name, asked),) = server.asked.items()
    assert (name, asked["work_queue_name"]) == ("profile/b", "here")
    assert asked["parameters"] == {
        "experiment": Experiment().model_dump(mode="json"),
        "run": "run-1",
        "device_type": "b",
    }
    assert "job_variables" not in asked, "what stands there, all can read who may sign in to the server"
    assert server.cancelled == []


def test_who_watches_is_told_what_the_machine_is_at(server: FakeServer) -> None:
    server.states = {"profile/a": [Running(), Completed()], "profile/b": [Running(), Running(), Completed()]}
    told: list[str] = []
    readying.ready_and_measured(Experiment(), HERE, None, told.append)
    assert told == ["here makes itself ready: profile/a, profile/b", "here makes itself ready: profile/b"]


def test_a_machine_whose_types_are_known_is_only_made_ready(server: FakeServer) -> None:
    server.known = {"a", "b"}
    readying.ready_and_measured(Experiment(), HERE)
    assert set(server.asked) == {"prepare/a"}


def test_a_server_that_is_away_is_asked_again_under_the_same_key(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose answer was lost starts no second flow run."""
    monkeypatch.setattr(launcher, "RETRY_S", 0.0)
    server.known, server.away = {"a", "b"}, ["", ""]
    readying.ready_and_measured(Experiment(), HERE)
    assert server.away == [server.asked["prepare/a"]["idempotency_key"]] * 2


def test_what_a_machine_cannot_do_is_said_in_its_own_words_and_the_others_are_ended(server: FakeServer) -> None:
    server.states = {"profile/a": [Running()], "profile/b": [Failed(message="The disk of here is full.")]}
    with pytest.raises(UserError, match=r"^The disk of here is full\.$"):
        readying.ready_and_measured(Experiment(), HERE)
    assert server.cancelled == ["profile/a"]


def test_a_machine_whose_workers_are_gone_is_named(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readying, "START_DEADLINE_S", -1.0)
    server.states = {"profile/a": [Running()], "profile/b": [Pending()]}
    with pytest.raises(UserError, match=r"Nobody on here has begun profile/b .* `hexflow up`"):
        readying.ready_and_measured(Experiment(), HERE)
    assert server.cancelled == ["profile/a", "profile/b"]


def test_a_machine_that_does_not_get_ready_is_given_up(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readying, "READY_DEADLINE_S", -1.0)
    server.states = {"profile/a": [Running()], "profile/b": [Completed()]}
    with pytest.raises(UserError, match=r"here was not through with profile/a"):
        readying.ready_and_measured(Experiment(), HERE)
    assert server.cancelled == ["profile/a"]


def test_whatever_ends_the_wait_ends_what_was_asked_for(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flows.running.readying.time.sleep", interrupt)
    server.states = {"profile/a": [Running()], "profile/b": [Running()]}
    with pytest.raises(KeyboardInterrupt):
        readying.ready_and_measured(Experiment(), HERE)
    assert server.cancelled == ["profile/a", "profile/b"]


def test_a_profile_that_does_not_reach_shared_storage_is_named(server: FakeServer) -> None:
    server.known = {"a"}
    server.states = {"profile/b": [Completed()]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "read_flow_run", lambda _: SimpleNamespace(state=Completed()))
        with pytest.raises(UserError, match=r"here measured b, but no profile .* share HEXFLOW_RUNS"):
            readying.ready_and_measured(Experiment(), HERE)
