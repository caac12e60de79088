"""All engines of this process: who answers for which model."""

from service.device import Device
from service.engine import Engine
from service.errors import UnknownModel


class Engines:
    """The engines of a device's bundles by id, the default first."""

    def __init__(self, device: Device) -> None:
        self.by_id = {bundle.manifest.id: Engine(bundle, device) for bundle in device.bundles}
        self.load = device.load
        self.alive = device.alive

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
