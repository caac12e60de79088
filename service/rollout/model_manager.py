"""The model manager, which decides which bundles are served, at the start and by commands.

The manager reads, checks, opens and tests a new bundle in a thread, while the other models are served. Then it sends
the new model table to the subscriber, and the command returns when every process uses the table. A bundle that is
unloaded first gets no new requests. The manager closes it when its last request is answered.
"""

import asyncio
import re
import stat
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from service.core import bundle as bundles
from service.core.addresses import address
from service.core.bundle import Bundle, BundleError, Manifest
from service.core.bundle_cache import fetch_bundle, forget, stored_bundle
from service.core.session import RUNTIME_ERRORS, trim
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
from service.engines.model_state import ModelRecord, Models, ServedModel, Subscriber
from service.errors import (
    BadBundle,
    ChangedAnswers,
    Conflict,
    Forbidden,
    InvalidInput,
    NewEmbeddingSpace,
    UnknownModel,
)
from service.observability.metrics import ORDERS, Counts, Metrics
from service.scheduling.load import EARLY_SHARE
from service.settings import Settings

log = structlog.get_logger()

OPENING_ERRORS: tuple[type[Exception], ...] = (BundleError, OSError, *RUNTIME_ERRORS)

# The rest of an address below an allowed one: plain names, so that no server reads it as another address.
BELOW = re.compile(r"[A-Za-z0-9_@-][\w.+=@-]*(/[A-Za-z0-9_@-][\w.+=@-]*)*", re.ASCII)

LOAD_ALONE_S = 10.0  # seconds in which a load is the only one; then the next one starts
SHOWN_HEADS = 5  # in the message that an encoder cannot be unloaded
STOP_S = 5.0  # beyond load_timeout_s, for the runtime to stop

CommandResult = Mapping[str, Any]
Resume = Mapping[str, Any]  # state for the next process, as JSON


async def tell_nobody(_: Mapping[str, object]) -> None:
    """Ignore a report, where there is no main process to send it to."""


Trial = Callable[[Settings, Path], Awaitable[object]]


async def no_trial(settings: Settings, folder: Path) -> None:
    """Open no bundle elsewhere."""


Hold = Callable[[Sequence[ModelRecord]], Awaitable[None]]


async def hold_nowhere(models: Sequence[ModelRecord]) -> None:
    """Open no bundle on other devices, where there are none."""


