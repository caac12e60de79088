"""The inference processes of the further devices: they open the bundles that the first device's process chooses.

The first device's process has a channel to each of them. It tells them which bundles to hold, and gets their loads and
their metrics.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial

from service import errors
from service.core import bundle
from service.core.bundle_cache import stored_bundle
from service.engines.commands import Command
from service.engines.local_device import LocalDevice, OpenedBundle
from service.engines.model_state import ModelRecord
from service.observability.metrics import Metrics
from service.processes import messages
from service.processes.device_group import NoModels
from service.processes.http_peers import HttpPeers
from service.processes.peer import Receive, Reply
from service.processes.remote_device import RemoteDevice
from service.processes.remote_metrics import KEPT, PUSH_S
from service.rollout.model_manager import bundle_errors
from service.scheduling.executor import BatchStats
from service.scheduling.load import Load


class Followers:
    """The processes of the further devices, as the first device's process sees them. names: of all devices"""

    def __init__(self, device: LocalDevice, names: Sequence[str], metrics: Metrics) -> None:
        self._own = device
        self._names = names
        self._metrics = metrics
        self._models: Sequence[ModelRecord] = ()
        self._devices = [RemoteDevice(name=name) for name in names[1:]]
        self._tasks = {asyncio.create_task(device.watch()) for device in self._devices}
        for follower in self._devices:
            follower.subscribe(NoModels())
            follower.when_open = partial(self._begin, follower)

    async def connect(self, number: int, end: socket.socket) -> None:
        await self._devices[number - 1].connect(end)

    def _begin(self, device: RemoteDevice) -> None:
        observe = partial(messages.Observed.repeat, metrics=self._metrics)
        for work in (device.follow_metrics(observe), self._hold_again(device)):
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _hold_again(self, device: RemoteDevice) -> None:
        with suppress(errors.QuartetError):  # logged there; it has those that it could open
            await device.hold(self._models)

    async def hold(self, models: Sequence[ModelRecord]) -> None:
        """Keep exactly these bundles open on each device whose process is there. Raises BadBundle."""
        self._models = models

        async def hold(device: RemoteDevice) -> None:
            with suppress(errors.ReplicaLost):  # its next process will hold them
                await device.hold(models)

        await asyncio.gather(*map(hold, self._devices))

    def loads(self) -> Mapping[str, Load]:
        """Return the load of each device by its name."""
        loads = [self._own.load(), *(device.load() for device in self._devices)]
        return dict(zip(self._names, loads, strict=True))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()


class ForwardedMetrics(Metrics):
    """The metrics of a further device, which the first device's process counts."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: deque[tuple[str, Sequence[object]]] = deque(maxlen=KEPT)

    def observe_batch(self, stats: BatchStats, padded: bool = False) -> None:
        figures = asdict(replace(stats, failed=(), batch=()))
        self._calls.append(("observe_remote_batch", (figures, len(stats.failed), padded)))

    def observe_canary(self, model: str, well: bool) -> None:
        self._calls.append(("observe_canary", (model, well)))

    def take(self) -> messages.Observed | None:
        """Return what was observed since the last call, or None."""
        calls = [*self._calls]
        self._calls.clear()
        return messages.Observed(calls) if calls else None


class LeaderPeers(HttpPeers):
    """The HTTP processes of a further device, and the process of the first device, which chooses its bundles."""

    def __init__(self, device: LocalDevice, metrics: ForwardedMetrics) -> None:
        super().__init__(device, refuse, metrics)
        self._local = device
        self._forwarded = metrics
        self._holding = asyncio.Lock()
        self._problem = "the device opens its bundles"

    def _load(self) -> Load:
        load = super()._load()
        return replace(load, problem=load.problem or self._problem)

    async def _serve(self, request: messages.Message, arrays: bytes, send_part: Receive) -> Reply:
        match request:
            case messages.Hold(bundles):
                async with self._holding:
                    try:
                        await self._hold({name: (path, sha256) for name, path, sha256 in bundles})
                    finally:
                        self._problem = ""
                return messages.Done(), b""
            case messages.Follow():
                while True:
                    if observed := self._forwarded.take():
                        send_part(observed, b"")
                    await asyncio.sleep(PUSH_S)
        return await super()._serve(request, arrays, send_part)

    async def _hold(self, bundles: Mapping[str, tuple[str, str]]) -> None:
        """Open and drop bundles until exactly these are open. Raises BadBundle for one that cannot be opened."""
        held = self._local.texts
        gone = [n for n, texts in held.items() if bundles.get(n, ("", ""))[1] != texts.sha256]
        for name in sorted(gone, key=lambda name: held[name].manifest.encoder is None):
            await self._local.drop(name)
        for name, (path, sha256) in bundles.items():
            if name not in held:
                self._local.add(await asyncio.to_thread(open_bundle, self._local, path, sha256))


async def refuse(command: Command) -> Mapping[str, object]:
    raise errors.Conflict(f"{command.name}: only the first device's process decides on models")


def open_bundle(device: LocalDevice, path: str, sha256: str) -> OpenedBundle:
    """Open a bundle. Raises BadBundle, also where its contents have changed since the first device has opened it."""
    with bundle_errors():
        loaded = bundle.load(stored_bundle(path, sha256))
        if loaded.sha256 != sha256:
            raise bundle.BundleError(path, "changed since the first device has opened it")
        return device.open(loaded)
