"""What waits, and in which order: start-time fair queueing over the requests of all bundles.

A request is a flow: its entries get virtual starts one after the other, counted in tokens from the
virtual time at which it came, and the smallest start is next. So one text never waits behind a
thousand. (A flow that outlives its request, such as a tenant's, would go on from its own last
finish.) Small requests that keep coming could hold up a large one for ever, so the line also knows
who has gone longest without a seat.

Nothing here knows of time, threads or tasks; the batcher owns the one `Line` there is.
"""

import asyncio
import itertools
import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from service.cost import Estimator
from service.encode import Window
from service.errors import InternalError, QuartetError

MAX_PASSED = 16  # batches that may leave without a request before it goes first
POOL = 256  # entries of one bundle that are looked at for a batch
TYPICAL_LENGTH = 64  # tokens; stands for entries that have not come yet

Outputs = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """An entry's own rows by head ([C], [n, C], [n, 2] or [D]), and the batch they come from."""

    outputs: Outputs
    queue_s: float
    inference_s: float
    batch_size: int
    batch_tokens: int
    padding_ratio: float


@dataclass(slots=True, eq=False)
class Entry:
    """One window on its way through a batch; times are `time.monotonic()` seconds.

    With a `head`, only that head's output is checked and returned. One that is `alone` shares its batch with no
    other. What follows is the batcher's own.
    """

    bundle: str
    window: Window
    request_id: str
    arrival: float
    deadline: float
    priority: int = 0
    tenant: str = ""
    head: str | None = None
    alone: bool = False
    tokens: int = field(init=False)
    start: float = field(default=0.0, init=False)  # virtual time, in tokens
    passed: int = field(default=0, init=False)  # batches that left without a seat for its request
    queued: bool = field(default=False, init=False)
    request: "Request | None" = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.tokens = max(len(self.window), 1)

    @property
    def done(self) -> bool:
        """Whether its request has its answer, its error, or nobody who waits for it."""
        return self.request is not None and self.request.future.done()

    @property
    def owner(self) -> "Request":
        """Its request; asked only once it was admitted."""
        assert self.request is not None, "our bug: this entry was never admitted"
        return self.request


Tell = Callable[[Entry, Outcome], None]


