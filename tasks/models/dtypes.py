"""The names of number formats as torch has them."""

from typing import TYPE_CHECKING

from planners.workload.model import Dtype

if TYPE_CHECKING:
    import torch


def torch_dtype(name: Dtype) -> "torch.dtype":
    """torch's format of this name. Loads torch."""
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
