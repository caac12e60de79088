"""The threads that encode and decode large texts, shared among classes, tenants and models as the device is.

A part is the work of one turn of a thread, such as encoding some inputs of a request. The flow with the smallest
virtual time is next (`service.scheduling.flow_turns`), with its oldest part. Each part adds its measured seconds to the
virtual time of its flow.

A tokenizer cannot be interrupted, and no cut of a text is right for every tokenizer. A text above `LONG_CHARACTERS` is
therefore one part. Such a part never takes the last idle thread, so shorter texts wait for shorter parts only. The long
parts of a flow are a flow of their own.
"""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from service.scheduling.cost_model import Drain
from service.scheduling.executor import Ended, Job, Threads
from service.scheduling.flow_turns import FlowTurns, FlowWork
from service.scheduling.load import Backlog, Flow, Load, RemainingWork

T = TypeVar("T")
# Called with the size and the work of a part; returns the work's result.
RunPart = Callable[[int, Callable[[], Any]], Awaitable[Any]]

THREADS = 2  # few, so that few texts are in memory at once
LONG_CHARACTERS = 65_536  # of the largest part that may take the last idle thread
FEW_CHARACTERS = 2 * LONG_CHARACTERS  # that wait or run; the expected wait is not computed below
GUESS = 1e6  # characters per second of a thread, before anything was measured


@dataclass(slots=True, eq=False)
class Part:
    """The work, in a thread, of one turn; its return value is the result. size: in characters"""

    size: int
    work: Callable[[], Any]
    arrival: float
    result: asyncio.Future[Any]


class WaitingParts(FlowWork):
    """The parts of one flow, in the order of their arrival."""

    def __init__(self, flow: Flow) -> None:
        super().__init__(flow)
        self.parts: deque[Part] = deque()

    def __bool__(self) -> bool:
        return bool(self.parts)

    @property
    def arrival(self) -> float:
        return self.parts[0].arrival


