"""The model manager, which decides which bundles are served, at the start and by commands.

The manager reads, checks, opens and tests a new bundle in a thread, while the other models are served. Then it sends
the new model table to the subscriber, and the command returns when every process uses the table. A bundle that is
unloaded first gets no new requests. The manager closes it when its last request is answered.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from service.core import bundle as bundles
from service.core.addresses import address
from service.core.bundle import Bundle, BundleError, BundleTexts
from service.core.bundle_cache import fetch_bundle, forget, stored_bundle
from service.core.manifest import Manifest
from service.core.session import trim
from service.engines import model_state
from service.engines.commands import (
    Command,
    ListModels,
    LoadModel,
    PromoteModel,
    RollBackModel,
    UnloadModel,
)
from service.engines.local_device import LocalDevice, OpenedBundle
from service.engines.memory_need import graph_needs, on_demand_folders
from service.engines.model_state import ModelRecord, Models, ServedModel, Subscriber
from service.errors import BadBundle, Conflict, NewEmbeddingSpace, UnknownModel
from service.observability.metrics import ORDERS, Counts, Metrics
from service.rollout.checks import check_answers, embeds, locate
from service.rollout.on_demand import OPENING_ERRORS, Listed, OnDemandDevice, Trial
from service.scheduling.load import EARLY_SHARE
from service.settings import Settings

log = structlog.get_logger()

LOAD_ALONE_S = 10.0  # seconds in which a load is the only one; then the next one starts
SHOWN_HEADS = 5  # in the message that an encoder cannot be unloaded
STOP_S = 5.0  # beyond load_timeout_s, for the runtime to stop
REFRESH_S = 0.5  # delay of the models' states, which no request depends on
USE_S = 1.0  # between reports of which models are in use

CommandResult = Mapping[str, Any]
Resume = Mapping[str, Any]  # state for the next process, as JSON


Hold = Callable[[Sequence[ModelRecord]], Awaitable[None]]


async def do_nothing(*_: object) -> None:
    """Report, try and hold nothing, where there is no other process."""


class ModelManager:
    """The manager of the bundles that a device computes and of the requests that each of them gets.

    models: the served models, with states only as `_stated` returns them; the first current one is the default
    device: where requests for all models are sent
    resident: hashes of bundles that only a command unloads; a new version does not replace them
    report: called with the state for the next process after every change
    trial: opens a bundle elsewhere before this process does; raises BundleError if it must not be opened here
    hold: keeps exactly these bundles open on all other devices; raises BadBundle
    """

    def __init__(
        self,
        device: LocalDevice,
        settings: Settings,
        metrics: Metrics,
        report: Callable[[Mapping[str, object]], Awaitable[None]] = do_nothing,
        trial: Trial = do_nothing,
        hold: Hold = do_nothing,
    ) -> None:
        self.models: Models = ()
        self._hold = hold
        self._device = device
        self._settings = settings
        self._report = report
        self._trial = trial
        self._subscriber: Subscriber | None = None
        self._coming: dict[Path, float] = {}  # start of loading, in seconds of `time.time`
        self._going: dict[str, tuple[ServedModel, asyncio.Task[None]]] = {}
        self._opening = asyncio.Lock()
        self._deciding = asyncio.Lock()
        self.resident: Collection[str] = ()
        self._commands: set[asyncio.Task[CommandResult]] = set()
        self._metrics = metrics
        self.device = OnDemandDevice(
            device, settings, trial, self._refresh, lambda ids: self._report_resume(opening=ids)
        )
        self._is_stale = False
        self._refreshing: asyncio.Task[None] | None = None
        self._to_open: list[str] = []  # models of the previous process, the busiest first
        metrics.watch(self.device.loads, self.facts, EARLY_SHARE * settings.deadline_ms / 1000)

    # -- at start ---------------------------------------------------------------------------------

    def open(self, resume: Resume | None = None) -> None:
        """Open the bundles of the settings, or with `resume` list the bundles of the previous process, for `reopen`.

        Raises BundleError or ProviderError if a bundle, or all previous ones, cannot be served.
        """
        if resume is None:
            loaded = [bundles.load(path) for path in self._settings.bundles]
            # Encoders first, because heads need theirs.
            order = sorted(loaded, key=lambda bundle: bundle.manifest.encoder is not None)
            by_id = {model.id: model for model in map(self._open, order)}
            opened = [by_id[bundle.manifest.id] for bundle in loaded]
            opened += self._list_directory()
        else:
            opened = self._list_again(resume)
        self.models = model_state.settled(opened, time.time())
        names = {model.name for model in self.models}
        for alias, name in self._settings.aliases.items():
            if name not in names:
                log.warning("alias of no served model", alias=alias, model=name, served=[*names])

    def _open(self, bundle: Bundle, path: Path | str | None = None) -> ServedModel:
        self._check_new(bundle.path, bundle.manifest)
        return self._add(path or bundle.path, self._device.open(bundle))

    def _check_new(self, path: Path | str, manifest: Manifest) -> None:
        if manifest.id in self._device.texts:
            reason = f"{manifest.id} is served already; give one of them another name or version"
            raise BundleError(path, reason)

    def _list_directory(self) -> Iterator[ServedModel]:
        """List the bundles of `models_dir` that are opened on demand, by name, the newest version first."""
        found: list[tuple[Path, BundleTexts]] = []
        pinned = {known.sha256 for known in self._device.texts.values()}
        folders = on_demand_folders(self._settings)
        for folder in sorted(folders, key=lambda folder: -folder.stat().st_ctime):
            with self._logged(folder):
                found.append((folder, bundles.list_texts(folder)))

        def place(own: tuple[Path, BundleTexts]) -> tuple[bool, str]:
            manifest = own[1].manifest
            return manifest.encoder is not None, manifest.name  # heads last: they need encoders

        for folder, texts in sorted(found, key=place):
            if texts.sha256 not in pinned:
                with self._logged(folder):
                    yield self._list_cold(folder, texts, self._reserve(folder, texts))

    @contextmanager
    def _logged(self, folder: Path) -> Iterator[None]:
        try:
            yield
        except (BundleError, OSError) as error:
            log.error("not listed", path=str(folder), problem=str(error))

    def _reserve(self, folder: Path, texts: BundleTexts) -> int:
        """Return the bytes of an on-demand model's sessions. Raises BundleError for more than the whole budget."""
        if texts.manifest.encoder is not None:
            return 0  # it is open while its encoder is
        sessions = len(self._device.slots.threads)
        needs = graph_needs(self._settings, folder)
        size = sum(sessions * need.memory.opened for need in needs)
        budget = self._settings.memory_budget
        if budget is None or size > budget:
            raise BundleError(
                folder, f"it needs {size} bytes, more than memory_budget, {budget}: raise that"
            )
        return max(size, 1)

    def _list_cold(self, path: Path | str, texts: BundleTexts, reserved: int = 0) -> ServedModel:
        self._check_new(path, texts.manifest)
        self._device.list_closed(texts)
        return self._make_model(path, texts, reserved)

    def _list_again(self, resume: Resume) -> list[ServedModel]:
        """List the models of the previous process, and count its end against models that may have caused it."""
        opened: list[ServedModel] = []
        problems: list[Exception] = []
        former = [ModelRecord(**record) for record in resume["models"]]
        # Encoders first, because heads need theirs.
        for kept in sorted(former, key=lambda kept: kept.encoder != ""):
            try:
                texts = bundles.list_texts(stored_bundle(kept.path, kept.sha256))
                model = self._list_cold(kept.path, texts, kept.reserved)
            except OPENING_ERRORS as error:
                log.error("not served again", model=kept.id, problem=str(error))
                problems.append(error)
                continue
            if model.sha256 == kept.sha256:
                model = replace(
                    model,
                    state=kept.state,
                    since=kept.since,
                    shadow=kept.shadow,
                    aliases=tuple(kept.aliases),
                )
            else:
                log.error("changed since it was served", model=kept.id, now=model.id)
            opened.append(model)
        if not opened:
            raise problems[0]
        always_open = [model.id for model in opened if not (model.reserved or model.encoder)]
        self._to_open = [*dict.fromkeys([*resume.get("used", ()), *always_open])]
        self.device.proofs.records.update(resume.get("proofs", {}))
        self.device.strikes.update(resume.get("strikes", {}))
        self.device.strike(resume.get("opening", ()))
        places = {kept.path: place for place, kept in enumerate(former)}
        return sorted(opened, key=lambda model: places[model.path])

    async def reopen(self) -> None:
        """Open the models that were open in the previous process, one after the other, the busiest first."""
        await self.device.open_all(self._to_open)

    async def watch_use(self) -> None:
        """Report regularly which models the next process should open first, and whose requests may end it."""
        reported: dict[str, object] = {}
        while True:
            await asyncio.sleep(USE_S)
            self.device.acquit()
            now: dict[str, object] = {
                "used": self.device.rank(),
                "strikes": dict(self.device.strikes),
                "proofs": dict(self.device.proofs.records),
            }
            if changed := {name: own for name, own in now.items() if reported.get(name) != own}:
                reported = now
                await self._report_resume(**changed)

    async def _report_resume(self, **state: object) -> None:
        await self._report({"resume": state})

    def _add(self, path: Path | str, opened: OpenedBundle) -> ServedModel:
        """Add a bundle to the device as a pinned model, which gets no requests yet."""
        self._device.add(opened)
        self.device.proofs.put(Path(path), opened.texts.sha256, opened.proof)
        return self._make_model(path, opened.texts, is_open=True)

    def _make_model(
        self, path: Path | str, texts: BundleTexts, reserved: int = 0, is_open: bool = False
    ) -> ServedModel:
        manifest, sha256 = texts.manifest, texts.sha256
        self.device.enlist(manifest.id, Listed(str(path), sha256, reserved), is_open)
        runs_on, now = self._device.runs_on[manifest.id], time.time()
        configured = self._settings.aliases.items()
        aliases = tuple(alias for alias, name in configured if name == manifest.name)
        shared = (model.aliases for model in self.models if model.name == manifest.name)
        return ServedModel(
            manifest.id,
            address(path) or str(path),
            sha256,
            "pinned",
            now,
            runs_on,
            aliases=next(shared, aliases),
            encoder=manifest.encoder.id if manifest.encoder else "",
            reserved=reserved,
        )

    async def follow(self, subscriber: Subscriber) -> None:
        """Send the model table to a subscriber, now and after every change. Raises ValueError if the first fails."""
        await self.device.add_heads()
        await subscriber.adopt(self._stated(self.models), self._device.texts)
        self._subscriber = subscriber
        await self._report_models()

    # -- commands ---------------------------------------------------------------------------------

    async def execute(self, command: Command) -> CommandResult:
        """Execute a command to its end, even if the caller is cancelled. Raises QuartetErrors, with nothing changed."""
        task = asyncio.create_task(self._run(command))
        self._commands.add(task)
        task.add_done_callback(partial(self._executed, command))
        return await asyncio.shield(task)

    async def _run(self, command: Command) -> CommandResult:
        match command:
            case ListModels():
                return self._list()
            case LoadModel():
                return await self._load(command)
            case PromoteModel():
                return await self._promote(command)
            case RollBackModel():
                return await self._roll_back(command)
            case UnloadModel():
                return await self._unload(command)

    def _executed(self, command: Command, task: asyncio.Task[CommandResult]) -> None:
        self._commands.discard(task)
        error = None if task.cancelled() else task.exception()
        if command.name in ORDERS:
            self._metrics.observe_order(command.name, not (error or task.cancelled()))
        if error:
            log.warning("refused", order=command.name, **asdict(command), reason=str(error))

    def _list(self) -> CommandResult:
        """Return every model that is served, loading or draining."""
        unknown = {"id": None, "sha256": None, "embedding_space": None}
        idle = {"requests": 0, "shadow": 0.0, "aliases": (), "compared": {}}
        idle |= {"reserved": None, "problem": None}
        coming = [
            {
                **unknown,
                "path": address(path) or str(path),
                "state": "loading",
                "since": moment(since),
                **idle,
            }
            for path, since in self._coming.items()
        ]
        going = [{**self._told(model), "state": "draining"} for model, _ in self._going.values()]
        return {"models": [*map(self._told, self.models), *going, *coming]}

    async def _load(self, command: LoadModel) -> CommandResult:
        """Load a bundle of the operator's directory, and promote it unless the command excludes that."""
        promote = command.promote and not command.shadow
        allowed = command.allow_new_embedding_space or not promote
        folder = locate(self._settings.models_dir, command.path, self._settings.model_sources)
        with bundle_errors():
            async with self._opening:
                opening = asyncio.create_task(self._open_new(folder, allowed, command.on_demand))
                await asyncio.wait({opening}, timeout=LOAD_ALONE_S)
            texts, opened = await opening
        async with self._deciding:
            self._check_space(texts.manifest, allowed)
            self._check_encoder(folder, texts.manifest)
            # Another command may have added it meanwhile.
            if self._known(texts):
                new = self._find(texts.manifest.id)
                if not command.on_demand:
                    new = await self._pin(new)
            elif opened:
                new = self._add(folder, opened)
            else:
                with bundle_errors():
                    own = stored_bundle(str(folder), texts.sha256)
                    new = self._list_cold(folder, texts, self._reserve(own, texts))
                await self.device.add_heads()
            if promote:
                return await self._introduce(
                    "load", new, command.by, command.keep_old, command.aliases
                )
            return await self._stand_by(new, command)

    async def _pin(self, model: ServedModel) -> ServedModel:
        """Keep a listed model open from now on; also open one that was set aside. Raises NotReady if that fails."""
        await self.device.pin(model.id)
        pinned = replace(model, reserved=0)
        self.models = tuple(pinned if m is model else m for m in self.models)
        await self._report_models()
        return pinned

    async def _open_new(
        self, folder: Path, allowed: bool, on_demand: bool
    ) -> tuple[BundleTexts, OpenedBundle | None]:
        """Load a bundle, and open it unless it is served already or opened on demand.

        allowed: whether its embedding space may differ from the current one
        """
        seconds = self._settings.load_timeout_s + STOP_S
        with self._listed(folder):
            try:
                async with asyncio.timeout(seconds):
                    own = await asyncio.to_thread(fetch_bundle, folder)
                    if on_demand:
                        return await asyncio.to_thread(bundles.list_texts, own), None
                    bundle = await asyncio.to_thread(bundles.load, own)
                texts = await asyncio.to_thread(bundles.read_texts, bundle)
                if self._known(texts):
                    return texts, None
                self._check_space(bundle.manifest, allowed)
                self._check_encoder(folder, bundle.manifest)
                if shared := bundle.manifest.encoder:
                    await self.device.pin(shared.id)
                else:  # heads have no graph, which could crash
                    await self._trial(self._settings, own)
                async with asyncio.timeout(seconds):
                    opened = await asyncio.to_thread(self._device.open, bundle)
            except TimeoutError:  # its thread goes on until the runtime's current operator ends
                raise BundleError(folder, f"loading it takes more than {seconds:g} s") from None
        return texts, opened

    async def _promote(self, command: PromoteModel) -> CommandResult:
        """Make a loaded version the current one of its name."""
        async with self._deciding:
            new = self._find(command.model)
            if command.max_changed is not None:
                compared = self._compared(new)
                check_answers(command.model, compared, command.max_changed, command.min_compared)
            self._check_space(self._manifest(new), command.allow_new_embedding_space)
            return await self._introduce(
                "promote", new, command.by, command.keep_old, command.aliases
            )

    async def _roll_back(self, command: RollBackModel) -> CommandResult:
        """Make the previous version the current one."""
        name = command.model
        async with self._deciding:
            former = model_state.previous(self.models, name)
            if former is not None:
                return await self._introduce("roll back", former, command.by)
            if model_state.current(self.models, name) is None:
                raise self._unknown(name)
            raise Conflict(f"{name} has no previous version")

    async def _unload(self, command: UnloadModel) -> CommandResult:
        """Unload a version; return when its memory is free."""
        async with self._deciding:
            leaving = self._find(command.model)
            if heads := [model.id for model in self.models if model.encoder == leaving.id]:
                named = ", ".join(heads[:SHOWN_HEADS])
                more = f" and {len(heads) - SHOWN_HEADS} more" if len(heads) > SHOWN_HEADS else ""
                raise Conflict(f"{leaving.id} computes {named}{more}: unload these first")
            rest = model_state.remove_model(self.models, leaving.id, time.time())
            if not rest:
                raise Conflict(f"{leaving.id} is the last served model")
            await self._serve(rest)
            _, gone = self._going[leaving.id]
            heir = model_state.current(rest, leaving.name)
            now = heir.id if heir else None
            log.info("unload", model=leaving.id, current=now, by=command.by)
        await gone
        return {"unloaded": leaving.id, "current": now}

    @property
    def standing(self) -> object:
        """The served and the draining models; while this value is unchanged, a refused command is refused again."""
        return self.models, frozenset(self._going)

    def facts(self) -> dict[str, dict[str, str]]:
        """Return the labels of each bundle for the metrics, by id."""
        states = {model.id: model.shown_state for model in self._stated(self.models)}
        facts = self._device.facts()
        return {name: {**facts[name], "state": states.get(name, "draining")} for name in facts}

    # -- changes of the model table ---------------------------------------------------------------

    async def _introduce(
        self,
        what: str,
        new: ServedModel,
        by: str,
        keep_old: bool = True,
        aliases: Sequence[str] | None = None,
    ) -> CommandResult:
        old = model_state.current(self.models, new.name)
        if new is not old:
            used = {model.encoder for model in self.models}
            encoders = {model.sha256 for model in self.models if model.id in used}
            now, resident = time.time(), encoders.union(self.resident)
            later = model_state.introduce_model(
                self.models, new, now, keep_old=keep_old, resident=resident
            )
            await self._serve(later)
            former = old.id if old else None
            log.info(what, model=new.id, sha256=new.sha256, instead_of=former, by=by)
        return await self._introduced(new, by, aliases)

    async def _stand_by(self, new: ServedModel, command: LoadModel) -> CommandResult:
        """Serve a bundle for `name@version` requests, and for copies of its name's requests if `shadow` is above 0."""
        by, shadow = command.by, command.shadow
        if new.state == "current" and shadow:
            raise Conflict(
                f"{new.id} is the current version of {new.name}: mirrored requests would compare it with itself"
            )
        new = replace(new, shadow=shadow)
        if new not in self.models:
            await self._serve(model_state.add_model(self.models, new, time.time()))
            log.info("load", model=new.id, sha256=new.sha256, shadow=shadow, by=by)
        return await self._introduced(new, by, command.aliases)

    async def _introduced(
        self, new: ServedModel, by: str, aliases: Sequence[str] | None
    ) -> CommandResult:
        """Give the name of a model these aliases, unless they are None, and return the model's state."""
        if aliases is not None:
            await self._serve(model_state.assign_aliases(self.models, new.name, aliases))
            log.info("aliases", model=new.name, aliases=aliases, by=by)
        kept = model_state.previous(self.models, new.name)
        return {
            "model": self._told(self._find(new.id)),
            "previous": self._told(kept) if kept else None,
            "unloading": [*self._going],
        }

    async def _serve(self, models: Models) -> None:
        """Send all new requests to these models, and unload all other bundles. Raises BadBundle."""
        assert self._subscriber is not None, "our bug: there is no subscriber"
        before, self.models = self.models, models
        try:
            await self._hold([*{model.id: model for model in (*before, *models)}.values()])
            await self._subscriber.adopt(self._stated(models), self._device.texts)
        except (ValueError, BadBundle) as error:
            self.models = before
            await self._subscriber.adopt(self._stated(before), self._device.texts)
            raise BadBundle(str(error)) from None
        finally:
            self._let_go_of({model.id: model for model in (*before, *models)})
        if models is not before:
            await self._report_models()

    async def _report_models(self) -> None:
        await self._report_resume(models=[*map(kept_of, self.models)])

    def _stated(self, models: Models) -> Models:
        """Return the models with the graph of each, and whether it is cold or set aside."""
        states = (self.device.state(model.id) for model in models)
        return tuple(replace(m, **state) for m, state in zip(models, states, strict=True))

    def _refresh(self) -> None:
        """Send the models' states to the subscriber soon."""
        self._is_stale = True
        if self._subscriber and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.create_task(self._send_states())

    async def _send_states(self) -> None:
        while self._is_stale:
            await asyncio.sleep(REFRESH_S)
            self._is_stale = False
            async with self._deciding:
                with suppress(BadBundle):  # the subscriber keeps the previous states
                    await self._serve(self.models)

    def _let_go_of(self, models: Mapping[str, ServedModel]) -> None:
        """Start to unload the models that are no longer served."""
        for name in models.keys() - {model.id for model in self.models} - self._going.keys():
            self._going[name] = models[name], asyncio.create_task(self._let_go(name))

    async def _let_go(self, name: str) -> None:
        assert self._subscriber is not None
        await self._subscriber.left(name)
        model, _ = self._going[name]
        await asyncio.to_thread(forget, model.path, model.sha256)
        await self.device.drop(name)
        del self._going[name]
        await self._hold(self.models)
        self._metrics.forget_others(self._device.texts)
        if not model.encoder:
            await asyncio.to_thread(trim)
        log.info("unloaded", model=name)

    # -- look-ups and checks ----------------------------------------------------------------------

    def _find(self, model_id: str) -> ServedModel:
        for model in self.models:
            if model.id == model_id:
                return model
        raise self._unknown(model_id)

    def _unknown(self, asked: str) -> UnknownModel:
        there = ", ".join(model.id for model in self.models)
        return UnknownModel(f"no model {asked!r}; loaded here: {there}", param="model")

    def _known(self, bundle: BundleTexts) -> bool:
        """Return whether a bundle is served. Raises Conflict if its id is draining or has other contents."""
        name = bundle.manifest.id
        if name in self._going:
            raise Conflict(f"{name} is being unloaded: try again later")
        served = self._device.texts.get(name)
        if served is not None and served.sha256 != bundle.sha256:
            raise Conflict(
                f"{name} is served with other contents: change the version of the new bundle"
            )
        return served is not None

    def _check_encoder(self, path: Path, manifest: Manifest) -> None:
        """Raise Conflict for heads whose encoder is not served, or is being unloaded."""
        if manifest.encoder is None:
            return
        try:
            encoder = self._device.encoder_of(path, manifest)
        except BundleError as error:
            raise Conflict(str(error)) from None
        if encoder in self._going:
            raise Conflict(f"{path}: its encoder {encoder} is being unloaded")

    def _manifest(self, model: ServedModel) -> Manifest:
        return self._device.texts[model.id].manifest

    def _check_space(self, new: Manifest, allowed: bool) -> None:
        """Raise NewEmbeddingSpace when the vectors of the bundle and of its current version cannot be compared."""
        old = model_state.current(self.models, new.name)
        if allowed or old is None:
            return
        former = self._manifest(old)
        if embeds(former) and embeds(new) and former.embedding_space != new.embedding_space:
            raise NewEmbeddingSpace(
                f"{new.id} has another embedding space ({new.embedding_space}) than {old.id}"
                f" ({former.embedding_space}): their vectors cannot be compared",
                param="allow_new_embedding_space",
            )

    @contextmanager
    def _listed(self, folder: Path) -> Iterator[None]:
        self._coming[folder] = time.time()
        try:
            yield
        finally:
            self._coming.pop(folder, None)

    def _told(self, model: ServedModel) -> dict[str, Any]:
        (model,) = self._stated((model,))
        return {
            "id": model.id,
            "path": model.path,
            "sha256": model.sha256,
            "state": model.shown_state,
            "since": moment(model.since),
            "embedding_space": self._manifest(model).embedding_space,
            "requests": self._device.requests(model.id),
            "shadow": model.shadow,
            "aliases": model.aliases,
            "reserved": model.reserved or None,
            "problem": model.problem or None,
            "compared": self._compared(model),
        }

    def _compared(self, model: ServedModel) -> Counts:
        return self._metrics.compared.get(model.id, {})


@contextmanager
def bundle_errors() -> Iterator[None]:
    """Raise BadBundle for the client for every error of opening a bundle."""
    try:
        yield
    except OPENING_ERRORS as error:
        log.debug("cannot open", exc_info=True)
        raise BadBundle(" ".join(str(error).split())) from None


def kept_of(model: ServedModel) -> dict[str, Any]:
    return {field.name: getattr(model, field.name) for field in fields(ModelRecord)}


def moment(seconds: float) -> str:
    """Format seconds of `time.time` as an ISO 8601 time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
