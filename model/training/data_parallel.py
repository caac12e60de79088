"""Several processes that train one model together, as `torchrun` starts them; or one that is alone.

Each has the whole model and reads its part of every batch. Gradients are added up, so that together they do what one
process would with the whole batch.
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
    """This process among the others: number `rank` of `world`, which computes on `device`."""

    rank: int
    world: int
    device: torch.device

    @classmethod
    @contextlib.contextmanager
    def join(cls) -> Iterator["Ranks"]:
        """Meet the other processes that `torchrun` started, if it did: with NCCL on GPUs, with gloo on CPUs.

        Raises ConnectionError where another one is gone while this one waits for it.
        """
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
            with contextlib.suppress(RuntimeError):  # whoever is gone by now has said why
                dist.barrier()  # nobody hangs up on one that is not done
        except RuntimeError as error:
            if not _is_lost(error):
                raise
            raise ConnectionError(
                "another process of this run is gone: the same command goes on where it last saved"
            ) from error
        finally:
            dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        """Is it the one that writes and tells?"""
        return self.rank == 0

    @contextlib.contextmanager
    def leader_first(self) -> Iterator[None]:
        """What the first process prepares, the others find done."""
        if not self.leads:
            dist.barrier()
        yield
        if self.leads and self.world > 1:
            dist.barrier()

    def agreed(self, value: Any) -> Any:
        """The first process' value, for all."""
        if self.world == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def total(self, values: dict[str, float]) -> dict[str, float]:
        """The sums over all processes, by name."""
        if self.world == 1:
            return values
        sums = torch.tensor([*values.values()], dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return dict(zip(values, sums.tolist(), strict=True))

    def add_up(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients become their sums over all processes, which have them for the same parameters."""
        if self.world == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        together = nn.utils.parameters_to_vector(gradients)
        dist.all_reduce(together)
        nn.utils.vector_to_parameters(together, gradients)


def _is_lost(error: RuntimeError) -> bool:
    """Does an error of the backend say that another process has ended?"""
    said = str(error).lower()
    return isinstance(error, dist.DistError) or "connection" in said or "gloo" in said
