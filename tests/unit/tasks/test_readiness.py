"""What a run needs is checked before it starts, and refused with the reason."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from planners.errors import UserError
from planners.hardware.machine import Device, Machine
from planners.workload.model import read_model
from tasks import readiness
from tasks.config.experiment import Experiment
from tasks.config.files import load_experiment
from tasks.config.settings import Settings
from tasks.exchange.layout import RunDirectory
from tasks.machine.devices import hold_devices
from tasks.machine.discovery import discover_machine
from tasks.models.prepare import prepare_model
from tasks.readiness import make_ready, require_free_devices, require_memory
from tests.support.places import EXPERIMENTS, settings_of

TINY = EXPERIMENTS / "tiny.yaml"


def tiny(*overrides: str) -> Experiment:
    return load_experiment(TINY, list(overrides))


def rows_experiment(path: Path, questions: list[str]) -> Experiment:
    path.write_text("\n".join(json.dumps({"question": text, "answer": "a"}) for text in questions))
    file = f"data.0={{kind: jsonl, path: {path}}}"
    return tiny(file, "evaluations.0.size=4", "workload.max_prompt_tokens=8")


def test_the_tiny_experiment_is_ready(settings: Settings) -> None:
    assert (make_ready(tiny(), discover_machine(), settings) / "config.json").is_file()


def test_every_row_of_a_file_is_checked(settings: Settings, tmp_path: Path) -> None:
    """One over-long prompt far down would end a run hours after its start."""
    questions = [f"q{number}" for number in range(600)]
    make_ready(rows_experiment(tmp_path / "rows.jsonl", questions), discover_machine(), settings)
    for number in (500, 550):  # in training or held out, whichever the seed chose
        spoilt = [text if n != number else "far too long" for n, text in enumerate(questions)]
        with pytest.raises(UserError, match=f"'far too long' in line {number + 1} of rows has 12 tokens"):
            make_ready(rows_experiment(tmp_path / "rows.jsonl", spoilt), discover_machine(), settings)


def test_a_tokenizer_of_another_model_is_refused(settings: Settings, tmp_path: Path) -> None:
    """Its token would end the engine, or be read as noise."""
    shutil.copytree(prepare_model(tiny().model, settings), tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 258, "content": "<new>"})
    file.write_text(json.dumps(tokenizer))
    own = f"model.source={tmp_path / 'model'}"
    make_ready(tiny(own), discover_machine(), settings)
    with pytest.raises(UserError, match=r"has the token 258 .* ends at 257: take tokenizer and model"):
        make_ready(tiny(own, "prompt.template=<new>{question}"), discover_machine(), settings)


def test_a_file_that_is_not_there_is_told_before_a_model_is_made(settings: Settings, tmp_path: Path) -> None:
    """And before any directory is: a slip costs neither minutes nor a clean-up."""
    elsewhere = replace(settings, local=replace(settings.local, home=tmp_path / "home"))
    experiment = rows_experiment(tmp_path / "absent.jsonl", ["q"])
    (tmp_path / "absent.jsonl").unlink()
    with pytest.raises(UserError, match=r"There is no file .*absent\.jsonl"):
        make_ready(experiment, discover_machine(), elsewhere)
    assert not elsewhere.local.home.exists()


def test_a_reward_of_ones_own_that_cannot_be_used_is_refused(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(answer): return 1.0")
    with pytest.raises(UserError, match=r"score in .*mine\.py is called with prompt, answer and item"):
        make_ready(
            tiny(f"rewards.1={{kind: python, function: {tmp_path}/mine.py:score}}"), discover_machine(), settings
        )


@pytest.mark.parametrize(("capability", "is_refused"), [("7.0", True), ("7.5", True), ("8.0", False), ("12.0", False)])
def test_gpus_that_do_not_compute_in_the_models_format_are_refused(
    settings: Settings, capability: str, is_refused: bool
) -> None:
    """Their engine would refuse it, when the run has begun."""
    gpu = Device(
        index=0, device_type="v100-16", kind="cuda", memory_bytes=2**34, uuid="a", compute_capability=capability
    )
    machine = Machine(name="here", devices=(gpu, gpu.model_copy(update={"index": 1, "uuid": "b"})))
    if is_refused:
        with pytest.raises(UserError, match=rf"bfloat16, which v100-16 \(compute capability {capability}\)"):
            make_ready(tiny("model.dtype=bfloat16"), machine, settings)
    else:
        make_ready(tiny("model.dtype=bfloat16"), machine, settings)
    make_ready(tiny("model.dtype=float32"), machine, settings)


@pytest.mark.parametrize(("place", "variable"), [("home", "HEXFLOW_HOME"), ("runs", "HEXFLOW_RUNS")])
def test_a_place_that_cannot_be_written_is_named(settings: Settings, tmp_path: Path, place: str, variable: str) -> None:
    (tmp_path / "file").write_text("")
    places = {"home": settings.local.home, "runs": settings.shared.runs, place: tmp_path / "file" / "inner"}
    blocked = settings_of(places["home"], places["runs"], settings.shared.ledger_url)
    with pytest.raises(UserError, match=rf"file/inner cannot be written .* {variable}"):
        make_ready(tiny(), discover_machine(), blocked)


def test_a_run_that_the_disk_cannot_hold_is_refused(settings: Settings) -> None:
    """1 M parameters: 4 MB a version, 12 MB a checkpoint."""
    many = ["run.steps=1000000", "run.checkpoint_every=1"]
    make_ready(tiny(*many), discover_machine(), settings)
    with pytest.raises(UserError, match=r"1000001 weight versions of 0.0 GiB .* are free: make room"):
        make_ready(
            tiny(*many, "storage.keep_versions=1000000", "storage.keep_checkpoints=1000000"),
            discover_machine(),
            settings,
        )


def test_a_resumed_run_needs_room_for_what_is_not_there_yet(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 steps keep 3 versions of 4 MB and 2 checkpoints of 12 MB; all but one checkpoint are there already."""
    prepare_model(tiny().model, settings)
    run = RunDirectory(tmp_path / "run")
    run.create()
    for directory, size in [(run.weights_path(0, number), 4_000_000) for number in (5, 6, 7)] + [
        (run.checkpoints / "first", 12_000_000)
    ]:
        directory.mkdir()
        with (directory / "content").open("wb") as file:
            file.truncate(size)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=20_000_000))
    with pytest.raises(UserError, match=r"needs about 0\.0 GiB in "):
        make_ready(tiny(), discover_machine(), settings)
    make_ready(tiny(), discover_machine(), settings, run)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000_000))
    with pytest.raises(UserError, match=r"needs about 0\.0 GiB more in "):
        make_ready(tiny(), discover_machine(), settings, run)


