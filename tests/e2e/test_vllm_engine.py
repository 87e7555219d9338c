"""The vLLM engine: versions per token are exact, log-probabilities are their version's, no process outlives it."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from planners.costs.memory import CPU_KV_CACHE_BYTES, kv_bytes_per_token
from planners.workload.model import read_model
from tasks.rollout.engine import Answer, Sampling
from tasks.rollout.vllm.engine import CPU_BLOCK_TOKENS, VllmEngine, cut_into_segments

VOCABULARY = 128
PROMPT = [token % VOCABULARY for token in range(3, 3 + 7 * 40, 7)]
SHORT = Sampling(temperature=1.0, max_new_tokens=4, stop_token_ids=())
LONG = Sampling(temperature=1.0, max_new_tokens=200, stop_token_ids=())
_SIZES: dict[str, Any] = {
    "replica": "r0",
    "lineage": 0,
    "number": 0,
    "dtype": "float32",
    "max_context": 256,
    "concurrency": 8,
    "kind": "cpu",
    "seed": 1,
}


@given(st.lists(st.integers(1, 5), max_size=4))
def test_segments_hold_every_token_once_and_in_order(lengths: list[int]) -> None:
    ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
    spans = [(f"2.{number}", end - lengths[number], end) for number, end in enumerate(ends)]
    tokens = range(sum(lengths))

    segments = cut_into_segments(tokens, [-float(token) for token in tokens], spans, "r1")

    assert [token for segment in segments for token in segment.token_ids] == list(tokens)
    assert [segment.version for segment in segments] == list(range(len(lengths)))
    assert all((segment.logprobs == -segment.token_ids).all() for segment in segments)


@pytest.mark.parametrize("spans", [[], [("0.1", 1, 3)], [("0.1", 0, 2)], [("0.1", 0, 1), ("0.2", 2, 3)]])
def test_tokens_without_a_version_are_refused(spans: list[tuple[str, int, int]]) -> None:
    with pytest.raises(RuntimeError, match="do not cover the 3 tokens"):
        cut_into_segments([5, 6, 7], [-1.0, -1.0, -1.0], spans, "r1")


@pytest.fixture
def one_core() -> Iterator[int]:
    """The only core that this process and what it starts may use; environment and cores are restored."""
    environment, cores = dict(os.environ), os.sched_getaffinity(0)
    core = max(cores)
    os.sched_setaffinity(0, {core})
    yield core
    os.sched_setaffinity(0, cores)
    os.environ.clear()
    os.environ.update(environment)


@pytest.mark.e2e
def test_weights_change_under_running_requests(tmp_path: Path, one_core: int) -> None:
    weights = [_write_model(tmp_path / f"v{number}", seed=number) for number in range(3)]
    asyncio.run(_live_through_swaps(weights, tmp_path / "cache", one_core))


async def _live_through_swaps(weights: list[Path], cache_dir: Path, core: int) -> None:
    others = set(psutil.Process().children())
    counted: list[int] = []
    engine = await VllmEngine.start(weights[0], **_SIZES, cache_dir=cache_dir, count_tokens=counted.append)
    try:
        process = _started_since(others)
        threads = [int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir()]
        assert [os.sched_getaffinity(thread) for thread in threads] == [{core}] * len(threads)
        _holds_what_the_planner_computes(engine, weights[0])
        await _counts_tokens_on_the_way(engine, counted)
        await _stops_at_a_stop_token(engine, weights)
        await _continue_keeps_versions_per_token(engine, weights)
        await _restart_starts_answers_again(engine, weights)
        await _drain_finishes_first(engine, weights)
        running = await _start_long_answers(engine, "last")
    finally:
        await engine.shutdown()
    assert [(await answer).finish_reason for answer in running] == ["aborted"] * len(running)
    await engine.shutdown()
    assert not psutil.pid_exists(process.pid)


def _started_since(others: set[psutil.Process]) -> psutil.Process:
    """EngineCore, which is this process's child now and was none before."""
    started = set(psutil.Process().children()) - others
    (process,) = [child for child in started if "resource_tracker" not in str(child.cmdline())]
    return process


def _holds_what_the_planner_computes(engine: VllmEngine, path: Path) -> None:
    """The planner's key-value bytes per token give the capacity that vLLM itself reports."""
    expected = CPU_KV_CACHE_BYTES / kv_bytes_per_token(read_model(path, element_bytes=4), tensor_ranks=1)
    blocks = engine._llm.vllm_config.cache_config.num_gpu_blocks
    assert blocks is not None
    assert blocks * CPU_BLOCK_TOKENS == pytest.approx(expected, rel=0.01)


