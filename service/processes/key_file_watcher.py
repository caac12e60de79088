"""A watcher of the files with API keys, which reads them again when they change."""

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import structlog

from service.keys import Keys
from service.settings_sources import ConfigError, KeySource

log = structlog.get_logger()

CHECK_S = 0.5  # between two checks of the files

Stamp = tuple[int, int, int, int] | None


class KeyFiles:
    """A watcher that calls `changed` with all keys when the files of their source no longer contain `keys`."""

    def __init__(self, source: KeySource, keys: Keys, changed: Callable[[Keys], None]) -> None:
        self._source = source
        self._keys = keys
        self._changed = changed

    async def watch(self) -> None:
        """Read the files on SIGHUP, and after a change (also of a link) once two checks in a row agree."""
        signaled = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, signaled.set)
        known = last = await asyncio.to_thread(self._stamps)
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(signaled.wait(), CHECK_S)
            now = await asyncio.to_thread(self._stamps)
            if signaled.is_set() or now == last != known:
                signaled.clear()
                known = now
                await self.read_again()
            last = now

    async def read_again(self) -> None:
        """Read the files now. If they cannot be read, the previous keys stay valid."""
        try:
            keys = await asyncio.to_thread(self._source.read)
        except ConfigError as error:
            log.error("cannot read API keys; the previous keys stay valid", problem=str(error))
            return
        before, self._keys = self._keys, keys
        log.info("API keys were read again", **differences(before, keys))
        if keys != before:
            self._changed(keys)

    def _stamps(self) -> Mapping[Path, Stamp]:
        return {path: stamp(path) for path in self._source.files}


def stamp(path: Path) -> Stamp:
    """Return a value that changes when a file is written or replaced, also behind a link; None for a missing file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def differences(before: Keys, after: Keys) -> Mapping[str, list[str]]:
    """Return the names of the keys that were added, removed or changed."""
    return {
        "added": sorted(after.keys() - before.keys()),
        "removed": sorted(before.keys() - after.keys()),
        "changed": sorted(
            name for name in before.keys() & after.keys() if before[name] != after[name]
        ),
    }