@dataclass(slots=True, eq=False)
class Answer:
    """The outcomes of a request, collected until the future can have them all; each is told of, too, if need be."""

    entries: Sequence[Entry]
    future: asyncio.Future[list[Outcome]]
    tell: Tell | None = None
    outcomes: dict[Entry, Outcome] = field(default_factory=dict)

    @property
    def missing(self) -> list[Entry]:
        """The entries that have no outcome yet."""
        return [entry for entry in self.entries if entry not in self.outcomes]

    def add(self, entry: Entry, outcome: Outcome) -> None:
        """A request that cannot be told of its outcomes fails."""
        if self.future.done():
            return
        self.outcomes[entry] = outcome
        if self.tell is not None:
            try:
                self.tell(entry, outcome)
            except Exception as error:
                failure = InternalError("our bug: an answer could not be told")
                failure.__cause__ = error
                self.fail(failure)
                return
        if len(self.outcomes) == len(self.entries):
            self.future.set_result([self.outcomes[entry] for entry in self.entries])

    def fail(self, error: QuartetError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(slots=True, eq=False, kw_only=True)
class Request(Answer):
    """Entries that are admitted together and answered together."""

    queue: "Queue"
    deadline: float = field(init=False)
    left: int = field(default=0, init=False)  # entries that still wait
    seated: int = field(default=0, init=False)  # the last batch that took an entry of it

    def __post_init__(self) -> None:
        self.deadline = min(entry.deadline for entry in self.entries)
        for entry in self.entries:
            entry.request = self

    def first(self) -> Entry:
        """The first entry that still waits; asked only while one does."""
        return next(entry for entry in self.entries if entry.queued)

    def release(self) -> None:
        """Let go of the entries, which refer back: no cycle is left to the garbage collector."""
        self.entries = ()
        self.outcomes = {}


class Queue:
    """The entries of one bundle by virtual start: a sorted front to plan from, a heap behind it.

    estimators: what batches of this bundle cost, by the slots that they take
    `tokens` and `size` count from admission until an entry is taken or dropped.
    """

    def __init__(self, estimators: Mapping[int, Estimator]) -> None:
        self.estimators = estimators
        self.tokens = 0
        self.size = 0
        self._order = itertools.count()
        self._front: list[tuple[float, int, Entry]] = []
        self._heap: list[tuple[float, int, Entry]] = []

    @property
    def mean_length(self) -> int:
        return round(self.tokens / self.size) if self.size else TYPICAL_LENGTH

    def admit(self, entries: Sequence[Entry]) -> None:
        self.tokens += sum(entry.tokens for entry in entries)
        self.size += len(entries)

    def push(self, entry: Entry) -> None:
        entry.queued = True
        heappush(self._heap, (entry.start, next(self._order), entry))

    def remove(self, entry: Entry) -> None:
        entry.queued = False
        self.tokens -= entry.tokens
        self.size -= 1

    def pool(self) -> list[Entry]:
        """The smallest starts, in order; costs the front, and O(log n) per entry new to it."""
        front = [key for key in self._front if key[2].queued]
        if len(self._heap) > 2 * self.size + POOL:  # most of it was dropped
            self._heap = [key for key in self._heap if key[2].queued]
            heapify(self._heap)
        while self._heap and (len(front) < POOL or self._heap[0] < front[-1]):
            key = heappop(self._heap)
            if key[2].queued:
                insort(front, key)
        for key in front[POOL:]:
            heappush(self._heap, key)
        self._front = front[:POOL]
        return [entry for _, _, entry in self._front]


class Line:
    """Everything that waits, over all bundles, in one virtual time."""

    def __init__(self) -> None:
        self.queues: dict[str, Queue] = {}
        self._requests: OrderedDict[Request, None] = OrderedDict()  # longest without a seat first
        self._batches = 0
        self._virtual = 0.0  # the smallest start at the last look
        self._next_deadline = math.inf  # no request has an earlier one

    def __bool__(self) -> bool:
        return bool(self._requests)

    @property
    def tokens(self) -> int:
        return sum(queue.tokens for queue in self.queues.values())

    @property
    def size(self) -> int:
        return sum(queue.size for queue in self.queues.values())

    def enter(self, request: Request) -> None:
        start = self._virtual
        for entry in request.entries:
            entry.start = start
            request.queue.push(entry)
            start += entry.tokens
        request.left = len(request.entries)
        request.seated = self._batches
        self._requests[request] = None
        self._next_deadline = min(self._next_deadline, request.deadline)

    def leave(self, request: Request) -> None:
        """Drop what still waits of a request, if anything does."""
        if request.left:
            del self._requests[request]
            request.left = 0
            for entry in request.entries:
                if entry.queued:
                    request.queue.remove(entry)

    def late(self, now: float) -> list[Request]:
        """The waiting requests whose deadline has passed."""
        if now < self._next_deadline:
            return []
        late = [request for request in self._requests if request.deadline <= now]
        later = (request.deadline for request in self._requests if request.deadline > now)
        self._next_deadline = min(later, default=math.inf)
        return late

    def of(self, queue: Queue) -> list[Request]:
        return [request for request in self._requests if request.queue is queue]

    def pool(self) -> tuple[Queue, list[Entry]]:
        """The bundle whose turn it is, and the entries that its next batch may be made from."""
        pools = {queue: pool for queue in self.queues.values() if (pool := queue.pool())}
        turn = min(pools, key=lambda queue: (pools[queue][0].start, pools[queue][0].arrival))
        self._virtual = pools[turn][0].start
        longest = next(iter(self._requests))
        first = longest.first()
        first.passed = self._batches - longest.seated
        if first.passed > MAX_PASSED:
            return longest.queue, [first, *pools[longest.queue]]
        return turn, pools[turn]

    def take(self, batch: Sequence[Entry]) -> None:
        """Seat a batch: its entries wait no longer, and their requests stand last in line."""
        self._batches += 1
        for entry in batch:
            request = entry.owner
            request.queue.remove(entry)
            request.left -= 1
            request.seated = self._batches
            if request.left:
                self._requests.move_to_end(request)
            else:
                del self._requests[request]
