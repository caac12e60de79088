"""The files that API keys come from, read again when they change."""

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

CHECK_S = 0.5  # between two looks at the files

Stamp = tuple[int, int, int, int] | None


class KeyFiles:
    """Calls `changed` with all keys whenever their source has other ones; `keys`: those that are in force."""

    def __init__(self, source: KeySource, keys: Keys, changed: Callable[[Keys], None]) -> None:
        self._source = source
        self._keys = keys
        self._changed = changed

    async def watch(self) -> None:
        """Read the files again on SIGHUP, and after each change once two looks in a row have found the same.

        So a file that is being written is left alone. A link that is set to another file is a change, too.
        """
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
        """Read the files now. If they cannot be read, the keys that are in force stay."""
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
    """What differs once a file was written or replaced, also behind a link; None where it cannot be found."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def differences(before: Keys, after: Keys) -> Mapping[str, list[str]]:
    """The names of keys that came, went or have another record."""
    return {
        "added": sorted(after.keys() - before.keys()),
        "removed": sorted(before.keys() - after.keys()),
        "changed": sorted(
            name for name in before.keys() & after.keys() if before[name] != after[name]
        ),
    }
