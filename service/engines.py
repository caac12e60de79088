"""All engines of this process, and their life: the device is opened, they answer, it is drained."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.device import Device, open_device
from service.engine import Engine
from service.errors import UnknownModel
from service.metrics import Metrics
from service.settings import Settings


class Engines:
    """The engines of a device's bundles by id, the default first."""

    def __init__(self, device: Device) -> None:
        self.by_id = {
            bundle.manifest.id: Engine(bundle, device.runs_on[bundle.manifest.id], device.submit)
            for bundle in device.bundles
        }
        self.load = device.load

    def get(self, model: str | None) -> Engine:
        """The default engine, or the one of that name or `name@version`. Raises UnknownModel."""
        for engine in self.by_id.values():
            if model is None or model in (engine.id, engine.manifest.name):
                return engine
        served = ", ".join(self.by_id)
        raise UnknownModel(f"no model {model!r}; served here: {served}", param="model")

    def all(self) -> list[Engine]:
        return list(self.by_id.values())

    def close(self) -> None:
        for engine in self.all():
            engine.close()


@asynccontextmanager
async def open_engines(metrics: Metrics, settings: Settings) -> AsyncIterator[Engines]:
    """Engines on a device in this process, which tells the metrics of its batches; raises what `open_device` does."""
    async with open_device(settings, metrics.observe_batch) as device:
        metrics.watch_queue(lambda: device.load().queue_tokens)
        engines = Engines(device)
        try:
            yield engines
        finally:
            engines.close()
