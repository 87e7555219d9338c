"""The command line: bad input, exit status, what is shown."""

import errno
import io
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from rich.console import Console
from sqlalchemy import insert, update

from deployments.cli import follow, running
from deployments.cli import main as cli
from deployments.cli.show import run_row, show_running, show_runs, show_status, summary_lines
from deployments.local import stack
from deployments.local.servers import Member, StackState, save_state
from deployments.local.stack import Stack
from deployments.prefect import api
from deployments.prefect.api import Json, Unreachable
from deployments.prefect.versions import local_versions
from planners.errors import UserError
from planners.hardware.machine import Device, Machine
from tasks import readiness
from tasks.config.files import load_experiment
from tasks.config.settings import Settings
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Ledger
from tasks.exchange.ledger.schema import plan_epochs, schema_info
from tasks.exchange.wire import WIRE_VERSION
from tasks.machine.devices import hold_devices
from tasks.machine.discovery import discover_machine
from tasks.machine.processes import process_key
from tests.support.api import FULL, FakeApi, a_state
from tests.support.checkpoints import make_checkpoint_of_before
from tests.support.ledger import begin, join, lease, score, take
from tests.support.places import DEPLOYMENTS, REPOSITORY
from tests.support.plan import gpu_plan

TINY = DEPLOYMENTS / "experiments" / "tiny.yaml"
LAPTOP = str(DEPLOYMENTS / "clusters" / "laptop.yaml")


@pytest.mark.parametrize(
    ("state", "status"),
    [("COMPLETED", 0), ("FAILED", 1), ("CRASHED", 1), ("CANCELLED", 130), ("CANCELLING", 130), ("RUNNING", 130)],
)
def test_exit_status_tells_the_truth(state: str, status: int) -> None:
    out = io.StringIO()
    with pytest.raises(typer.Exit) as left:
        running.leave(a_state(state), Console(file=out))
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
        def __init__(self, url: str, pair: str) -> None:
            super().__init__("SCHEDULED")

        def create_flow_run(self, deployment: str, parameters: Json) -> str:
            return "flow-1"

        def set_state(self, flow_run_id: str, state_type: str, message: str, force: bool = False) -> None:
            raise error

    out = io.StringIO()
    monkeypatch.setattr(follow, "PICKUP_DEADLINE_S", 0.0)
    monkeypatch.setattr(running, "open_console", lambda: Console(file=out, force_terminal=True, width=100))
    monkeypatch.setattr(running, "bring_up", lambda *_: Stack("http://127.0.0.1:1/api", "http://127.0.0.1:2"))
    monkeypatch.setattr(stack, "PrefectApi", LostApi)
    with pytest.raises(typer.Exit) as left:
        running.run_and_follow(settings, {})
    assert left.value.exit_code == 1
    said = capsys.readouterr().err
    assert said.startswith(f"hexflow: {cause}. ")
    assert "hexflow status" in said
    assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l") >= 0


