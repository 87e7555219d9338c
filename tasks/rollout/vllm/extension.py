"""What runs inside vLLM's EngineCore process; vLLM imports this module itself, by the names given in vllm_engine."""

import logging
import os
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from tasks.machine.processes import die_with_parent
from tasks.rollout.vllm.engine import CPU_BLOCK_TOKENS


@register_backend(AttentionBackendEnum.CPU_ATTN)
class SmallBlockAttention(CPUAttentionBackend):
    """vLLM's CPU attention with the smallest block its kernels have (`vec16`); it advertises multiples of 32 only."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Multiples of `CPU_BLOCK_TOKENS`."""
        return [MultipleOf(CPU_BLOCK_TOKENS)]


class ReplicaExecutor(UniProcExecutor):
    """Runs the model inside the EngineCore process and ends that process with the replica.

    vLLM would put a CPU model into one more process, only to set OpenMP variables that the replica's environment holds
    already.
    """

    def _init_executor(self) -> None:
        die_with_parent()
        # It warns at every reload that rotary tables and tied output layers have no weights of their own. A tensor that
        # is really missing from a version is still warned of, by vLLM's `reload_weights`.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        super()._init_executor()


class ReplicaWorker:
    """Methods added to vLLM's worker class, which supplies the attributes declared here."""

    model_runner: Any
    vllm_config: VllmConfig

    def process_id(self) -> int:
        """The process that holds the weights: EngineCore itself under `ReplicaExecutor`."""
        return os.getpid()

    def load_version(self, path: str) -> None:
        """Replace all weights in place by those of a directory in Hugging Face layout; generation must be paused."""
        if not any(Path(path).glob("*.safetensors")):
            raise FileNotFoundError(f"There are no safetensors weights in {path}.")
        self.reload_weights(weights_path=path)  # type: ignore[attr-defined]
        if current_platform.is_cpu():
            self._repack_output_layer()

    def _repack_output_layer(self) -> None:
        # vLLM's reload skips an output layer that shares the embedding's weight, but its CPU kernel reads a packed
        # copy made when the layer was first loaded: without this, log-probabilities are off by about 0.5.
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            for layer in self.model_runner.get_model().modules():
                if isinstance(layer, ParallelLMHead):
                    layer.quant_method.process_weights_after_loading(layer)
