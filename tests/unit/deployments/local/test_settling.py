"""What becomes of runs whose processes are gone: only the run that is meant is closed, and nothing else is touched."""

from collections.abc import Iterator
from typing import ClassVar

import psutil
import pytest

from deployments.local import servers, settling, sign_in
from deployments.local.servers import StackState
from deployments.prefect.api import Json, PrefectApi
from tasks.config.settings import Settings
from tasks.exchange.ledger import Actor, Ledger
from tests.support.ledger import a_process, begin, join

Ended = list[tuple[object, ...]]


class SettledApi(PrefectApi):
    """A server with a flow run whose process is gone, one that lives, one that starts just now and one that crashed."""

    closed: ClassVar[list[tuple[str, str]]] = []
    looks = 0

    def flow_runs(self, state_types: list[str]) -> list[Json]:
        if state_types == ["CRASHED"]:
            return [{"id": "flow-crashed"}]
        self.looks += 1
        # The server's clock was set back in between; one ends in good order after the first look.
        found = {"flow-gone": "RUNNING", "flow-living": "RUNNING", "flow-starting": "PENDING", "flow-ending": "RUNNING"}
        times = dict.fromkeys(found, "2026-12-01T12:00:00Z") | {"flow-starting": "2026-12-01T11:00:00Z"}
        return [
            {"id": name, "state": {"type": found[name], "timestamp": times[name]}}
            for name in found
            if name != "flow-ending" or self.looks == 1
        ]

    def set_state(self, flow_run_id: str, state_type: str, message: str, force: bool = False) -> None:
        self.closed.append((flow_run_id, state_type))


@pytest.fixture(autouse=True)
def _a_stack_with_one_flow_run_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SettledApi, "closed", [])
    monkeypatch.setattr(sign_in, "PrefectApi", SettledApi)
    monkeypatch.setattr(settling, "STARTING_S", 0.0)
    living = iter([["flow-living"]])

    def marked(settings: Settings) -> list[tuple[psutil.Process, dict[str, str]]]:
        here = next(living, ["flow-living", "flow-starting"])
        return [(psutil.Process(), {"PREFECT__FLOW_RUN_ID": name}) for name in here]

    monkeypatch.setattr(servers, "marked_processes", marked)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Ended:
    """What MLflow was told."""
    told: Ended = []
    monkeypatch.setattr(settling, "end_run", lambda *arguments: told.append(arguments))
    return told


@pytest.fixture
def ledger(settings: Settings) -> Iterator[Ledger]:
    opened = Ledger(settings.shared.ledger_url)
    yield opened
    opened.close()


def at_work(ledger: Ledger, name: str) -> Actor:
    """The supervisor of a run `name` with its actors, all at work."""
    supervisor = begin(ledger, name, flow_run_id=f"flow-{name}")
    for actor in (supervisor, *(join(ledger, role, run_id=name) for role in ("trainer", "replica"))):
        ledger.heartbeat(actor)
    ledger.set_mlflow_run(supervisor, f"mlflow-{name}")
    return supervisor


def states(ledger: Ledger) -> dict[str, tuple[str, set[str]]]:
    """Of each run, its state and those of its supervisor and actors."""
    return {r.run_id: (r.state, {actor.state for actor in ledger.actors(r.run_id)}) for r in ledger.list_runs()}


def settle(settings: Settings, state_type: str) -> None:
    state = StackState(prefect_url="http://prefect", mlflow_url="http://mlflow", identity={}, members={})
    settling.settle_flow_runs(settings, state, state_type, "Ended.", pytest.fail)


@pytest.mark.parametrize(
    ("state_type", "state", "status"), [("CANCELLED", "cancelled", "KILLED"), ("CRASHED", "failed", "FAILED")]
)
def test_runs_whose_process_was_killed_are_closed(
    settings: Settings, ledger: Ledger, ended: Ended, state_type: str, state: str, status: str
) -> None:
    """Whether their worker saw it and called the flow run crashed, or was killed itself; no actor stays at work."""
    for name in ("gone", "living", "starting", "crashed"):
        at_work(ledger, name)
    settle(settings, state_type)
    assert SettledApi.closed == [("flow-gone", state_type)]
    closed, open_ = (state, {"fenced"}), ("running", {"running"})
    assert states(ledger) == {"gone": closed, "living": open_, "starting": open_, "crashed": closed}
    newest = {("replica", 0): 1, ("supervisor", 0): 1, ("trainer", 0): 1}
    assert ended == [("http://mlflow", f"mlflow-{name}", status, newest) for name in ("gone", "crashed")]


@pytest.mark.parametrize("flow_run_id", ["flow-gone", "flow-resumed"])
def test_a_run_that_is_taken_over_meanwhile_is_left_to_its_supervisor(
    settings: Settings, ledger: Ledger, ended: Ended, flow_run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it by a retry of the same flow run: between the look at processes and the settling there is time."""
    former = at_work(ledger, "gone")

    def take_over(api: SettledApi, flow_run: str, state_type: str, message: str, force: bool = False) -> None:
        ledger.finish(former, "failed")
        ledger.take_over("gone", a_process(), flow_run_id)
        join(ledger, "replica", run_id="gone")

    monkeypatch.setattr(SettledApi, "set_state", take_over)
    settle(settings, "CRASHED")
    assert states(ledger)["gone"][0] == "running"
    assert {(row.role, row.state) for row in ledger.actors("gone")} == {
        ("supervisor", "starting"),
        ("replica", "starting"),
        ("trainer", "fenced"),
    }
    assert ended == []


def test_down_writes_down_that_the_runs_here_are_to_end(settings: Settings, ledger: Ledger) -> None:
    """Before any signal, which may be lost; a run that another machine supervises is not meant."""
    here, elsewhere = at_work(ledger, "living"), at_work(ledger, "elsewhere")
    settling.want_the_end(settings, pytest.fail)
    assert [ledger.heartbeat(supervisor).wanted for supervisor in (here, elsewhere)] == ["leave", "run"]


def test_a_ledger_that_cannot_be_read_hinders_no_end(settings: Settings) -> None:
    path = settings.local.home / "ledger.db"
    assert str(path) in settings.shared.ledger_url
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"not a database" * 100)
    said: list[str] = []
    settling.want_the_end(settings, said.append)
    (line,) = said
    assert line.startswith("The runs in the ledger are left as they are: ")
