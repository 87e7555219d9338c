"""The command `hexflow`. Heavy imports happen inside commands, so that each one starts quickly."""

import errno
import sys
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from planners.errors import UserError

if TYPE_CHECKING:
    from tasks.config.settings import Settings

_Choice = TypeVar("_Choice", bound=StrEnum)


class PlanMode(StrEnum):
    """How a cluster is planned; see `planners.search.make.make_plan`."""

    JOINT = "joint"
    TWO_PHASE = "two-phase"
    HOMOGENEOUS = "homogeneous"
    UNIFORM = "uniform"
    EXHAUSTIVE = "exhaustive"


class SyncChoice(StrEnum):
    """How weights reach the replicas; all but storage are what-if."""

    STORAGE = "storage"
    BLOCKING = "blocking"
    TREE = "tree"
    OVERLAPPED = "overlapped"


def _choices(kind: type[StrEnum]) -> str:
    return f"[{'|'.join(kind)}]"


def _one_of(kind: type[_Choice]) -> Callable[[str], _Choice]:
    """Reads a choice; Typer's own way begins its complaint with "Value error"."""

    def parse(text: str) -> _Choice:
        if text not in list(kind):
            raise typer.BadParameter(f"'{text}' is not one of {', '.join(kind)}.")
        return kind(text)

    return parse


app = typer.Typer(
    help="Asynchronous reinforcement learning of language models, planned and run on this machine's devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes cut choices in two in a narrow terminal
    context_settings={"help_option_names": ["-h", "--help"]},
)

