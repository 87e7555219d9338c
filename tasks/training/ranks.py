"""The trainer's processes: one per device, stepping together."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from tasks.training.meeting import PLACE, SOCKET


@dataclass(frozen=True)
class Ranks:
    """This process's place among the trainer's processes.

    Attributes:
        rank: number of this process, 0 leads.
        size: number of processes.
        device: where this process computes.
        control: a CPU group for small messages; waiting in it costs no GPU.
    """

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone speaks to the ledger."""
        return self.rank == 0

    def share(self, numbers: list[int]) -> list[int]:
        """Rank 0's numbers on every rank; the other ranks pass as many of any value."""
        message = torch.tensor(numbers, dtype=torch.int64)
        dist.broadcast(message, src=0, group=self.control)
        return [int(number) for number in message]

    def share_text(self, text: str) -> str:
        """Rank 0's text on every rank."""
        encoded = list(text.encode())
        (length,) = self.share([len(encoded)])
        padded = encoded if self.leads else [0] * length
        return bytes(self.share(padded)).decode()

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.control)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """[ranks, n] the CPU tensors [n] of all ranks, on every rank."""
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(gathered, values, group=self.control)
        return torch.stack(gathered)


def join_ranks(rendezvous_s: float, wait_s: float) -> Ranks:
    """Meet the other ranks where `tasks.training.meeting` says, as RANK of WORLD_SIZE and with device LOCAL_RANK.

    Args:
        rendezvous_s: longest wait for the ranks to meet, and of any collective while training.
        wait_s: longest wait in the control group, where ranks wait for rank 0 to find data.

    Raises:
        torch.distributed.DistError: a rank did not come, or went away.
    """
    # The shared-memory collectives are compiled at the first start, which takes minutes and gains nothing.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    cuda, timeout = torch.cuda.is_available(), timedelta(seconds=rendezvous_s)
    if cuda:
        torch.cuda.set_device(local_rank)
    backend = "nccl" if cuda else "gloo"
    store = _open_store(rank, size, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    deepspeed.init_distributed(dist_backend=backend, timeout=timeout, verbose=False)  # takes the group that is there
    return Ranks(
        rank=rank,
        size=size,
        device=torch.device("cuda", local_rank) if cuda else torch.device("cpu"),
        control=dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s)),
    )


def _open_store(rank: int, size: int, timeout: timedelta) -> Any:
    """What the ranks tell each other their addresses by; rank 0 of several machines listens where it was told alone."""
    place = os.environ[PLACE]
    if place.startswith("file://"):
        here = dist.FileStore(place.removeprefix("file://"), size)  # type: ignore[attr-defined]
        here.set_timeout(timeout)
        return here
    host, _, port = place.removeprefix("tcp://").rpartition(":")
    return dist.TCPStore(  # type: ignore[attr-defined]
        host.strip("[]"),
        int(port),
        size,
        is_master=rank == 0,
        timeout=timeout,
        master_listen_fd=int(os.environ[SOCKET]) if rank == 0 else None,
    )
