"""The interface between an engine and the device that computes its entries.

`service.engines.local_device` computes in this process, `service.processes.remote_device` sends the entries to another
process.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from service.core.cpu import CPU
from service.core.manifest import Manifest, Memory
from service.scheduling.entries import Entry, EntryOutcome, OnOutcome
from service.scheduling.load import Load


@dataclass(frozen=True, slots=True)
class RunsOn:
    """The graph, provider and runtime of a bundle. provider_note: why an available GPU is not used, or None"""

    precision: str
    layout: str
    provider: str
    provider_note: str | None
    runtime: str

    def stated_memory(self, manifest: Manifest) -> Memory | None:
        """Return the memory that the manifest states for the graph that runs; None on a GPU, or if it states none."""
        if self.provider != CPU.provider:
            return None
        graphs = (
            g for g in manifest.graphs if (g.precision, g.layout) == (self.precision, self.layout)
        )
        return next((graph.memory for graph in graphs), None)

    @property
    def facts(self) -> dict[str, str]:
        return {"precision": self.precision, "provider": self.provider, "runtime": self.runtime}


class Device(Protocol):
    """The device that computes entries, in this process or in another."""

    @property
    def max_queue_tokens(self) -> int:
        """Tokens that may wait, including the tokens of a new request."""

    def submit(
        self, entries: Sequence[Entry], on_outcome: OnOutcome | None = None
    ) -> Awaitable[list[EntryOutcome]]:
        """Compute one request, as `Batcher.submit` does. Raises ReplicaLost when the device is gone."""

    def load(self) -> Load:
        """Return the backlog, the drain rates, and the problem that keeps the device from accepting requests."""

    def loads(self) -> Mapping[str, Load]:
        """Return the load of each single device by its name."""

    def alive(self) -> bool:
        """Return whether the device works; False when only a restart of this process can help."""
