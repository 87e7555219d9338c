"""The rollout engine: vLLM's AsyncLLM with weights swapped between two tokens.

Invariants:
- A token's version is the label its EngineCore held when it sampled the token. EngineCore stamps every output it sends,
  and the label moves only while generation is paused, after the new weights are in: there is nothing to count here.
- After a swap no key or value computed under older weights is read: cached prefixes are dropped, and answers in flight
  recompute theirs under the new weights.
- A log-probability belongs to the distribution the token was drawn from (`logprobs_mode="processed_logprobs"`):
  softmax(logits / temperature) over the whole vocabulary, because top-k, top-p and penalties stay off.
- After `shutdown` no process of the engine is left, and EngineCore ends with the replica however that one ends.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import psutil

from planners.costs.memory import CPU_KV_CACHE_BYTES
from tasks.config.settings import machine_directory
from tasks.exchange.trajectories import Segment
from tasks.machine.deaths import Watch, how_it_ended
from tasks.machine.network import LOOPBACK, talking_on
from tasks.machine.private import make_private
from tasks.machine.processes import kill_processes
from tasks.rollout.engine import LOAD_DEADLINE_S, Answer, EngineDied, FinishReason, InFlight, Sampling

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

SHUTDOWN_DEADLINE_S = 20.0
"""Longest time EngineCore may take to end before it is killed."""
CPU_BLOCK_TOKENS = 16
"""Key-value block of a CPU replica, the smallest its kernels take. Only whole blocks of a prompt are shared in a group,
and where answers are short prompts are most of the work: SmolLM2-135M, prompts of 27 and answers of 5 tokens, 64 at
once, makes 42 response tokens per second of one core with blocks of 32 and 64 to 71 with these."""

_TOKENS_AT_ONCE = 16
"""How many tokens of an answer are told together: telling each one would cost the event loop dear."""

_PAUSE_MODES: dict[InFlight, Literal["keep", "abort", "wait"]] = {
    "continue": "keep",
    "restart": "abort",
    "drain": "wait",
}
_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}


class VllmEngine:
    """An `Engine` (tasks/rollout/engine.py) on one device: the CPU cores this process may use, or the first GPU."""

    def __init__(
        self,
        llm: "AsyncLLM",
        core: psutil.Process,
        replica: str,
        loaded: tuple[int, int],
        watch: Watch,
        count_tokens: Callable[[int], object],
    ) -> None:
        self.replica = replica
        self.loaded = loaded
        self._count_tokens = count_tokens
        self._llm = llm
        self._core = core
        # Its parent object, which alone hears its exit status.
        (self._core_process,) = llm.engine_core.resources.engine_manager.processes
        self._watch = watch
        self._in_flight: set[str] = set()
        self._aborted: set[str] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._restarts = 0
        self._closed = False

    @classmethod
    async def start(
        cls,
        model_path: Path,
        *,
        replica: str,
        lineage: int,
        number: int,
        dtype: str,
        max_context: int,
        concurrency: int,
        kind: Literal["cpu", "cuda"],
        cache_dir: Path,
        seed: int,
        tensor_parallel: int = 1,
        count_tokens: Callable[[int], object] = lambda amount: None,
    ) -> "VllmEngine":
        """Start EngineCore on the weights of version (lineage, number) and answer one request to warm it up.

        Blocks the event loop while EngineCore starts (its sockets belong to the loop that makes them): heartbeats need
        a thread. Sets variables of this process's environment, which EngineCore inherits: one engine per process.

        Args:
            model_path: model, generation settings and tokenizer in Hugging Face layout.
            replica: name written into every segment.
            dtype: "float32" or "bfloat16", for weights and key-value cache.
            max_context: longest prompt plus answer, in tokens.
            concurrency: answers computed at once; more wait in the engine.
            kind: "cpu" uses the process's cores with OMP_NUM_THREADS threads, "cuda" its first visible GPU.
            cache_dir: compiled kernels, kept between runs.
            seed: of the draws of requests without a seed of their own; replicas need different ones.
            tensor_parallel: devices that share every layer; plans of today have 1, which is all that EngineCore alone
                can do.
            count_tokens: hears how many tokens were generated while answers are under way, a few dozen at a time.
        """
        _set_environment(cache_dir, kind)
        # vLLM reads its environment while it is imported.
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        watch = Watch()
        arguments = _engine_arguments(model_path, dtype, max_context, concurrency, kind, seed)
        arguments["tensor_parallel_size"] = tensor_parallel
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        (core_pid,) = await llm.collective_rpc("process_id")
        engine = cls(llm, psutil.Process(core_pid), replica, (lineage, number), watch, count_tokens)
        del llm  # A library imported above keeps this frame, and `shutdown` wants to free the object.
        try:
            await engine._llm.update_weight_version(_label(lineage, number))
            await engine.generate("warm-up", [0], Sampling(temperature=1.0, max_new_tokens=2, stop_token_ids=()))
        except BaseException:
            await engine.shutdown()
            raise
        return engine

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> Answer:
        """Answer one prompt; under `restart`, a change of weights starts the answer again unseen by the caller.

        Raises:
            ValueError: the id is in flight already, or the prompt leaves no room within max_context.
            EngineDied: EngineCore is gone.
        """
        if request_id in self._in_flight:
            raise ValueError(f"Request {request_id} is in flight already: ids are unique among running requests.")
        self._in_flight.add(request_id)
        self._is_idle.clear()
        try:
            while True:
                restarts = self._restarts
                async with self._telling_of_its_death():
                    completion, token_ids, logprobs = await self._complete(request_id, prompt_ids, sampling)
                stopped_by_swap = completion.finish_reason == "abort" and self._restarts > restarts
                if not stopped_by_swap or request_id in self._aborted:
                    break
        finally:
            self._in_flight.discard(request_id)
            self._aborted.discard(request_id)
            if not self._in_flight:
                self._is_idle.set()
        finish_reason = str(completion.finish_reason)
        if finish_reason not in _FINISH_REASONS:
            raise RuntimeError(f"vLLM ended request {request_id} of replica {self.replica} with '{finish_reason}'.")
        segments = cut_into_segments(
            token_ids,
            logprobs,
            [(span.version, span.start, span.end) for span in completion.weight_versions or []],
            self.replica,
        )
        return Answer(segments, _FINISH_REASONS[finish_reason])

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests with the tokens they have."""
        self._aborted |= self._in_flight.intersection(request_ids)
        await self._llm.abort(list(request_ids))

    async def load(self, lineage: int, number: int, path: Path, in_flight: InFlight) -> None:
        """Take the weights of `path`, a verified version directory; calls one at a time.

        Under `drain` all answers end first, those that still wait for a place as well: ask for no more meanwhile.
        Answers in flight restart when the lineage changes, whatever `in_flight` says: nothing generated under an
        abandoned lineage is kept. After an error the weights are undefined: shut the engine down.

        Raises:
            TimeoutError: LOAD_DEADLINE_S passed.
            EngineDied: EngineCore is gone.
        """
        if lineage != self.loaded[0]:
            in_flight = "restart"
        if in_flight == "restart":
            self._restarts += 1
        try:
            async with self._telling_of_its_death(), asyncio.timeout(LOAD_DEADLINE_S):
                if in_flight == "drain":
                    # vLLM's own wait is for answers that it computes: those that queue would begin with new weights.
                    await self._is_idle.wait()
                await self._llm.pause_generation(mode=_PAUSE_MODES[in_flight], clear_cache=False)
                await self._llm.collective_rpc("load_version", args=(str(path),))
                await self._llm.reset_prefix_cache(reset_running_requests=True)
                await self._llm.update_weight_version(_label(lineage, number))
                self.loaded = (lineage, number)
                await self._llm.resume_generation()
        except TimeoutError:
            raise TimeoutError(
                f"Replica {self.replica} did not load weight version {_label(lineage, number)} ({in_flight}) within "
                f"{LOAD_DEADLINE_S:.0f} s; {len(self._in_flight)} answers are in flight."
            ) from None

    async def shutdown(self) -> None:
        """Abort what is in flight and end EngineCore, verified gone; safe to repeat.

        Raises:
            RuntimeError: EngineCore outlived SIGKILL.
        """
        if self._closed:
            return
        self._closed = True
        try:
            await self.abort(list(self._in_flight))
            self._llm.shutdown(timeout=SHUTDOWN_DEADLINE_S)
            # Freed here: at the interpreter's exit its finaliser fails, in the last lines of the replica's log.
            del self._llm
        finally:
            kill_processes({self._core})

    @asynccontextmanager
    async def _telling_of_its_death(self) -> AsyncIterator[None]:
        """Say how EngineCore ended where vLLM only knows that it did."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError as error:
            deadline = time.monotonic() + SHUTDOWN_DEADLINE_S
            while (status := self._core_process.exitcode) is None and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            if status is None:
                raise EngineDied("vLLM's EngineCore gave up but has not ended", by_itself=True) from error
            message = f"vLLM's EngineCore {how_it_ended(status)}"
            raise EngineDied(message, by_itself=self._watch.ended_by_itself(status)) from error

    async def _complete(
        self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling
    ) -> tuple["CompletionOutput", list[int], list[float]]:
        """The last output, which says how the answer ended, and all tokens with their log-probabilities."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            # The experiment names the stop tokens; the model's own end token is one only if listed.
            ignore_eos=True,
            seed=sampling.seed,
            logprobs=0,  # of the sampled token alone, so that the flat list has one for each
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            stream_interval=_TOKENS_AT_ONCE,
        )
        prompt = tokens_input(list(prompt_ids))
        token_ids: list[int] = []
        logprobs: list[float] = []
        async for output in self._llm.generate(prompt, parameters, request_id):
            (part,) = output.outputs
            token_ids += part.token_ids
            logprobs += part.logprobs.logprobs
            self._count_tokens(len(part.token_ids))
        return part, token_ids, logprobs


