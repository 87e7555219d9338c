"""A published version is a whole Hugging Face directory."""

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from planners.errors import UserError
from tasks.exchange.layout import RunDirectory
from tasks.exchange.weights import publish_weights, verify_weights
from tasks.training import export
from tasks.training.export import write_weights
from tests.support.training import make_engine, parameters_of, save_tiny_model


def test_exported_weights_load_with_their_tokenizer_and_without_the_old_weights(tmp_path: Path) -> None:
    model_path = save_tiny_model(tmp_path / "model")
    (model_path / "tokenizer.json").write_text("{}")
    (model_path / "README.md").write_text("not part of a version")
    (model_path / "tokenizer").mkdir()
    weights = parameters_of(make_engine(seed=1))
    run = RunDirectory(tmp_path / "run")
    path = publish_weights(run, 0, 1, lambda directory: write_weights(directory, model_path, weights))
    verify_weights(path)
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {file.name for file in path.iterdir()}
    assert not (path / "README.md").exists()
    loaded = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())


def test_a_full_disk_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(export, "save_file", fail)
    with pytest.raises(UserError, match="No space left on device"):
        publish_weights(RunDirectory(tmp_path), 0, 1, lambda directory: write_weights(directory, tmp_path, {}))
    assert not list((tmp_path / "weights").iterdir())
