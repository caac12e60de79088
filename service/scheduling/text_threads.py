"""The threads that encode and decode large texts, shared among classes, tenants and models as the device is.

A part is the work of one turn of a thread, such as encoding some inputs of a request. Parts wait in a `FairQueue`. Each
adds its measured seconds to the virtual time of its flow. A part's size is in characters.

A tokenizer cannot be interrupted, and no cut of a text is right for every tokenizer. A text above `LONG_CHARACTERS` is
therefore one part. Such a part never takes the last idle thread, so shorter texts wait for shorter parts only.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from service.core.encode import Window
from service.scheduling.cost_model import Drain
from service.scheduling.entries import Entry
from service.scheduling.executor import Job, Threads
from service.scheduling.fair_queue import FairQueue, ModelStatistics, QueuedRequest, request_of
from service.scheduling.load import Backlog, Flow, Load, RemainingWork

T = TypeVar("T")

THREADS = 2  # few, so that few texts are in memory at once
LONG_CHARACTERS = 65_536  # of the largest part that may take the last idle thread
FEW_CHARACTERS = 2 * LONG_CHARACTERS  # that wait or run; the expected wait is not computed below
GUESS = 1e6  # characters per second of a thread, before anything was measured
NO_WINDOW = Window(np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(slots=True, eq=False, kw_only=True)
class Part(Entry):
    """An entry that is computed in a text thread; its `tokens` are characters.

    work: called in the thread; its return value is the part's result
    """

    characters: int
    work: Callable[[], Any]

    def __post_init__(self) -> None:
        self.tokens = max(self.characters, 1)


class TextStatistics(ModelStatistics):
    """The data about the parts of one model.

    is_long: whether the parts have more than `LONG_CHARACTERS`
    """

    def __init__(self, is_long: bool) -> None:
        super().__init__({}, unbatched=True)
        self.is_long = is_long
        self._drain = Drain()

    @property
    def rate(self) -> float:
        """Characters per second of one thread."""
        return GUESS * self._drain.speed

    @property
    def price(self) -> float:
        return 1 / self.rate

    def observe(self, characters: int, seconds: float) -> None:
        """Add a measured part."""
        self._drain.observe(characters / GUESS, seconds)


class TextThreads:
    """The scheduler of the text threads of a process. All methods are called in its event loop.

    clock: measures a part in its thread, in seconds
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._queue = FairQueue()
        self._threads = Threads(THREADS, self._receive, "text")
        self._statistics: dict[str, TextStatistics] = {}  # by lane, see `_lane`
        self._waiting: dict[Flow, Backlog] = {}  # parts that wait or run, and parts to come
        self._characters = 0  # of all these parts
        self._long_running = 0
        self._has_prefetched = False

    def stop(self) -> None:
        """End the idle threads, and cancel the parts that wait; a busy thread ends after its part."""
        for lane in self._statistics:
            for request in self._queue.remove(lane):
                request.future.cancel()
        self._threads.stop()

    def forget(self, model: str) -> None:
        """Forget a model that is no longer served, unless another version with the same id has parts."""
        for lane in (_lane(model, False), _lane(model, True)):
            if not any(flow.bundle == lane for flow in self._waiting):
                self._queue.remove(lane)
                self._queue.models.pop(lane, None)
                self._statistics.pop(lane, None)

    def wait_s(self, flow: Flow, sizes: Sequence[int]) -> float:
        """Return the expected seconds until more parts of a flow have run; 0 while few characters wait or run.

        sizes: characters of each part
        """
        if self._characters < FEW_CHARACTERS:
            return 0.0
        by_lane = Counter[Flow]()
        for size in sizes:
            by_lane[_lane_flow(flow, size)] += size
        for own in by_lane:
            self._open_lane(own.bundle)
        load = self.load()
        return max((load.wait_s(own, size) for own, size in by_lane.items()), default=0.0)

    def load(self) -> Load:
        """Return the rates of the threads, and the backlog, as `Batcher.load` does for the device.

        Its tokens are characters. The bundle of each flow is a lane: a model's parts above or up to `LONG_CHARACTERS`.
        """
        rates = {
            lane: known.rate * (THREADS - known.is_long) for lane, known in self._statistics.items()
        }
        return Load(rates, self._waiting)

    def open(self, flow: Flow, sizes: Sequence[int]) -> "TextRequest":
        """Return a context in which a request of a flow runs its parts, which have these sizes."""
        return TextRequest(self, flow, sizes)

    async def run(self, flow: Flow, size: int, work: Callable[[], T]) -> T:
        """Run a request of one part."""
        with self.open(flow, [size]) as request:
            return await request.run(size, work)

    # -- for the requests -------------------------------------------------------------------------

    def change(self, flow: Flow, before: RemainingWork, after: RemainingWork) -> None:
        """Change the remaining work of a request in the backlog of its lane's flow."""
        self._open_lane(flow.bundle)
        backlog = self._waiting.setdefault(flow, Backlog())
        backlog.change(before, after)
        self._characters += after.tokens - before.tokens
        if not backlog.tokens:
            del self._waiting[flow]

    def _open_lane(self, lane: str) -> None:
        if lane not in self._statistics:
            self._statistics[lane] = TextStatistics(_is_long_lane(lane))
            self._queue.models[lane] = self._statistics[lane]

    async def run_part(self, flow: Flow, size: int, work: Callable[[], T]) -> T:
        """Run one part in a thread when it is next; cancellation drops it if it still waits."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        part = Part(
            bundle=flow.bundle,
            window=NO_WINDOW,
            request_id="",
            arrival=time.monotonic(),
            deadline=math.inf,
            priority=flow.priority,
            tenant=flow.tenant,
            characters=size,
            work=work,
        )
        flow_queue = self._queue.flow_queue(flow)
        request = QueuedRequest([part], future, flow_queue=flow_queue)
        may_be_next = not (self._has_prefetched and flow_queue)  # a later part of a flow never is
        flow_queue.admit(request)
        self._queue.enter(request)
        if may_be_next:
            self._fill()
        try:
            result: T = await future
            return result
        finally:
            if part.queued:
                flow_queue.leave(request)
                self._fill()  # the part may be prefetched
            request.release()

    # -- the threads ------------------------------------------------------------------------------

    def _receive(self, message: Callable[[], None]) -> None:
        """Handle the end of a part, and begin the next one."""
        message()
        self._fill()

    def _fill(self) -> None:
        """Begin with the next part on every idle thread, and prefetch one, as far as their lengths allow it.

        A thread begins with the prefetched part without waiting for the event loop.
        """
        if self._has_prefetched:
            if not self._threads.cancel_prefetch():
                return  # a thread has begun with it, which the end of its previous part will report
            self._has_prefetched = False
        while self._threads.idle and (part := self._next()):
            self._threads.run(self._job(part))
        if not self._threads.idle and (part := self._next()):
            self._has_prefetched = True
            self._threads.prefetch(self._job(part))

    def _next(self) -> Part | None:
        """Return the part that is next among those that may run; None if there is none."""
        flow_queue = self._queue.next_flow(self._may_run)
        if flow_queue is None:
            return None
        (part,) = flow_queue.frontend(1)
        assert isinstance(part, Part), "our bug: an entry of the device in the queue of texts"
        return part

    def _may_run(self, statistics: ModelStatistics) -> bool:
        assert isinstance(statistics, TextStatistics)
        return not statistics.is_long or self._long_running < THREADS - 1

    def _job(self, part: Part) -> Job:
        request = request_of(part)
        flow_queue, future = request.flow_queue, request.future
        statistics = self._statistics[flow_queue.flow.bundle]
        expected_s = part.tokens / statistics.rate
        charged = 0.0  # virtual time

        def started() -> None:
            self._has_prefetched = False
            self._long_running += statistics.is_long
            if part.queued:  # not cancelled since the prefetch
                nonlocal charged
                before = flow_queue.virtual_time
                self._queue.take([part], expected_s)
                charged = flow_queue.virtual_time - before

        def ended(ran: Future[tuple[Any, float]]) -> None:
            self._long_running -= statistics.is_long
            if error := ran.exception():
                if not future.done():
                    future.set_exception(error)
                return
            result, seconds = ran.result()
            statistics.observe(part.tokens, seconds)
            flow_queue.virtual_time += charged * (seconds / expected_s - 1)
            if not future.done():
                future.set_result(result)

        return Job(1, partial(_timed, part.work, self._clock), started, ended)


class TextRequest:
    """The parts of one request, which run one after the other. All of them count as waiting until the context ends.

    flow: the flow of the request on the device; each part waits in the lane for its length
    """

    def __init__(self, threads: TextThreads, flow: Flow, sizes: Sequence[int]) -> None:
        self._threads = threads
        self._flow = flow
        self._left: dict[Flow, RemainingWork] = {}
        for size in sizes:
            self._change(size, 1)

    def __enter__(self) -> "TextRequest":
        for flow, left in self._left.items():
            self._threads.change(flow, RemainingWork(), left)
        return self

    def __exit__(self, *_: object) -> None:
        for flow, left in self._left.items():
            self._threads.change(flow, left, RemainingWork())

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Run a part of this size, which is one of the request's sizes."""
        result = await self._threads.run_part(_lane_flow(self._flow, size), size, work)
        if sum(left.windows for left in self._left.values()) > 1:
            flow, before = self._change(size, -1)
            self._threads.change(flow, before, self._left[flow])
        return result

    def _change(self, size: int, sign: int) -> tuple[Flow, RemainingWork]:
        """Add or remove a part; return its flow, and what was left of the request in it before."""
        flow = _lane_flow(self._flow, size)
        before = self._left.get(flow, RemainingWork())
        self._left[flow] = RemainingWork(before.tokens + sign * max(size, 1), before.windows + sign)
        return flow, before


def _lane(model: str, is_long: bool) -> str:
    """Return the lane of a model's parts. Long and shorter parts have a lane each, which shares as a model does."""
    return f"{model} {'long' if is_long else 'short'}"


def _is_long_lane(lane: str) -> bool:
    return lane.endswith(" long")


def _lane_flow(flow: Flow, size: int) -> Flow:
    return flow._replace(bundle=_lane(flow.bundle, size > LONG_CHARACTERS))


def _timed(work: Callable[[], T], clock: Callable[[], float]) -> tuple[T, float]:
    began = clock()
    result = work()
    return result, clock() - began
