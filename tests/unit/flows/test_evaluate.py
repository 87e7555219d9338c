"""Where and how the flow `evaluate` runs, and what it refuses, in the words that a person reads."""

import itertools
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prefect import State

from flows import evaluate as evaluating
from flows.evaluate import evaluate, evaluate_here, take_newest_weights
from flows.running import children
from planners.errors import UserError
from planners.hardware.machine import Device, Machine
from planners.hardware.profile import DeviceProfile
from planners.plan.run import MachineShare
from tasks.config.experiment import Experiment
from tasks.config.files import load_experiment
from tasks.config.settings import Settings
from tasks.evaluation.progress import count_work
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Actor, Ledger
from tasks.exchange.weights import delete_unused, publish_weights, verify_weights
from tests.support.ledger import RUN
from tests.support.places import EXPERIMENTS
from tests.support.plan import profile_of


@pytest.mark.parametrize("name", ["none-1", "../outside"])
def test_a_run_that_is_not_there_ends_the_flow_with_a_sentence(settings: Settings, tmp_path: Path, name: str) -> None:
    """Before anything starts, and without a traceback; what lies outside the runs is none."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "experiment.json").write_text("{}")
    ended = cast(State[None], evaluate.fn(run=name))
    assert ended.is_failed()
    assert ended.message == f"There is no run {name} in {settings.shared.runs}: `hexflow runs` lists them."


@pytest.mark.usefixtures("settings", "trainer")
def test_a_run_without_weights_is_told(ledger: Ledger, tmp_path: Path) -> None:
    """Version 0 is recorded, but its files are gone."""
    with pytest.raises(UserError, match=f"Run {RUN} has no weights to evaluate"):
        take_newest_weights(ledger, RUN, tmp_path / "taken")
    assert not (tmp_path / "taken").exists()


def test_weights_that_are_evaluated_outlive_the_version(
    settings: Settings, ledger: Ledger, trainer: Actor, tmp_path: Path
) -> None:
    """A run that trains on deletes what nobody claims; an evaluation is no actor of it."""
    run = RunDirectory(settings.shared.runs / RUN)
    run.create()

    def fill(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(b"weights")

    path = publish_weights(run, 0, 1, fill)
    ledger.record_version(trainer, 1, str(path))
    take_newest_weights(ledger, RUN, tmp_path / "taken")
    assert delete_unused(run, 0, {(0, 1)}) == []
    assert not path.exists()
    verify_weights(tmp_path / "taken")


HERE = Machine(
    name="here",
    devices=tuple(
        Device(index=core, device_type=name, kind="cpu", memory_bytes=2**33)
        for core, name in enumerate(("fast", "slow", "slow"))
    ),
)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> dict[str, Any]:
    """What an evaluation's process was started with."""
    seen: dict[str, Any] = {}

    def measure(experiment: Experiment, machine: Machine, path: str, device_type: str) -> dict[str, DeviceProfile]:
        return {device_type: profile_of(device_type, {8: 10.0, 64: 40.0, 128: 30.0}, 1.0)}

    def run(
        argv: list[str], share: MachineShare, what: str, log: Path, deadline_s: float, work: Callable[[], int]
    ) -> None:
        seen.update(zip(argv[3::2], argv[4::2], strict=True))
        seen["share"] = share
        rewards = {"greedy": [1.0, 0.0], "sampled": [[1.0, 1.0], [1.0, 0.0]], "unscored": {}, "others": {}}
        count_work(Path(seen["--out"]), 2)
        count_work(Path(seen["--out"]), 1)
        assert work() == 3, "it is not seen to get on, however long it takes"
        Path(seen["--out"]).write_text(json.dumps(rewards))

    for name, stand_in in {
        "discover": lambda: HERE,
        "prepare_here": lambda experiment, machine, run: "/model",
        "measure_here": measure,
        "run_until_it_ends": run,
        "create_table_artifact": lambda *table, **words: None,
    }.items():
        monkeypatch.setattr(evaluating, name, stand_in)
    return seen


def test_an_evaluation_takes_the_devices_of_its_deployment_at_the_measured_concurrency(started: dict[str, Any]) -> None:
    tiny = load_experiment(EXPERIMENTS / "tiny.yaml", ["planner.concurrency="])
    result = evaluate_here(tiny, None, "slow")
    assert (started["share"].device_type, started["share"].devices) == ("slow", (1, 2))
    assert started["--concurrency"] == "64"
    assert (result["greedy"], result["sampled"]) == (0.5, 0.75)
    evaluate_here(load_experiment(EXPERIMENTS / "tiny.yaml", ["planner.concurrency=16"]), None, "slow")
    assert started["--concurrency"] == "16"


@pytest.mark.parametrize(
    ("device_type", "message"),
    [
        ("slow", r"cluster.device_types \['fast'\] leaves no device of slow to evaluate on; here has fast, slow"),
        ("gpu", "the deployment names the device type 'gpu', which here lacks"),
    ],
)
def test_a_type_that_may_not_evaluate_is_told(device_type: str, message: str, started: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=message):
        evaluate_here(load_experiment(EXPERIMENTS / "tiny.yaml", ["cluster.device_types=[fast]"]), None, device_type)
    assert started == {}


@pytest.mark.parametrize("gets_on", [True, False])
def test_an_evaluation_may_take_as_long_as_it_gets_on(
    gets_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seconds pass at every look, of which it may do nothing for fifteen; it is over once its tenth answer is."""
    clock, answers, out = itertools.count(step=10), itertools.count(), tmp_path / "out"
    stand_in = SimpleNamespace(monotonic=lambda: float(next(clock)), sleep=lambda _: None)
    monkeypatch.setattr(children, "time", stand_in)

    def work() -> int:
        done = next(answers) if gets_on else 0
        if done == 10:
            out.touch()
        return done

    waits = f"import pathlib, time\nwhile not pathlib.Path({str(out)!r}).exists(): time.sleep(0.01)"
    share = MachineShare(machine="here", device_type="fast", kind="cpu", devices=(0,))
    run = partial(children.run_until_it_ends, [sys.executable, "-c", waits], share, "it", tmp_path / "log", 15.0, work)
    if gets_on:
        run()
    else:
        with pytest.raises(RuntimeError, match="did nothing for 15 s"):
            run()