ExperimentFile = Annotated[
    Path,
    typer.Argument(metavar="EXPERIMENT", help="Experiment file, YAML; its keys are in tasks/config."),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Plan for the machines that this YAML file describes. Without it: this machine."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Values to change, as in optimizer.lr=1e-6."),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        from deployments.prefect.versions import local_versions

        print(f"hexflow {local_versions()['hexflow']}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Options before the command."""
    from deployments.surroundings import clean_own

    clean_own()


@app.command()
def up() -> None:
    """Start what is missing of the local stack.

    It is a Prefect and an MLflow server on this machine, the set-up of pools and deployments, and a worker per pool.
    Servers that PREFECT_API_URL and MLFLOW_TRACKING_URI name are used instead. May be repeated.
    """
    from deployments.cli import running

    running.bring_up(_settings(), running.open_console())


@app.command()
def down() -> None:
    """End the local stack and all that runs on it.

    Verifies that nothing is left; may be repeated. Servers named in the environment stay.
    """
    from deployments.cli import running
    from deployments.local import stack

    console = running.open_console()
    ran = stack.down(_settings(), lambda line: console.print(line, soft_wrap=True, highlight=False))
    console.print("Everything has ended." if ran else "No stack was running.")


@app.command("open")
def open_pages() -> None:
    """Open the pages of Prefect and MLflow, signed in.

    Says how to sign in by hand as well. The stack's secret appears neither here nor in an address.
    """
    from deployments.cli import running
    from deployments.local import sign_in, stack

    settings, say = _settings(), partial(running.open_console().print, soft_wrap=True, markup=False)
    sign_in.open_pages(settings, stack.find(settings), say)


@app.command()
def status() -> None:
    """Show servers, workers and running runs.

    Exit status 1 if the stack is not complete.
    """
    from deployments.cli import running
    from deployments.cli.show import show_status
    from deployments.local import stack

    settings = _settings()
    if not show_status(settings, stack.find(settings), running.open_console()):
        raise typer.Exit(1)


@app.command()
def runs() -> None:
    """List all runs with their results."""
    from deployments.cli import running
    from deployments.cli.show import show_runs

    show_runs(_settings(), running.open_console())


@app.command()
def train(experiment: ExperimentFile, overrides: Overrides = None) -> None:
    """Run an experiment and show its progress.

    Starts the stack if needed. Ctrl-C or SIGTERM cancels the run.

    Exit status 0: completed; 1: failed, or lost from sight; 2: bad input, nothing was started; 130: cancelled.
    """
    from deployments.cli import running
    from deployments.cli.terminal import telling
    from tasks.config.files import load_experiment
    from tasks.machine.discovery import discover_machine
    from tasks.readiness import make_ready, require_free_devices, require_places

    resolved, settings, console = load_experiment(experiment, overrides), _settings(), running.open_console()
    machine = discover_machine()
    require_places(settings)
    with telling(console.print) as tell:
        tell("looking whether the devices are free")
        require_free_devices(resolved, machine)
        tell(running.PREPARING.format(resolved.model.source))
        make_ready(resolved, machine, settings)
    running.run_and_follow(settings, {"experiment": resolved.model_dump(mode="json"), "resume": None}, machine)


@app.command()
def prepare(experiment: ExperimentFile, overrides: Overrides = None) -> None:
    """Prepare the model and measure the devices.

    A run can start at once then; quick when nothing changed.
    """
    from deployments.cli import running
    from deployments.cli.terminal import telling
    from tasks.config.files import load_experiment
    from tasks.machine.discovery import discover_machine
    from tasks.readiness import make_ready, profile_machine

    resolved, settings, console = load_experiment(experiment, overrides), _settings(), running.open_console()
    console.print(f"Preparing {resolved.model.source} and checking the experiment.", soft_wrap=True)
    machine = discover_machine()
    with telling(console.print) as tell:
        tell(running.PREPARING.format(resolved.model.source))
        model_path = make_ready(resolved, machine, settings)
        console.print(running.MEASURING)
        tell("measuring")
        profiles = profile_machine(resolved, machine, model_path, settings)
    console.print(f"model: {model_path}", soft_wrap=True)
    for name, profile in profiles.items():
        best = max(profile.generation_tokens_per_s.values())
        console.print(f"{name}: generates {best:.1f}, trains {profile.training_tokens_per_s:.1f} response tokens/s")


@app.command()
def cancel(run: Annotated[str, typer.Argument(metavar="RUN", help="Run id, as `hexflow runs` shows it.")]) -> None:
    """Cancel a run that goes on, and wait for its end.

    It does not matter who started it. What it has learnt is kept: `hexflow resume` continues it.

    Exit status 130: cancelled; 0: it was complete before that; 1: failed, or lost from sight; 2: no such run goes on.
    """
    from deployments.cli import running

    running.cancel_run(_settings(), run, running.open_console())


@app.command()
def resume(run: Annotated[str, typer.Argument(metavar="RUN", help="Run id, as `hexflow runs` shows it.")]) -> None:
    """Continue a run from its newest whole checkpoint.

    It goes on under the experiment that it was started with.

    Exit status as of `hexflow train`.
    """
    from deployments.cli import running
    from deployments.cli.terminal import telling
    from flows.running.context import SUPERVISOR_SILENCE_S, require_unsupervised
    from tasks.config.files import read_resolved_experiment
    from tasks.exchange.layout import RunDirectory
    from tasks.exchange.ledger import Ledger
    from tasks.machine.discovery import discover_machine
    from tasks.readiness import require_free_devices, require_places
    from tasks.training.checkpoints import resume_point

    settings = _settings()
    directory = RunDirectory(settings.shared.runs / run)
    path = directory.experiment
    if not path.exists():
        raise UserError(f"There is no run {run} in {settings.shared.runs}: `hexflow runs` lists them.")
    require_places(settings)
    ledger = Ledger(settings.shared.ledger_url, patience_s=0)
    row = ledger.find_run(run_id=run)
    if row is not None and row.state == "completed":
        raise UserError(f"Run {run} is complete: there is nothing to resume. Start a new run instead.")
    resolved, machine = read_resolved_experiment(path), discover_machine()
    with telling(running.open_console().print) as tell:
        if row is not None:
            tell(f"watching whether somebody is at work on {run}, for up to {SUPERVISOR_SILENCE_S:.0f} s")
            require_unsupervised(run, ledger)
        tell("looking whether the devices are free")
        require_free_devices(resolved, machine, run)
        if row is not None:
            tell("comparing the newest checkpoint with its checksums")
            resume_point(directory, ledger, run, resolved.run, lambda damage: None)  # told when it is taken
    if row is None:
        raise UserError(
            f"The ledger does not know run {run} of {settings.shared.runs}: set HEXFLOW_HOME and HEXFLOW_LEDGER_URL as "
            "they were when it was started."
        )
    running.run_and_follow(settings, {"experiment": resolved.model_dump(mode="json"), "resume": run}, machine)


@app.command()
def plan(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    cluster: ClusterFile = None,
    mode: Annotated[
        PlanMode,
        typer.Option(
            parser=_one_of(PlanMode),
            metavar=_choices(PlanMode),
            help="joint: the fastest plan; two-phase: as AReaL-Hex plans; the others: to compare.",
        ),
    ] = PlanMode.JOINT,
    budget: Annotated[
        float | None, typer.Option(metavar="USD", help="The fastest plan that costs at most this much per hour.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(metavar="TOKENS", help="The cheapest plan with this many response tokens/s.")
    ] = None,
    sync: Annotated[
        SyncChoice,
        typer.Option(
            parser=_one_of(SyncChoice),
            metavar=_choices(SyncChoice),
            help="How weights reach the replicas. All but storage need --what-if.",
        ),
    ] = SyncChoice.STORAGE,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Allow layouts and sync modes that do not run yet.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan to this file, which `hexflow simulate` reads.")
    ] = None,
) -> None:
    """Show what would run where, and how fast.

    Without --cluster this machine is measured and planned for. With it the described machines are, by a cost model, to
    which the other options belong.
    """
    from deployments.cli import running
    from tasks.config.files import load_experiment
    from tasks.data.split import check_tasks

    resolved, settings, console = load_experiment(experiment, overrides), _settings(), running.open_console()
    check_tasks(resolved.data)
    if cluster is None:
        chosen = mode is not PlanMode.JOINT or sync is not SyncChoice.STORAGE or what_if
        if chosen or (json, budget, target) != (None, None, None):
            raise UserError(_FOR_CLUSTERS)
        running.plan_here(settings, resolved, console)
        return
    from deployments.cli.cluster_plan import plan_cluster
    from tasks.planning import ClusterWish

    if cluster == Path():
        raise UserError(
            "--cluster names no file: give a cluster file, or leave the option out to plan for this machine."
        )
    wish: dict[str, Any] = {"mode": mode.value, "sync_mode": sync.value, "what_if": what_if}
    wish |= {"file": str(cluster), "budget_usd_per_h": budget, "target_tokens_per_s": target}
    plan_cluster(resolved, ClusterWish.model_validate(wish), console, _writable(json))


def _writable(path: Path | None) -> Path | None:
    """The file for a result, refused before the work that makes it."""
    from tasks.exchange.files import require_writable

    if path is not None:
        path = path.resolve()
        require_writable(path)
    return path


@app.command()
def simulate(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="Plan file that `hexflow plan … --cluster … --json` wrote.")
    ],
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Seed of answer lengths.")] = 0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures to this file.")] = None,
) -> None:
    """Run a plan through a simulator.

    It is event-driven, and shows throughput, waits, staleness and a Gantt chart.
    """
    from deployments.cli import running
    from deployments.cli.cluster_plan import simulate_plan

    simulate_plan(plan, running.open_console(), _writable(json), steps=steps, seed=seed)


