"""The device of an HTTP process: a client of the inference process with the interface of `service.engines.device`."""

import asyncio
import math
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import structlog

from service import errors, liveness
from service.engines.commands import Command
from service.engines.model_state import ModelRecord, Subscriber
from service.liveness import LastSign, StallClock
from service.processes import messages
from service.processes.peer import Peer, PeerLost, Reply
from service.scheduling.entries import Entry, EntryOutcome, OnOutcome, Outcome, PendingRequest
from service.scheduling.load import Flow, Load, RemainingWork

log = structlog.get_logger()

STARTING = "the inference process is being started"


class RemoteDevice:
    """A device that computes in the inference process.

    When the inference process is lost, its unanswered requests are sent to the next one, once. They are sent one
    request at a time, with each entry in a batch of its own, so an input that kills the process affects no other
    request the second time. A request that is lost twice fails with ReplicaLost. So does a request that arrives while
    there is no inference process.

    name: of the device
    lost: the requests that processes have lost; devices that share them compute those of each other
    broken: called when a message of the inference process cannot be processed here, or a model table cannot be adopted
    after a reconnection; only a restart of this process can help
    """

    def __init__(
        self,
        broken: Callable[[], None] = lambda: None,
        lost: list[PendingRequest] | None = None,
        name: str = "cpu",
    ) -> None:
        self._name = name
        # Called when a process accepts requests, and when it has lost a request.
        self.when_open: Callable[[], object] = self.compute_lost
        self.when_lost: Callable[[], object] = lambda: None
        self._broken = broken
        self._peer: Peer | None = None
        self._is_open = False  # new requests follow the inference process's model table
        self._load = Load(problem=STARTING)
        self._stall_clock = StallClock(liveness.TICK_S)
        self._last_load = LastSign(self._stall_clock)
        # The requests that are sent, but not part of a load report yet, with their numbers.
        self._unseen: deque[tuple[int, Flow, RemainingWork]] = deque()
        self._lost = [] if lost is None else lost
        self._lost_models: set[str] = set()  # of requests that the last process has lost
        self._resubmission: asyncio.Task[None] | None = None
        self._subscriber: Subscriber | None = None
        self._subscribed = asyncio.Event()
        self._adopting = asyncio.Lock()  # model tables are adopted one after the other
        self._adopted = asyncio.Event()  # whether the first model table was adopted or failed
        self._problem = ""

    async def connect(self, end: socket.socket) -> None:
        """Connect to an inference process. It is used as soon as it has opened its bundles. A previous one is lost."""
        if self._peer is not None:
            self._peer.close()
        self._peer = Peer("inference", self._serve, self._receive, self._forget)
        await self._peer.connect(end)

    @property
    def connected(self) -> bool:
        """Whether there is a channel to an inference process, which may still be opening its bundles."""
        return self._peer is not None and self._peer.open

    async def follow(self, subscriber: Subscriber) -> None:
        """Send the current and all later model tables to a subscriber. Raises ValueError if the first fails."""
        self.subscribe(subscriber)
        await self._adopted.wait()
        if self._problem:
            raise ValueError(self._problem)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Send model tables to a subscriber, as `follow` does, but do not wait for the first."""
        self._subscriber = subscriber
        self._subscribed.set()

    # -- requests to the inference process --------------------------------------------------------

    async def submit(
        self, entries: Sequence[Entry], on_outcome: OnOutcome | None = None
    ) -> list[EntryOutcome]:
        if not entries:
            return []
        peer = self._open_peer()
        request = PendingRequest(entries, asyncio.get_running_loop().create_future(), on_outcome)
        flow, left = entries[0].flow, RemainingWork(sum(e.tokens for e in entries), len(entries))
        self._load.add(flow, left)
        self._unseen.append((peer.sent + 1, flow, left))
        try:
            await self._compute(peer, request)
        except PeerLost:
            self._lost.append(request)
            self._lost_models.add(flow.bundle)
            self.when_lost()
        return await request.future

    def compute_lost(self) -> None:
        """Begin to compute the lost requests, unless this happens already or no process is open."""
        if self._peer is None or not self._is_open:
            return
        if self._resubmission is None or self._resubmission.done():
            self._resubmission = asyncio.create_task(self._compute_lost(self._peer))

    async def _compute(self, peer: Peer, request: PendingRequest, unbatched: bool = False) -> None:
        """Add the outcomes of the missing entries to a request as they arrive. Raises PeerLost and other errors."""
        sent = request.missing

        def receive(message: messages.Message, arrays: bytes) -> None:
            assert isinstance(message, messages.Computed)
            for entry, outcome in outcomes(message, arrays, sent):
                request.add(entry, outcome)

        await peer.call(*submission(request, sent, unbatched), receive=receive)

    async def _compute_lost(self, peer: Peer) -> None:
        """Compute the requests that previous processes have lost, one at a time and small requests first.

        A request whose process is lost again fails, unless the request before it was cancelled and may still have been
        computed.
        """
        is_previous_cancelled = False
        while self._lost and peer.open:
            request = min(self._lost, key=lambda lost: len(lost.missing))
            self._lost.remove(request)
            if request.future.done():
                continue
            work = asyncio.create_task(self._compute(peer, request, unbatched=True))
            request.future.add_done_callback(partial(_cancel, work))
            await asyncio.wait([work])
            error = None if work.cancelled() else work.exception()
            if isinstance(error, PeerLost):
                self._lost_models.add(request.entries[0].bundle)
            if isinstance(error, PeerLost) and is_previous_cancelled:
                self._lost.append(request)
            elif isinstance(error, PeerLost):
                message = "the inference process was lost twice with this request"
                request.fail(errors.ReplicaLost(message))
            elif isinstance(error, errors.QuartetError):
                request.fail(error)
            is_previous_cancelled = request.future.cancelled()

    async def page(self) -> bytes:
        """Return the metrics page. Raises ReplicaLost."""
        _, page = await self._open_peer().call(messages.Render())
        return page

    async def watch_live(self, send: Callable[[bytes], None]) -> None:
        """Call a function with each frame of the live view until cancelled. Raises Overloaded or ReplicaLost."""
        await self._open_peer().call(messages.Watch(), receive=lambda _, frame: send(frame))

    async def execute(self, command: Command) -> Mapping[str, Any]:
        """Execute a command in the inference process. Raises ReplicaLost and the errors of `ModelManager.execute`."""
        reply, _ = await self._open_peer().call(messages.Execute.of(command))
        assert isinstance(reply, messages.Executed)
        return reply.answer

    async def hold(self, models: Sequence[ModelRecord]) -> None:
        """Keep exactly these bundles open. Raises BadBundle, or ReplicaLost."""
        # Encoders first, because heads need theirs.
        ordered = sorted(models, key=lambda model: model.encoder != "")
        bundles = [(model.id, model.path, model.sha256) for model in ordered]
        await self._open_peer().call(messages.Hold(bundles))

    async def follow_metrics(self, observe: Callable[[messages.Observed], None]) -> None:
        """Call a function with the observations of the process until it is lost."""

        def receive(message: messages.Message, _: bytes) -> None:
            assert isinstance(message, messages.Observed)
            observe(message)

        with suppress(errors.ReplicaLost):
            await self._open_peer().call(messages.Follow(), receive=receive)

    def push(self, observed: messages.Observed) -> bool:
        """Send observations to the inference process, which keeps the metrics. Returns False if it is not connected."""
        try:
            self._open_peer().notify(observed)
        except errors.ReplicaLost:
            return False
        return True

    def _open_peer(self) -> Peer:
        """Return the inference process. Raises ReplicaLost if it is not connected, or is still opening its bundles."""
        if self._peer is None or not self._peer.open or not self._is_open:
            raise errors.ReplicaLost(STARTING)
        return self._peer

    # -- the load ---------------------------------------------------------------------------------

    @property
    def max_queue_tokens(self) -> int:
        return self._load.max_queue_tokens

    def load(self) -> Load:
        silent_s = self._last_load.silent_s
        if self._load.ready and silent_s > liveness.LOAD_SILENCE_S:
            problem = f"the inference process has sent nothing for {silent_s:.1f} s"
            return replace(self._load, problem=problem)
        return self._load

    def loads(self) -> Mapping[str, Load]:
        return {self._name: self.load()}

    async def watch(self) -> None:
        """Measure the silence of the inference process, excluding time in which this process was stopped or starved."""
        while True:
            await self._stall_clock.tick()

    def alive(self) -> bool:
        return True  # independent of the inference process, which the main process restarts

    def _receive(self, notice: messages.Message, arrays: bytes) -> None:
        assert isinstance(notice, messages.LoadReport), (
            f"our bug: the inference process sent {notice}"
        )
        if not self._is_open:
            return
        self._load = notice.load
        while self._unseen and self._unseen[0][0] <= notice.seen:
            self._unseen.popleft()
        for _, flow, left in self._unseen:
            self._load.add(flow, left)
        self._last_load.renew()

    def _forget(self, peer: Peer) -> None:
        if peer.broken:
            self._broken()
        self._is_open = False
        self._load = Load(problem=STARTING)
        self._unseen.clear()

    # -- requests from the inference process ------------------------------------------------------

    async def _serve(self, request: messages.Message, arrays: bytes, _: object) -> Reply:
        await self._subscribed.wait()
        assert self._subscriber is not None
        match request:
            case messages.ModelTable():
                async with self._adopting:
                    await self._adopt(self._subscriber, request, arrays)
            case messages.Leave(model):
                await self._subscriber.left(model)
        return messages.Done(), b""

    async def _adopt(
        self, subscriber: Subscriber, table: messages.ModelTable, texts: bytes
    ) -> None:
        """Make new requests follow a model table. Raises BadBundle if that is not possible."""
        problem = ""
        try:
            await subscriber.adopt(table.served, table.read(texts))
        except (ValueError, MemoryError) as error:
            log.debug("cannot adopt the model table", exc_info=True)
            problem = str(error)
        if problem and self._adopted.is_set() and not self._is_open:
            self._broken()  # the first table of a new inference process, which comes only once
        self._problem = problem
        self._adopted.set()
        if problem:
            raise errors.BadBundle(problem)
        if not self._is_open and self._peer is not None:
            self._is_open = True
            if self._lost_models:
                self._peer.notify(messages.Lost([*self._lost_models]))
                self._lost_models.clear()
            self.when_open()


def _cancel(work: asyncio.Task[None], _: object) -> None:
    work.cancel()


def submission(
    request: PendingRequest, entries: Sequence[Entry], unbatched: bool
) -> tuple[messages.Submit, bytes, bytes]:
    """Return entries of a request as a message and its arrays. The entries differ only in their tokens."""
    first = entries[0]
    assert first.heads, "our bug: an entry that goes to another process names its heads"
    hidden = [entry.window.hidden for entry in entries]
    message = messages.Submit(
        bundle=first.bundle,
        heads=[*first.heads],
        lengths=[entry.window.lengths or entry.tokens for entry in entries],
        hidden=hidden if any(hidden) else [],
        request_id=first.request_id,
        arrival=first.arrival,
        deadline=first.deadline,
        priority=first.priority,
        tenant=first.tenant,
        each=request.on_outcome is not None,
        unbatched=unbatched,
    )
    ids = b"".join([entry.window.input_ids.tobytes() for entry in entries])
    types = b"".join([entry.window.token_type_ids.tobytes() for entry in entries])
    return message, ids, types


def outcomes(
    computed: messages.Computed, arrays: bytes, entries: Sequence[Entry]
) -> Iterator[tuple[Entry, EntryOutcome]]:
    """Yield the entries of a message, with their outcomes."""
    start = 0
    failed: dict[int, dict[int, errors.QuartetError]] = {}
    for place, row, code, message in computed.failed:
        failed.setdefault(place, {})[row] = errors.revive(code, message)
    for place, shapes, facts in zip(computed.places, computed.shapes, computed.facts, strict=True):
        entry = entries[place]
        outputs = {}
        for head, shape in zip(entry.heads, shapes, strict=True):
            output = np.frombuffer(arrays, np.float32, math.prod(shape), start).reshape(shape)
            start += output.nbytes
            outputs[head] = output
        yield entry, Outcome(outputs, *facts, failed.pop(place, {}))
    for place, own in failed.items():
        yield entries[place], own[-1]
