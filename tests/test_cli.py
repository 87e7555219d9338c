"""The command line: bad input, live progress, exit status."""

import errno
import io
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
import typer
from rich.console import Console
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

from deployments import api, cli, follow, stack
from deployments.api import Json, PrefectApi, Unreachable
from deployments.cli import CANCELLED, EXIT_STATUS
from deployments.follow import Follower, View, describe_step, draw, ending, outcome, time_left_s, waiting_for
from deployments.servers import Member, StackState
from deployments.show import show_running, show_runs, show_status, summary_lines
from deployments.stack import Stack
from deployments.versions import WIRE_SCHEMA
from planners.cluster import Device, Machine
from planners.errors import UserError
from tasks import readiness
from tasks.devices import hold_devices
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Ledger
from tasks.exchange.rows import ActorRow, Progress, RunRow, SpanRow, StepRow
from tasks.exchange.schema import SCHEMA_VERSION, schema_info
from tasks.experiment import load_experiment
from tasks.settings import Settings
from tests.plan_support import gpu_plan

TINY = Path(cli.__file__).parent / "experiments" / "tiny.yaml"
LAPTOP = str(Path(cli.__file__).parent / "clusters" / "laptop.yaml")
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


def a_state(state_type: str) -> Json:
    return {"type": state_type, "name": state_type.capitalize(), "message": "because"}


class FakeApi(PrefectApi):
    """A flow run that goes through `states`, one a look, and stays in the last one."""

    def __init__(self, *states: str | Exception) -> None:
        super().__init__("http://127.0.0.1:1/api")
        self.states = list(states)
        self.proposed: list[str] = []
        self.on_look: Callable[[], None] = lambda: None

    def flow_run(self, flow_run_id: str) -> Json:
        self.on_look()
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, Exception):
            raise state
        return {"state": a_state(state)}

    def set_state(self, flow_run_id: str, state_type: str, message: str, force: bool = False) -> None:
        self.proposed.append(state_type)
        self.states = ["CANCELLING", "CANCELLED"]


class FakeBooks:
    """A ledger with the views given, one a look, the last one for ever."""

    def __init__(self, *views: View) -> None:
        self._views = list(views)
        self.asked: list[str] = []

    def find_run(self, *, run_id: str | None = None, flow_run_id: str | None = None) -> RunRow | None:
        self._view = self._views.pop(0) if len(self._views) > 1 else self._views[0]
        return self._view.run

    def progress(self, run_id: str) -> Progress:
        assert self._view.progress
        return self._view.progress

    def steps(self, run_id: str) -> list[StepRow]:
        return list(self._view.steps)

    def actors(self, run_id: str) -> list[ActorRow]:
        return list(self._view.actors)

    def spans(self, run_id: str) -> list[SpanRow]:
        return list(self._view.spans)

    def ask_to_cancel(self, flow_run_id: str) -> None:
        self.asked.append(flow_run_id)


@pytest.fixture(autouse=True)
def _quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "POLL_S", 0.001)


def follower(api: FakeApi, *views: View) -> tuple[Follower, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=100, highlight=False)
    return Follower(api, FakeBooks(*(views or (View("Running"),))), "flow-1", console), out


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
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == ["step 2/4"]


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
    api, books = FakeApi("RUNNING"), FakeBooks(View("Running"))
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


def test_a_second_ctrl_c_leaves() -> None:
    api = FakeApi("RUNNING")
    interrupt_at(api, 2, 3)
    shown, _ = follower(api)
    assert "left to end by itself" in shown.follow()["message"]


FULL = OperationalError("INSERT", {}, sqlite3.OperationalError("database or disk is full"))


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

    def ask_to_cancel(self, flow_run_id: str) -> None:
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


