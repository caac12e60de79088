"""All engines of this process, and their life: opened, checked and measured; served; drained."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import structlog

from service import bundle as bundles
from service.batcher import Batcher, BatchStats, Load
from service.bundle import Bundle, BundleError
from service.encode import Encoding
from service.engine import Engine
from service.errors import UnknownModel
from service.session import CPU, SessionOptions, find_provider, open_session, unused_gpu
from service.settings import Settings, Slots, usable_cores
from service.waiting import Outputs

log = structlog.get_logger()


class Engines:
    """The engines of this process by id, the default first, and the batcher that they share."""

    def __init__(self, settings: Settings, slots: Slots) -> None:
        self.by_id: dict[str, Engine] = {}
        self._observers: list[Callable[[BatchStats], None]] = []
        self.batcher = Batcher(
            self._run,
            slots=slots.number,
            wide=slots.number in slots.threads,
            max_batch_tokens=settings.max_batch_tokens,
            max_batch_size=settings.max_batch_size,
            max_queue_tokens=settings.max_queue_tokens,
            max_wait_ms=settings.max_wait_ms,
            observe=self._observe,
        )

    def add(self, engine: Engine) -> None:
        self.by_id[engine.id] = engine
        self.batcher.add_bundle(engine.id, engine.warm_up())

    def get(self, model: str | None) -> Engine:
        """The default engine, or the one of that name or `name@version`. Raises UnknownModel."""
        for engine in self.by_id.values():
            if model is None or model in (engine.id, engine.manifest.name):
                return engine
        served = ", ".join(self.by_id)
        raise UnknownModel(f"no model {model!r}; served here: {served}", param="model")

    def all(self) -> list[Engine]:
        return list(self.by_id.values())

    def load(self) -> Load:
        return self.batcher.load()

    def observe(self, observer: Callable[[BatchStats], None]) -> None:
        """Have an observer told of every batch that runs."""
        self._observers.append(observer)

    def _run(self, width: int, model: str, encodings: Sequence[Encoding]) -> list[Outputs]:
        return self.by_id[model].run(width, encodings)

    def _observe(self, stats: BatchStats) -> None:
        for observer in self._observers:
            observer(stats)


@asynccontextmanager
async def open_engines(settings: Settings) -> AsyncIterator[Engines]:
    """Open the bundles, check their goldens, measure their cost; serve; drain; close.

    Raises BundleError or ProviderError when one of them must not be served.
    """
    provider = find_provider(settings.provider)  # the clearest error first
    slots = settings.slots(provider == CPU, usable_cores())
    engines = Engines(settings, slots)
    for path in settings.bundles:
        _open(engines, bundles.load(path), settings, slots)
    await engines.batcher.start()
    try:
        yield engines
    finally:
        await engines.batcher.stop(settings.drain_s)
        for engine in engines.all():
            engine.close()


def _open(engines: Engines, bundle: Bundle, settings: Settings, slots: Slots) -> None:
    name = bundle.manifest.id
    if name in engines.by_id:
        raise BundleError(
            bundle.path, f"{name} is served already; give one of them another version"
        )
    sessions = {
        width: open_session(
            bundle,
            precision=settings.precision,
            provider=settings.provider,
            options=SessionOptions(threads, settings.spin),
        )
        for width, threads in slots.threads.items()
    }
    engines.add(Engine(bundle, sessions, engines.batcher))
    if problem := unused_gpu(sessions[1]):
        log.warning("the GPU is not used", model=name, reason=problem)
