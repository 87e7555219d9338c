"""Weights as a directory in Hugging Face layout, for any engine to load."""

import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

_COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
)
"""Files of the model directory that every version carries besides its weights."""


def write_weights(directory: Path, model_path: Path, weights: dict[str, Tensor]) -> None:
    """Write `weights`, by Hugging Face name, with the configuration and tokenizer of the model they were trained from.

    Args:
        directory: existing directory to write into.
        model_path: the prepared model.
        weights: contiguous CPU tensors.
    """
    for pattern in _COPIED:
        for file in sorted(model_path.glob(pattern)):
            shutil.copyfile(file, directory / file.name)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
