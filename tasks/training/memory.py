"""What training a model takes, and the check before it is loaded: does it fit?"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from safetensors import safe_open

from planners.errors import UserError
from tasks.machine.memory import memory_bytes

if TYPE_CHECKING:  # commands ask for sizes without loading torch
    from tasks.training.ranks import Ranks

_GIB = 1024**3


def training_memory_bytes(parameters: int, zero_stage: int, ranks: int) -> float:
    """Bytes one rank needs for weights, gradients and Adam: 16 per parameter, less what ZeRO shares among ranks.

    In float32: 4 for the weight, 4 for the gradient, 8 for Adam's two moments. In bfloat16: 2, 2, and 12 for the
    float32 copy and the moments.
    """
    weights = 4 / (ranks if zero_stage >= 3 else 1)
    gradients = 4 / (ranks if zero_stage >= 2 else 1)
    optimiser = 8 / (ranks if zero_stage >= 1 else 1)
    return parameters * (weights + gradients + optimiser)


def checkpoint_bytes(parameters: int, dtype: Literal["float32", "bfloat16"]) -> int:
    """Size of a checkpoint: the weights and Adam's two moments, with a float32 copy of bfloat16 weights."""
    return parameters * (12 if dtype == "float32" else 14)


def count_parameters(model_path: Path) -> int:
    """Parameters of a model on disk, from the headers of its safetensors files."""
    total = 0
    for path in sorted(model_path.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                total += math.prod(file.get_slice(name).get_shape())
    return total


def check_memory(model_path: Path, zero_stage: int, ranks: "Ranks") -> None:
    """Refuse a model whose training state does not fit in what is free for this rank.

    Raises:
        UserError: it does not fit; activations come on top.
    """
    needed = training_memory_bytes(count_parameters(model_path), zero_stage, ranks.size)
    if ranks.device.type == "cuda":
        import torch

        free: float = torch.cuda.mem_get_info(ranks.device)[0]
    else:
        free = memory_bytes()[1] / ranks.size
    if needed > free:
        raise UserError(
            f"Training {model_path} needs {needed / _GIB:.1f} GiB for weights, gradients and Adam on each rank, "
            f"but {free / _GIB:.1f} GiB are free on {ranks.device}: free memory, train on more devices with "
            "algorithm.zero_stage 3, or choose a smaller model."
        )
