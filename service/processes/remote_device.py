"""The device of an HTTP process: a client of the inference process with the interface of `service.engines.device`."""

import asyncio
import itertools
import math
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import structlog

from service import errors, health
from service.engines.commands import Command
from service.engines.model_state import Subscriber
from service.health import LastSign, StallClock
from service.processes import messages
from service.processes.channel import Channel
from service.scheduling.entries import Entry, EntryOutcome, OnOutcome, Outcome, PendingRequest
from service.scheduling.load import Flow, Load, RemainingWork

log = structlog.get_logger()

STARTING = "the inference process is being started"


@dataclass(slots=True, eq=False)
class SentRequest:
    """A request that waits for its answer.

    sent: the entries sent last; the places in outcomes refer to them
    """

    answer: PendingRequest
    sent: Sequence[Entry]


class RemoteDevice:
    """A device that computes in the inference process.

    When the inference process is lost, its unanswered requests are sent to the next one, once. They are sent one
    request at a time, with each entry in a batch of its own, so an input that kills the process affects no other
    request the second time. A request that is lost twice fails with ReplicaLost. So does a request that arrives while
    there is no inference process.

    broken: called when a message of the inference process cannot be processed here, or a model table cannot be adopted
    after a reconnection; only a restart of this process can help
    """

    def __init__(self, broken: Callable[[], None] = lambda: None) -> None:
        self._broken = broken
        self._opened = asyncio.Event()
        self._channel: Channel | None = None
        self._load = Load(problem=STARTING)
        self._stall_clock = StallClock(health.TICK_S)
        self._unseen: deque[tuple[int, Flow, RemainingWork]] = (
            deque()
        )  # sent, but not part of a load report yet
        self._last_load = LastSign(self._stall_clock)
        self._ids = itertools.count()
        self._asked: dict[int, SentRequest] = {}
        self._lost: deque[int] = deque()  # to be sent again, small requests first
        self._again: int | None = None  # the request that is being sent again
        # Whether the request resent before it was cancelled and may still be computed.
        self._doubt = False
        self._orders: dict[int, asyncio.Future[Any]] = {}  # other messages that wait for a reply
        self._subscriber: Subscriber | None = None
        self._followed = asyncio.Event()
        self._turn = asyncio.Lock()  # model tables are adopted one after the other
        self._adopted = asyncio.Event()  # whether the first model table was adopted or failed
        self._problem: str | None = None
        self._shown: set[str] = set()  # the bundles of the last model table
        self._tasks: set[asyncio.Task[None]] = set()

    async def connect(self, end: socket.socket) -> None:
        """Connect to an inference process. It is used as soon as it has opened its bundles. A previous one is lost."""
        if self._channel is not None:
            self._channel.close()
            self._forget(self._channel)
        loop = asyncio.get_running_loop()
        made = self._channel = Channel(self._receive, lambda: self._forget(made))
        self._shown = set()
        await loop.create_unix_connection(lambda: made, sock=end)
        if not made.open:
            self._forget(made)  # it had closed before the channel was assigned

    @property
    def connected(self) -> bool:
        """Whether there is a channel to an inference process, which may still be opening its bundles."""
        return self._channel is not None and self._channel.open

    async def follow(self, subscriber: Subscriber) -> None:
        """Pass the current and all later model tables to a subscriber.

        Raises ValueError if it cannot adopt the first.
        """
        self._subscriber = subscriber
        self._followed.set()
        await self._adopted.wait()
        if self._problem:
            raise ValueError(self._problem)

    async def submit(
        self, entries: Sequence[Entry], on_outcome: OnOutcome | None = None
    ) -> list[EntryOutcome]:
        if not entries:
            return []
        device = self._device()
        number = next(self._ids)
        answer = PendingRequest(entries, asyncio.get_running_loop().create_future(), on_outcome)
        self._asked[number] = SentRequest(answer, entries)
        device.send(*submission(number, answer, entries))
        left = RemainingWork(sum(entry.tokens for entry in entries), len(entries))
        self._load.add(entries[0].flow, left)
        self._unseen.append((number, entries[0].flow, left))
        try:
            return await answer.future
        except asyncio.CancelledError:
            if self._channel is not None:
                self._channel.send(messages.Cancel(number))
            raise
        finally:
            del self._asked[number]
            if number == self._again:
                self._again, self._doubt = None, answer.future.cancelled()
                self._ask_again()

    @property
    def max_queue_tokens(self) -> int:
        return self._load.max_queue_tokens

    def load(self) -> Load:
        silent_s = self._last_load.silent_s
        if self._load.ready and silent_s > health.LOAD_SILENCE_S:
            problem = f"the inference process has sent nothing for {silent_s:.1f} s"
            return replace(self._load, problem=problem)
        return self._load

    async def watch(self) -> None:
        """Measure the silence of the inference process, excluding time in which this process was stopped or starved."""
        while True:
            await self._stall_clock.tick()

    def alive(self) -> bool:
        return True  # independent of the inference process, which the main process restarts

    def push(self, observed: messages.Observed) -> bool:
        """Send observations to the inference process, which keeps the metrics. Returns False if it is not connected."""
        if self._computing is None:
            return False
        self._computing.send(observed)
        return True

    async def page(self, routes: Mapping[str, bool]) -> bytes:
        """Return the metrics page. Raises ReplicaLost."""
        page: bytes = await self._order(lambda number: messages.Render(number, routes))
        return page

    async def execute(self, command: Command) -> Mapping[str, Any]:
        """Execute a command in the inference process. Raises ReplicaLost and the errors of `ModelManager.execute`."""
        answer: Mapping[str, Any] = await self._order(
            lambda number: messages.Execute.of(number, command)
        )
        return answer

    async def _order(self, message: Callable[[int], messages.Message]) -> Any:
        device = self._device()
        number = next(self._ids)
        answer = self._orders[number] = asyncio.get_running_loop().create_future()
        device.send(message(number))
        try:
            return await answer
        finally:
            del self._orders[number]

    @property
    def _computing(self) -> Channel | None:
        """The channel to the inference process, if it is connected and has opened its bundles; else None."""
        there = self._channel is not None and self._channel.open and self._opened.is_set()
        return self._channel if there else None

    def _device(self) -> Channel:
        if self._computing is None:
            raise errors.ReplicaLost(STARTING)
        return self._computing

    def _forget(self, gone: Channel) -> None:
        if gone is not self._channel:
            return
        if gone.broken:
            self._broken()
        self._channel = None
        self._opened.clear()
        self._load = Load(problem=STARTING)
        self._unseen.clear()
        if self._doubt:
            self._again = None  # the request is sent once more
        lost = [number for number in self._asked if number != self._again]
        self._lost = deque(sorted(lost, key=lambda number: len(self._asked[number].answer.missing)))
        if self._again is not None:
            twice = errors.ReplicaLost("the inference process was lost twice with this request")
            self._asked[self._again].answer.fail(twice)
        self._doubt = False
        for order in self._orders.values():
            if not order.done():
                order.set_exception(errors.ReplicaLost("the inference process was lost"))

    def _ask_again(self) -> None:
        """Send the missing entries of the next lost request, small requests first."""
        while self._lost and self._again is None and (device := self._computing) is not None:
            number = self._lost.popleft()
            if asked := self._asked.get(number):
                self._again = number
                asked.sent = asked.answer.missing
                device.send(*submission(number, asked.answer, asked.sent, unbatched=True))

    def _receive(self, message: messages.Message, arrays: bytes) -> None:
        match message:
            case messages.Computed():
                self._take(message, arrays)
            case messages.Failed(id=number):
                error = errors.revive(
                    message.code,
                    message.message,
                    param=message.param,
                    retry_after_s=message.retry_after_s,
                )
                if asked := self._asked.get(number):
                    asked.answer.fail(error)
                elif (order := self._orders.get(number)) and not order.done():
                    order.set_exception(error)
            case messages.LoadReport() if self._opened.is_set():
                self._load = message.load
                while self._unseen and self._unseen[0][0] <= message.seen:
                    self._unseen.popleft()
                for _, flow, left in self._unseen:
                    self._load.add(flow, left)
                self._last_load.renew()
            case messages.Page(id=number):
                self._obeyed(number, arrays)
            case messages.Executed(id=number):
                self._obeyed(number, message.answer)
            case messages.Catalogue() if self._channel is not None:
                self._begin(self._adopt(message, arrays, self._channel))

    def _obeyed(self, number: int, answer: object) -> None:
        if (order := self._orders.get(number)) and not order.done():
            order.set_result(answer)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("unexpected error", exc_info=error)
            self._broken()

    async def _adopt(self, told: messages.Catalogue, texts: bytes, teller: Channel) -> None:
        """Make new requests follow a model table, and report when they do."""
        problem = None
        async with self._turn:
            await self._followed.wait()
            assert self._subscriber is not None
            try:
                await self._subscriber.adopt(told.served, told.read(texts))
            except Exception as error:
                log.debug("cannot adopt what is served", exc_info=True)
                problem = str(error)
        teller.send(messages.Adopted(told.number, problem))
        if problem and self._adopted.is_set() and not self._opened.is_set():
            self._broken()  # the first table of a new inference process, which comes only once
        self._problem = problem
        self._adopted.set()
        if teller is self._channel:
            self._show({model.id for model in told.served}, teller)
            if not problem:
                self._opened.set()
                self._ask_again()

    def _show(self, models: set[str], teller: Channel) -> None:
        for model_id in self._shown - models:
            self._begin(self._leave(model_id, teller))
        self._shown = models

    async def _leave(self, model_id: str, teller: Channel) -> None:
        """Report when no request uses a bundle any more."""
        assert self._subscriber is not None
        await self._subscriber.left(model_id)
        teller.send(messages.Released(model_id))

    def _take(self, computed: messages.Computed, arrays: bytes) -> None:
        asked = self._asked.get(computed.id)
        if asked is None or asked.answer.future.done():
            return
        for entry, outcome in outcomes(computed, arrays, asked.sent):
            asked.answer.add(entry, outcome)


def submission(
    number: int, answer: PendingRequest, entries: Sequence[Entry], unbatched: bool = False
) -> tuple[messages.Submit, bytes, bytes]:
    """Return entries of a request as a message and its arrays. The entries differ only in their tokens."""
    first = entries[0]
    assert first.heads, "our bug: an entry that goes to another process names its heads"
    hidden = [entry.window.hidden for entry in entries]
    message = messages.Submit(
        id=number,
        bundle=first.bundle,
        heads=[*first.heads],
        lengths=[entry.tokens for entry in entries],
        hidden=hidden if any(hidden) else [],
        request_id=first.request_id,
        arrival=first.arrival,
        deadline=first.deadline,
        priority=first.priority,
        tenant=first.tenant,
        each=answer.on_outcome is not None,
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
    for place, shapes, facts in zip(computed.places, computed.shapes, computed.facts, strict=True):
        entry = entries[place]
        outputs = {}
        for head, shape in zip(entry.heads, shapes, strict=True):
            output = np.frombuffer(arrays, np.float32, math.prod(shape), start).reshape(shape)
            start += output.nbytes
            outputs[head] = output
        yield entry, Outcome(outputs, *facts)
    for place, code, message in computed.failed:
        yield entries[place], errors.revive(code, message)