async def _counts_tokens_on_the_way(engine: VllmEngine, counted: list[int]) -> None:
    counted.clear()
    answer = await engine.generate("counted", PROMPT, LONG)
    assert sum(counted) == answer.tokens == LONG.max_new_tokens
    assert len(counted) > 5, "a long answer shows only at its end that the engine got on"


async def _stops_at_a_stop_token(engine: VllmEngine, weights: list[Path]) -> None:
    stop = tuple(range(0, VOCABULARY, 2))
    sampling = Sampling(temperature=0.7, max_new_tokens=60, stop_token_ids=stop, seed=3)
    answer = await engine.generate("stop", PROMPT, sampling)
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] in stop
    assert not set(answer.token_ids[:-1]) & set(stop)
    assert _error(answer, weights, temperature=0.7) < 1e-4
    assert _error(answer, weights, temperature=1.0) > 1e-2, "the temperature is part of a log-probability"
    assert await engine.generate("stop again", PROMPT, sampling) == answer, "the same seed draws the same answer"


async def _continue_keeps_versions_per_token(engine: VllmEngine, weights: list[Path]) -> None:
    running = await _start_long_answers(engine, "continue")
    await engine.load(0, 1, weights[1], "continue")
    assert engine.loaded == (0, 1)
    after_one = await engine.generate("after-1", PROMPT, SHORT)
    await engine.load(0, 2, weights[2], "continue")
    for answer in await asyncio.gather(*running):
        assert answer.finish_reason == "length"
        assert len(answer.token_ids) == LONG.max_new_tokens
        assert [segment.version for segment in answer.segments] == [0, 1, 2]
        assert _error(answer, weights) < 1e-4
        assert _error(answer, [weights[1], weights[2], weights[0]]) > 1e-1, "the three versions differ"
    assert [segment.version for segment in after_one.segments] == [1]
    assert _error(after_one, weights) < 1e-4, "a prompt cached under the old weights was used again"


async def _restart_starts_answers_again(engine: VllmEngine, weights: list[Path]) -> None:
    running = await _start_long_answers(engine, "restart")
    await engine.abort(["restart-0", "unknown"])
    await engine.load(0, 3, weights[0], "restart")
    aborted, *answers = await asyncio.gather(*running)
    assert aborted.finish_reason == "aborted"
    assert 0 < len(aborted.token_ids) < LONG.max_new_tokens
    running = await _start_long_answers(engine, "lineage")
    await engine.load(1, 3, weights[0], "continue")
    for answer in [*answers, *await asyncio.gather(*running)]:
        assert answer.finish_reason == "length"
        assert [(segment.version, len(segment.token_ids)) for segment in answer.segments] == [(3, LONG.max_new_tokens)]
        assert _error(answer, [weights[0]] * 4) < 1e-4


async def _drain_finishes_first(engine: VllmEngine, weights: list[Path]) -> None:
    running = await _start_long_answers(engine, "drain")
    more = [asyncio.create_task(engine.generate(f"queued-{number}", PROMPT, SHORT)) for number in range(12)]
    await asyncio.sleep(0)
    await engine.load(1, 4, weights[1], "drain")
    assert engine.loaded == (1, 4)
    for answer in await asyncio.gather(*running, *more):
        assert [segment.version for segment in answer.segments] == [3]
        assert _error(answer, [weights[0]] * 4) < 1e-4


async def _start_long_answers(engine: VllmEngine, name: str) -> list[asyncio.Task[Answer]]:
    """Six long answers to one prompt, each with some tokens already: a shorter request that came later has ended."""
    running = [asyncio.create_task(engine.generate(f"{name}-{number}", PROMPT, LONG)) for number in range(6)]
    await asyncio.sleep(0)
    await engine.generate(f"{name}-short", PROMPT, SHORT)
    return running


def _error(answer: Answer, weights: Sequence[Path], temperature: float = 1.0) -> float:
    """Largest difference between the answer's log-probabilities and Hugging Face's under `weights[version]`."""
    sequence = torch.tensor([PROMPT + answer.token_ids.tolist()])
    position, worst = len(PROMPT), 0.0
    for segment in answer.segments:
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(weights[segment.version]).eval()(sequence).logits[0]
        expected = torch.log_softmax(logits.float() / temperature, dim=-1)
        places = torch.arange(position, position + len(segment.token_ids))
        difference = expected[places - 1, sequence[0, places]] - torch.tensor(segment.logprobs)
        worst = max(worst, difference.abs().max().item())
        position += len(segment.token_ids)
    return worst


def _write_model(path: Path, seed: int) -> Path:
    """A tiny random model with tied embeddings and far from uniform predictions."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path
