"""Memory by part of every device of a plan.

States as DeepSpeed keeps them, for P parameters over d data-parallel ranks. The tests compare its own estimators,
`estimate_zero2_model_states_mem_needs` and `estimate_zero3_…`, and count the bytes of live engines:

                 bfloat16                                    float32
    weights      2P (stage 3: 2P/d + the largest layer)      4P (stage 3: 4P/d + the largest layer)
    gradients    2P (2: 2P/d; 3: the largest layer's)        4P (2: 4P/d; 3: the largest layer's)
    optimiser    16P (stages 1 to 3: 16P/d)                  8P (stages 1 and 2: 12P/d; stage 3: 16P/d)

The optimiser's are two moments, 8P; float32 master weights, 4P, which float32 without ZeRO does not need; and the
float32 gradients that an update reads, 4P, where they are not the ones above. Stage 3 also keeps its share of gradients
through an update, 2P/d or 4P/d, when activations and gathered layers are gone. Where the algorithm refers to the model
that the run began with, every rank holds that whole beside the weights, in every stage: 2P or 4P.

Activations, for a micro-batch of T tokens:

    layers     where micro-batches may be large, layers are recomputed: the input of each; else all that each keeps
    one layer  its working set, twice what it keeps
    logits     16 bytes for each of a chunk of tokens: float32 logits, log-probabilities, their product and gradient
    mask       T² elements: what every query adds to its score of every key, once for all layers and heads

Scores of queries and keys are not kept: of PyTorch's CUDA kernels that take a mask, only its last resort holds them.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from planners.hardware.catalogue import DeviceType
from planners.workload.demand import Demand
from planners.workload.model import Model

USABLE_SHARE = 0.90  # of device memory: vLLM's default gpu_memory_utilization, and as much for training
RECOMPUTE_TOKENS = 4096  # micro-batches that may be larger have their layers computed again for the gradient
LEAST_MICRO_BATCH_TOKENS, MOST_MICRO_BATCH_TOKENS = 1024, 16384  # that are chosen where nobody wishes for anything
ACTIVATION_SHARE = 0.25  # of a GPU's memory; the rest is for states, which depend on the layout
LOGIT_CHUNK_TOKENS = 1024
LOGIT_BYTES = 16
PREFILL_CHUNK_TOKENS = 8192  # vLLM's default max_num_batched_tokens
WORKSPACE_BYTES = 1_500_000_000  # CUDA context, NCCL and cuBLAS buffers (assumed)
CPU_KV_CACHE_BYTES = 1 << 30  # what a replica on cores asks vLLM for; answers that do not fit wait for their turn
GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, by part, and how many there are."""

    weights: float
    gradients: float
    optimiser: float
    activations: float
    kv: float
    workspace: float
    available: float

    @property
    def total(self) -> float:
        """All parts."""
        return self.weights + self.gradients + self.optimiser + self.activations + self.kv + self.workspace

    @property
    def fits(self) -> bool:
        """Whether the parts fit into what may be used."""
        return self.total <= self.available


@dataclass(frozen=True)
class TrainingStates:
    """Bytes that one training rank holds, whatever the micro-batch."""

    weights: float
    gradients: float
    optimiser: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.optimiser


def training_states(
    model: Model,
    *,
    data_ranks: int,
    zero: int,
    tensor_ranks: int = 1,
    layer_share: float = 1.0,
    reference: bool = False,
) -> TrainingStates:
    """What one rank holds of a model; the table above.

    Arguments are those of `training_memory`; `reference`: it holds the model that the run began with as well.
    """
    element = model.element_bytes
    parameters = model.parameters * layer_share / tensor_ranks
    shared = parameters / data_ranks
    gathered = max(model.layer_parameters, model.vocabulary * model.hidden) / tensor_ranks
    if zero == 0:
        optimiser = (16 if element == 2 else 8) * parameters
    else:
        optimiser = (16 if element == 2 or zero == 3 else 12) * shared
    trained = shared + gathered if zero == 3 else parameters
    return TrainingStates(
        weights=element * (trained + (parameters if reference else 0.0)),
        gradients=element * (gathered if zero == 3 else shared if zero == 2 else parameters),
        optimiser=optimiser,
    )


def training_memory(
    model: Model,
    demand: Demand,
    device: DeviceType,
    *,
    data_ranks: int,
    tensor_ranks: int,
    layer_share: float,
    zero: int,
    micro_batches_in_flight: int = 1,
) -> Memory:
    """One training rank.

    Args:
        data_ranks: d, ranks that share one copy of the states under ZeRO.
        tensor_ranks: ranks that split every layer.
        layer_share: share of the layers in this pipeline stage; 1 without a pipeline.
        zero: DeepSpeed ZeRO stage.
        micro_batches_in_flight: micro-batches whose activations a pipeline stage holds (1F1B).
    """
    split = {"data_ranks": data_ranks, "tensor_ranks": tensor_ranks}
    states = training_states(model, zero=zero, layer_share=layer_share, reference=demand.reference, **split)
    layers = model.layers * layer_share * micro_batches_in_flight
    return Memory(
        weights=states.weights,
        gradients=states.gradients,
        optimiser=states.optimiser,
        activations=activation_bytes(model, demand, layers=layers, **split),
        kv=0.0,
        workspace=workspace_bytes(device),
        available=device.memory_bytes * USABLE_SHARE,
    )


