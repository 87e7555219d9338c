"""The planner's key-value bytes per token against the capacity that vLLM itself reports."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from planners.memory import CPU_KV_CACHE_BYTES, kv_bytes_per_token
from planners.model import read_model
from tasks.rollout.vllm_engine import CPU_BLOCK_TOKENS, VllmEngine


@pytest.fixture
def environment() -> Iterator[None]:
    """The engine sets variables; they are restored."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.e2e
@pytest.mark.usefixtures("environment")
def test_vllm_reports_the_capacity_that_the_planner_computes(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    expected = CPU_KV_CACHE_BYTES / kv_bytes_per_token(read_model(tmp_path / "model", element_bytes=4), tensor_ranks=1)
    assert asyncio.run(_reported_tokens(tmp_path)) == pytest.approx(expected, rel=0.01)


async def _reported_tokens(path: Path) -> int:
    engine = await VllmEngine.start(
        path / "model",
        replica="r0",
        lineage=0,
        number=0,
        dtype="float32",
        max_context=256,
        concurrency=4,
        kind="cpu",
        cache_dir=path / "cache",
        seed=0,
    )
    try:
        blocks = engine._llm.vllm_config.cache_config.num_gpu_blocks
    finally:
        await engine.shutdown()
    assert blocks is not None
    return blocks * CPU_BLOCK_TOKENS
