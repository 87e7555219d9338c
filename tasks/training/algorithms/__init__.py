"""The algorithms that an experiment can choose, a file each: what a group of answers teaches, and how tokens learn it.

An algorithm is its section of the experiment, with the methods of `base.AlgorithmSection`: the advantages of the
answers, which groups it keeps, and the losses of tokens with the measures that go with them. To add one, write a file
like `cispo.py` here and name its class in the union below; nothing else knows the algorithms apart.

The command reads experiments without loading torch, so nothing here imports it: losses use the methods of tensors.
"""

from typing import Annotated

from pydantic import Field

from planners.sections import as_choices
from tasks.training.algorithms.cispo import Cispo
from tasks.training.algorithms.decoupled_ppo import DecoupledPpo

__all__ = ["Algorithm", "Cispo", "DecoupledPpo"]

Algorithm = Annotated[DecoupledPpo | Cispo, Field(discriminator="kind", json_schema_extra=as_choices)]
