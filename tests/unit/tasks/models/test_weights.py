"""A person's model directory is judged by its files before any work; the sound ones are saved by transformers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from planners.errors import UserError
from tasks.models.directory import check_user_directory
from tests.support.models import SMALL_KINDS, save_small_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A directory as transformers saves a model of this kind, made once."""
    root = tmp_path_factory.mktemp("models")
    made: dict[tuple[str, ...], Path] = {}

    def save(kind: str, dtype: str = "float32", **how: Any) -> Path:
        key = (kind, dtype, *how)
        if key not in made:
            made[key] = save_small_model(root / str(len(made)), kind, dtype, **how)
        return made[key]

    return save


@pytest.fixture
def directory(saved: Callable[..., Path], tmp_path: Path) -> Path:
    return shutil.copytree(saved("llama"), tmp_path / "model")


@pytest.mark.parametrize("kind", SMALL_KINDS)
def test_what_transformers_saves_is_sound(saved: Callable[..., Path], kind: str) -> None:
    check_user_directory(saved(kind))


def test_shards_and_sixteen_bits_are_sound_too(saved: Callable[..., Path]) -> None:
    path = saved("qwen2", "bfloat16", max_shard_size="2KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    check_user_directory(path)


def edit(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    """Change the tensors of a directory's one file."""

    def apply(path: Path) -> None:
        tensors = dict(load_file(path / "model.safetensors"))
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return apply


def set_key(file: str, **values: Any) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        tree = json.loads((path / file).read_text())
        (path / file).write_text(json.dumps(tree | values))

    return apply


def half_renamed(path: Path) -> None:
    (path / "model.safetensors").rename(path / "weights.safetensors")


NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit(lambda t: t.pop(NORM)), "lack model.norm.weight, which"),
        (edit(lambda t: [t.pop(name) for name in list(t) if ".1." in name]), r"lack model\.layers\.1\S+ and 8 more"),
        (edit(lambda t: t.update(extra=t[NORM])), "have extra, which config.json does not ask for"),
        (edit(lambda t: t.update({DOWN: t[DOWN].T.copy()})), r"down_proj.* shape \[24, 16\], but .* \[16, 24\]"),
        (edit(lambda t: t[DOWN].__setitem__((3, 4), np.nan)), "down_proj.* not finite"),
        (edit(lambda t: t[NORM].__setitem__(0, -np.inf)), "model.norm.weight.* not finite"),
        (set_key("config.json", num_hidden_layers=3), r"lack model\.layers\.2"),
        (set_key("config.json", num_hidden_layers=1), r"have model\.layers\.1\S+ and 8 more"),
        (set_key("config.json", vocab_size=41), r"embed_tokens.* \[40, 16\], but .* \[41, 16\]"),
        (set_key("config.json", attention_bias=True), "lack .*bias"),
        (set_key("config.json", eos_token_id=40), "eos_token_id 40, but .* ends at 39"),
        (set_key("config.json", pad_token_id=-1), "pad_token_id -1"),
        (set_key("generation_config.json", eos_token_id=[2, 128009]), r"generation_config\.json names .* 128009"),
        (set_key("config.json", model_type="qwen2"), "LlamaForCausalLM and the model_type qwen2"),
        (
            lambda path: shutil.copy(path / "model.safetensors", path / "old.safetensors"),
            r"has old\.safetensors beside",
        ),
        (half_renamed, r"neither model\.safetensors nor"),
        (lambda path: (path / "model.safetensors.index.json").write_text("[" * 100_000), "is no index"),
        (lambda path: (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}'), "names no"),
        (lambda path: (path / "config.json").write_text('{"a":' * 100_000), "not valid JSON"),
    ],
)
def test_weights_of_another_model_are_refused(directory: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(directory)
    with pytest.raises(UserError, match=message):
        check_user_directory(directory)


def test_an_old_file_beside_shards_is_refused(saved: Callable[..., Path], tmp_path: Path) -> None:
    path = shutil.copytree(saved("qwen2", "bfloat16", max_shard_size="2KB"), tmp_path / "model")
    shutil.copy(saved("qwen2") / "model.safetensors", path)
    with pytest.raises(UserError, match=r"has model\.safetensors beside what model\.safetensors\.index\.json holds"):
        check_user_directory(path)


def test_a_number_in_sixteen_bits_that_is_not_finite_is_found(saved: Callable[..., Path], tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file as save

    path = shutil.copytree(saved("qwen3", "bfloat16"), tmp_path / "model")
    tensors = load(path / "model.safetensors")
    tensors[NORM][3] = torch.inf
    save(tensors, path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.norm\.weight .* not finite"):
        check_user_directory(path)


def test_what_other_trainers_leave_is_no_weight(directory: Path) -> None:
    for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth", "scheduler.pt"):
        (directory / name).touch()
    check_user_directory(directory)


def test_a_tied_head_may_be_there_all_the_same(saved: Callable[..., Path], tmp_path: Path) -> None:
    path = shutil.copytree(saved("llama with biases, tied"), tmp_path / "model")
    edit(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))(path)
    check_user_directory(path)
