"""How a run is followed and cancelled from the command line."""

import io
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from deployments.cli import follow
from deployments.cli.follow import (
    Follower,
    View,
    describe_step,
    draw,
    ending,
    interrupts_kept,
    look,
    outcome,
    step_figures,
    time_left_s,
    waiting_for,
)
from deployments.cli.running import EXIT_STATUS
from deployments.cli.terminal import CANCELLED
from deployments.prefect.api import Unreachable
from tasks.exchange.ledger.rows import ActorRow, Progress, RunRow, SpanRow, StepRow
from tests.support.api import FULL, FakeApi, a_state

RUN = RunRow(
    run_id="tiny-1",
    flow_run_id="flow-1",
    mlflow_run_id=None,
    state="running",
    lineage=0,
    prompts_per_step=4,
    max_staleness=2,
    steps=4,
    max_attempts_per_prompt=3,
    created_s=0.0,
)
PROGRESS = Progress(
    step=2,
    steps=4,
    groups={},
    dropped={},
    outcomes={},
    quarantined_prompts=0,
    response_tokens=0,
    consumed=8,
    max_staleness_seen=1,
    latest_version=(0, 2),
    reward_mean=0.5,
)
METRICS = {
    "reward/mean": 0.125,
    "throughput/response_tokens_per_s": 312.4,
    "staleness/max": 1.0,
    "wait/trainer_for_rollouts": 0.25,
}
STEPS = (StepRow(0, 100.0, METRICS), StepRow(1, 110.0, METRICS))
REPLICA = ActorRow("replica", 0, 1, "starting", 1, "here", None, 0.0, "loading weights")


class FakeBooks:
    """A ledger with the views given, one a look, the last one for ever."""

    def __init__(self, *views: View) -> None:
        self._views = list(views)
        self._view = views[0]
        self.asked: list[str] = []
        self.rows_read: list[StepRow | SpanRow] = []

    def find_run(self, *, run_id: str | None = None, flow_run_id: str | None = None) -> RunRow | None:
        self._view = self._views.pop(0) if len(self._views) > 1 else self._views[0]
        return self._view.run

    def progress(self, run_id: str) -> Progress:
        assert self._view.progress
        return self._view.progress

    def steps(self, run_id: str, since: int = 0) -> list[StepRow]:
        self.rows_read += (read := [row for row in self._view.steps if row.step >= since])
        return read

    def actors(self, run_id: str) -> list[ActorRow]:
        return list(self._view.actors)

    def spans(self, run_id: str, since_s: float | None = None) -> list[SpanRow]:
        self.rows_read += (read := [row for row in self._view.spans if since_s is None or row.end_s > since_s])
        return read

    def ask_to_cancel(self, flow_run_id: str) -> bool:
        self.asked.append(flow_run_id)
        return self._view.run is not None


@pytest.fixture(autouse=True)
def _quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "POLL_S", 0.001)


def follower(api: FakeApi, *views: View, clock: Callable[[], float] = time.monotonic) -> tuple[Follower, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=100, highlight=False)
    return Follower(api, FakeBooks(*(views or (View("Running"),))), "flow-1", console, clock), out


def a_view(steps: tuple[StepRow, ...], actors: tuple[ActorRow, ...] = (REPLICA,)) -> View:
    return View("Running", RUN, replace(PROGRESS, step=len(steps)), steps, actors, ())


def test_a_log_gets_one_line_per_step_and_per_wait() -> None:
    api = FakeApi("SCHEDULED", "RUNNING", "RUNNING", "RUNNING", "RUNNING", "COMPLETED")
    views = [View("Scheduled"), a_view(()), a_view(()), a_view(STEPS[:1]), a_view(STEPS), a_view(STEPS)]
    shown, out = follower(api, *views)
    assert shown.follow()["type"] == "COMPLETED"
    lines = out.getvalue().splitlines()
    assert lines == [
        "flow run: scheduled",
        "replica 0 starting: loading weights",
        "step 1/4  reward 0.125  tokens/s 312.4  staleness 1  trainer waits 25%",
        "step 2/4  reward 0.125  tokens/s 312.4  staleness 1  trainer waits 25%  left 20 s",
    ]