def activation_bytes(model: Model, demand: Demand, *, data_ranks: int, tensor_ranks: int, layers: float) -> float:
    """Activations of one rank that holds those of so many layers, times micro-batches in flight."""
    tokens = micro_batch_tokens(demand, data_ranks)
    width = (
        4 * model.hidden + (3 * model.intermediate + 2 * (model.heads + model.kv_heads) * model.head_dim) / tensor_ranks
    )
    recomputed = recomputes(demand.micro_batch_tokens, demand.longest_tokens)
    kept = tokens * (model.hidden if recomputed else width) * layers
    working_set = 2 * tokens * width
    logits = min(tokens, LOGIT_CHUNK_TOKENS) * model.vocabulary / tensor_ranks * LOGIT_BYTES
    return (kept + working_set + tokens**2) * model.element_bytes + logits


def fitting_micro_batch_tokens(model: Model, demand: Demand, gpu_memory_bytes: Collection[int]) -> int:
    """What the trainer packs answers into, where nobody wishes for anything.

    The largest power of two up to MOST_MICRO_BATCH_TOKENS with which the activations of a rank take no more than
    ACTIVATION_SHARE of the smallest GPU that may train; none above RECOMPUTE_TOKENS only to have layers computed twice.
    Cores get LEAST_MICRO_BATCH_TOKENS: they compute no faster for larger ones, which only take memory.
    """
    tokens = MOST_MICRO_BATCH_TOKENS if demand.longest_tokens > RECOMPUTE_TOKENS else RECOMPUTE_TOKENS
    room = ACTIVATION_SHARE * min(gpu_memory_bytes, default=0)
    while tokens > LEAST_MICRO_BATCH_TOKENS:
        asked = replace(demand, micro_batch_tokens=tokens)
        if activation_bytes(model, asked, data_ranks=1, tensor_ranks=1, layers=model.layers) <= room:
            return tokens
        tokens //= 2
    return LEAST_MICRO_BATCH_TOKENS


def recomputes(micro_batch_tokens: int, longest_tokens: int) -> bool:
    """Whether layers are computed again for the gradient, so that a micro-batch's activations are small.

    One answer for a whole run: ranks gather weights together, so all must recompute or none.

    Args:
        micro_batch_tokens: the budget.
        longest_tokens: longest prompt plus answer, which is a micro-batch of its own where it is above the budget.
    """
    return max(micro_batch_tokens, longest_tokens) > RECOMPUTE_TOKENS


def micro_batch_tokens(demand: Demand, data_ranks: int) -> float:
    """Tokens of the largest micro-batch: the budget, at least one longest sequence, at most a rank's whole share."""
    longest = min(float(demand.longest_tokens), demand.prompt.longest + demand.response.longest)
    prompts = math.ceil(demand.minibatch_groups[0] / data_ranks) * demand.prompt.mean
    share = prompts + demand.largest_minibatch_tokens / data_ranks
    return max(longest, min(float(demand.micro_batch_tokens), share))


def serving_memory(model: Model, device: DeviceType, tensor_ranks: int, cached_tokens: float | None = None) -> Memory:
    """One device of a rollout replica; the KV cache takes all that is left, or what `cached_tokens` need.

    A process on cores is one such device, with a cache of CPU_KV_CACHE_BYTES.
    """
    available = device.memory_bytes * USABLE_SHARE
    weights = model.weight_bytes / tensor_ranks
    width = 2 * model.hidden + (2 * model.intermediate + 2 * model.heads * model.head_dim) / tensor_ranks
    activations = PREFILL_CHUNK_TOKENS * width * model.element_bytes
    workspace = workspace_bytes(device)
    left = max(0.0, available - weights - activations - workspace)
    if device.kind == "cpu":
        left = min(left, float(CPU_KV_CACHE_BYTES))
    kv = left if cached_tokens is None else cached_tokens * kv_bytes_per_token(model, tensor_ranks)
    return Memory(weights, 0.0, 0.0, activations, kv, workspace, available)


def kv_bytes_per_token(model: Model, tensor_ranks: int) -> float:
    """Cache bytes of one token on one device; heads are copied once there are more ranks than heads."""
    return model.kv_bytes_per_token / min(tensor_ranks, model.kv_heads)


def kv_capacity_tokens(model: Model, device: DeviceType, tensor_ranks: int) -> float:
    """Tokens that the cache of a replica holds."""
    return serving_memory(model, device, tensor_ranks).kv / kv_bytes_per_token(model, tensor_ranks)


def workspace_bytes(device: DeviceType) -> float:
    """Buffers of the libraries: a twentieth of a small device, 1.5 GB of a large one."""
    return min(WORKSPACE_BYTES, 0.05 * device.memory_bytes)
