"""Several devices behind the interface of one."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from service.core.bundle import BundleTexts
from service.engines.model_state import Models
from service.processes.remote_device import RemoteDevice
from service.scheduling.entries import Entry, EntryOutcome, OnOutcome, PendingRequest
from service.scheduling.load import Backlog, Flow, Load, RemainingWork, total_load

RETRY_S = 0.1  # until lost requests look for a device again


class NoModels:
    """A subscriber of a device whose table is empty, because the first device's process has the models of all."""

    async def adopt(self, models: Models, texts: Mapping[str, BundleTexts]) -> None:
        """Do nothing."""

    async def left(self, model_id: str) -> None:
        """Do nothing."""


@dataclass(eq=False)
class Member:
    """A device, and the requests that this process has sent to it and that are not answered."""

    device: RemoteDevice
    sent: dict[Flow, Backlog] = field(default_factory=dict)

    def rank(self, flow: Flow, tokens: int) -> tuple[bool, bool, float]:
        """Return a value that is smallest for the device to choose for one more request.

        A device without the model is last, and before it one with a problem, which may only be a busy machine. The rest
        is the expected wait by the requests of this process.
        """
        load = self.device.load()
        sent = {own: backlog for own, backlog in self.sent.items() if own.bundle in load.rates}
        wait_s = Load(load.rates, sent).wait_s(flow, tokens)
        return flow.bundle not in load.rates, not load.ready, wait_s

    def change(self, flow: Flow, before: RemainingWork, after: RemainingWork) -> None:
        backlog = self.sent.setdefault(flow, Backlog())
        backlog.change(before, after)
        if not backlog.tokens:
            del self.sent[flow]


class DeviceGroup:
    """The devices of an HTTP process. A request goes to the device on which its expected wait is shortest.

    A device that is lost takes only its own batches: the others compute its unanswered requests. The process of the
    first device has the models and the metrics of all.
    """

    def __init__(self, names: Sequence[str], broken: Callable[[], None]) -> None:
        self._lost: list[PendingRequest] = []
        self._retry: asyncio.TimerHandle | None = None
        self._members = [Member(RemoteDevice(broken, self._lost, name)) for name in names]
        self.devices = [member.device for member in self._members]
        for device in self.devices:
            device.when_lost = self._compute_lost
        for device in self.devices[1:]:
            device.when_open = lambda: None  # its process has no models yet
            device.subscribe(NoModels())

    async def submit(
        self, entries: Sequence[Entry], on_outcome: OnOutcome | None = None
    ) -> list[EntryOutcome]:
        if not entries:
            return []
        flow, work = entries[0].flow, RemainingWork(sum(e.tokens for e in entries), len(entries))
        chosen = min(self._members, key=lambda member: member.rank(flow, work.tokens))
        chosen.change(flow, RemainingWork(), work)
        try:
            return await chosen.device.submit(entries, on_outcome)
        finally:
            chosen.change(flow, work, RemainingWork())

    def _compute_lost(self) -> None:
        """Compute the lost requests on a device that has their models, as soon as there is one."""
        bundles = {request.entries[0].bundle for request in self._lost}
        for device in self.devices:
            load = device.load()
            if load.ready and bundles <= load.rates.keys():
                device.compute_lost()
                return
        if self._retry is not None:
            self._retry.cancel()
        self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._compute_lost)

    @property
    def max_queue_tokens(self) -> int:
        return self.load().max_queue_tokens

    def load(self) -> Load:
        return total_load([device.load() for device in self.devices])

    def loads(self) -> Mapping[str, Load]:
        return {name: load for device in self.devices for name, load in device.loads().items()}

    def alive(self) -> bool:
        return True
