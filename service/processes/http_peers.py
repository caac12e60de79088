"""The HTTP processes from the inference process's side: their requests, and the messages to them."""

import asyncio
import itertools
import socket
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import numpy as np
import structlog

from service import errors, health
from service.core.bundle import BundleTexts
from service.core.encode import Window
from service.engines.device import Device
from service.engines.model_state import Models
from service.observability.metrics import Metrics
from service.processes import messages
from service.processes.channel import Channel
from service.rollout.model_manager import ModelManager
from service.scheduling.entries import Entry, EntryOutcome, Outcome
from service.scheduling.load import Load

log = structlog.get_logger()


class Frontend:
    """One HTTP process from the inference process's side. Its requests are computed while it is connected.

    holds: ids of the bundles that its requests may use
    news: called when it releases a bundle or disconnects
    """

    def __init__(
        self,
        device: Device,
        manager: ModelManager,
        metrics: Metrics,
        news: Callable[["Frontend"], None],
    ) -> None:
        self.holds: set[str] = set()
        self._device = device
        self._manager = manager
        self._metrics = metrics
        self._news = news
        self._work: dict[int, asyncio.Future[Any]] = {}
        self._seen = -1  # the last request that is or was part of the device's load
        self._adopting: dict[int, asyncio.Future[str | None]] = {}
        self.channel = Channel(self._receive, self._lost)

    async def connect(self, end: socket.socket) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self.channel, sock=end)

    async def adopt(
        self, number: int, models: Models, texts: Mapping[str, BundleTexts]
    ) -> str | None:
        """Send a model table. Wait until new requests follow it, or the process disconnects.

        Returns the problem if the process cannot adopt the table, else None.
        """
        if not self.channel.open:
            return None
        new = [texts[model.id] for model in models if model.id not in self.holds]
        self.holds.update(model.id for model in models)
        adopted: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._adopting[number] = adopted
        self.channel.send(*messages.Catalogue.of(number, models, new))
        return await adopted

    def tell(self, load: Load) -> None:
        self.channel.send(messages.LoadReport.of(load, self._seen))

    def _receive(self, message: messages.Message, arrays: bytes) -> None:
        match message:
            case messages.Submit():
                self._compute(message, arrays)
            case messages.Cancel(id=number) if number in self._work:
                self._work[number].cancel()
            case messages.Observed(calls, lost_lines):
                self._metrics.observe_lost_lines(lost_lines)
                for method, arguments in calls:
                    getattr(self._metrics, method)(*arguments)
            case messages.Render(number, routes):
                self._metrics.expect(routes)
                self._begin(number, self._render(number))
            case messages.Execute(id=number):
                self._begin(number, self._execute(message))
            case messages.Adopted(number, problem):
                if not (adopted := self._adopting.pop(number)).done():
                    adopted.set_result(problem)
            case messages.Released(model):
                self.holds.discard(model)
                self._news(self)

    def _begin(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._work[number] = task
        task.add_done_callback(lambda _: self._end(number))

    def _end(self, number: int) -> None:
        """Remove the work of a request. A request counts as seen even if its work was cancelled before it began."""
        self._seen = max(self._seen, number)
        self._work.pop(number, None)

    def _lost(self) -> None:
        for work in self._work.values():
            work.cancel()
        for adopted in self._adopting.values():
            if not adopted.done():
                adopted.set_result(None)
        self._adopting.clear()
        self._news(self)

    async def _render(self, number: int) -> None:
        try:
            self.channel.send(messages.Page(number), await self._metrics.page())
        except Exception as error:
            self._fail(number, error)

    async def _execute(self, asked: messages.Execute) -> None:
        try:
            answer = await self._manager.execute(asked.command)
            self.channel.send(messages.Executed(asked.id, dict(answer)))
        except Exception as error:
            self._fail(asked.id, error)

    def _fail(self, number: int, error: Exception) -> None:
        """Send an error to the HTTP process."""
        if isinstance(error, errors.QuartetError):
            log_cause(error)
        else:
            log.error("unexpected error", exc_info=error)
            error = errors.InternalError(f"our bug: {error!r}")
        self.channel.send(failed(number, error))

    def _compute(self, asked: messages.Submit, arrays: bytes) -> None:
        """Start the computation of a request, without a separate task, since hundreds of requests arrive per second."""
        asked_for = entries(asked, arrays)
        places = {entry: place for place, entry in enumerate(asked_for)} if asked.each else {}

        def send(entry: Entry, outcome: EntryOutcome) -> None:
            self.channel.send(*computed(asked, {places[entry]: outcome}))

        self._seen = max(self._seen, asked.id)
        on_outcome = send if asked.each else None
        try:
            work = asyncio.ensure_future(self._device.submit(asked_for, on_outcome))
        except Exception as error:
            self._fail(asked.id, error)
        else:
            self._work[asked.id] = work
            work.add_done_callback(partial(self._computed, asked))

    def _computed(self, asked: messages.Submit, work: asyncio.Future[list[EntryOutcome]]) -> None:
        self._end(asked.id)
        if work.cancelled():
            return
        try:
            outcomes = work.result()
            if not asked.each:
                self.channel.send(*computed(asked, dict(enumerate(outcomes))))
        except Exception as error:
            self._fail(asked.id, error)


def entries(asked: messages.Submit, arrays: bytes) -> list[Entry]:
    tokens = np.frombuffer(arrays, np.int64).reshape(2, -1)
    heads = tuple(asked.heads)
    ends = itertools.accumulate(asked.lengths)
    every_hidden = asked.hidden or [0] * len(asked.lengths)
    return [
        Entry(
            bundle=asked.bundle,
            window=Window(
                tokens[0, end - length : end], tokens[1, end - length : end], hidden=hidden
            ),
            request_id=asked.request_id,
            arrival=asked.arrival,
            deadline=asked.deadline,
            priority=asked.priority,
            tenant=asked.tenant,
            heads=heads,
            unbatched=asked.unbatched,
        )
        for length, end, hidden in zip(asked.lengths, ends, every_hidden, strict=True)
    ]


def computed(
    asked: messages.Submit, ended: Mapping[int, EntryOutcome]
) -> tuple[messages.Computed, bytes]:
    """Return the outcomes of some entries of a request, by their places, as a message and its arrays."""
    outcomes = {place: o for place, o in ended.items() if isinstance(o, Outcome)}
    outputs = [[outcome.outputs[head] for head in asked.heads] for outcome in outcomes.values()]
    message = messages.Computed(
        id=asked.id,
        places=[*outcomes],
        shapes=[[[*output.shape] for output in own] for own in outputs],
        facts=[
            (o.queue_s, o.inference_s, o.batch_size, o.batch_tokens, o.padding_ratio)
            for o in outcomes.values()
        ],
        failed=[
            (place, error.code, error.message)
            for place, error in ended.items()
            if isinstance(error, errors.QuartetError)
        ],
    )
    return message, b"".join([output.tobytes() for own in outputs for output in own])


def failed(number: int, error: errors.QuartetError) -> messages.Failed:
    retry_after_s = error.retry_after_s if isinstance(error, errors.RetryableError) else None
    return messages.Failed(number, error.code, error.message, error.param, retry_after_s)


def log_cause(error: errors.QuartetError) -> None:
    """Log an error's cause, which only this process has. The HTTP process logs the rest under the request's id."""
    if error.__cause__ is not None:
        log.error(error.message, exc_info=error.__cause__)


class Frontends:
    """All connected HTTP processes."""

    def __init__(self, device: Device, manager: ModelManager, metrics: Metrics) -> None:
        self._device = device
        self._manager = manager
        self._metrics = metrics
        self._there: set[Frontend] = set()
        self._news = asyncio.Event()
        self._catalogues = itertools.count()
        self._served: tuple[Models, Mapping[str, BundleTexts]] = ((), {})
        self._greeting: set[asyncio.Task[None]] = set()

    async def add_http_process(self, end: socket.socket) -> None:
        frontend = Frontend(self._device, self._manager, self._metrics, self._hear)
        await frontend.connect(end)
        if frontend.channel.open:
            self._there.add(frontend)
            greeting = asyncio.create_task(self._greet(frontend))
            self._greeting.add(greeting)
            greeting.add_done_callback(self._greeting.discard)

    async def _greet(self, frontend: Frontend) -> None:
        """Send the model table to a new HTTP process. If that fails, close its channel, so that it gets another."""
        try:
            if problem := await frontend.adopt(next(self._catalogues), *self._served):
                log.error("an HTTP process cannot activate the served models", problem=problem)
            frontend.tell(self._device.load())
        except Exception as error:
            log.error("unexpected error", exc_info=error)
            frontend.channel.close()

    async def adopt(self, models: Models, texts: Mapping[str, BundleTexts]) -> None:
        """Make all new requests follow this model table. Raises ValueError if a process cannot adopt it."""
        self._served = models, texts
        number = next(self._catalogues)
        adopting = [frontend.adopt(number, models, texts) for frontend in self._there]
        if problems := [*filter(None, await asyncio.gather(*adopting))]:
            raise ValueError(problems[0])

    async def left(self, model_id: str) -> None:
        """Wait until no request uses a bundle any more."""
        while any(model_id in frontend.holds for frontend in self._there):
            await self._next_news()

    async def tell_load(self) -> None:
        """Send the load to all HTTP processes regularly, so that none has to request it.

        Returns when the device fails.
        """
        while True:
            load = self._device.load()
            for frontend in self._there:
                frontend.tell(load)
            if not self._device.alive():
                return
            await asyncio.sleep(health.LOAD_REPORT_S)

    async def none(self) -> None:
        """Wait until no HTTP process is connected."""
        while self._there:
            await self._next_news()

    async def _next_news(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _hear(self, frontend: Frontend) -> None:
        if not frontend.channel.open:
            self._there.discard(frontend)
        self._news.set()