def test_only_a_run_that_goes_on_can_be_cancelled(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever started it; the exit status says how it ended."""
    console, ledger = Console(file=io.StringIO()), Ledger(settings.shared.ledger_url)
    monkeypatch.setattr(running, "api_of", lambda settings, state: FakeApi("RUNNING"))
    with pytest.raises(UserError, match="knows no run absent: `hexflow runs`"):
        running.cancel_run(settings, "absent", console)
    supervisor = begin(ledger, "tiny-1", (4, 2, 4), flow_run_id="flow-1")
    with pytest.raises(UserError, match="No stack was ever started"):
        running.cancel_run(settings, "tiny-1", console)
    save_state(settings, StackState(prefect_url="http://127.0.0.1:1/api", mlflow_url="", identity={}))
    with pytest.raises(typer.Exit) as left:
        running.cancel_run(settings, "tiny-1", console)
    assert left.value.exit_code == 130
    assert ledger.heartbeat(supervisor).wanted == "leave"
    ledger.close_run(supervisor, "cancelled")
    with pytest.raises(UserError, match="Run tiny-1 is cancelled: there is nothing to cancel"):
        running.cancel_run(settings, "tiny-1", console)


@pytest.mark.parametrize("message", ["Cancelled; `hexflow resume tiny-1` continues it.", "Ended by `hexflow down`."])
def test_how_to_continue_a_cancelled_run_is_said_once(
    message: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    ledger = Ledger(settings.shared.ledger_url)
    begin(ledger, "tiny-1", (4, 2, 4), flow_run_id="flow-1")
    state = {"type": "CANCELLED", "name": "Cancelled", "message": message}
    monkeypatch.setattr(api.PrefectApi, "create_flow_run", lambda *_: "flow-1")
    monkeypatch.setattr(follow.Follower, "follow", lambda _: state)
    monkeypatch.setattr(running, "open_console", lambda: Console(file=out, width=100))
    monkeypatch.setattr(running, "bring_up", lambda *_: Stack("http://127.0.0.1:1/api", "http://127.0.0.1:2"))
    with pytest.raises(typer.Exit):
        running.run_and_follow(settings, {})
    assert out.getvalue().count("hexflow resume tiny-1") == 1
    assert "Cancelled: Cancelled" not in out.getvalue()
    assert "Cancelled" in out.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "none.yaml"], "no experiment file none.yaml"),
        (["train", "bad.yaml"], "did you mean 'algorithm'"),
        (["train", "good.yaml", "optimizer.lr=fast"], "optimizer.lr"),
        (["plan", "bad.yaml"], "did you mean 'algorithm'"),
        (["resume", "none-1"], "no run none-1"),
        (["resume", "broken-1"], "the experiment of the run, cannot be read"),
        (["resume", "lost-1"], "The ledger does not know run lost-1"),
        (
            ["plan", "good.yaml", "data.0={kind: reasoning_gym, task: chain_sums}", "--cluster", LAPTOP],
            "did you mean 'chain_sum'",
        ),
        (["plan", "good.yaml", "--cluster", ""], "--cluster names no file"),
        (["plan", "good.yaml", "--cluster", LAPTOP, "--json", "."], "is a directory: name a file"),
        (["plan", "good.yaml", "--cluster", LAPTOP, "--json", "/proc/plan.json"], "cannot be written"),
        (["plan", "good.yaml", "--cluster", LAPTOP, "--json", "none/plan.json"], "none is no directory. Make it first"),
        (["plan", "good.yaml", "--cluster", LAPTOP, "--json", "/dev/null"], "no regular file"),
        (["simulate", "none.json", "--json", "/proc/figures.json"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(
    arguments: list[str], message: str, settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "bad.yaml").write_text("algoritm: {lr: 1}\n")
    (tmp_path / "good.yaml").write_text("run: {steps: 1}\n")
    for run, text in {"broken-1": "{", "lost-1": "{}"}.items():
        RunDirectory(settings.shared.runs / run).root.mkdir(parents=True)
        RunDirectory(settings.shared.runs / run).experiment.write_text(text)
    done = run_hexflow(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (settings.local.home / "stack.json").exists()


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
    assert len([line for line in commands if line.strip()]) == len(cli.app.registered_commands)
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
    """In place of `running.bring_up`: a broken check must not start a stack."""
    raise AssertionError("a stack would have been started")


@pytest.mark.parametrize("command", ["train", "resume"])
def test_busy_devices_are_told_before_anything_starts(
    command: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, *_ = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(readiness, "LEAVING_S", 0.0)
    monkeypatch.setattr(running, "bring_up", started)
    run = RunDirectory(settings.shared.runs / "tiny-2")
    run.root.mkdir(parents=True)
    run.experiment.write_text(load_experiment(TINY).model_dump_json())
    with (
        hold_devices(discover_machine().name, "cpu", [core], "tiny-1 (train 0)", settings),
        pytest.raises(UserError, match=rf"Core {core} is held by tiny-1 \(train 0\)"),
    ):
        cli.train(TINY) if command == "train" else cli.resume("tiny-2")


def test_a_run_without_a_whole_checkpoint_is_told_before_anything_starts(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "bring_up", started)
    run, ledger = RunDirectory(settings.shared.runs / "tiny-3"), Ledger(settings.shared.ledger_url)
    run.create()
    run.experiment.write_text(load_experiment(TINY).model_dump_json())
    supervisor = begin(ledger, "tiny-3", (1, 2, 12))
    trainer, replica = (join(ledger, role, run_id="tiny-3") for role in ("trainer", "replica"))
    score(ledger, replica, lease(ledger, replica))
    take(ledger, trainer, 0)
    ledger.record_step(trainer, 0, "{}")
    ledger.finish(supervisor, "failed")
    make_checkpoint_of_before(run, 0, 1)
    with pytest.raises(UserError, match=r"Run tiny-3 cannot be continued, for none of .* in DeepSpeed's pickles"):
        cli.resume("tiny-3")


def test_an_older_ledger_is_told_before_anything_starts(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 kept another kind of plan, and checkpoints under names without a lineage."""
    ledger = Ledger(settings.shared.ledger_url)
    begin(ledger, "tiny-1", (4, 2, 4))
    with ledger.write("schema") as connection:
        older = {"run_id": "tiny-1", "epoch": 0, "plan_json": '{"training": {}, "replicas": []}', "created_s": 0.0}
        connection.execute(insert(plan_epochs).values(**older))
        connection.execute(update(schema_info).values(version=1))
    monkeypatch.setattr(running, "bring_up", started)
    message = (
        rf"^The ledger .* has tables of version 1, but this hexflow needs version {WIRE_VERSION}: "
        "use the hexflow that made it, or "
    )
    for command in (
        lambda: show_running(settings, Console(file=io.StringIO())),
        lambda: running.run_and_follow(settings, {}),
    ):
        with pytest.raises(UserError, match=message):
            command()


def test_what_is_wanted_of_an_actor_is_shown(settings: Settings) -> None:
    ledger, out = Ledger(settings.shared.ledger_url), io.StringIO()
    supervisor = begin(ledger, "tiny-1", (4, 2, 4))
    replica = join(ledger, "replica", run_id="tiny-1")
    ledger.want(supervisor, replica, "drain")
    show_running(settings, Console(file=out, width=160))
    (line,) = (line for line in out.getvalue().splitlines() if "replica 0" in line)
    assert "starting, is to drain" in line
    assert out.getvalue().count("is to") == 1


def test_processes_that_share_no_ledger_share_no_stack() -> None:
    assert local_versions()["wire_schema"] == str(WIRE_VERSION)


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
    member = Member(pid=os.getpid(), key=process_key(), log=settings.local.logs / "log")
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
    root = str(REPOSITORY)
    return subprocess.run(
        [sys.executable, "-m", "deployments.cli.main", *arguments],
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

    Ledger(settings.shared.ledger_url).close()
    monkeypatch.setattr(Ledger, "list_runs", fail)
    monkeypatch.setattr(sys, "argv", ["hexflow", "runs"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("hexflow: The ledger failed: database or disk is full. ")


def test_the_command_line_starts_without_the_heavy_packages() -> None:
    code = (
        "import sys, deployments.cli.main, deployments.local.stack, deployments.cli.follow, deployments.cli.show\n"
        "print([name for name in ('prefect', 'torch', 'mlflow', 'vllm', 'transformers') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).strip() == "[]"


def test_runs_of_a_ledger_elsewhere_are_listed(settings: Settings, tmp_path: Path) -> None:
    """Whether there is a ledger is asked of the file that its URL names."""
    elsewhere = replace(settings, shared=replace(settings.shared, ledger_url=f"sqlite:///{tmp_path / 'other.db'}"))
    begin(Ledger(elsewhere.shared.ledger_url), "tiny-1", (4, 2, 4))
    out = io.StringIO()
    show_runs(elsewhere, Console(file=out, width=160))
    assert "tiny-1" in out.getvalue()


def test_runs_are_listed_with_their_results(settings: Settings) -> None:
    ledger = Ledger(settings.shared.ledger_url)
    out = io.StringIO()
    show_runs(settings, Console(file=out, width=160))
    assert "No run yet" in out.getvalue()
    begin(ledger, "tiny-1", (4, 2, 4))
    (settings.shared.runs / "tiny-1").mkdir(parents=True)
    (settings.shared.runs / "tiny-1" / "summary.json").write_text(
        '{"eval_before": 0.06, "eval_after": 0.7, "tokens_per_s": 39}'
    )
    show_runs(settings, Console(file=out, width=160))
    assert all(expected in out.getvalue() for expected in ("tiny-1", "running", "0/4", "0.06 → 0.7", "39"))


def test_a_completed_run_without_its_summary_is_not_all_there_yet(settings: Settings) -> None:
    """A run that was resumed has the summary of its first part already."""
    ledger = Ledger(settings.shared.ledger_url)
    supervisor = begin(ledger, "tiny-1", (4, 2, 4))
    ledger.close_run(supervisor, "completed")
    (run,) = ledger.list_runs()
    for summary in ({}, {"status": "cancelled"}):
        assert run_row(ledger, run, summary)[1] == "completed, its report follows"
    assert run_row(ledger, run, {"status": "completed"})[1] == "completed"


def test_status_tells_machines_and_the_plan_in_force(settings: Settings) -> None:
    plan = gpu_plan("here", "fast", 3)
    ledger = Ledger(settings.shared.ledger_url)
    device = Device(index=0, device_type="fast", kind="cpu", memory_bytes=1)
    ledger.announce_machine("here", Machine(name="here", devices=(device,)).model_dump_json())
    supervisor = begin(ledger, "tiny-1", (4, 2, 4))
    for step_s in (9.0, 2.5):
        ledger.add_plan_epoch(supervisor, plan.model_copy(update={"step_s": step_s}))
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
    assert "could not be scored" not in next(iter(summary_lines({"eval_before": 0.25, "eval_unscored": 0}, tmp_path)))


def test_only_what_is_known_of_a_run_is_told(tmp_path: Path) -> None:
    known = {"eval_before": 0.25, "eval_after": None, "steps": 0, "step_s_predicted": 9.0, "max_staleness_seen": 0}
    lines = dict(line.split("  ", 1) for line in summary_lines(known, tmp_path))
    assert list(lines) == ["held-out accuracy", "steps", "files"]
    assert lines["held-out accuracy"].strip() == "0.25 before training"
    lines = dict(line.split("  ", 1) for line in summary_lines({"eval_ci95": [0.5, 0.73]}, tmp_path))
    assert list(lines) == ["95 % interval of the gain", "files"]
    assert "1833" in next(iter(summary_lines({"tokens_per_s": 1833.4}, tmp_path)))
    assert lines["95 % interval of the gain"].strip() == "+0.500 to +0.730"
