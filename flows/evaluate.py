"""Flow `evaluate`: accuracy on the evaluations' questions, of the untrained model or of a run's weights.

A deployment of every device type's pool, which prepares, measures and generates on the machine it runs on, as a run
would: with as many answers in flight as the type's profile found best.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from prefect import State, flow, runtime
from prefect.artifacts import create_table_artifact
from prefect.states import Failed

from flows.preparation import discover, measure_here, prepare_here
from flows.running.children import on_devices, run_until_it_ends
from planners.errors import UserError
from planners.hardware.machine import Machine
from planners.plan.run import MachineShare
from tasks.config.experiment import LAPTOP, Experiment
from tasks.config.files import read_resolved_experiment
from tasks.config.settings import Settings, load_settings
from tasks.evaluation.progress import work_so_far
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Ledger
from tasks.exchange.weights import keep_by_links, verify_weights
from tasks.wishes import check_type

_TRIES = 5


@flow(name="evaluate", flow_run_name="evaluate-{experiment.run.name}", log_prints=True)
def evaluate(experiment: Experiment = LAPTOP, run: str | None = None) -> dict[str, Any] | State[Any]:
    """Evaluate on the questions kept from training, greedily and sampled; returns the first evaluation's result.

    It runs on devices of the type that its deployment is named after.

    Args:
        experiment: Model, data, prompt, rewards and evaluations; ignored where `run` names a run, which has its own.
        run: Run whose newest weights are evaluated; empty: the experiment's model as it is.
    """
    try:
        return evaluate_here(experiment, run, runtime.deployment.name)
    except UserError as error:
        return Failed(message=str(error))  # raised, the log would have a traceback of ours before it


def evaluate_here(experiment: Experiment, run: str | None, device_type: str | None = None) -> dict[str, Any]:
    """Evaluate on this machine's devices of a type, or of the first that may be used; the rest is as of the flow."""
    settings = load_settings()
    if run is not None:
        experiment = run_experiment(settings, run)
    machine = discover()
    share = evaluation_share(machine, experiment, device_type)
    model_path = prepare_here(experiment, machine, run)
    profile = measure_here(experiment, machine, model_path, share.device_type)[share.device_type]
    concurrency = experiment.planner.concurrency or profile.best_concurrency
    beside = settings.shared.runs / run if run is not None else None  # where its weights can have a second name
    with tempfile.TemporaryDirectory(prefix=".evaluation-", dir=beside) as scratch:
        out, weights_path = Path(scratch) / "rewards.json", Path(model_path)
        if run is not None:
            weights_path = Path(scratch) / "weights"
            take_newest_weights(Ledger(settings.shared.ledger_url), run, weights_path)
        argv = [sys.executable, "-m", "tasks.evaluation.process", "--experiment", experiment.model_dump_json()]
        argv += ["--model-path", model_path, "--weights-path", str(weights_path)]
        argv += ["--kind", share.kind, "--concurrency", str(concurrency), "--out", str(out)]
        with on_devices(share, "an evaluation"):
            deadline_s = experiment.run.start_deadline_s + experiment.run.step_deadline_s
            log, done = settings.local.logs / "evaluate.log", partial(work_so_far, out)
            run_until_it_ends(argv, share, "the evaluation", log, deadline_s, done)
        rewards = json.loads(out.read_text())
    weights = run or experiment.model.source
    first = experiment.evaluations[0].label
    results = [accuracy(weights, name, result) for name, result in {first: rewards, **rewards["others"]}.items()]
    create_table_artifact(results, key="evaluation", description="Mean reward on the questions of each evaluation.")
    print(*results, sep="\n")
    return results[0]


def accuracy(weights: str, name: str, rewards: Mapping[str, Any]) -> dict[str, Any]:
    """What is reported of an evaluation; `rewards` is its `EvaluationResult` as JSON."""
    return {
        "weights": weights,
        "evaluation": name,
        "greedy": fmean(rewards["greedy"]),
        "sampled": fmean([fmean(samples) for samples in rewards["sampled"]]),
        "questions": len(rewards["greedy"]),
        "answers without a score": sum(rewards["unscored"].values()),
    }


def run_experiment(settings: Settings, run_id: str) -> Experiment:
    """The experiment that a run was started with.

    Raises:
        UserError: there is no such run.
    """
    directory = RunDirectory(settings.shared.runs / run_id)
    if Ledger(settings.shared.ledger_url).find_run(run_id=run_id) is None or not directory.experiment.exists():
        raise UserError(f"There is no run {run_id} in {settings.shared.runs}: `hexflow runs` lists them.")
    return read_resolved_experiment(directory.experiment)


def take_newest_weights(ledger: Ledger, run_id: str, directory: Path) -> None:
    """Hold the newest weights of a run in a new directory, whatever the run deletes meanwhile.

    Raises:
        UserError: the run published none, or they are gone.
        WeightsCorrupt: they are not what was published.
    """
    run = RunDirectory(load_settings().shared.runs / run_id)
    for _ in range(_TRIES):  # a run that trains on deletes old versions
        latest = ledger.latest_version(run_id)
        directory.mkdir()
        try:
            if latest is not None:
                keep_by_links(run.weights_path(*latest), directory)
                verify_weights(directory)
                return
        except FileNotFoundError:
            pass
        shutil.rmtree(directory)
    raise UserError(f"Run {run_id} has no weights to evaluate: it published none, or they were deleted.")


def evaluation_share(machine: Machine, experiment: Experiment, device_type: str | None = None) -> MachineShare:
    """All devices of a type on CPUs, one where they are GPUs; without a type, of the first that may be used.

    Raises:
        UserError: there is none, or the experiment may not use it.
    """
    if device_type is not None:
        check_type(device_type, machine.count_by_type(), "the deployment", machine.name)
    usable = experiment.cluster.device_types
    allowed = [
        device
        for device in machine.devices
        if (usable is None or device.device_type in usable) and device_type in (None, device.device_type)
    ]
    if not allowed:
        raise UserError(
            f"cluster.device_types {usable} leaves no device of {device_type or machine.name} to evaluate on; "
            f"{machine.name} has {', '.join(machine.count_by_type())}."
        )
    first = allowed[0]
    same = [device.index for device in allowed if device.device_type == first.device_type]
    return MachineShare(
        machine=machine.name,
        device_type=first.device_type,
        kind=first.kind,
        devices=tuple(same if first.kind == "cpu" else same[:1]),
    )