def _set_environment(cache_dir: Path, kind: str) -> None:
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_HOST_IP": LOOPBACK,
        **talking_on(LOOPBACK),
        # Sockets, whose paths hold 107 characters: TMPDIR may be longer, and is open to others.
        "VLLM_RPC_BASE_PATH": str(make_private(machine_directory(), "HEXFLOW_LOCAL")),
        "VLLM_CACHE_ROOT": str(cache_dir / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir / "inductor"),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if kind == "cpu":
        # EngineCore inherits this process's cores and OMP_NUM_THREADS; vLLM would choose cores of its own.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # All that is left to compile is one comparison in the sampler: it would take the first request a minute.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    os.environ.update(variables)


def _engine_arguments(
    model_path: Path, dtype: str, max_context: int, concurrency: int, kind: Literal["cpu", "cuda"], seed: int
) -> dict[str, Any]:
    """vLLM's `AsyncEngineArgs`; the names are those of `VllmEngine.start`."""
    arguments: dict[str, Any] = {
        "model": str(model_path),
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "max_model_len": max_context,
        "max_num_seqs": concurrency,
        "seed": seed,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "distributed_executor_backend": "tasks.rollout.vllm.extension.ReplicaExecutor",
        "worker_extension_cls": "tasks.rollout.vllm.extension.ReplicaWorker",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if kind == "cpu":
        arguments |= {
            "enforce_eager": True,
            "block_size": CPU_BLOCK_TOKENS,
            "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES,
        }
    return arguments


def _label(lineage: int, number: int) -> str:
    return f"{lineage}.{number}"


def cut_into_segments(
    token_ids: Sequence[int], logprobs: Sequence[float], spans: Sequence[tuple[str, int, int]], replica: str
) -> tuple[Segment, ...]:
    """The tokens of an answer, cut where the weight version changes.

    Args:
        token_ids: the answer.
        logprobs: one per token.
        spans: (version label, first token, one past the last token), as EngineCore stamped them.
        replica: name written into every segment.

    Raises:
        RuntimeError: the spans do not cover the tokens one after the other.
    """
    ends = [end for _, _, end in spans]
    if [start for _, start, _ in spans] + [len(token_ids)] != [0, *ends]:
        raise RuntimeError(f"vLLM's version spans {list(spans)} do not cover the {len(token_ids)} tokens of an answer.")
    ids, values = np.array(token_ids, np.int32), np.array(logprobs, np.float32)
    return tuple(
        Segment(ids[start:end], values[start:end], int(label.partition(".")[2]), replica) for label, start, end in spans
    )
