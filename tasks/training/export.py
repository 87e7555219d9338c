"""Weights as a directory in Hugging Face layout, for any engine to load."""

import re
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

_OS_ERROR = re.compile(r"\(os error (\d+)\)")
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

    Raises:
        OSError: the disk refused, for example because it is full.
    """
    for pattern in _COPIED:
        for file in sorted(file for file in model_path.glob(pattern) if file.is_file()):
            shutil.copyfile(file, directory / file.name)
    save_tensors(directory / "model.safetensors", weights, {"format": "pt"})


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write contiguous tensors as a safetensors file.

    Raises:
        OSError: the disk refused, for example because it is full.
    """
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        # safetensors removes what it has written and tells the cause in its text only.
        code = _OS_ERROR.search(str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), str(error)) from error