@pytest.mark.parametrize(
    ("state", "status"),
    [("COMPLETED", 0), ("FAILED", 1), ("CRASHED", 1), ("CANCELLED", 130), ("CANCELLING", 130), ("RUNNING", 130)],
)
def test_exit_status_tells_the_truth(state: str, status: int) -> None:
    out = io.StringIO()
    with pytest.raises(typer.Exit) as left:
        cli._leave(a_state(state), Console(file=out))
    assert left.value.exit_code == status
    assert ("because" in out.getvalue()) == (state != "COMPLETED")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (Unreachable("No answer from the server"), "No answer from the server"),
        (UserError("The server refused it."), "The server refused it"),
        (FULL, "The ledger failed: database or disk is full"),
    ],
)
def test_a_run_lost_from_sight_was_started_all_the_same(
    error: Exception,
    cause: str,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit status 2 would say that nothing was started; and the cursor, hidden by the live display, must come back."""

    class LostApi(FakeApi):
        def __init__(self, url: str) -> None:
            super().__init__("SCHEDULED")

        def create_flow_run(self, deployment: str, parameters: Json) -> str:
            return "flow-1"

        def set_state(self, flow_run_id: str, state_type: str, message: str, force: bool = False) -> None:
            raise error

    out = io.StringIO()
    monkeypatch.setattr(follow, "PICKUP_DEADLINE_S", 0.0)
    monkeypatch.setattr(cli, "_console", lambda: Console(file=out, force_terminal=True, width=100))
    monkeypatch.setattr(cli, "_bring_up", lambda *_: Stack("http://127.0.0.1:1/api", "http://127.0.0.1:2"))
    monkeypatch.setattr(api, "PrefectApi", LostApi)
    with pytest.raises(typer.Exit) as left:
        cli._run_and_follow(settings, {})
    assert left.value.exit_code == 1
    said = capsys.readouterr().err
    assert said.startswith(f"hexflow: {cause}. ")
    assert "hexflow status" in said
    assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l") >= 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "none.yaml"], "no experiment file none.yaml"),
        (["train", "bad.yaml"], "did you mean 'algorithm'"),
        (["train", "good.yaml", "algorithm.lr=fast"], "algorithm.lr"),
        (["plan", "bad.yaml"], "did you mean 'algorithm'"),
        (["resume", "none-1"], "no run none-1"),
        (["resume", "broken-1"], "the experiment of the run, cannot be read"),
        (["resume", "lost-1"], "The ledger does not know run lost-1"),
        (["plan", "good.yaml", "data.task=chain_sums", "--cluster", LAPTOP], "did you mean 'chain_sum'"),
        (["plan", "good.yaml", "--cluster", ""], "--cluster names no file"),
        (["plan", "good.yaml", "--cluster", LAPTOP, "--json", "."], "is a directory: name a file"),
        (["plan", "good.yaml", "--cluster", LAPTOP, "--json", "/proc/none/plan.json"], "cannot be written"),
        (["plan", "good.yaml", "--cluster", LAPTOP, "--json", "/dev/null"], "no regular file"),
        (["simulate", "none.json", "--json", "/proc/none/figures.json"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(
    arguments: list[str], message: str, settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "bad.yaml").write_text("algoritm: {lr: 1}\n")
    (tmp_path / "good.yaml").write_text("run: {steps: 1}\n")
    for run, text in {"broken-1": "{", "lost-1": "{}"}.items():
        RunDirectory(settings.runs / run).root.mkdir(parents=True)
        RunDirectory(settings.runs / run).experiment.write_text(text)
    done = run_hexflow(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (settings.home / "stack.json").exists()


@pytest.mark.parametrize("command", ["train", "prepare", "plan"])
def test_a_home_that_cannot_be_made_is_one_line(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc takes no files, not even from root."""
    monkeypatch.setenv("HEXFLOW_HOME", "/proc/none")
    monkeypatch.setenv("HEXFLOW_RUNS", str(tmp_path))
    done = run_hexflow(tmp_path, command, str(TINY))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "/proc/none cannot be written" in done.stderr


def test_a_terminal_that_knows_ascii_only_gets_question_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setenv("HEXFLOW_HOME", str(tmp_path / "η"))
    done = run_hexflow(tmp_path, "runs")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{tmp_path}/?; HEXFLOW_HOME names another place" in done.stdout


@pytest.mark.parametrize("arguments", [["-h"], ["plan", "-h"], ["down", "-h"]])
def test_a_short_way_to_help(arguments: list[str], tmp_path: Path) -> None:
    done = run_hexflow(tmp_path, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "-h, --help" in done.stdout


def test_what_a_command_does_fits_its_line_in_the_list(tmp_path: Path) -> None:
    commands = run_hexflow(tmp_path, "--help").stdout.partition("Commands:")[2].split("\n")
    assert len([line for line in commands if line.strip()]) == 10
    assert [line for line in commands if line.endswith("...")] == []


def test_a_named_server_needs_a_scheme() -> None:
    state = StackState(prefect_url="localhost:4200/api", mlflow_url="", identity={})
    with pytest.raises(UserError, match="PREFECT_API_URL is localhost:4200/api: write http://"):
        stack._require_named_servers(state, own=["mlflow"])


def test_a_place_without_permission_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root may do everything, so the refusal is made up."""

    def refuse() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/secret")

    monkeypatch.setattr(cli, "app", refuse)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("hexflow: /secret cannot be used, permission is denied: mend that")


def started(*_: object) -> Stack:
    """In place of `cli._bring_up`: a broken check must not start a stack."""
    raise AssertionError("a stack would have been started")


@pytest.mark.parametrize("command", ["train", "resume"])
def test_busy_devices_are_told_before_anything_starts(
    command: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, *_ = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(readiness, "LEAVING_S", 0.0)
    monkeypatch.setattr(cli, "_bring_up", started)
    run = RunDirectory(settings.runs / "tiny-2")
    run.root.mkdir(parents=True)
    run.experiment.write_text(load_experiment(TINY).model_dump_json())
    with (
        hold_devices("cpu", [core], "tiny-1 (train 0)", settings),
        pytest.raises(UserError, match=rf"Core {core} is held by tiny-1 \(train 0\)"),
    ):
        cli.train(TINY) if command == "train" else cli.resume("tiny-2")


def test_an_older_ledger_is_told_before_anything_starts(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 kept another kind of plan, and checkpoints under names without a lineage."""
    ledger = Ledger(settings.ledger_url)
    ledger.create_run("tiny-1", prompts_per_step=4, max_staleness=2, steps=4, max_attempts_per_prompt=3)
    ledger.add_plan_epoch("tiny-1", '{"training": {"role": "train"}, "replicas": []}')
    with ledger.write("schema") as connection:
        connection.execute(update(schema_info).values(version=1))
    monkeypatch.setattr(cli, "_bring_up", started)
    message = (
        r"^The ledger .* has tables of version 1, but this hexflow needs version 3: use the hexflow that made it, or "
    )
    for command in (
        lambda: show_running(settings, Console(file=io.StringIO())),
        lambda: cli._run_and_follow(settings, {}),
    ):
        with pytest.raises(UserError, match=message):
            command()


def test_processes_that_share_no_ledger_share_no_stack() -> None:
    """Whoever raises the ledger's version has to raise the wire's."""
    assert int(WIRE_SCHEMA) >= SCHEMA_VERSION


def test_the_version_is_told(tmp_path: Path) -> None:
    done = run_hexflow(tmp_path, "--version")
    assert (done.returncode, done.stdout) == (0, f"hexflow {version('hexflow')}\n")


def test_status_without_a_stack(settings: Settings, tmp_path: Path) -> None:
    done = run_hexflow(tmp_path, "status")
    assert done.returncode == 1
    assert "hexflow up" in done.stdout


def shown_status(settings: Settings, state: StackState | None) -> str:
    out = io.StringIO()
    assert not show_status(settings, state, Console(file=out, width=160))
    return out.getvalue()


def test_status_tells_named_servers(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these answers; a person wants to know that, and who named them."""
    own, named = "http://127.0.0.1:2", "http://me:secret@127.0.0.1:1/api"
    member = Member(pid=os.getpid(), started_s=psutil.Process().create_time(), log=settings.logs / "log")
    state = StackState(
        prefect_url=named, mlflow_url=own, identity={}, own_urls={"mlflow": own}, members={"mlflow": member}
    )
    assert "named by" not in shown_status(settings, None)
    assert "MLFLOW_TRACKING_URI" not in shown_status(settings, state)
    monkeypatch.setenv("PREFECT_API_URL", named)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:3")
    without, within = shown_status(settings, None), shown_status(settings, state)
    assert "Prefect server does not answer: http://…@127.0.0.1:1/api, named by PREFECT_API_URL" in without
    assert "No stack runs" in without
    assert "http://…@127.0.0.1:1, named by PREFECT_API_URL" in within
    assert f"MLFLOW_TRACKING_URI names http://127.0.0.1:3, but this stack uses {own}: `hexflow down`" in within
    assert "secret" not in without + within


def run_hexflow(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(cli.__file__).parent.parent)
    return subprocess.run(
        [sys.executable, "-m", "deployments.cli", *arguments],
        cwd=directory,
        # No such server answers, so that no stack starts even if a check is broken.
        env={**os.environ, "PYTHONPATH": root, "PREFECT_API_URL": "http://127.0.0.1:1/api"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_ledger_that_fails_under_a_command_is_one_line(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise FULL

    Ledger(settings.ledger_url).close()
    monkeypatch.setattr(Ledger, "list_runs", fail)
    monkeypatch.setattr(sys, "argv", ["hexflow", "runs"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("hexflow: The ledger failed: database or disk is full. ")


def test_the_command_line_starts_without_the_heavy_packages() -> None:
    code = (
        "import sys, deployments.cli, deployments.stack, deployments.follow, deployments.show\n"
        "print([name for name in ('prefect', 'torch', 'mlflow', 'vllm', 'transformers') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).strip() == "[]"


def test_runs_are_listed_with_their_results(settings: Settings) -> None:
    ledger = Ledger(settings.ledger_url)
    out = io.StringIO()
    show_runs(settings, Console(file=out, width=160))
    assert "No run yet" in out.getvalue()
    ledger.create_run("tiny-1", prompts_per_step=4, max_staleness=2, steps=4, max_attempts_per_prompt=3)
    (settings.runs / "tiny-1").mkdir(parents=True)
    (settings.runs / "tiny-1" / "summary.json").write_text(
        '{"eval_before": 0.06, "eval_after": 0.7, "tokens_per_s": 39}'
    )
    show_runs(settings, Console(file=out, width=160))
    assert all(expected in out.getvalue() for expected in ("tiny-1", "running", "0/4", "0.06 → 0.7", "39"))


def test_status_tells_machines_and_the_plan_in_force(settings: Settings) -> None:
    plan = gpu_plan("here", "fast", 3)
    ledger = Ledger(settings.ledger_url)
    device = Device(index=0, device_type="fast", kind="cpu", memory_bytes=1)
    ledger.announce_machine("here", Machine(name="here", devices=(device,)).model_dump_json())
    ledger.create_run("tiny-1", prompts_per_step=4, max_staleness=2, steps=4, max_attempts_per_prompt=3)
    for step_s in (9.0, 2.5):
        ledger.add_plan_epoch("tiny-1", plan.model_copy(update={"step_s": step_s}).model_dump_json())
    out = io.StringIO()
    show_running(settings, Console(file=out, width=160))
    assert "machine here: 1 × fast; a flow looked 0 s ago" in out.getvalue()
    assert "run tiny-1: step 0/4" in out.getvalue()
    assert (
        "plan epoch 1: trains on 1 × fast of here, generates with 2 replicas; 2.5 s a step predicted" in out.getvalue()
    )


def test_answers_without_a_score_are_told(tmp_path: Path) -> None:
    lines = summary_lines({"eval_before": 0.25, "eval_after": 0.5, "eval_unscored": 3}, tmp_path)
    assert "0.25 → 0.5 (3 answers could not be scored and count 0)" in next(iter(lines))
    assert "could not be scored" not in next(iter(summary_lines({"eval_unscored": 0}, tmp_path)))


def test_summary_lines_leave_gaps_where_nothing_is_known(tmp_path: Path) -> None:
    lines = dict(line.split("  ", 1) for line in summary_lines({"eval_ci95": [0.5, 0.73], "steps": 40}, tmp_path))
    assert lines["95 % interval of the gain"].strip() == "+0.500 to +0.730"
    assert lines["held-out accuracy"].strip() == "– → –"
