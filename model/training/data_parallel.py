"""Data-parallel training in the processes that `torchrun` starts, or in a single process.

Each process has the whole model and reads its part of every batch. Gradients are summed over the processes, so the
result is that of one process with the whole batch.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from model.training import optim


@dataclass(frozen=True)
class Ranks:
    """This process: number `rank` of `world` processes, which computes on `device`."""

    rank: int
    world: int
    device: torch.device

    @classmethod
    @contextlib.contextmanager
    def join(cls) -> Iterator["Ranks"]:
        """Join `torchrun`'s process group (NCCL or gloo), if any. Raises ConnectionError if another process ends."""
        device = optim.pick_device()
        if not os.environ.get("RANK"):
            yield cls(0, 1, device)
            return
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        try:
            yield cls(dist.get_rank(), dist.get_world_size(), device)
            with contextlib.suppress(RuntimeError):  # a failed process reports its own error
                dist.barrier()  # a process ends only when all are done
        except RuntimeError as error:
            if not _is_lost(error):
                raise
            raise ConnectionError(
                "another process of this run is gone: the same command goes on where it last saved"
            ) from error
        finally:
            dist.destroy_process_group()

    @property
    def is_leader(self) -> bool:
        """Whether this process writes files and logs."""
        return self.rank == 0

    @contextlib.contextmanager
    def leader_first(self) -> Iterator[None]:
        """Run the block in the first process, then in the others."""
        if not self.is_leader:
            dist.barrier()
        yield
        if self.is_leader and self.world > 1:
            dist.barrier()

    def broadcast(self, value: Any) -> Any:
        """Return the first process' value in all processes."""
        if self.world == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def total(self, values: dict[str, float]) -> dict[str, float]:
        """Return the sums over all processes, by name."""
        if self.world == 1:
            return values
        sums = torch.tensor([*values.values()], dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return dict(zip(values, sums.tolist(), strict=True))

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace gradients by their sums over all processes, which must have them for the same parameters."""
        if self.world == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = nn.utils.parameters_to_vector(gradients)
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat, gradients)


def _is_lost(error: RuntimeError) -> bool:
    """Return whether an error of the backend means that another process has ended."""
    message = str(error).lower()
    return isinstance(error, dist.DistError) or "connection" in message or "gloo" in message
