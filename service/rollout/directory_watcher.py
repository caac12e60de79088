"""A watcher that loads the bundles that appear in a directory, and unloads those that disappear from it.

The watcher scans the directory periodically, because many network and container file systems do not report changes. It
loads a bundle once two scans in a row have found the same files, so that it ignores an unfinished copy. It retries and
logs a rejected bundle only after the files have changed. It changes models by the same commands as an administrator,
which the `ModelManager` executes.
"""

import asyncio
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from service.core.addresses import address, full_name
from service.core.bundle import MANIFEST, BundleError
from service.core.bundle_cache import Unreachable, fetch_bundle
from service.core.remote_files import files_at
from service.engines.commands import LoadModel, UnloadModel
from service.engines.model_state import ServedModel
from service.errors import Conflict, QuartetError
from service.rollout.model_manager import ModelManager
from service.settings import Settings

log = structlog.get_logger()

BY = "models_dir"  # the origin of the commands, for the log


@dataclass(frozen=True, slots=True)
class SeenBundle:
    """The state of a bundle's directory at a scan."""

    # Name, size in bytes and modification time in nanoseconds of each file; at an address, name and version.
    files: tuple[tuple[str, int, int] | tuple[str, str], ...]
    sha256: str  # of the manifest
    name: str | None  # the model's, if the manifest can be read
    # Arrival time in nanoseconds: the later status change of the manifest and of the directory, which may be moved.
    came: int


Look = Mapping[Path, SeenBundle | None]


def scan_bundles(root: Path) -> dict[Path, SeenBundle | None]:
    """Return directories with a manifest, except links and hidden ones; None for an unreadable one. Raises OSError."""
    found: dict[Path, SeenBundle | None] = {}
    for folder in root.iterdir():
        if not folder.name.startswith(".") and not folder.is_symlink():
            try:
                found[folder] = examine(folder)
            # No bundle, or one that is being removed.
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                found[folder] = None
    return found


def examine(folder: Path) -> SeenBundle:
    manifest = folder / MANIFEST
    text = manifest.read_bytes()
    came = max(path.stat().st_ctime_ns for path in (manifest, folder))
    stats = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
    files = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    return SeenBundle(files, hashlib.sha256(text).hexdigest(), read_name(text), came)


def scan_address(url: str) -> dict[Path, SeenBundle | None]:
    """Return addresses with a manifest below an address, except hidden ones. Raises OSError."""
    store, folders = files_at(url), defaultdict[str, list[tuple[str, str]]](list)
    listing = store.list()
    for path, (version, _) in sorted(listing.items()):
        folder, _, name = path.partition("/")
        if name and not folder.startswith("."):
            folders[folder].append((name, version))
    found: dict[Path, SeenBundle | None] = {}
    for folder, files in folders.items():
        manifest = f"{folder}/{MANIFEST}"
        if manifest in listing:
            with store.open(manifest) as file:
                text = file.read()
            _, came = listing[manifest]
            sha256 = hashlib.sha256(text).hexdigest()
            found[Path(url, folder)] = SeenBundle(tuple(files), sha256, read_name(text), came)
    return found


def read_name(manifest: bytes) -> str | None:
    with suppress(ValueError, TypeError, KeyError):
        return str(json.loads(manifest)["name"])
    return None


class DirectoryWatcher:
    """A watcher that keeps a model manager's models equal to the bundles in a directory."""

    def __init__(self, root: Path, manager: ModelManager, on_demand: bool = False) -> None:
        url = address(root)
        self._scan = partial(scan_address, url) if url else partial(scan_bundles, root.absolute())
        self._manager = manager
        self._on_demand = on_demand
        self._last: Look = {}
        # The state in which a bundle was loaded or refused.
        self._known: dict[Path, SeenBundle] = {}
        self._stuck: dict[Path, object] = {}  # the manager's state at a conflict, by directory
        self._blind = False

    async def run(self, every_s: float) -> None:
        """Scan the directory every `every_s` seconds, without end."""
        while True:
            try:
                await self.heed(await asyncio.to_thread(self._scan))
                self._blind = False
            except OSError as error:
                self._tell(error)
            except Exception:  # the next scan may succeed
                log.exception("unexpected error")
            await asyncio.sleep(every_s)

    async def heed(self, now: Look) -> None:
        """Load and unload bundles after a scan; load first, so that a name always has a served version."""
        before, self._last = self._last, now
        bundles = {
            folder: known
            for folder, seen in now.items()
            if (known := seen or self._known.get(folder)) is not None
        }
        self._manager.resident = {seen.sha256 for seen in bundles.values()}
        gone = self._known.keys() - now.keys() - before.keys()
        for folder, seen in sorted(bundles.items(), key=lambda item: (item[1].came, item[0])):
            new = seen != self._known.get(folder)
            if before.get(folder) == seen and (new or self._may_try_again(folder)):
                self._known[folder] = seen
                await self._load(folder, seen, bundles.values())
        for folder in gone:
            await self._unload(folder)

    async def _load(self, folder: Path, seen: SeenBundle, bundles: Iterable[SeenBundle]) -> None:
        """Load a bundle; promote it if no other bundle of its name arrived later."""
        self._stuck.pop(folder, None)
        if any(model.sha256 == seen.sha256 for model in self._manager.models):
            return  # loaded by the command line, an administrator, or the previous process
        rivals = [other.came for other in bundles if other.name == seen.name]
        promote = seen.came >= max(rivals)
        try:
            await asyncio.to_thread(fetch_bundle, folder)
        except Unreachable as error:
            del self._known[folder]  # the next scan tries again
            self._tell(error)
            return
        except BundleError:  # the manager finds it again, and logs it
            pass
        try:
            await self._manager.execute(
                LoadModel(path=str(folder), promote=promote, by=BY, on_demand=self._on_demand)
            )
        except Conflict:
            self._stuck[folder] = self._manager.standing
        except QuartetError:  # the manager has logged it, as it logs conflicts
            pass

    async def _unload(self, folder: Path) -> None:
        """Unload the versions of a removed directory, the current one last, so that none of the others becomes current.

        A refused command, such as for the last served model, is retried when the served models have changed.
        """
        if folder in self._stuck and not self._may_try_again(folder):
            return
        try:
            for model in sorted(self._of(folder), key=lambda model: model.state == "current"):
                await self._manager.execute(UnloadModel(model=model.id, by=BY))
        except QuartetError:
            self._stuck[folder] = self._manager.standing
        else:
            del self._known[folder]
            self._stuck.pop(folder, None)

    def _may_try_again(self, folder: Path) -> bool:
        """Return whether a command for this directory was refused and the served models have changed since then."""
        return folder in self._stuck and self._stuck[folder] != self._manager.standing

    def _of(self, folder: Path) -> Sequence[ServedModel]:
        own = full_name(folder)
        return [model for model in self._manager.models if full_name(model.path) == own]

    def _tell(self, error: Exception) -> None:
        """Log once that the directory cannot be read; its bundles stay as they are."""
        if not self._blind:
            log.error("models_dir cannot be read", problem=str(error))
        self._blind = True


async def watch(manager: ModelManager, settings: Settings) -> None:
    """Watch `models_dir` if it and `watch_s` are set."""
    if settings.models_dir is not None and settings.watch_s is not None:
        on_demand = settings.memory_budget is not None
        await DirectoryWatcher(settings.models_dir, manager, on_demand).run(settings.watch_s)
