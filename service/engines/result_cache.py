"""Results that are computed once: a device that remembers the outputs of windows.

The key of an output is the model, the heads and the tokens of its window, so a remembered output has the bytes of the
computed one. Windows that are being computed count as remembered: a second request waits for the first one's outputs.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from service.engines.device import Device
from service.scheduling.entries import Entry, EntryOutcome, Heads, OnOutcome, Outcome, Outputs
from service.scheduling.load import Load

ENTRY_BYTES = 400  # of a remembered window, in addition to its outputs
FOUND = ("hit", "joined", "computed")

ObserveFound = Callable[[Mapping[str, int]], None]


class Key(NamedTuple):
    """The identity of the outputs of a window. tenant: of the request; digest: of the tokens"""

    bundle: str
    heads: Heads
    digest: bytes
    tenant: str

    @property
    def bundles(self) -> set[str]:
        """The ids of all bundles that compute the outputs; a head of another bundle has its id before a slash."""
        return {self.bundle, *(head.rpartition("/")[0] or self.bundle for head in self.heads)}


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """A window that is being computed. outputs: None if it failed; priority: of its request"""

    key: Key
    outputs: asyncio.Future[Outputs | None]
    priority: int


class ResultCache:
    """A device that remembers the outputs of another one, up to a number of bytes; the least recently used go first.

    shared: whether all tenants share the outputs; otherwise none can learn from a fast response what another has asked
    observe: called with the number of windows of each request by `FOUND`
    """

    def __init__(self, device: Device, max_bytes: int, shared: bool, observe: ObserveFound) -> None:
        self.loads, self.alive = device.loads, device.alive
        self.bytes = 0
        self._device = device
        self._max_bytes = max_bytes
        self._shared = shared
        self._observe = observe
        self._outputs: OrderedDict[Key, Outputs] = OrderedDict()
        self._running: dict[Key, Running] = {}
        self._models: dict[str, str] = {}

    @property
    def max_queue_tokens(self) -> int:
        return self._device.max_queue_tokens

    def load(self) -> Load:
        """Return the device's load. Each entry has one window, which may be remembered."""
        return replace(self._device.load(), entry_size=1)

    def keep(self, models: Mapping[str, str]) -> None:
        """Forget the outputs of all models but these. models: the hash of each bundle by its id"""
        former, self._models = self._models, dict(models)
        gone = {name for name, sha256 in former.items() if models.get(name) != sha256}
        for key in [key for key in self._outputs if not gone.isdisjoint(key.bundles)]:
            self._forget(key)

    async def submit(
        self, entries: Sequence[Entry], on_outcome: OnOutcome | None = None
    ) -> list[EntryOutcome]:
        """Compute one request, as the device does, but remembered windows without the device."""
        outcomes: dict[Entry, EntryOutcome] = {}
        missing: dict[Entry, Running] = {}
        joined: dict[Entry, asyncio.Future[Outputs | None]] = {}

        def add(entry: Entry, outcome: EntryOutcome) -> None:
            if entry in missing:
                self._end(missing[entry], outcome)
            outcomes[entry] = outcome
            if on_outcome is not None:
                on_outcome(entry, outcome)

        for entry in entries:
            key = self._key(entry)
            if key in self._outputs:
                self._outputs.move_to_end(key)
                add(entry, remembered(self._outputs[key]))
            elif (running := self._running.get(key)) and running.priority <= entry.priority:
                joined[entry] = running.outputs
            else:
                outputs = asyncio.get_running_loop().create_future()
                missing[entry] = self._running[key] = Running(key, outputs, entry.priority)
        self._observe(dict(zip(FOUND, (len(outcomes), len(joined), len(missing)), strict=True)))
        try:
            await self._compute([*missing], add, on_outcome)
        finally:
            for running in missing.values():
                self._end(running)
        failed = []
        for entry, future in joined.items():
            found = await asyncio.shield(future)
            if found is None:
                failed.append(entry)
            else:
                add(entry, remembered(found))
        await self._compute(failed, add, on_outcome)
        return [outcomes[entry] for entry in entries]

    async def _compute(
        self, entries: Sequence[Entry], add: OnOutcome, on_outcome: OnOutcome | None
    ) -> None:
        """Compute entries on the device. on_outcome: that of the request, if it wants each outcome at once"""
        if not entries:
            return
        if on_outcome is not None:
            await self._device.submit(entries, add)
            return
        for entry, outcome in zip(entries, await self._device.submit(entries), strict=True):
            add(entry, outcome)

    def _end(self, running: Running, outcome: EntryOutcome | None = None) -> None:
        """Give the outputs of a computed window to the requests that wait for them, and remember them."""
        key = running.key
        if self._running.get(key) is running:
            del self._running[key]
        outputs = copied(outcome.outputs, key.heads) if isinstance(outcome, Outcome) else None
        if not running.outputs.done():
            running.outputs.set_result(outputs)
        if outputs is None or key in self._outputs or not key.bundles <= self._models.keys():
            return
        self._outputs[key] = outputs
        self.bytes += size_of(outputs)
        while self.bytes > self._max_bytes:
            self._forget(next(iter(self._outputs)))

    def _forget(self, key: Key) -> None:
        self.bytes -= size_of(self._outputs.pop(key))

    def _key(self, entry: Entry) -> Key:
        window = entry.window
        digest = hashlib.blake2b(window.input_ids.tobytes(), digest_size=32)
        digest.update(window.token_type_ids.tobytes())
        digest.update(window.hidden.to_bytes(8))
        tenant = "" if self._shared else entry.tenant
        return Key(entry.bundle, entry.heads, digest.digest(), tenant)


def remembered(outputs: Outputs) -> Outcome:
    """Return the outcome of a window that rode in no batch."""
    return Outcome(outputs, 0.0, 0.0, 0, 0, 1.0)


def copied(outputs: Outputs, heads: Heads) -> Outputs:
    """Return the outputs of these heads, or of all if empty, in read-only arrays that are no part of a whole batch."""
    found = {name: np.array(outputs[name]) for name in heads or outputs}
    for output in found.values():
        output.flags.writeable = False
    return found


def size_of(outputs: Outputs) -> int:
    return ENTRY_BYTES + sum(output.nbytes for output in outputs.values())