class TextThreads:
    """The scheduler of the text threads of a process. All methods are called in its event loop.

    clock: measures a part in its thread, in seconds
    waiting: the parts of each flow that wait or run, and parts to come, in characters
    speeds: the measured speed with each model's tokenizer, as a multiple of `GUESS`
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.waiting: dict[Flow, Backlog] = {}
        self.speeds: defaultdict[str, Drain] = defaultdict(Drain)
        self._clock = clock
        self._turns = FlowTurns(WaitingParts)
        self._threads = Threads(THREADS, self._receive, "text")
        self._characters = 0  # of all waiting parts
        self._long_running = 0
        self._has_prefetched = False

    def stop(self) -> None:
        """End the idle threads, and cancel the parts that wait; a busy thread ends after its part."""
        for flow_parts in self._turns:
            for part in flow_parts.parts:
                part.result.cancel()
        self._threads.stop()

    def forget(self, model: str) -> None:
        """Forget a model that is no longer served, unless another version with the same id has parts."""
        if not any(flow.bundle == model for flow in self.waiting):
            self.speeds.pop(model, None)

    def wait_s(self, flow: Flow, sizes: Sequence[int]) -> float:
        """Return the expected seconds until parts of these characters have run; 0 while few characters wait."""
        if self._characters < FEW_CHARACTERS:
            return 0.0
        waits_s = [0.0]
        for own, work in _work_of(flow, sizes).items():
            models = {flow.bundle, *(other.bundle for other in self.waiting)}
            rates = {model: (THREADS - own.is_long) * self._rate(model) for model in models}
            waits_s.append(Load(rates, self.waiting).wait_s(own, work.tokens))
        return max(waits_s)

    def _rate(self, model: str) -> float:
        """Return the characters per second of one thread."""
        return GUESS * self.speeds[model].speed

    @contextmanager
    def open(self, flow: Flow, sizes: Sequence[int]) -> Iterator[RunPart]:
        """Yield a function that runs a request's parts in turn; those to come, in characters, count as waiting."""
        left = _work_of(flow, sizes)
        for own, work in left.items():
            self._change(own, RemainingWork(), work)

        async def run(size: int, work: Callable[[], Any]) -> Any:
            ((own, part),) = _work_of(flow, [size]).items()
            result = await self._run_part(own, part.tokens, work)
            before = left[own]
            left[own] = RemainingWork(before.tokens - part.tokens, before.windows - 1)
            self._change(own, before, left[own])
            return result

        try:
            yield run
        finally:
            for own, work in left.items():
                self._change(own, work, RemainingWork())

    async def run(self, flow: Flow, size: int, work: Callable[[], T]) -> T:
        """Run a request of one part."""
        with self.open(flow, [size]) as run_part:
            result: T = await run_part(size, work)
            return result

    def _change(self, flow: Flow, before: RemainingWork, after: RemainingWork) -> None:
        """Change the remaining work of a request in the backlog of its flow."""
        backlog = self.waiting.setdefault(flow, Backlog())
        backlog.change(before, after)
        self._characters += after.tokens - before.tokens
        if not backlog.tokens:
            del self.waiting[flow]

    async def _run_part(self, flow: Flow, size: int, work: Callable[[], T]) -> T:
        """Run one part in a thread when it is next; cancellation drops it if it still waits."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        part = Part(size, work, time.monotonic(), result)
        flow_parts = self._turns.get(flow)
        may_be_next = not (self._has_prefetched and flow_parts)  # a later part of a flow never is
        flow_parts.parts.append(part)
        if may_be_next:
            self._fill()
        try:
            return await result
        finally:
            if result.cancelled() and part in flow_parts.parts:
                flow_parts.parts.remove(part)
                self._fill()  # the part may be prefetched

    # -- the threads ------------------------------------------------------------------------------

    def _receive(self, message: Callable[[], None]) -> None:
        """Handle the end of a part, and begin the next one."""
        message()
        self._fill()

    def _fill(self) -> None:
        """Run and prefetch the next parts on idle threads; a thread does not wait for the event loop to begin."""
        if self._has_prefetched:
            if not self._threads.cancel_prefetch():
                return  # a thread has begun with it, which the end of its previous part will report
            self._has_prefetched = False
        while self._threads.idle and (flow_parts := self._turns.next(self._may_run)):
            self._threads.run(self._job(flow_parts))
        if not self._threads.idle and (flow_parts := self._turns.next(self._may_run)):
            self._has_prefetched = True
            self._threads.prefetch(self._job(flow_parts))

    def _may_run(self, flow_parts: WaitingParts) -> bool:
        return not flow_parts.flow.is_long or self._long_running < THREADS - 1

    def _job(self, flow_parts: WaitingParts) -> Job:
        """Return the job of the first part of a flow."""
        flow, part = flow_parts.flow, flow_parts.parts[0]
        expected_s = part.size / self._rate(flow.bundle)
        charged = 0.0  # virtual time

        def started() -> None:
            nonlocal charged
            self._has_prefetched = False
            self._long_running += flow.is_long
            if flow_parts and flow_parts.parts[0] is part:  # not cancelled since the prefetch
                before = flow_parts.virtual_time
                self._turns.charge({flow_parts: expected_s})
                charged = flow_parts.virtual_time - before
                flow_parts.parts.popleft()

        def ended(end: Ended) -> None:
            self._long_running -= flow.is_long
            if end.error is not None:
                if not part.result.done():
                    part.result.set_exception(end.error)
                return
            result, seconds = end.value
            self.speeds[flow.bundle].observe(part.size / GUESS, seconds)
            flow_parts.virtual_time += charged * (seconds / expected_s - 1)
            if not part.result.done():
                part.result.set_result(result)

        return Job(1, partial(_timed, part.work, self._clock), started, ended)


def _work_of(flow: Flow, sizes: Sequence[int]) -> dict[Flow, RemainingWork]:
    """Return the work of parts of these sizes, by its flow. A part without characters counts as one character."""
    work: dict[Flow, RemainingWork] = {}
    for size in sizes:
        own = flow._replace(is_long=size > LONG_CHARACTERS)
        tokens, windows = work.get(own, RemainingWork())
        work[own] = RemainingWork(tokens + max(size, 1), windows + 1)
    return work


def _timed(work: Callable[[], T], clock: Callable[[], float]) -> tuple[T, float]:
    began = clock()
    result = work()
    return result, clock() - began
