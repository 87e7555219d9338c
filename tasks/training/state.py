"""The trainer's state by parameter name: as DeepSpeed holds it on each rank, and as files that every other cut reads.

A parameter's state is its float32 master, Adam's two moments, and its weights where they are not float32 themselves.
ZeRO cuts each, flattened, among the ranks; where, depends on its stage and their number. A file has the pieces of one
rank, and says where in its parameter each begins. Whoever reads asks for the elements that it holds itself, so no rank
needs more memory than for its share and one parameter. What DeepSpeed 0.19 calls its parts is known here alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state
from safetensors import safe_open
from torch import Tensor, nn

from planners.errors import UserError
from tasks.exchange.files import sync, write_json
from tasks.training.export import save_tensors
from tasks.training.ranks import Ranks

_MASTER, _WEIGHT = "master", "weight"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALARS = ("lr", "betas", "eps", "weight_decay")


@dataclass(frozen=True)
class Piece:
    """Elements of a flattened parameter from `start` on, by kind; all kinds have the same."""

    name: str
    start: int
    tensors: dict[str, Tensor]

    @property
    def size(self) -> int:
        """Elements of each kind."""
        return self.tensors[_MASTER].numel()

    def share(self, rank: int, ranks: int) -> "Piece":
        """One of `ranks` even parts, for a piece that every rank has."""
        first, last = (self.size * k // ranks for k in (rank, rank + 1))
        return Piece(self.name, self.start + first, {kind: t[first:last] for kind, t in self.tensors.items()})


@dataclass(frozen=True)
class StatePart:
    """What one rank adds to a checkpoint. Its tensors are the live ones: write them before they change, or copy them.

    Attributes:
        pieces: disjoint from those of all other ranks, and with them everything.
        shapes: of every parameter, by name.
        optimizer: AdamW's scalars; the same on every rank.
        random: states of this rank's random generators.
    """

    pieces: list[Piece]
    shapes: dict[str, list[int]]
    optimizer: dict[str, Any]
    random: dict[str, Any]

    def write(self, directory: Path, rank: int) -> None:
        """Write this part as the files of `rank`, and bring them to the disk.

        Raises:
            OSError: the disk refused, for example because it is full.
        """
        tensors = {f"{piece.name}|{kind}": t for piece in self.pieces for kind, t in piece.tensors.items()}
        starts = {piece.name: str(piece.start) for piece in self.pieces}
        path = _part_path(directory, rank)
        save_tensors(path, tensors, starts)
        sync(path)
        write_json(random_path(directory, rank), self.random)


class HeldState:
    """A model and its optimiser as DeepSpeed holds them on this rank."""

    def __init__(self, model: nn.Module, optimizer: Any, adamw: torch.optim.AdamW, ranks: Ranks) -> None:
        """`optimizer` is what DeepSpeed made of `adamw`; parameters are called by their names in `model`."""
        self._parameters: dict[str, Any] = dict(model.named_parameters())
        self._optimizer = optimizer
        self._adamw = adamw
        self._ranks = ranks
        first = next(iter(self._parameters.values()))
        self._cuts_weights = hasattr(first, "ds_id")  # ZeRO 3
        self._cuts_masters = hasattr(first, "_hp_mapping")  # ZeRO 1 and 2

    def take(self, random: dict[str, Any]) -> StatePart:
        """This rank's part of a checkpoint, with the states of its random generators."""
        pieces = list(self._pieces())
        if not self._cuts_weights and not self._cuts_masters:
            pieces = [piece.share(self._ranks.rank, self._ranks.size) for piece in pieces]
        group = self._adamw.param_groups[0]
        scalars = {"updates": self._updates(), **{name: group[name] for name in _SCALARS}}
        return StatePart([piece for piece in pieces if piece.size], self.shapes(), scalars, random)

    @torch.no_grad()
    def put(self, directory: Path, optimizer: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
        """Continue from the files in `directory`, whichever ranks wrote them; every rank must call it.

        Args:
            directory: of a checkpoint that is whole.
            optimizer: AdamW's scalars.
            shapes: of the parameters in the files, by name.

        Raises:
            UserError: the checkpoint is of another model.
        """
        if {name: list(shape) for name, shape in shapes.items()} != self.shapes():
            raise UserError(
                f"The checkpoint {directory} is of another model than the run's: model.source of the run's experiment "
                "has changed since, so start a new run."
            )
        if self._cuts_weights:
            self._optimizer.checkpoint_event_prologue()
        with _saved_tensors(directory) as saved:
            for piece in self._pieces():
                for kind, tensor in piece.tensors.items():
                    tensor.copy_(saved.read(piece.name, kind, piece.start, piece.size))
                if self._cuts_weights and _WEIGHT not in piece.tensors:
                    _cut_weights(self._parameters[piece.name], piece.size).copy_(piece.tensors[_MASTER])
            if self._cuts_masters:  # of weights every rank has all
                for name, parameter in self._parameters.items():
                    kind = _MASTER if parameter.dtype == torch.float32 else _WEIGHT
                    parameter.data.view(-1).copy_(saved.read(name, kind, 0, parameter.numel()))
        if self._cuts_weights:
            self._optimizer.checkpoint_event_epilogue()
        for updated in self._updated():
            self._moments(updated)["step"].fill_(optimizer["updates"])
        for group in self._adamw.param_groups:
            group.update({**{name: optimizer[name] for name in _SCALARS}, "betas": tuple(optimizer["betas"])})

    def shapes(self) -> dict[str, list[int]]:
        """Of every parameter, by name."""
        return {name: list(p.ds_shape if self._cuts_weights else p.shape) for name, p in self._parameters.items()}

    def _pieces(self) -> Iterator[Piece]:
        """What this rank holds of master and moments, and as much of the weights; views, so they can be written to."""
        updated = self._updated()
        moments = [self._moments(tensor) for tensor in updated]
        for number, (name, parameter) in enumerate(self._parameters.items()):
            if self._cuts_weights:
                piece = self._cut_with_weights(name, parameter)
            elif self._cuts_masters:
                piece = self._cut(name, parameter)
            else:
                piece = self._whole(name, parameter, updated[number], moments[number])
            if piece is not None:
                yield piece

    def _whole(self, name: str, parameter: Any, master: Tensor, moments: Mapping[str, Tensor]) -> Piece:
        """No ZeRO: every rank has everything; a float32 parameter is its own master."""
        tensors = self._kinds(master.data, moments)
        if parameter.dtype != torch.float32:
            tensors[_WEIGHT] = parameter.data.view(-1)
        return Piece(name, 0, tensors)

    def _cut_with_weights(self, name: str, parameter: Any) -> Piece | None:
        """ZeRO 3: even parts of every parameter, in the order of the ranks, the last ones filled up."""
        master = safe_get_local_fp32_param(parameter)
        start = self._ranks.rank * master.numel()
        size = min(master.numel(), parameter.ds_numel - start)
        if size <= 0:
            return None
        tensors = {_MASTER: master[:size]}
        tensors |= {key: safe_get_local_optimizer_state(parameter, key)[:size] for key in _MOMENTS}
        if parameter.ds_tensor.dtype != torch.float32:
            tensors[_WEIGHT] = _cut_weights(parameter, size)
        return Piece(name, start, tensors)

    def _cut(self, name: str, parameter: Any) -> Piece | None:
        """ZeRO 1 and 2: even parts of all parameters in a row."""
        if parameter._hp_mapping is None:
            return None
        here, there = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
        (flat,) = self._updated()
        tensors = self._kinds(flat.data, self._moments(flat))
        tensors = {kind: tensor.narrow(0, there.start, there.numel) for kind, tensor in tensors.items()}
        if parameter.dtype != torch.float32:
            tensors[_WEIGHT] = parameter.data.view(-1).narrow(0, here.start, here.numel)
        return Piece(name, here.start, tensors)

    def _kinds(self, master: Tensor, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {_MASTER: master.view(-1), **{key: moments[key].view(-1) for key in _MOMENTS}}

    def _updated(self) -> list[Tensor]:
        """The tensors that AdamW updates on this rank."""
        if self._cuts_weights:  # which it is shown one after the other, for its steps only
            return list(self._optimizer.fp32_partitioned_groups_flat)
        return [tensor for group in self._adamw.param_groups for tensor in group["params"]]

    def _moments(self, updated: Tensor) -> dict[str, Tensor]:
        """AdamW's state of a tensor; before the first update, as AdamW would begin it."""
        state: dict[str, Tensor] = self._adamw.state[updated]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=updated.device)
            state |= {key: torch.zeros_like(updated) for key in _MOMENTS}
        return state

    def _updates(self) -> float:
        """Updates behind this state, as AdamW counts them to correct its bias."""
        return max(float(self._moments(updated)["step"]) for updated in self._updated())


def _cut_weights(parameter: Any, size: int) -> Tensor:
    """ZeRO 3: this rank's elements [size] of the weights."""
    elements: Tensor = parameter.ds_tensor.data.view(-1)[:size]
    return elements


class _SavedTensors:
    """The tensors of a checkpoint, of which any slice can be read, whichever rank wrote it."""

    def __init__(self, files: Sequence[Any]) -> None:
        self._parts: dict[str, list[tuple[int, Any]]] = {}
        for file in files:
            for name, start in (file.metadata() or {}).items():
                self._parts.setdefault(name, []).append((int(start), file))

    def read(self, name: str, kind: str, start: int, size: int) -> Tensor:
        """Elements [size] of a flattened parameter from `start` on."""
        found = []
        for begin, file in sorted(self._parts[name], key=lambda part: part[0]):
            part = file.get_slice(f"{name}|{kind}")
            first, last = max(start - begin, 0), min(start + size - begin, part.get_shape()[0])
            if first < last:
                found.append(part[first:last])
        elements: Tensor = found[0] if len(found) == 1 else torch.cat(found)
        return elements


@contextmanager
def _saved_tensors(directory: Path) -> Iterator[_SavedTensors]:
    with ExitStack() as stack:
        paths = sorted(directory.glob("part-*.safetensors"))
        yield _SavedTensors([stack.enter_context(safe_open(path, framework="pt")) for path in paths])


def random_path(directory: Path, rank: int) -> Path:
    """The states of a rank's random generators, JSON."""
    return directory / f"random-{rank:05d}.json"


def _part_path(directory: Path, rank: int) -> Path:
    return directory / f"part-{rank:05d}.safetensors"
