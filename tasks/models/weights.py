"""The weights in a model directory, compared with what its configuration says: names, shapes, numbers.

Libraries differ in what they do about a tensor that is missing, left over or of another shape: some fill it with noise,
some pass over it, some fail after a minute. Headers tell all of it in milliseconds.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from planners.errors import UserError
from planners.workload.model import Model, model_from_config

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
Shape = tuple[int, ...]

_EXPONENTS = {"F32": (np.uint32, 0x7F800000), "BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00)}
"""By safetensors' name of a format: the integer of its size, and the exponent's bits, all set in what is not finite."""
_CHUNK = 2**24  # elements


def check_weights(path: Path, config: dict[str, Any]) -> int:
    """Refuse weights that are not, in names, shapes and numbers, those of the configuration; returns their bytes.

    Raises:
        UserError: the first thing that is wrong with them.
    """
    files = _weight_files(path)
    found = _headers(files)
    wanted = expected_shapes(model_from_config(config, path.name), _biased(config))
    passed_over = {name for name in found if name.endswith(".rotary_emb.inv_freq")}
    passed_over |= {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    if missing := [name for name in wanted if name not in found]:
        raise UserError(f"The weights in {path} lack {_named(missing)}, which config.json asks for: copy them again.")
    if left := sorted(found.keys() - wanted.keys() - passed_over):
        raise UserError(
            f"The weights in {path} have {_named(left)}, which config.json does not ask for: config.json and weights "
            "are of different models."
        )
    for name, shape in wanted.items():
        has, file = found[name]
        if has != shape:
            raise UserError(
                f"{name} in {file} has the shape {list(has)}, but config.json asks for {list(shape)}: config.json and "
                "weights are of different models."
            )
    for file in files:
        _check_finite(file)
    return sum(file.stat().st_size for file in files)


def _biased(config: dict[str, Any]) -> set[str]:
    """The projections that have a bias: of the three architectures, each has a rule of its own."""
    if config["model_type"] == "qwen2":
        return {"q_proj", "k_proj", "v_proj"}
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"} if config.get("attention_bias") else set()
    is_llama = config["model_type"] == "llama"
    return attention | ({"gate_proj", "up_proj", "down_proj"} if is_llama and config.get("mlp_bias") else set())


def expected_shapes(model: Model, biased: Collection[str]) -> dict[str, Shape]:
    """Hugging Face's names of all weights, with their shapes; `biased` are the projections that have a bias."""
    wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (model.vocabulary, model.hidden)}
    for layer in range(model.layers):
        at = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", wide, model.hidden),
            ("self_attn.k_proj", narrow, model.hidden),
            ("self_attn.v_proj", narrow, model.hidden),
            ("self_attn.o_proj", model.hidden, wide),
            ("mlp.gate_proj", model.intermediate, model.hidden),
            ("mlp.up_proj", model.intermediate, model.hidden),
            ("mlp.down_proj", model.hidden, model.intermediate),
        ):
            shapes[f"{at}.{name}.weight"] = (rows, columns)
            if name.partition(".")[2] in biased:
                shapes[f"{at}.{name}.bias"] = (rows,)
        if model.query_key_norm:
            shapes |= {f"{at}.self_attn.{which}_norm.weight": (model.head_dim,) for which in "qk"}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{norm}.weight"] = (model.hidden,)
    shapes["model.norm.weight"] = (model.hidden,)
    if not model.tied:
        shapes["lm_head.weight"] = (model.vocabulary, model.hidden)
    return shapes


def _weight_files(path: Path) -> list[Path]:
    """The files that make up the weights: one, or the shards that the index names. Nothing else may lie beside them."""
    index, files = path / INDEX, sorted(path.glob("*.safetensors"))
    if not index.is_file():
        names = {SINGLE}
        if SINGLE not in {file.name for file in files}:
            raise UserError(f"The model directory {path} has neither {SINGLE} nor {INDEX}: copy the missing one.")
    else:
        names = set(_read_index(index).values())
        if missing := sorted(names - {file.name for file in files}):
            raise UserError(f"The model directory {path} lacks {missing[0]}, which {INDEX} names: copy it again.")
    if left := [file.name for file in files if file.name not in names]:
        what = INDEX if index.is_file() else SINGLE
        raise UserError(
            f"The model directory {path} has {left[0]} beside what {what} holds, and libraries differ in which they "
            "load: keep one of them."
        )
    return [path / name for name in sorted(names)]


def _read_index(index: Path) -> dict[str, str]:
    """File names by tensor."""
    try:
        names = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{index} is no index of safetensors shards: copy it again.") from None
    if not isinstance(names, dict) or not all(isinstance(name, str) and "/" not in name for name in names.values()):
        raise UserError(f"{index} names no files beside it: copy it again.")
    return names


def _headers(files: Collection[Path]) -> dict[str, tuple[Shape, Path]]:
    """By tensor: its shape, and the file that has it."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[Shape, Path]] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise UserError(f"{file} is not a whole safetensors file ({error}): copy it again.") from None
        if twice := sorted(shapes.keys() & found.keys()):
            raise UserError(f"{twice[0]} is in {found[twice[0]][1]} and in {file}: keep the shards of one model.")
        found |= {name: (shape, file) for name, shape in shapes.items()}
    return found


def _check_finite(file: Path) -> None:
    """Read every number of a file once: one that is not finite makes all answers nonsense, without an error."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    for name, tensor in header.items():
        if name == "__metadata__" or tensor["dtype"] not in _EXPONENTS:
            continue
        integer, exponent = _EXPONENTS[tensor["dtype"]]
        begin, end = tensor["data_offsets"]
        if begin == end:
            continue
        numbers = np.memmap(file, integer, "r", 8 + length + begin, (end - begin) // np.dtype(integer).itemsize)
        for start in range(0, len(numbers), _CHUNK):
            if np.any(numbers[start : start + _CHUNK] & exponent == exponent):
                raise UserError(f"{name} in {file} holds numbers that are not finite: the model is damaged.")


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