def test_a_run_waits_for_no_others_devices(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may take every device of the allowed types, so one in use is enough; those of other types may be."""
    types = ["fast", "fast", "slow", "slow"]
    devices = [Device(index=core, device_type=t, kind="cpu", memory_bytes=2**30) for core, t in enumerate(types)]
    machine = Machine(name="here", devices=tuple(devices))
    monkeypatch.setattr(readiness, "LEAVING_S", 0.0)
    require_free_devices(tiny(), machine)
    with hold_devices("here", "cpu", [1], "a (train 0)", settings):
        require_free_devices(tiny("cluster.device_types=[slow]"), machine)
        with pytest.raises(
            UserError, match=r"Core 1 is held by a \(train 0\) since .*: wait .* or cancel it.*device_types"
        ):
            require_free_devices(tiny(), machine)


def test_a_resumed_run_does_not_wait_for_its_own_actors(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resume ends them; were they waited for, a run whose supervisor was killed could not be resumed."""
    devices = [Device(index=core, device_type="cpu", kind="cpu", memory_bytes=2**30) for core in (0, 1, 2)]
    machine = Machine(name="here", devices=tuple(devices))
    monkeypatch.setattr(readiness, "LEAVING_S", 0.0)
    with hold_devices("here", "cpu", [0, 1], "a (rollout 0)", settings):
        require_free_devices(tiny(), machine, "a")
        with (
            hold_devices("here", "cpu", [2], "a-2 (train 0)", settings),
            pytest.raises(UserError, match=r"Core 2 is held by a-2 \(train 0\)"),
        ):
            require_free_devices(tiny(), machine, "a")


def test_memory_is_checked_before_anything_starts(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "memory_bytes", lambda: (2**34, 2**30))
    with pytest.raises(UserError, match=r"tiny-random needs at least 1.0 GiB .* but 1.0 GiB are available"):
        # Weights and training come on top of 1 GiB for keys and values.
        make_ready(tiny(), discover_machine(), settings)


@pytest.mark.parametrize(
    ("memory_mb", "overrides", "message"),
    [
        ([40, 40], [], None),  # 1 M parameters: 16 MB to train, 4 MB and one context to generate
        ([12, 12], [], "needs 0.0 GiB on each device, but a big has"),
        ([12, 12, 12, 12], ["planner.zero_stage=3"], None),
        ([12, 12, 12, 12], ["planner.zero_stage=3", "planner.train_devices=1"], "zero_stage 3"),
        ([4] * 16, ["planner.zero_stage=3"], "Generating with tiny-random needs"),
    ],
)
def test_gpus_too_small_however_they_are_split_are_refused(
    settings: Settings, memory_mb: list[int], overrides: list[str], message: str | None
) -> None:
    devices = [
        Device(index=index, device_type="big", kind="cuda", memory_bytes=size * 1_000_000)
        for index, size in enumerate(memory_mb)
    ]
    experiment, machine = tiny(*overrides), Machine(name="here", devices=tuple(devices))
    model = read_model(prepare_model(experiment.model, settings), element_bytes=4)
    if message is None:
        require_memory(experiment, machine, model)
        return
    with pytest.raises(UserError, match=message):
        require_memory(experiment, machine, model)


def test_the_checks_do_without_torch(settings: Settings) -> None:
    """The command answers in seconds; importing torch would take as long again."""
    prepare_model(tiny().model, settings)
    code = (
        "import sys\nfrom pathlib import Path\nfrom tasks.config.files import load_experiment\n"
        "from tasks.readiness import make_ready\nfrom tasks.config.settings import load_settings\n"
        "from tasks.machine.discovery import discover_machine\n"
        f"make_ready(load_experiment(Path({str(TINY)!r})), discover_machine(), load_settings())\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"
