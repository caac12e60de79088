"""The engines of this process, by the model name that a request contains."""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from tokenizers import Tokenizer

from service.core.bundle import BundleTexts
from service.core.encode import Encoder, parse_tokenizer, tokenizer_errors
from service.engines.commands import Command
from service.engines.device import Device
from service.engines.engine import Engine
from service.engines.mirroring import Compared, MirroredTraffic
from service.engines.model_state import Models, ServedModel, current
from service.engines.result_cache import ObserveFound, ResultCache
from service.engines.task_plan import Limits
from service.errors import UnknownModel
from service.scheduling.text_threads import TextThreads
from service.settings import Settings, UnknownModelRule

ExecuteCommand = Callable[[Command], Awaitable[Mapping[str, Any]]]


class Engines:
    """An engine for each served bundle; engines are added and removed while requests run.

    execute: executes a command, as `ModelManager.execute` does
    compared: called with the results of compared copies
    settings: the limits of each request, and the cache of results
    found: called with the windows of each request that were found in the cache, if there is one
    """

    def __init__(
        self,
        device: Device,
        execute: ExecuteCommand,
        compared: Compared,
        settings: Settings,
        found: ObserveFound = lambda found: None,
    ) -> None:
        self._cache: ResultCache | None = None
        if settings.cache_mb:
            shared = settings.cache_shared
            device = self._cache = ResultCache(device, settings.cache_mb * 2**20, shared, found)
        self.load = device.load
        self.loads = device.loads
        self.alive = device.alive
        self.execute = execute
        self.text_threads = TextThreads()
        # Ids of models that get requests; a version kept for a rollback is idle.
        self.expected: list[str] = []
        self._device = device
        self._limits = Limits.of(settings)
        self._compared = compared
        self._by_id: dict[str, Engine] = {}
        self._by_name: dict[
            str | None, Engine
        ] = {}  # names, aliases, ids, and None for the default
        self._leaving: dict[Engine, asyncio.Task[None]] = {}
        self._views: dict[tuple[str, ...], Engines] = {}  # by the names of models

    async def adopt(self, models: Models, texts: Mapping[str, BundleTexts]) -> None:
        """Switch to these models at once; an engine of another model closes when its last request has ended.

        Raises ValueError for a tokenizer that cannot be used, and then keeps the engines. texts: of new models
        """
        engines: dict[str, Engine] = {}
        # Encoders come first, because the engines of heads use theirs.
        for model in sorted(models, key=lambda model: model.encoder != ""):
            known = self._known(model) or await self._open(texts[model.id], model, engines)
            engines[model.id] = known
        for engine in self._by_id.values():
            engine.copies = None
        for model in models:
            engines[model.id].model = model
            if model.shadow and (answering := current(models, model.name)):
                shadow = MirroredTraffic(engines[model.id], model.shadow, self.load, self._compared)
                engines[answering.id].copies = shadow
        kept = set(engines.values())
        for engine in set(self._by_id.values()) - kept:
            self._leaving[engine] = asyncio.create_task(self._end(engine))
        if self._cache is not None:
            self._cache.keep({model.id: model.sha256 for model in models})
        self._by_id = engines
        self._by_name = by_name(models, engines)
        self._views.clear()
        self.expected = [
            model.id
            for model in models
            if model.state != "previous" and not model.shadow and not model.encoder
        ]

    def _known(self, model: ServedModel) -> Engine | None:
        engine = self._by_id.get(model.id)
        return engine if engine is not None and engine.sha256 == model.sha256 else None

    async def _open(
        self, texts: BundleTexts, model: ServedModel, engines: Mapping[str, Engine]
    ) -> Engine:
        """Open an engine; engines: of the other models, among them a head bundle's encoder."""
        if model.encoder:
            encoder = engines[model.encoder].encoder
            if encoder.max_length != texts.manifest.max_length:
                encoder = Encoder(encoder.tokenizer, texts.manifest.max_length)
            return self._make(texts, encoder, model)
        tokenizer = self._tokenizer(texts.manifest.vocabulary.sha256, engines)
        if tokenizer is None:
            tokenizer = await asyncio.to_thread(parse_tokenizer, texts.tokenizer)
        with tokenizer_errors(f"the tokenizer of {model.id} cannot be used"):
            encoder = Encoder(tokenizer, texts.manifest.max_length)
        return self._make(texts, encoder, model)

    def _make(self, texts: BundleTexts, encoder: Encoder, model: ServedModel) -> Engine:
        return Engine(texts, encoder, model, self._device, self.text_threads, self._limits)

    def _tokenizer(self, sha256: str, new: Mapping[str, Engine]) -> Tokenizer | None:
        """Return the tokenizer of an engine with this hash, as many models share one, or None."""
        engines = [*self._by_id.values(), *new.values()]
        fits = (e.encoder.tokenizer for e in engines if e.manifest.vocabulary.sha256 == sha256)
        return next(fits, None)

    async def left(self, model_id: str) -> None:
        """Wait until no request uses a bundle that is no longer served."""
        if ending := [task for engine, task in self._leaving.items() if engine.id == model_id]:
            await asyncio.wait(ending)

    async def _end(self, engine: Engine) -> None:
        await engine.unused()
        engine.close()
        del self._leaving[engine]

    def get(self, model: str | None, unknown: UnknownModelRule = "refuse") -> Engine:
        """Return the engine of a name, an alias or `name@version`, or the default one for None. Raises UnknownModel.

        unknown: what happens to every other name
        """
        engine = self._by_name.get(model)
        if engine is None and unknown == "default":
            engine = self._by_name.get(None)
        if engine is None:
            aliases = [*dict.fromkeys(a for e in self._by_id.values() for a in e.model.aliases)]
            served = ", ".join([*self._by_id, *aliases])
            raise UnknownModel(
                f"no model {model!r}; served here: {served}; the settings aliases and unknown_model accept other names",
                param="model",
            )
        return engine

    def visible_to(self, models: tuple[str, ...]) -> "Engines":
        """Return the engines of the models with these names only, or all if empty; `*` stands for any letters."""
        if not models:
            return self
        if models not in self._views:
            view = self._views[models] = copy.copy(self)
            view._by_id = {
                name: engine
                for name, engine in self._by_id.items()
                if any(fnmatchcase(engine.manifest.name, allowed) for allowed in models)
            }
            view._by_name = by_name([e.model for e in view._by_id.values()], view._by_id)
        return self._views[models]

    def serves(self, model: str) -> bool:
        """Return whether a model has this name, alias or `name@version`."""
        return model in self._by_name

    def all(self) -> list[Engine]:
        return list(self._by_id.values())

    def close(self) -> None:
        for engine in [*self.all(), *self._leaving]:
            engine.close()
        self.text_threads.stop()


def by_name(
    models: Sequence[ServedModel], engines: Mapping[str, Engine]
) -> dict[str | None, Engine]:
    """Return the engine of each id, the current engine of each name and alias, and the default engine under None."""
    found: dict[str | None, Engine] = {}
    current = [model for model in models if model.state == "current"]
    found.update((None, engines[model.id]) for model in current[:1])
    found.update((alias, engines[model.id]) for model in current for alias in model.aliases)
    found.update((model.name, engines[model.id]) for model in current)
    found.update((model.id, engines[model.id]) for model in models)
    return found
