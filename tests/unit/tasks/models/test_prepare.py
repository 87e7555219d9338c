"""Prepared models: complete or absent, checked each time, made once by many; a user's directory is refused clearly."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import pytest

from planners.errors import UserError
from planners.workload.model import read_model
from tasks.config.sections import ModelSection
from tasks.config.settings import Settings
from tasks.models import prepare as models
from tasks.models.prepare import prepare_model, read_sizes
from tasks.models.shipped import SHIPPED_MODELS, ShippedModel
from tests.support.models import save_small_model, stored_tensors
from tests.support.places import DEPLOYMENTS, settings_of


class FakeModel:
    """Writes a tiny directory in place of a real model, and counts how often."""

    def __init__(self) -> None:
        self.written = 0

    def write(self, directory: Path, dtype: str) -> None:
        self.written += 1
        (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 512, "dtype": dtype}))
        (directory / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def private(tmp_path: Path) -> Settings:
    return settings_of(home=tmp_path / "home", runs=tmp_path / "runs", ledger_url="sqlite://")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    fake = FakeModel()
    shipped = ShippedModel(fake.write, {}, recipe=1, packages=("numpy",), disk_bytes=1, memory_bytes=1)
    monkeypatch.setitem(SHIPPED_MODELS, "fake", shipped)
    return fake


FAKE = ModelSection(source="fake")


def test_the_sizes_of_a_shipped_model_are_those_that_it_is_made_with(settings: Settings) -> None:
    model = ModelSection(source="tiny-random")
    sizes = read_sizes(model)
    assert replace(read_model(prepare_model(model, settings), element_bytes=4), name="tiny-random") == sizes


def test_a_prepared_model_is_used_again(private: Settings, fake: FakeModel) -> None:
    first = prepare_model(FAKE, private)
    assert prepare_model(FAKE, private) == first
    assert fake.written == 1
    assert first.parent == private.local.models


def test_dtype_recipe_and_package_versions_decide_the_place(
    private: Settings, fake: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {prepare_model(FAKE, private), prepare_model(ModelSection(source="fake", dtype="bfloat16"), private)}
    shipped = SHIPPED_MODELS["fake"]
    for other in (replace(shipped, recipe=2), replace(shipped, packages=("safetensors",))):
        monkeypatch.setitem(SHIPPED_MODELS, "fake", other)
        places.add(prepare_model(FAKE, private))
    assert len(places) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "model.safetensors").write_bytes(b"wEights"),
        lambda path: (path / "model.safetensors").unlink(),
        lambda path: (path / "unknown.bin").write_bytes(b"pickle"),
        lambda path: (path / models.MANIFEST).unlink(),
        lambda path: (path / models.MANIFEST).write_text("{"),
        lambda path: (path / models.MANIFEST).write_text("[]"),
    ],
)
def test_a_damaged_model_is_prepared_anew(private: Settings, fake: FakeModel, damage: Callable[[Path], object]) -> None:
    path = prepare_model(FAKE, private)
    damage(path)
    assert prepare_model(FAKE, private) == path
    assert fake.written == 2
    assert (path / "model.safetensors").read_bytes() == b"weights"
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors", models.MANIFEST]


def test_many_at_once_prepare_one_model_once(private: Settings, fake: FakeModel) -> None:
    together = threading.Barrier(4)
    found = []

    def prepare() -> None:
        together.wait()
        found.append(prepare_model(FAKE, private))

    threads = [threading.Thread(target=prepare) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert fake.written == 1


def test_a_lock_held_too_long_is_named(private: Settings, fake: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    path = prepare_model(FAKE, private)
    monkeypatch.setattr(models, "LOCK_DEADLINE_S", 0.1)
    with filelock.FileLock(f"{path}.lock"), pytest.raises(UserError, match=r"Another process .*\.lock\)"):
        prepare_model(FAKE, private)


def test_an_interrupted_preparation_leaves_no_model_and_is_cleared_by_the_next(
    private: Settings, fake: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prepare_model(FAKE, private)
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    left = path.with_name(f".{path.name}.0123.tmp")  # as SIGKILL in the middle of preparing leaves it
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"wei")
    prepare_model(FAKE, private)
    assert not left.exists()

    def fail(directory: Path, dtype: str) -> None:
        (directory / "half").write_bytes(b"half")
        raise ValueError("broken")

    monkeypatch.setitem(SHIPPED_MODELS, "fake", replace(SHIPPED_MODELS["fake"], write=fail, recipe=2))
    before = set(private.local.models.glob("*"))
    with pytest.raises(ValueError, match="broken"):
        prepare_model(FAKE, private)
    assert {place for place in private.local.models.glob("*") if place.is_dir()} <= before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"disk_bytes": 2**60}, r"needs 1073741824\.0 GiB in .* make room"),
        ({"memory_bytes": 2**60}, r"of memory .* smaller model"),
        ({"packages": ("no-such-package-here",)}, r"no-such-package-here, which is not installed"),
    ],
)
def test_what_this_machine_lacks_is_said_before_anything_is_written(
    private: Settings, fake: FakeModel, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.setitem(SHIPPED_MODELS, "fake", replace(SHIPPED_MODELS["fake"], **change))
    with pytest.raises(UserError, match=message):
        prepare_model(FAKE, private)
    assert fake.written == 0


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path, fake: FakeModel) -> None:
    (tmp_path / "home").write_text("a file")
    settings = settings_of(home=tmp_path / "home", runs=tmp_path, ledger_url="sqlite://")
    with pytest.raises(UserError, match=r"home/models cannot be written.*HEXFLOW_HOME"):
        prepare_model(FAKE, settings)


# --- a user's directory ---


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def directory(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "model")


def change_config(**values: object) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | values))

    return change


def test_a_sound_directory_is_used_where_it_lies(private: Settings, directory: Path) -> None:
    assert prepare_model(ModelSection(source=str(directory)), private) == directory.resolve()
    assert not private.local.home.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: (path / "tokenizer.json").unlink(), r"no tokenizer \(tokenizer\.json\): download the whole"),
        (lambda path: (path / "pytorch_model.bin").touch(), r"pickled weights \(pytorch_model\.bin\)"),
        (lambda path: (path / "state.pt").touch(), r"pickled weights \(state\.pt\)"),
        (lambda path: (path / "config.json").unlink(), r"no config\.json"),
        (lambda path: (path / "config.json").write_text("{"), "not valid JSON"),
        (lambda path: (path / "config.json").write_text("[" * 100_000), "not valid JSON"),
        (lambda path: (path / "config.json").write_text("\ufeff{}"), "not valid JSON"),
        (lambda path: (path / "config.json").write_text("[]"), "JSON object"),
        (lambda path: (path / "model.safetensors").unlink(), r"no weights \(\*\.safetensors\): download"),
        (lambda path: (path / "model.safetensors").write_bytes(b"short"), "not a whole safetensors file"),
        (
            lambda path: (path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "b.safetensors"}}'),
            r"lacks b\.safetensors",
        ),
        (change_config(architectures=["MambaForCausalLM"]), "architecture MambaForCausalLM"),
        (change_config(architectures=None), "architecture none"),
        (change_config(quantization_config={"bits": 4}), "quantised"),
        (change_config(use_sliding_window=True), "sliding-window"),
        (change_config(max_position_embeddings=256), "max_context is 512, but .* 256 tokens"),
        (change_config(max_position_embeddings=None), "max_position_embeddings"),
    ],
)
def test_an_unfit_directory_is_refused_with_the_reason(
    private: Settings, directory: Path, change: Callable[[Path], object], message: str
) -> None:
    change(directory)
    with pytest.raises(UserError, match=message):
        prepare_model(ModelSection(source=str(directory)), private)


@pytest.mark.parametrize("size", ["1.5b", "7b", "14b"])
def test_a_shipped_configuration_says_how_to_get_its_model(size: str, private: Settings) -> None:
    path = DEPLOYMENTS / "models" / f"r1-distill-qwen-{size}"
    message = (
        r"has no weights \(\*\.safetensors\) and no tokenizer \(tokenizer\.json\): download the whole model, as with "
        rf"`hf download deepseek-ai/DeepSeek-R1-Distill-Qwen-{size.upper()} --local-dir DIRECTORY`"
    )
    with pytest.raises(UserError, match=message):
        prepare_model(ModelSection(source=str(path)), private)


def test_a_misspelt_source_names_the_nearest(private: Settings) -> None:
    with pytest.raises(UserError, match="did you mean 'tiny-random'"):
        prepare_model(ModelSection(source="tiny-randm"), private)
    with pytest.raises(UserError, match="shipped models: smollm2-135m-instruct"):
        prepare_model(ModelSection(source="/no/such/place"), private)
    with pytest.raises(UserError, match=r"shipped models: .* a relative path starts at the experiment file"):
        prepare_model(ModelSection(source="models/mine"), private)


# --- the shipped models ---


def test_tiny_random_is_the_same_on_every_machine_and_loads(private: Settings, tmp_path: Path) -> None:
    import transformers

    path = prepare_model(ModelSection(source="tiny-random"), private)
    elsewhere = settings_of(home=tmp_path / "elsewhere", runs=tmp_path, ledger_url="sqlite://")
    again = prepare_model(ModelSection(source="tiny-random"), elsewhere)
    assert (path / models.MANIFEST).read_bytes() == (again / models.MANIFEST).read_bytes()

    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert 0.9e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.1e6
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert len(tokenizer) == model.config.vocab_size
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.encode("<eos>")[0]
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.apply_chat_template([{"role": "user", "content": "07 say a"}], tokenize=False) == "07 say a"
    text = "07 say a\n\x00 é 日本 {}  "
    assert len(tokenizer.encode(text)) == len(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_making_a_model_leaves_the_terminal_clean(private: Settings) -> None:
    """In a process of its own: what is imported once warns once."""
    code = (
        "from tasks.models.prepare import prepare_model\nfrom tasks.config.settings import load_settings\n"
        "from tasks.config.sections import ModelSection\n"
        "prepare_model(ModelSection(source='tiny-random'), load_settings())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={name: value for name, value in os.environ.items() if name not in ("DS_ACCELERATOR", "TQDM_DISABLE")}
        | private.environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert done.stderr.startswith(f"Making the model tiny-random ready in {private.local.models}")


def test_tiny_random_in_bfloat16(private: Settings) -> None:
    path = prepare_model(ModelSection(source="tiny-random", dtype="bfloat16"), private)
    assert {dtype for _, dtype in stored_tensors(path)} == {"BF16"}
    assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"
