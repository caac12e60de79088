"""The HTTP processes from the inference process's side: their requests, and the messages to them."""

import asyncio
import itertools
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import structlog

from service import errors, liveness
from service.core.bundle import BundleTexts
from service.core.encode import Window
from service.engines.device import Device
from service.engines.model_state import Models
from service.engines.registry import ExecuteCommand
from service.observability.metrics import Metrics
from service.processes import messages
from service.processes.peer import Peer, PeerLost, Receive, Reply
from service.scheduling.entries import Entry, EntryOutcome, Outcome
from service.scheduling.load import Load

log = structlog.get_logger()

# Of outputs in one message, which a process copies in one turn of its event loop.
PART_BYTES = 2**20


class HttpPeer(Peer):
    """A connected HTTP process; bundles: those whose texts it has."""

    bundles: frozenset[str] = frozenset()


class HttpPeers:
    """All connected HTTP processes. Their requests are computed while they are connected.

    strike: called with the models whose requests the previous process has lost
    """

    def __init__(
        self,
        device: Device,
        execute: ExecuteCommand,
        metrics: Metrics,
        strike: Callable[[Sequence[str]], None] = lambda _: None,
    ) -> None:
        self._device = device
        self._strike = strike
        self._execute = execute
        self._metrics = metrics
        self._models: Models = ()
        self._texts: Mapping[str, BundleTexts] = {}
        self._peers: set[HttpPeer] = set()
        self._disconnected = asyncio.Event()
        self._first_tables: set[asyncio.Task[None]] = set()

    async def add(self, end: socket.socket) -> None:
        """Connect an HTTP process, and send the model table to it."""
        peer = HttpPeer("HTTP", self._serve, self._receive, self._remove)
        await peer.connect(end)
        if peer.open:
            self._peers.add(peer)
            table = asyncio.create_task(self._send_first_table(peer))
            self._first_tables.add(table)
            table.add_done_callback(self._first_tables.discard)

    async def _send_first_table(self, peer: HttpPeer) -> None:
        """Send the model table to a new HTTP process. Close its channel if the process cannot adopt it."""
        if problem := await self._send_table(peer):
            log.error("an HTTP process cannot activate the served models", problem=problem)
            peer.close()
        self._send_load(peer)

    async def _send_table(self, peer: HttpPeer) -> str:
        """Send the model table, and wait until it is used or the process is lost. Return the problem, or ""."""
        models = self._models
        new = [self._texts[model.id] for model in models if model.id not in peer.bundles]
        try:
            await peer.call(*messages.ModelTable.of(models, new))
        except PeerLost:
            return ""
        except errors.QuartetError as error:
            return error.message
        peer.bundles = frozenset(model.id for model in models)
        return ""

    async def adopt(self, models: Models, texts: Mapping[str, BundleTexts]) -> None:
        """Make all new requests follow this model table. Raises ValueError if a process cannot adopt it."""
        self._models, self._texts = models, texts
        problems = await asyncio.gather(*map(self._send_table, self._peers))
        if problem := next(filter(None, problems), None):
            raise ValueError(problem)

    async def left(self, model_id: str) -> None:
        """Wait until no request uses a bundle any more."""
        await asyncio.gather(*[_leave(peer, model_id) for peer in self._peers])

    async def report_load(self) -> None:
        """Send the load to all HTTP processes regularly. Return when the device fails."""
        while True:
            for peer in self._peers:
                self._send_load(peer)
            if not self._device.alive():
                return
            await asyncio.sleep(liveness.LOAD_REPORT_S)

    def _send_load(self, peer: HttpPeer) -> None:
        peer.notify(messages.LoadReport.of(self._load(), peer.received))

    def _load(self) -> Load:
        return self._device.load()

    async def all_disconnected(self) -> None:
        """Wait until no HTTP process is connected."""
        while self._peers:
            self._disconnected.clear()
            await self._disconnected.wait()

    def _remove(self, peer: Peer) -> None:
        self._peers = {other for other in self._peers if other is not peer}
        self._disconnected.set()

    def _receive(self, notice: messages.Message, _: bytes) -> None:
        if isinstance(notice, messages.Lost):
            self._strike(notice.models)
            return
        assert isinstance(notice, messages.Observed), f"our bug: an HTTP process sent {notice}"
        self._metrics.observe_lost_lines(notice.lost_lines)
        notice.repeat(self._metrics)

    async def _serve(self, request: messages.Message, arrays: bytes, send_part: Receive) -> Reply:
        match request:
            case messages.Submit():
                return await self._compute(request, entries(request, arrays), send_part)
            case messages.Render():
                return messages.Page(), await self._metrics.page()
            case messages.Watch():
                await self._metrics.watch_live(partial(send_part, messages.Page()))
            case messages.Execute():
                answer = await self._execute(request.command)
                return messages.Executed(dict(answer)), b""
        raise TypeError(f"an HTTP process requested {request}")

    async def _compute(
        self, request: messages.Submit, entries: Sequence[Entry], send_part: Receive
    ) -> Reply:
        places = {entry: place for place, entry in enumerate(entries)}
        unsent: dict[int, EntryOutcome] = {}
        size = 0

        def send(entry: Entry, outcome: EntryOutcome) -> None:
            nonlocal size
            unsent[places[entry]] = outcome
            if isinstance(outcome, Outcome):
                size += sum(output.nbytes for output in outcome.outputs.values())
            if request.each or size > PART_BYTES:
                send_part(*computed(request, unsent))
                unsent.clear()
                size = 0

        await self._device.submit(entries, send)
        return computed(request, unsent)


async def _leave(peer: Peer, model_id: str) -> None:
    with suppress(PeerLost):  # it has no requests
        await peer.call(messages.Leave(model_id))


def entries(request: messages.Submit, arrays: bytes) -> list[Entry]:
    ids, types = np.frombuffer(arrays, np.int64).reshape(2, -1)
    heads = tuple(request.heads)
    lengths = [[own] if isinstance(own, int) else own for own in request.lengths]
    ends = itertools.accumulate(map(sum, lengths))
    every_hidden = request.hidden or [0] * len(lengths)
    return [
        Entry(
            bundle=request.bundle,
            window=Window(
                ids[end - sum(own) : end],
                types[end - sum(own) : end],
                hidden=hidden,
                lengths=own if len(own) > 1 else (),
            ),
            request_id=request.request_id,
            arrival=request.arrival,
            deadline=request.deadline,
            priority=request.priority,
            tenant=request.tenant,
            heads=heads,
            unbatched=request.unbatched,
        )
        for own, end, hidden in zip(lengths, ends, every_hidden, strict=True)
    ]


def computed(
    request: messages.Submit, ended: Mapping[int, EntryOutcome]
) -> tuple[messages.Computed, bytes]:
    """Return the outcomes of some entries of a request, by their places, as a message and its arrays."""
    outcomes = {place: o for place, o in ended.items() if isinstance(o, Outcome)}
    outputs = [[outcome.outputs[head] for head in request.heads] for outcome in outcomes.values()]
    message = messages.Computed(
        places=[*outcomes],
        shapes=[[[*output.shape] for output in own] for own in outputs],
        facts=[
            (o.queue_s, o.inference_s, o.batch_size, o.batch_tokens, o.padding_ratio)
            for o in outcomes.values()
        ],
        failed=[
            (place, row, error.code, error.message)
            for place, own in ended.items()
            for row, error in (own.failed if isinstance(own, Outcome) else {-1: own}).items()
        ],
    )
    return message, b"".join([output.tobytes() for own in outputs for output in own])
