"""A model directory of a person's own, in Hugging Face layout: found, and checked before any work."""

import difflib
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from planners.errors import UserError
from planners.workload.model import ARCHITECTURES, model_from_config
from tasks.config.sections import ModelSection
from tasks.machine.memory import gib, memory_bytes
from tasks.models.weights import check_weights

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")
_NO_WEIGHTS = re.compile(r"training_args\.bin|(optimizer|scheduler|scaler)\.pt|rng_state.*\.pth")
"""What other trainers leave beside the weights, and nobody here reads."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def find_user_directory(source: str, shipped: Collection[str]) -> Path:
    """The directory that `source`, none of the `shipped` models, names. Raises UserError where there is none."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path.resolve()
    near = difflib.get_close_matches(source, shipped, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"shipped models: {', '.join(shipped)}"
    if not near and not path.is_absolute():
        hint += "; a relative path starts at the experiment file, in an override at the working directory"
    raise UserError(f"model.source '{source}' is neither a shipped model nor a directory ({hint}).")


def check_user_directory(path: Path) -> None:
    """Refuse a directory that cannot be trained: files, architecture, weights or memory. Raises UserError."""
    config = _read_config(path)
    architectures = config.get("architectures") or ["none"]
    if architectures[0] != ARCHITECTURES.get(str(config.get("model_type"))):
        raise UserError(
            f"{path / 'config.json'} names the architecture {architectures[0]} and the model_type "
            f"{config.get('model_type')}, which cannot be trained here: use one of {', '.join(ARCHITECTURES.values())}."
        )
    if config.get("quantization_config"):
        raise UserError(f"The model in {path} is quantised and cannot be trained: save it dequantised first.")
    if config.get("use_sliding_window"):
        raise UserError(f"The model in {path} uses sliding-window attention, which cannot be trained here.")
    _check_complete(path, config)
    model_from_config(config, path.name)  # refuses a key that is missing
    _check_token_ids(path, config)
    check_memory(str(path), check_weights(path, config))


def _check_complete(path: Path, config: dict[str, Any]) -> None:
    pickles = sorted(
        file.name for pattern in PICKLE_PATTERNS for file in path.glob(pattern) if not _NO_WEIGHTS.match(file.name)
    )
    if pickles:
        raise UserError(
            f"The model directory {path} holds pickled weights ({pickles[0]}), which can run code when loaded: save "
            "the model with safetensors and delete them."
        )
    lacks = [] if any(path.glob("*.safetensors")) else ["weights (*.safetensors)"]
    lacks += [] if any((path / name).is_file() for name in TOKENIZER_FILES) else ["tokenizer (tokenizer.json)"]
    if lacks:
        known = str(config.get("_name_or_path"))
        name = known if _HUB_NAME.fullmatch(known) else "ORGANISATION/NAME"
        raise UserError(
            f"The model directory {path} has no {' and no '.join(lacks)}: download the whole model, as with "
            f"`hf download {name} --local-dir DIRECTORY`, and name it with model.source=DIRECTORY."
        )


def _check_token_ids(path: Path, config: dict[str, Any]) -> None:
    """Those that the model's files name: a prompt's are checked with the prompt."""
    generation = path / "generation_config.json"
    for file, tree in ((path / "config.json", config), (generation, _read_json(generation, {}))):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            named = tree.get(key)
            for token_id in named if isinstance(named, list) else [named]:
                if token_id is not None and not (isinstance(token_id, int) and 0 <= token_id < config["vocab_size"]):
                    raise UserError(
                        f"{file} names {key} {token_id}, but the model's embedding ends at {config['vocab_size'] - 1}: "
                        "take the files of one model."
                    )


def check_context(path: Path, model: ModelSection) -> None:
    """Refuse a `model.max_context` beyond what the model in `path` was made for. Raises UserError."""
    longest = _read_config(path).get("max_position_embeddings")
    if not isinstance(longest, int):
        raise UserError(f"{path / 'config.json'} does not say max_position_embeddings, the model's longest context.")
    if longest < model.max_context:
        raise UserError(
            f"model.max_context is {model.max_context}, but {model.source} has a context of {longest} tokens: lower it."
        )


def _read_config(path: Path) -> dict[str, Any]:
    if not (path / "config.json").is_file():
        raise UserError(f"The model directory {path} has no config.json: name a directory in Hugging Face layout.")
    return _read_json(path / "config.json")


def _read_json(path: Path, absent: dict[str, Any] | None = None) -> dict[str, Any]:
    """The object in a file; `absent`, where given, if there is no such file."""
    if absent is not None and not path.is_file():
        return absent
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))  # a byte order mark is refused, as by who loads the model
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not valid JSON: copy it again.") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold a JSON object.")
    return tree


def check_memory(source: str, needed_bytes: int) -> None:
    """Refuse to load what does not fit into the memory that is available. Raises UserError."""
    _, available_bytes = memory_bytes()
    if available_bytes < needed_bytes:
        raise UserError(
            f"{source} needs {gib(needed_bytes)} of memory to be loaded, but {gib(available_bytes)} are available: "
            "end other programs or take a smaller model."
        )