@app.command()
def doctor() -> None:
    """Say what this machine lacks, and the remedy.

    Exit status 1 if anything must be mended.
    """
    from deployments import doctor as checks

    raise typer.Exit(checks.main())


def _settings() -> "Settings":
    from tasks.config.settings import load_settings

    return load_settings()


_FOR_CLUSTERS = "--mode, --sync, --what-if, --json, --budget and --target are for a cluster: name one with --cluster."
_DISK_ERRORS = {
    errno.ENOSPC: "written, the disk is full: free some space",
    errno.EROFS: "written, its disk is read-only: set HEXFLOW_HOME and HEXFLOW_RUNS to directories that can be written",
    errno.EACCES: "used, permission is denied: mend that, or name another place (HEXFLOW_HOME, HEXFLOW_RUNS)",
}


def main() -> None:
    """Run the command; what a person can mend is one line on stderr and exit status 2, never a traceback."""
    from deployments.cli.terminal import complain, tolerate_encodings
    from deployments.prefect.api import Unreachable

    tolerate_encodings()
    try:
        app()
    except UserError as error:
        sys.exit(complain(str(error)))
    except Unreachable as error:
        sys.exit(complain(f"{error}. See `hexflow status`; `hexflow up` starts what is missing."))
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        sys.exit(complain(f"{error.filename or 'A file'} cannot be {_DISK_ERRORS[error.errno]}."))
    except Exception as error:
        # Imported only now: the quick commands do without.
        from sqlalchemy.exc import SQLAlchemyError

        from tasks.exchange.ledger.database import cause_of

        if not isinstance(error, SQLAlchemyError):
            raise
        sys.exit(complain(f"The ledger failed: {cause_of(error)}. Mend its disk or its server (HEXFLOW_LEDGER_URL)."))


if __name__ == "__main__":
    main()
