"""The policy: a causal language model that returns the log-probabilities of given tokens.

The head runs at the positions that predict an answer token, in chunks, so the logits of a whole sequence never exist.
Nor does a score of every query with every key for each head: on CUDA, a mask leaves scaled_dot_product_attention its
memory-efficient and cuDNN kernels, which read one mask for all heads. (Of PyTorch 2.13's source,
aten/src/ATen/native/transformers; measured on no GPU yet.)
"""

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from planners.errors import UserError
from tasks.training.packing import MicroBatch

HEAD_CHUNK = 1024  # positions per head chunk: 200 MB of float32 logits at a vocabulary of 49 k
_MASK_ALIGNMENT = 16  # elements: the memory-efficient kernel copies a mask whose rows begin anywhere else


class Policy(nn.Module):
    """A Hugging Face causal language model behind the packed layout; temperature as in sampling."""

    def __init__(self, model: PreTrainedModel, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the batch's targets [N], and the entropies [N] of those predictions, detached."""
        hidden = self.model.base_model(
            input_ids=batch.input_ids[None],
            attention_mask=_additive(batch.attention_mask(), self.model.dtype),
            position_ids=batch.position_ids[None],
            use_cache=False,
        ).last_hidden_state[0, batch.predict_at]
        if len(hidden) <= HEAD_CHUNK:
            return self._score(hidden, batch.targets)
        # Recomputing a chunk in the backward pass bounds the logits kept to one chunk.
        chunks = zip(hidden.split(HEAD_CHUNK), batch.targets.split(HEAD_CHUNK), strict=True)
        scores = [checkpoint(self._score, h, t, use_reentrant=False) for h, t in chunks]
        return torch.cat([s[0] for s in scores]), torch.cat([s[1] for s in scores])

    def _score(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model.get_output_embeddings()(hidden).float() / self.temperature
        logprobs = logits.log_softmax(dim=-1)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        return logprobs.gather(1, targets[:, None])[:, 0], entropy


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask [1, 1, T, T] as what is added to the scores: 0 where allowed, else -inf.

    Attention would make it from the boolean one in every layer, and keep it there for the backward pass.
    """
    tokens = allowed.shape[-1]
    row = math.ceil(tokens / _MASK_ALIGNMENT) * _MASK_ALIGNMENT
    mask = torch.zeros(1, 1, tokens, row, dtype=dtype, device=allowed.device)[..., :tokens]
    return mask.masked_fill_(~allowed, -math.inf)


def load_policy(
    model_path: Path, temperature: float, max_context: int, dtype: torch.dtype, *, recompute: bool = False
) -> Policy:
    """Load a causal language model from a directory in Hugging Face layout.

    Args:
        model_path: the directory.
        temperature: as in sampling.
        max_context: longest prompt plus answer, in tokens.
        dtype: of the weights.
        recompute: keep only the input of each layer for the backward pass, and compute the layer there again.

    Raises:
        UserError: the model attends through a sliding window shorter than the context, which the packed mask lacks.
    """
    config = AutoConfig.from_pretrained(model_path, local_files_only=True)
    window = config.to_dict().get("sliding_window")
    if window is not None and window < max_context:
        raise UserError(
            f"The model {model_path} attends to the last {window} tokens only, below model.max_context {max_context}; "
            f"lower model.max_context to {window} or choose a model with full attention."
        )
    config.attention_dropout = 0.0  # log-probabilities are compared with those of engines, which have none
    model = AutoModelForCausalLM.from_pretrained(
        model_path, config=config, dtype=dtype, attn_implementation="sdpa", local_files_only=True, use_safetensors=True
    )
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return Policy(model.train(), temperature)
