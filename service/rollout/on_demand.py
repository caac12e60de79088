"""A device that opens a listed model at its first request, within a memory budget.

A model is *cold* while its sessions are not open. Its first request opens it, and all requests for it wait for that,
until shortly before their deadlines. If the budget is used up, the model that was used least recently is closed first,
after its last answer. Two models are opened at a time where there are two cores, other openings wait.

After a crash all models are cold, and `open_all` opens those again that were open, the busiest first. A model whose
openings or requests have ended the process several times in a row is set aside: its requests fail, and the other
models are served.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from service.core import bundle as bundles
from service.core.addresses import address
from service.core.bundle import BundleError
from service.core.bundle_cache import stored_bundle
from service.core.session import RUNTIME_ERRORS, trim
from service.engines.local_device import LocalDevice, OpenedBundle, outputs_of
from service.engines.proofs import FILE, Proof, Proofs, identify
from service.errors import NotReady, Overloaded, UnknownModel
from service.scheduling.entries import Entry, EntryOutcome, OnOutcome
from service.scheduling.load import Load
from service.settings import Settings, usable_cores

log = structlog.get_logger()

OPENING_ERRORS: tuple[type[Exception], ...] = (BundleError, OSError, *RUNTIME_ERRORS)

MARGIN_S = 0.05  # before a request's deadline, in which its error still reaches the client
OPEN_S = 1.0  # expected seconds of an opening without a proof
STRIKES = 3  # ends of the process in a row, without an answer in between, that set a model aside
SET_ASIDE_RETRY_S = 60.0
AT_ONCE = 2  # openings; each takes one core, and for a moment up to twice its model's memory

Trial = Callable[[Settings, Path], Awaitable[Proof | None]]


@dataclass(slots=True)
class Listed:
    """A model that can be opened.

    path: the bundle's directory or address
    reserved: bytes of the budget while it is open; 0 for a model that stays open
    """

    path: str
    sha256: str
    reserved: int


class OnDemandDevice:
    """The interface `Device` in front of a local device, whose models it opens and closes.

    changed: called when a model was opened, closed or set aside
    opening: awaited with the ids of all models that are being opened, when they change
    """

    def __init__(
        self,
        device: LocalDevice,
        settings: Settings,
        trial: Trial,
        changed: Callable[[], None],
        opening: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:
        self.listed: dict[str, Listed] = {}
        self.problems: dict[str, str] = {}  # why a model is set aside, by id
        self.strikes = Counter[str]()
        self.alive = device.alive
        self._device = device
        self._settings = settings
        self._trial = trial
        self._changed = changed
        self._report_opening = opening
        self._ready: set[str] = set()  # open, and not about to be closed
        self._struck: set[str] = set()  # by the end of the previous process
        self._openings: dict[str, asyncio.Task[None]] = {}
        self._opening_now: list[str] = []  # the openings that have begun in this process
        self._lock = asyncio.Lock()  # of the beginning of an opening
        self._trying = asyncio.Lock()  # of openings in a process of their own
        self._waiting = Counter[str]()  # tokens of requests that wait for an opening, by model
        self._used: dict[str, float] = {}  # when a model last got a request, by `time.monotonic`
        self._recent = Counter[str]()  # requests since the last `rank`
        self._rates: dict[str, float] = {}
        root = settings.models_dir if settings.memory_budget is not None else None
        root = None if root is None or address(root) else root
        conditions = settings.precision, settings.provider, usable_cores(), device.slots
        self.proofs = Proofs(root / FILE if root else None, *conditions)

    # -- the interface of a device ----------------------------------------------------------------

    @property
    def max_queue_tokens(self) -> int:
        return self._device.max_queue_tokens

    def load(self) -> Load:
        load = self._device.load()
        if self.listed and len(self.problems) == len(self.listed):
            return replace(load, problem=load.problem or next(iter(self.problems.values())))
        return load

    def loads(self) -> dict[str, Load]:
        return {self._device.kind.name: self.load()}

    def submit(
        self, entries: Sequence[Entry], on_outcome: OnOutcome | None = None
    ) -> Awaitable[list[EntryOutcome]]:
        if not entries:
            return self._device.submit(entries)
        name = entries[0].bundle
        if self.problems:
            self._check_heads(entries[0])
        self._recent[name] += 1
        self._used[name] = time.monotonic()
        if name in self._ready:
            return self._device.submit(entries, on_outcome)
        return self._submit_cold(name, entries, on_outcome)

    def _check_heads(self, entry: Entry) -> None:
        """Raise NotReady if an entry is for a head bundle that is set aside."""
        for name, problem in self.problems.items():
            if outputs_of(self._device.texts[name].manifest) & {*entry.heads}:
                raise NotReady(problem, retry_after_s=SET_ASIDE_RETRY_S)

    async def _submit_cold(
        self, name: str, entries: Sequence[Entry], on_outcome: OnOutcome | None
    ) -> list[EntryOutcome]:
        deadline = min(entry.deadline for entry in entries)
        tokens = sum(entry.tokens for entry in entries)
        if self._waiting.total() + tokens > self.max_queue_tokens:
            raise Overloaded(
                f"{self._waiting.total()} tokens wait for models that are being opened, and {tokens} more would exceed"
                f" max_queue_tokens, {self.max_queue_tokens}"
            )
        self._waiting[name] += tokens
        try:
            while name not in self._ready:
                await self.open(name, deadline)
            answer = self._device.submit(entries, on_outcome)
        finally:
            self._waiting[name] -= tokens
        return await answer

    # -- models -----------------------------------------------------------------------------------

    def enlist(self, name: str, listed: Listed, is_open: bool) -> None:
        """Let requests for a model of the device open it, or use it if it is open."""
        self.listed[name] = listed
        if is_open:
            self._ready.add(name)

    async def add_heads(self) -> None:
        """Open the listed head bundles whose encoders are open; set those aside that cannot be opened."""
        for name, listed in [*self.listed.items()]:
            is_due = self._encoder_of(name) != name and self._device.is_open(name)
            if is_due and not {name} & (self._ready | self.problems.keys()):
                try:
                    folder = await asyncio.to_thread(stored_bundle, listed.path, listed.sha256)
                    self._device.add(await self._open(folder, listed.sha256))
                    self._ready.add(name)
                except OPENING_ERRORS as error:
                    self._fail(name, error)

    def _encoder_of(self, name: str) -> str:
        """Return the id of the encoder that a model's requests reach: its own, or that of a head bundle."""
        encoder = self._device.texts[name].manifest.encoder
        return encoder.id if encoder else name

    async def drop(self, name: str) -> None:
        """Remove a model once all accepted requests for it are answered, and its opening has ended."""
        self._ready.discard(name)
        self.listed.pop(name, None)
        if opening := self._openings.get(name):
            await asyncio.wait({opening})
        await self._device.drop(name)
        for known in (self.problems, self.strikes, self._used, self._rates, self._recent):
            known.pop(name, None)

    async def pin(self, name: str) -> None:
        """Open a model that then stays open, also one that was set aside. Raises NotReady if it cannot be opened."""
        for known in (self.problems, self.strikes):
            known.pop(name, None)
        encoder = self._encoder_of(name)
        self.listed[encoder].reserved = 0
        while encoder not in self._ready:
            await self.open(encoder)
        await self.add_heads()

    async def open(self, name: str, deadline: float | None = None) -> None:
        """Open a model, or wait for its opening. Raises NotReady if that fails, or does not end before the deadline."""
        if problem := self.problems.get(name):
            raise NotReady(problem, retry_after_s=SET_ASIDE_RETRY_S)
        if name not in self.listed:
            raise UnknownModel(f"no model {name!r} is served here", param="model")
        name = self._encoder_of(name)
        if name in self._ready:
            return
        if name not in self._openings:
            self._openings[name] = asyncio.create_task(self._open_next(name))
        left_s = None if deadline is None else max(deadline - MARGIN_S - time.monotonic(), 0.0)
        opened, _ = await asyncio.wait({self._openings[name]}, timeout=left_s)
        for task in opened:
            task.result()
        if not opened:
            expected_s = len(self._openings) * OPEN_S
            raise NotReady(
                f"{name} is being opened, and is not ready before the request's deadline",
                retry_after_s=expected_s,
            )

    async def _open_next(self, name: str) -> None:
        """Open a model when there is room for it; set it aside if that fails.

        An on-demand model without a proof is opened in a process of its own first, which other openings do not wait
        for. That process proves the goldens, so that this one needs not compute them.
        """
        listed = self.listed[name]
        try:
            folder = await asyncio.to_thread(stored_bundle, listed.path, listed.sha256)
            if listed.reserved and self.proofs.get(folder, listed.sha256) is None:
                await self._try(folder, listed.sha256)
            await self._begin(name, listed.reserved)
            try:
                await self._report_opening([*self._opening_now])
                opened = await self._open(folder, listed.sha256)
                if name in self.listed:
                    self._device.add(opened)
                    self._used[name] = time.monotonic()
                    await self.add_heads()
                    self._ready.add(name)
                    log.info("opened", model=name)
            finally:
                self._opening_now.remove(name)
                await self._report_opening([*self._opening_now])
        except OPENING_ERRORS as error:
            self._fail(name, error)
        finally:
            del self._openings[name]
        self._changed()

    async def _try(self, folder: Path, sha256: str) -> None:
        """Open a bundle in a process of its own, and keep its proof unless the files have changed meanwhile."""
        async with self._trying:
            files = await asyncio.to_thread(identify, folder)
            proof = await self._trial(self._settings, folder)
            if proof is not None and files == await asyncio.to_thread(identify, folder):
                await asyncio.to_thread(self.proofs.put, folder, sha256, proof)

    async def _begin(self, name: str, needed: int) -> None:
        """Wait until an opening may begin, with room in the budget."""
        async with self._lock:
            while not (self._may_begin(name) and await self._make_room(needed)):
                opening = [self._openings[other] for other in self._opening_now]
                await asyncio.wait(opening, return_when=asyncio.FIRST_COMPLETED)
            self._opening_now.append(name)

    async def _open(self, folder: Path, sha256: str) -> OpenedBundle:
        """Open a bundle, without its goldens if they are proven. Raises one of OPENING_ERRORS."""
        proof = self.proofs.get(folder, sha256)
        bundle = await asyncio.to_thread(bundles.load, folder, proven=proof is not None)
        if bundle.sha256 != sha256:
            raise BundleError(folder, "it has changed since it was listed")
        opened = await asyncio.to_thread(self._device.open, bundle, proof)
        if opened.proof is not proof and not opened.heads:
            await asyncio.to_thread(self.proofs.put, folder, sha256, opened.proof)
        return opened

    def _may_begin(self, name: str) -> bool:
        """Return whether a model may be opened next to those that are being opened.

        A model that may have ended the process is opened alone, so that another end is due to it.
        """
        alone = self.strikes.keys() & {name, *self._opening_now}
        return len(self._opening_now) < (1 if alone else min(AT_ONCE, usable_cores()))

    async def _make_room(self, needed: int) -> bool:
        """Close models, the least recently used first, until the budget has room. Idle models come first.

        Return False if models that are being opened leave no room.
        """
        budget = self._settings.memory_budget
        while budget is not None and self._reserved() + needed > budget:
            open_now = [name for name in self._ready if self.listed[name].reserved]
            if not open_now:
                return not self._opening_now
            name = min(open_now, key=lambda name: (self._is_busy(name), self._used[name]))
            self._ready -= {own for own in self._ready if self._encoder_of(own) == name}
            await self._device.close(name)
            await asyncio.to_thread(trim)
            log.info("closed", model=name)
        return True

    def _is_busy(self, name: str) -> bool:
        return bool(self._waiting[name] or self._device.batcher.requests(name))

    def _reserved(self) -> int:
        held = self._ready.union(self._opening_now) & self.listed.keys()
        return sum(self.listed[name].reserved for name in held)

    # -- after a crash ----------------------------------------------------------------------------

    async def open_all(self, names: Iterable[str]) -> None:
        """Open models in this order, those last that were in use when the process ended."""
        for name in sorted(names, key=lambda name: self.strikes[name] > 0):
            with suppress(NotReady, UnknownModel):
                await self.open(name)

    def strike(self, names: Iterable[str]) -> None:
        """Count the end of the previous process against these models, once. Set aside those that caused several.

        The last model that is served is not set aside, because the end of the process may be due to a single input.
        """
        for name in {*names} - self._struck:
            self._struck.add(name)
            self.strikes[name] += 1
            others = self.listed.keys() - self.problems.keys() - {name}
            if self.strikes[name] >= STRIKES and name in self.listed and others:
                self.set_aside(name, f"it has ended the inference process {STRIKES} times in a row")

    def _fail(self, name: str, error: Exception) -> None:
        self.set_aside(name, f"it cannot be opened: {' '.join(str(error).split())}")

    def set_aside(self, name: str, reason: str) -> None:
        self.problems[name] = f"{name} is set aside: {reason}; load it again to retry"
        log.error("set aside", model=name, reason=reason)
        self._changed()

    def acquit(self) -> None:
        """Forget the strikes of models that have answered since."""
        for name in [name for name in self.strikes if self._device.has_answered(name)]:
            del self.strikes[name]

    def rank(self) -> list[str]:
        """Return the open models, the busiest first. Older requests count less with each call."""
        for name in self._recent.keys() | self._rates.keys():
            self._rates[name] = self._rates.get(name, 0.0) / 2 + self._recent.pop(name, 0)
        return sorted(self._ready, key=lambda name: -self._rates.get(name, 0.0))

    def state(self, name: str) -> dict[str, Any]:
        """Return the fields of `ServedModel` that describe whether a model is open."""
        listed = self.listed.get(name)
        return {
            "runs_on": self._device.runs_on[name],
            "cold": not self._device.is_open(name),
            "reserved": listed.reserved if listed else 0,
            "problem": self.problems.get(name, ""),
        }
