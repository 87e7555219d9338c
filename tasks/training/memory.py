"""What training a model takes on this machine, and the check before it is loaded: does it fit?"""

from pathlib import Path
from typing import TYPE_CHECKING

from planners.costs.memory import training_states
from planners.errors import UserError
from planners.workload.model import ELEMENT_BYTES, Dtype, read_model
from tasks.machine.memory import gib, memory_bytes

if TYPE_CHECKING:  # commands ask for sizes without loading torch
    from tasks.training.ranks import Ranks


def checkpoint_bytes(parameters: int, dtype: Dtype) -> int:
    """Size of a checkpoint: the weights and Adam's two moments, with a float32 copy of bfloat16 weights."""
    return parameters * (12 if dtype == "float32" else 14)


def check_memory(
    model_path: Path, dtype: Dtype, zero_stage: int, ranks: "Ranks", *, with_reference: bool = False
) -> None:
    """Refuse a model whose training state does not fit in what is free for this rank.

    `with_reference`: each rank holds the model that the run began with, too.

    Raises:
        UserError: it does not fit; activations come on top.
    """
    model = read_model(model_path, ELEMENT_BYTES[dtype])
    needed = training_states(model, data_ranks=ranks.size, zero=zero_stage, reference=with_reference).total
    if ranks.device.type == "cuda":
        import torch

        free: float = torch.cuda.mem_get_info(ranks.device)[0]
    else:
        free = memory_bytes()[1] / ranks.size
    if needed > free:
        raise UserError(
            f"Training {model_path} needs {gib(needed)} for weights, gradients and Adam on each rank, "
            f"but {gib(free)} are free on {ranks.device}: free memory, train on more devices with "
            "planner.zero_stage 3, or choose a smaller model."
        )