class ModelManager:
    """The manager of the bundles that a device computes and of the requests that each of them gets.

    models: the served models; the first current one is the default
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
        report: Callable[[Mapping[str, object]], Awaitable[None]] = tell_nobody,
        trial: Trial = no_trial,
        hold: Hold = hold_nowhere,
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
        metrics.watch(device.loads, self.facts, EARLY_SHARE * settings.deadline_ms / 1000)

    # -- at start ---------------------------------------------------------------------------------

    def open(self, resume: Resume | None = None) -> None:
        """Open the bundles of the settings, or with `resume` those of the previous process that can be opened.

        Raises BundleError or ProviderError if a bundle, or all previous ones, cannot be served.
        """
        if resume is None:
            loaded = [bundles.load(path) for path in self._settings.bundles]
            # Encoders first, because heads need theirs.
            order = sorted(loaded, key=lambda bundle: bundle.manifest.encoder is not None)
            by_id = {model.id: model for model in map(self._open, order)}
            opened = [by_id[bundle.manifest.id] for bundle in loaded]
        else:
            opened = self._open_again([ModelRecord(**kept) for kept in resume["models"]])
        self.models = model_state.settled(opened, time.time())
        names = {model.name for model in self.models}
        for alias, name in self._settings.aliases.items():
            if name not in names:
                log.warning("alias of no served model", alias=alias, model=name, served=[*names])

    def _open(self, bundle: Bundle, path: Path | str | None = None) -> ServedModel:
        if bundle.manifest.id in self._device.texts:
            reason = f"{bundle.manifest.id} is served already; give one of them another version"
            raise BundleError(bundle.path, reason)
        return self._add(path or bundle.path, self._device.open(bundle))

    def _open_again(self, former: Iterable[ModelRecord]) -> list[ServedModel]:
        opened: list[ServedModel] = []
        problems: list[Exception] = []
        former = [*former]
        # Encoders first, because heads need theirs.
        for kept in sorted(former, key=lambda kept: kept.encoder != ""):
            try:
                model = self._open(bundles.load(stored_bundle(kept.path, kept.sha256)), kept.path)
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
        places = {kept.path: place for place, kept in enumerate(former)}
        return sorted(opened, key=lambda model: places[model.path])

    def _add(self, path: Path | str, opened: OpenedBundle) -> ServedModel:
        """Add a bundle to the device as a pinned model, which gets no requests yet."""
        self._device.add(opened)
        manifest, sha256 = opened.texts.manifest, opened.texts.sha256
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
        )

    async def follow(self, subscriber: Subscriber) -> None:
        """Send the model table to a subscriber, now and after every change. Raises ValueError if the first fails."""
        await subscriber.adopt(self.models, self._device.texts)
        self._subscriber = subscriber

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
                opening = asyncio.create_task(self._open_new(folder, allowed))
                await asyncio.wait({opening}, timeout=LOAD_ALONE_S)
            bundle, opened = await opening
        async with self._deciding:
            self._check_space(bundle.manifest, allowed)
            self._check_encoder(bundle)
            # Another command may have added it meanwhile.
            missing = None if self._known(bundle) else opened
            new = self._add(folder, missing) if missing else self._find(bundle.manifest.id)
            if promote:
                return await self._introduce(
                    "load", new, command.by, command.keep_old, command.aliases
                )
            return await self._stand_by(new, command)

    async def _open_new(self, folder: Path, allowed: bool) -> tuple[Bundle, OpenedBundle | None]:
        """Load a bundle, and open it unless it is served already.

        allowed: whether its embedding space may differ from the current one
        """
        seconds = self._settings.load_timeout_s + STOP_S
        with self._listed(folder):
            try:
                async with asyncio.timeout(seconds):
                    own = await asyncio.to_thread(fetch_bundle, folder)
                    bundle = await asyncio.to_thread(bundles.load, own)
                if self._known(bundle):
                    return bundle, None
                self._check_space(bundle.manifest, allowed)
                self._check_encoder(bundle)
                if bundle.manifest.encoder is None:  # heads have no graph, which could crash
                    await self._trial(self._settings, own)
                async with asyncio.timeout(seconds):
                    opened = await asyncio.to_thread(self._device.open, bundle)
            except TimeoutError:  # its thread goes on until the runtime's current operator ends
                raise BundleError(folder, f"loading it takes more than {seconds:g} s") from None
        return bundle, opened

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
        states = {model.id: model.state for model in self.models}
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
            await self._subscriber.adopt(models, self._device.texts)
        except (ValueError, BadBundle) as error:
            self.models = before
            await self._subscriber.adopt(before, self._device.texts)
            raise BadBundle(str(error)) from None
        finally:
            self._let_go_of({model.id: model for model in (*before, *models)})
        await self._report({"resume": {"models": [*map(kept_of, models)]}})

    def _let_go_of(self, models: Mapping[str, ServedModel]) -> None:
        """Start to unload the models that are no longer served."""
        for name in models.keys() - {model.id for model in self.models} - self._going.keys():
            self._going[name] = models[name], asyncio.create_task(self._let_go(name))

    async def _let_go(self, name: str) -> None:
        assert self._subscriber is not None
        await self._subscriber.left(name)
        model, _ = self._going[name]
        await asyncio.to_thread(forget, model.path, model.sha256)
        await self._device.drop(name)
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

    def _known(self, bundle: Bundle) -> bool:
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

    def _check_encoder(self, bundle: Bundle) -> None:
        """Raise Conflict for heads whose encoder is not served, or is being unloaded."""
        if bundle.manifest.encoder is None:
            return
        try:
            encoder = self._device.encoder_of(bundle.path, bundle.manifest)
        except BundleError as error:
            raise Conflict(str(error)) from None
        if encoder in self._going:
            raise Conflict(f"{bundle.path}: its encoder {encoder} is being unloaded")

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
        return {
            "id": model.id,
            "path": model.path,
            "sha256": model.sha256,
            "state": model.state,
            "since": moment(model.since),
            "embedding_space": self._manifest(model).embedding_space,
            "requests": self._device.requests(model.id),
            "shadow": model.shadow,
            "aliases": model.aliases,
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


def check_answers(model: str, compared: Counts, max_changed: float, min_compared: int) -> None:
    """Raise ChangedAnswers when too few results were compared, or too large a share of a head's changed or failed."""
    known = {
        head: (at.get("changed", 0) + at.get("failed", 0), at.get("same", 0))
        for head, at in compared.items()
    }
    number = sum(map(sum, known.values()))
    if number < min_compared:
        raise ChangedAnswers(
            f"{model}: {number} answers were compared, and {min_compared} are wanted",
            param="min_compared",
        )
    for head, (changed, same) in known.items():
        if changed > max_changed * (changed + same):
            raise ChangedAnswers(
                f"{model}: of {changed + same} answers of {head}, {changed} changed or failed"
                f" ({changed / (changed + same):.2%}), and {max_changed:.2%} may",
                param="max_changed",
            )


def embeds(manifest: Manifest) -> bool:
    return any(head.gives_vectors for head in manifest.heads.values())


def locate(models_dir: Path | None, path: str, sources: Sequence[str] = ()) -> Path:
    """Return the directory or address of a bundle from its path, or from its name in `models_dir`.

    sources: addresses, with a slash at the end, below which `path` may be
    Raises Forbidden where `models_dir` is unset, and InvalidInput for a path that leads out of it and of all sources.
    """
    if models_dir is not None and (root_url := address(models_dir)):
        sources = (*sources, f"{root_url}/")
        path = path if address(path) else f"{root_url}/{path}"
    if url := address(path):
        if any(url.startswith(one) and BELOW.fullmatch(url, len(one)) for one in sources):
            return Path(url)
        allowed = ", ".join(sources) or "model_sources is unset"
        raise InvalidInput(f"path: {url} is not below {allowed}", param="path")
    if models_dir is None:
        raise Forbidden("models_dir is unset: set it to load and unload bundles")
    root = models_dir.absolute()
    try:
        parts = (root / path).relative_to(root).parts
        folders = [root.joinpath(*parts[: end + 1]) for end in range(len(parts))]
        if not parts or any(part.startswith(".") for part in parts):
            raise ValueError(f"is not a directory in {root}")
        for folder in folders:
            # Not `is_symlink`, which from Python 3.14 on returns False for a name that is too long.
            with suppress(FileNotFoundError):
                if stat.S_ISLNK(folder.lstat().st_mode):
                    raise ValueError("must not contain a symbolic link")
    except (ValueError, OSError) as error:
        raise InvalidInput(f"path: {error}", param="path") from None
    return folders[-1]


def kept_of(model: ServedModel) -> dict[str, Any]:
    return {field.name: getattr(model, field.name) for field in fields(ModelRecord)}


def moment(seconds: float) -> str:
    """Format seconds of `time.time` as an ISO 8601 time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
