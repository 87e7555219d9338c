"""Small models of every architecture as transformers saves them, and what is in the files of a model."""

import json
from pathlib import Path
from typing import Any

_SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SMALL_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama with biases, tied": (
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3 with biases": ("Qwen3ForCausalLM", {"attention_bias": True, "tie_word_embeddings": False}),
}


def save_small_model(directory: Path, kind: str = "llama", dtype: str = "float32", **how: Any) -> Path:
    """Write a model of 40 tokens and 2 layers with a file in a tokenizer's place; `how` is for `save_pretrained`."""
    import torch
    import transformers

    name, extra = SMALL_KINDS[kind]
    config_class = getattr(transformers, name.replace("ForCausalLM", "Config"))
    model = getattr(transformers, name)(config_class(**_SIZES | extra))
    model.to(getattr(torch, dtype)).save_pretrained(directory, **how)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def stored_tensors(path: Path) -> list[tuple[str, str]]:
    """(name, dtype) of each tensor of model.safetensors."""
    data = (path / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [(name, tensor["dtype"]) for name, tensor in header.items() if name != "__metadata__"]
