"""A directory of bundles, looked at again and again: what has come is loaded, what has gone is unloaded.

It is looked at, for many file systems of networks and containers tell nobody of changes. What lies there is loaded when
it was the same at two looks, so that a copy that is under way is left alone; what must not be served is tried again
when it has changed, and told of no sooner. The orders are an administrator's own, done by the `ModelManager`.
"""

import asyncio
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from service.core.bundle import MANIFEST
from service.engines.commands import LoadModel, UnloadModel
from service.engines.model_state import ServedModel
from service.errors import Conflict, QuartetError
from service.rollout.model_manager import ModelManager
from service.settings import Settings

log = structlog.get_logger()

BY = "models_dir"  # who asks, for the log


@dataclass(frozen=True, slots=True)
class SeenBundle:
    """A bundle as it lies there.

    files: name, size and time of change of each; sha256: of the manifest; name: the model's, if it can be read;
    came: when it came to be here, in nanoseconds: its manifest, or the whole folder where that was moved
    """

    files: tuple[tuple[str, int, int], ...]
    sha256: str
    name: str | None
    came: int


Look = Mapping[Path, SeenBundle | None]


def scan_bundles(root: Path) -> dict[Path, SeenBundle | None]:
    """All that lies there and has a manifest, but for links and what is hidden. Raises OSError.

    What is there and cannot be read just now is None.
    """
    found: dict[Path, SeenBundle | None] = {}
    for folder in root.iterdir():
        if not folder.name.startswith(".") and not folder.is_symlink():
            try:
                found[folder] = examine(folder)
            except (FileNotFoundError, NotADirectoryError):  # no bundle, or one that is just going
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


def read_name(manifest: bytes) -> str | None:
    with suppress(ValueError, TypeError, KeyError):
        return str(json.loads(manifest)["name"])
    return None


class DirectoryWatcher:
    """Has a curator serve what lies in a directory."""

    def __init__(self, root: Path, manager: ModelManager) -> None:
        self._root = root.absolute()
        self._manager = manager
        self._last: Look = {}
        self._known: dict[Path, SeenBundle] = {}  # what was loaded, or refused, as it was then
        self._stuck: dict[
            Path, object
        ] = {}  # how things stood when others stood in these ones' way
        self._blind = False

    async def run(self, every_s: float) -> None:
        """Look so often."""
        while True:
            try:
                await self.heed(await asyncio.to_thread(scan_bundles, self._root))
                self._blind = False
            except OSError as error:
                self._tell(error)
            except Exception:
                log.exception("unexpected error")
            await asyncio.sleep(every_s)

    async def heed(self, now: Look) -> None:
        """Have that served which lies there now: first what came, so that a name goes on being answered for."""
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
        """Let it answer for its name, if no other of that name came later."""
        self._stuck.pop(folder, None)
        if any(model.sha256 == seen.sha256 for model in self._manager.models):
            return  # by the command line, an administrator, or the process before this one
        rivals = [other.came for other in bundles if other.name == seen.name]
        promote = seen.came >= max(rivals)
        try:
            await self._manager.execute(LoadModel(path=str(folder), promote=promote, by=BY))
        except Conflict:
            self._stuck[folder] = self._manager.standing
        except QuartetError:  # which the curator has told of, as of conflicts
            pass

    async def _unload(self, folder: Path) -> None:
        """Whoever answers for its name goes last, lest another of them gets to.

        Where that is refused, as of the last one that is served, it is tried again when others are served.
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
        """Whether something was in its way that may be there no longer."""
        return folder in self._stuck and self._stuck[folder] != self._manager.standing

    def _of(self, folder: Path) -> Sequence[ServedModel]:
        return [model for model in self._manager.models if Path(model.path).absolute() == folder]

    def _tell(self, error: OSError) -> None:
        """A directory that cannot be read is told of once, and says nothing of what lies in it."""
        if not self._blind:
            log.error("models_dir cannot be read", problem=str(error))
        self._blind = True


async def watch(manager: ModelManager, settings: Settings) -> None:
    """Watch the directory of the settings, if they want it."""
    if settings.models_dir is not None and settings.watch_s is not None:
        await DirectoryWatcher(settings.models_dir, manager).run(settings.watch_s)