def test_a_resumed_run_does_not_repeat_its_steps() -> None:
    api = FakeApi("RUNNING", "RUNNING", "COMPLETED")
    shown, out = follower(api, a_view(STEPS[:1]), a_view(STEPS))
    shown.follow()
    lines = [line.split("  ")[0] for line in out.getvalue().splitlines()]
    assert lines == ["replica 0 starting: loading weights", "step 2/4"]


@pytest.mark.parametrize("earlier", [(), STEPS[:1]], ids=["new", "resumed"])
def test_a_log_is_told_again_what_is_done_while_no_step_ends(
    earlier: tuple[StepRow, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the run's begin on, or from that of its resume, and in the words of the supervisor while it is alone."""
    monkeypatch.setattr(follow, "TELL_EVERY_S", 0.0)
    measuring = a_view(earlier, (replace(SUPERVISOR, message="here makes itself ready: profile/cpu"),))
    shown, out = follower(FakeApi("RUNNING", "RUNNING", "RUNNING", "COMPLETED"), measuring, measuring, a_view(STEPS))
    shown.follow()
    said = "run tiny-1: here makes itself ready: profile/cpu"
    lines = out.getvalue().splitlines()
    assert lines[:4] == [said, f"{said}, 0 s so far", f"{said}, 0 s so far", lines[3]]
    assert lines[3].startswith("step ")


def test_a_look_at_a_long_run_reads_its_last_steps_only() -> None:
    """And whoever missed some, as while the ledger could not be read, gets them all."""
    steps = tuple(StepRow(number, 10.0 * number, METRICS) for number in range(500))
    spans = tuple(SpanRow("replica", 0, 1, "wait", 10.0 * n - 5, 10.0 * n) for n in range(500))
    view = View("Running", RUN, replace(PROGRESS, step=500, steps=1000), steps, (REPLICA,), spans)
    books = FakeBooks(view)
    seen = look(books, "flow-1", "Running", printed_step=None)
    assert [row.step for row in seen.steps] == [*range(489, 500)]
    assert len(books.rows_read) == 11 + 10
    assert step_figures(seen, seen.steps[-1]) == step_figures(view, steps[-1])
    assert time_left_s(seen) == time_left_s(view)
    missed = look(FakeBooks(view), "flow-1", "Running", printed_step=100)
    assert [row.step for row in missed.steps] == [*range(100, 500)]


def test_time_left_is_not_fooled_by_the_gap_of_a_resume() -> None:
    ends = (0.0, 10.0, 5000.0, 5010.0, 5020.0)
    steps = tuple(StepRow(number, end, {}) for number, end in enumerate(ends))
    view = View("Running", RUN, replace(PROGRESS, step=5, steps=8), steps)
    assert time_left_s(view) == 30.0


def test_rollout_waits_are_a_share_of_the_step() -> None:
    spans = (
        SpanRow("replica", 0, 1, "wait", 95.0, 105.0),  # half of it belongs to the step before
        SpanRow("replica", 0, 1, "busy", 105.0, 110.0),
        SpanRow("trainer", 0, 1, "wait", 100.0, 110.0),
    )
    view = replace(a_view(STEPS), spans=spans)
    assert "rollouts wait 50%" in describe_step(view, STEPS[1])
    assert "rollouts wait" not in describe_step(view, STEPS[0])


def test_what_is_waited_for() -> None:
    assert waiting_for(View("Pending")) == "flow run: pending"
    assert "preparing" in waiting_for(a_view((), ()))
    assert waiting_for(a_view(())) == "replica 0 starting: loading weights"


def test_the_live_display_shows_bar_steps_and_notice() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, record=True)
    console.print(draw(a_view(STEPS), 75.0, "Cancelling"))
    text = console.export_text()
    for expected in ("step 2/4", "1 min 15 s gone, 20 s left", "312.4", "loading weights", "Cancelling"):
        assert expected in text


def test_a_server_that_is_away_does_not_end_the_watch() -> None:
    shown, out = follower(FakeApi("RUNNING", Unreachable("no answer"), Unreachable("no answer"), "COMPLETED"))
    assert shown.follow()["type"] == "COMPLETED"
    assert out.getvalue().count("no answer") == 1


def interrupt_at(api: FakeApi, *looks: int) -> None:
    seen = 0

    def look() -> None:
        nonlocal seen
        seen += 1
        if seen in looks:
            raise KeyboardInterrupt

    api.on_look = look


def test_ctrl_c_cancels_and_waits() -> None:
    api, books = FakeApi("RUNNING"), FakeBooks(a_view(()))
    interrupt_at(api, 2)
    out = io.StringIO()
    assert Follower(api, books, "flow-1", Console(file=out)).follow()["type"] == "CANCELLED"
    assert (api.proposed, books.asked) == (["CANCELLING"], ["flow-1"])
    assert "Cancelling" in out.getvalue()


@pytest.mark.parametrize("state", ["CANCELLING", "CANCELLED"])
def test_a_cancellation_that_came_too_late_is_none(state: str) -> None:
    """Prefect lets no flow run that it was told to cancel end as completed; the ledger knows better."""
    supervisor = replace(REPLICA, role="supervisor", state="done")
    complete = replace(a_view(STEPS, (supervisor,)), run=replace(RUN, state="completed"))
    assert (outcome(a_state(state), complete) or {})["type"] == "COMPLETED"
    reporting = replace(complete, actors=(replace(supervisor, state="running"),))
    assert outcome(a_state("CANCELLING"), reporting) is None
    cancelled = replace(complete, run=replace(RUN, state="cancelled"))
    assert outcome(a_state("CANCELLING"), cancelled) is None
    assert outcome(a_state("CANCELLED"), cancelled) == a_state("CANCELLED")
    api = FakeApi("RUNNING")
    interrupt_at(api, 2)
    shown, _ = follower(api, complete)
    assert shown.follow()["type"] == "COMPLETED"


class BusyApi(FakeApi):
    """Running, and busy from the first cancellation on, for so many requests."""

    def __init__(self, requests: int) -> None:
        super().__init__("RUNNING")
        self.requests = requests

    def set_state(self, flow_run_id: str, state_type: str, message: str, force: bool = False) -> None:
        self.requests -= 1
        if self.requests >= 0:
            raise Unreachable("The server is busy.")
        super().set_state(flow_run_id, state_type, message, force)


def test_a_cancellation_that_the_server_is_too_busy_for_is_asked_for_again() -> None:
    api = BusyApi(requests=3)
    interrupt_at(api, 2)
    shown, _ = follower(api)
    assert shown.follow()["type"] == "CANCELLED"
    assert api.proposed == ["CANCELLING"]


def test_the_ledger_is_asked_until_the_run_is_there() -> None:
    """The flow that makes the run may have begun just before, and its server be too busy to be told."""
    api, books, out = BusyApi(requests=3), FakeBooks(*[View("Running")] * 4, a_view(())), io.StringIO()
    interrupt_at(api, 2)
    assert Follower(api, books, "flow-1", Console(file=out)).follow()["type"] == "CANCELLED"
    assert books.asked == ["flow-1"] * 5


@pytest.mark.parametrize(("state", "status"), [("cancelled", 130), ("completed", 0), ("failed", 1)])
def test_without_a_server_the_ledger_tells_how_a_run_ended(state: str, status: int) -> None:
    """Once its supervisor has left, which ends the actors after closing the run."""
    supervisor = replace(REPLICA, role="supervisor", state="running")
    leaving = replace(a_view(STEPS, (supervisor,)), run=replace(RUN, state=state))
    left = replace(leaving, actors=(replace(supervisor, state="done"),))
    assert ending(a_view(STEPS)) is ending(leaving) is None
    api = BusyApi(requests=10**6)
    interrupt_at(api, 2)
    shown, _ = follower(api, a_view(STEPS), leaving, leaving, left)
    ended = shown.follow()
    assert (ended["type"], ended["name"]) == (state.upper(), state.capitalize())
    assert EXIT_STATUS.get(ended["type"], CANCELLED) == status


SUPERVISOR = replace(REPLICA, role="supervisor", state="running", message="")


class Clock:
    """Each look comes so much later."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def test_a_run_that_was_killed_with_its_stack_is_not_waited_for() -> None:
    """As `hexflow down` may leave it: its supervisor has not said that it leaves, but is seen to be silent."""
    unheard = a_view(STEPS, (replace(SUPERVISOR, silent_s=1e6),))
    cancelled = replace(unheard, run=replace(RUN, state="cancelled"))
    shown, _ = follower(FakeApi("RUNNING", Unreachable("no answer")), a_view(STEPS), cancelled, clock=Clock(4.0))
    assert shown.follow()["type"] == "CANCELLED"
    assert ending(replace(unheard, silent_s=30.0)) is None
    shown, _ = follower(FakeApi("RUNNING", Unreachable("no answer")), unheard, clock=Clock(4.0))
    state = shown.follow()
    assert "seems to have ended" in state["message"]
    assert "has been silent for 1 min 0 s. `hexflow up`" in state["message"]
    assert EXIT_STATUS[state["type"]] == 1


def test_what_could_not_be_seen_is_no_silence() -> None:
    """A laptop slept, or the clock was set: the old beat says nothing, and a gap of the watch begins anew."""
    unheard = a_view(STEPS, (replace(SUPERVISOR, silent_s=1e6),))
    away = Unreachable("no answer")
    shown, _ = follower(FakeApi("RUNNING", away, away, away, "COMPLETED"), unheard, clock=Clock(3600.0))
    assert shown.follow()["type"] == "COMPLETED"


def test_sigterm_cancels_like_ctrl_c() -> None:
    """Dying without a word it would leave a run that holds the devices."""
    api = FakeApi("RUNNING")
    looks = iter(range(100))
    api.on_look = lambda: os.kill(os.getpid(), signal.SIGTERM) if next(looks) == 2 else None
    before = signal.getsignal(signal.SIGTERM)
    shown, out = follower(api)
    assert shown.follow()["type"] == "CANCELLED"
    assert api.proposed == ["CANCELLING"]
    assert "Cancelling" in out.getvalue()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_run_is_being_started_cancels_it(number: signal.Signals) -> None:
    """Taken at once it would end the command, and leave alone the run that the server has begun meanwhile."""
    before = signal.getsignal(signal.SIGTERM)
    ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run where it is ignored
    shown, out = follower(api := FakeApi("RUNNING"))
    try:
        with interrupts_kept():
            os.kill(os.getpid(), number)
            assert shown.follow()["type"] == "CANCELLED"
    finally:
        signal.signal(signal.SIGINT, ctrl_c)
    assert api.proposed == ["CANCELLING"]
    assert "Cancelling" in out.getvalue()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_run_that_another_command_started_is_cancelled_and_waited_for() -> None:
    api, books, out = FakeApi("RUNNING"), FakeBooks(a_view(())), io.StringIO()
    assert Follower(api, books, "flow-1", Console(file=out)).cancel()["type"] == "CANCELLED"
    assert (api.proposed, books.asked) == (["CANCELLING"], ["flow-1"])


def test_who_leaves_a_cancelled_run_is_told_how_to_ask_again() -> None:
    api, books = FakeApi("RUNNING"), FakeBooks(a_view(()))
    interrupt_at(api, 2, 3)
    shown = Follower(api, books, "flow-1", Console(file=io.StringIO()))
    assert "`hexflow cancel tiny-1` asks again" in shown.follow()["message"]


def test_a_silent_supervisor_alone_does_not_end_the_watch() -> None:
    lost = a_view(STEPS, (replace(SUPERVISOR, silent_s=100.0),))
    shown, _ = follower(FakeApi("RUNNING", "RUNNING", "RUNNING", "COMPLETED"), lost)
    assert shown.follow()["type"] == "COMPLETED"


def test_a_flow_run_without_a_run_is_not_waited_for_when_its_server_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `hexflow plan` follows one."""
    monkeypatch.setattr(follow, "PICKUP_DEADLINE_S", 0.0)
    shown, _ = follower(FakeApi("RUNNING", Unreachable("no answer")))
    state = shown.follow()
    assert "has not answered" in state["message"]
    assert EXIT_STATUS[state["type"]] == 1


def test_a_killed_supervisor_is_told_with_what_goes_on() -> None:
    crashed = a_view(STEPS, (SUPERVISOR, REPLICA))
    shown, _ = follower(FakeApi("RUNNING", "CRASHED"), crashed)
    assert shown.follow()["message"] == "because. Its actors may go on until `hexflow resume` takes over."
    ended = replace(crashed, run=replace(RUN, state="failed"))
    shown, _ = follower(FakeApi("RUNNING", "CRASHED"), ended)
    assert shown.follow()["message"] == "because"


def test_a_restart_is_told_once() -> None:
    def during(attempt: int, state: str) -> View:
        return a_view(STEPS, (SUPERVISOR, replace(REPLICA, attempt=attempt, state=state)))

    views = [during(2, "running"), during(2, "fenced"), during(3, "starting"), during(3, "running")]
    shown, out = follower(FakeApi("RUNNING", "RUNNING", "RUNNING", "RUNNING", "COMPLETED"), *views)
    shown.follow()
    died = [line for line in out.getvalue().splitlines() if "died" in line]
    assert died == ["replica 0 died; started again (attempt 3)"]


def test_actors_of_an_earlier_attempt_are_not_shown() -> None:
    """A resume fences them, and has started none of its own yet."""
    fenced = a_view((), (SUPERVISOR, replace(REPLICA, state="fenced")))
    assert waiting_for(fenced) == "run tiny-1: preparing model, profile and plan"
    resumed = a_view((), (SUPERVISOR, replace(REPLICA, attempt=2)))
    shown, out = follower(FakeApi("RUNNING", "RUNNING", "COMPLETED"), fenced, resumed)
    shown.follow()
    assert "died" not in out.getvalue()
    done = replace(fenced, progress=replace(PROGRESS, step=4))
    assert waiting_for(done) == "run tiny-1: reporting"


def test_a_second_ctrl_c_leaves() -> None:
    api = FakeApi("RUNNING")
    interrupt_at(api, 2, 3)
    shown, _ = follower(api)
    assert "left to end by itself" in shown.follow()["message"]


class FullBooks(FakeBooks):
    """A ledger that takes no cancellation, and whose first `unread` looks fail."""

    def __init__(self, unread: int, *views: View) -> None:
        super().__init__(*views)
        self._unread = unread

    def find_run(self, *, run_id: str | None = None, flow_run_id: str | None = None) -> RunRow | None:
        self._unread -= 1
        if self._unread >= 0:
            raise FULL
        return super().find_run(run_id=run_id, flow_run_id=flow_run_id)

    def ask_to_cancel(self, flow_run_id: str) -> bool:
        raise FULL


def test_ctrl_c_is_told_to_prefect_although_the_ledger_takes_nothing() -> None:
    api, out = FakeApi("RUNNING"), io.StringIO()
    interrupt_at(api, 2)
    shown = Follower(api, FullBooks(0, View("Running")), "flow-1", Console(file=out))
    assert shown.follow()["type"] == "CANCELLED"
    assert api.proposed == ["CANCELLING"]
    (line,) = [line for line in out.getvalue().splitlines() if "disk is full" in line]
    assert line == "The ledger did not take the cancellation, which is left to Prefect: database or disk is full."


def test_a_ledger_that_cannot_be_read_does_not_end_the_watch() -> None:
    out = io.StringIO()
    books = FullBooks(2, a_view(STEPS[:1]), a_view(STEPS))
    api = FakeApi("RUNNING", "RUNNING", "RUNNING", "RUNNING", "COMPLETED")
    assert Follower(api, books, "flow-1", Console(file=out)).follow()["type"] == "COMPLETED"
    assert out.getvalue().count("The ledger cannot be read: database or disk is full.") == 1
    assert "step 2/4" in out.getvalue()


def test_a_cancellation_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "CANCEL_DEADLINE_S", 0.0)
    api = FakeApi("RUNNING")
    interrupt_at(api, 2)
    shown, _ = follower(api)
    state = shown.follow()
    assert "not cancelled within" in state["message"]
    assert EXIT_STATUS[state["type"]] == 1, "it was not cancelled"


def test_a_run_that_nobody_picks_up_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "PICKUP_DEADLINE_S", 0.0)
    api = FakeApi("SCHEDULED")
    shown, _ = follower(api)
    state = shown.follow()
    assert state["type"] == "CRASHED"
    assert "No worker" in state["message"]
    assert api.proposed == ["CANCELLED"]
