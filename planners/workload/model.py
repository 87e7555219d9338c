"""The language model as the planner sees it: sizes from a Hugging Face `config.json`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from planners.errors import UserError

Dtype = Literal["float32", "bfloat16"]
"""What weights are kept in."""
ELEMENT_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Classes by `model_type`, of full causal attention and rotary positions: the trainer's packed groups fit those."""


@dataclass(frozen=True)
class Model:
    """A dense decoder with grouped-query attention and a gated MLP."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    attention_bias: bool = False
    query_key_norm: bool = False
    element_bytes: int = 2

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: attention, MLP, norms."""
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        attention = self.hidden * width + self.heads * self.head_dim * self.hidden
        bias = width if self.attention_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.query_key_norm else 0)
        return attention + bias + 3 * self.hidden * self.intermediate + norms

    @property
    def parameters(self) -> int:
        """All parameters, a tied embedding once."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings + self.hidden

    @property
    def weight_bytes(self) -> int:
        """Bytes of one policy version."""
        return self.parameters * self.element_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def layer_flops_per_token(self) -> int:
        """Forward FLOPs of the matrix products of all layers for one token, attention scores not included."""
        width = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return 2 * self.layers * self.hidden * (width + 3 * self.intermediate)

    @property
    def head_flops_per_token(self) -> int:
        """Forward FLOPs of the language-model head for one token."""
        return 2 * self.hidden * self.vocabulary

    def attention_flops(self, squared_tokens: float) -> float:
        """Forward FLOPs of causal attention scores and values, for Σ length² over sequences."""
        return 2 * self.layers * self.heads * self.head_dim * squared_tokens


def read_model(path: Path, element_bytes: int = 2) -> Model:
    """Sizes from `config.json` (or the directory that holds it).

    Args:
        path: the file or its directory.
        element_bytes: 2 for bf16, 4 for float32.

    Raises:
        UserError: no such file, not JSON, an architecture that is not supported (mixtures of experts among them), or a
            missing key.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no model configuration {file}: give a directory in Hugging Face layout.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"The model configuration {file} cannot be read as JSON: {error}.") from None
    if not isinstance(config, dict):
        raise UserError(f"The model configuration {file} must hold a JSON object.")
    return model_from_config(config, file.resolve().parent.name, element_bytes)


def model_from_config(config: Mapping[str, Any], name: str, element_bytes: int = 2) -> Model:
    """Sizes from the keys of a Hugging Face configuration.

    Raises:
        UserError: as `read_model`.
    """
    kind = config.get("model_type")
    experts = [key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)]
    if experts or "moe" in str(kind):
        raise UserError(f"Model {name} is a mixture of experts, which is not supported yet: choose a dense model.")
    if kind not in ARCHITECTURES:
        raise UserError(f"Model {name} has model_type '{kind}'; supported are {', '.join(ARCHITECTURES)}.")
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return Model(
            name=name,
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocabulary=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            attention_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
            query_key_norm=kind == "qwen3",
            element_bytes=element_bytes,
        )
    except KeyError as error:
        raise UserError(f"The configuration of model {name} lacks {error}.") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"The configuration of model {name} has a size that is none: {error}.") from None
