"""The trainer's processes: one per device, stepping together."""

import os
from dataclasses import dataclass
from datetime import timedelta

import deepspeed
import torch
import torch.distributed as dist


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
    """Meet the other ranks through RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    Args:
        rendezvous_s: longest wait for the ranks to meet, and of any collective while training.
        wait_s: longest wait in the control group, where ranks wait for rank 0 to find data.

    Raises:
        torch.distributed.DistError: a rank did not come, or went away.
    """
    # The shared-memory collectives are compiled at the first start, which takes minutes and gains nothing.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    local_rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank)
    deepspeed.init_distributed(
        dist_backend="nccl" if cuda else "gloo", timeout=timedelta(seconds=rendezvous_s), verbose=False
    )
    return Ranks(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        device=torch.device("cuda", local_rank) if cuda else torch.device("cpu"),
        control=dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s)),
    )
