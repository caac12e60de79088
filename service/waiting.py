"""What waits, and in which order: weighted fair queueing of flows, and start-time fair queueing of requests in each.

A flow is the requests of one bundle, class and tenant (`service.load`). It is charged with the seconds that are
computed for it, divided by its weight, and the one charged least is next; one that comes starts where the others are,
so that nobody saves up. In a flow each request's entries get virtual starts one after the other, counted in tokens
from the virtual time at which it came, and the smallest start is next: one text never waits behind a thousand. Small
requests that keep coming could hold up a large one for ever, so a flow also knows who has gone longest without a seat.

Nothing here knows of time, threads or tasks; the batcher owns the one `Line` there is.
"""

import asyncio
import itertools
import math
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, merge
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from service.cost import Estimator
from service.encode import Window
from service.errors import InternalError, QuartetError
from service.load import Backlog, Flow, Left, weights

MAX_PASSED = 16  # batches that may leave without a request before it goes first
# So many batches' worth of entries are looked at for the next one. Of more, each would find a bit more company of its
# length, and be passed over for long where it has none: with all of 160 the speed is a hundredth higher than with 32 of
# them, and the longest wait half as long again.
POOL_BATCHES = 8
POOL_LEAST, POOL_MOST = 32, 256
FIRST_TRIAL, TRIAL_EVERY = 4, 64  # choices
SMOOTH = 0.1  # what a batch weighs beside those before it
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

    With a `head`, only that head's output is checked and returned. One that is `alone` was
    admitted before, by a process that is lost: it is not refused, and shares its batch with no other, for it may be
    what that process died of. What follows is the batcher's own.
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
    def flow(self) -> Flow:
        return Flow(self.bundle, self.priority, self.tenant)

    @property
    def done(self) -> bool:
        """Whether its request has its answer, its error, or nobody who waits for it."""
        return self.request is not None and self.request.future.done()

    @property
    def owner(self) -> "Request":
        """Its request; asked only once it was admitted."""
        assert self.request is not None, "our bug: this entry was never admitted"
        return self.request


Ended = Outcome | QuartetError
Tell = Callable[[Entry, Ended], None]


@dataclass(slots=True, eq=False)
class Answer:
    """The outcomes of a request, collected until the future can have them all; each is told of, too, if need be.

    spare: an entry that fails has its error for an outcome, and does not fail the request
    """

    entries: Sequence[Entry]
    future: asyncio.Future[list[Ended]]
    tell: Tell | None = None
    spare: bool = False
    outcomes: dict[Entry, Ended] = field(default_factory=dict)

    @property
    def missing(self) -> list[Entry]:
        """The entries that have no outcome yet."""
        return [entry for entry in self.entries if entry not in self.outcomes]

    def miss(self, entry: Entry, error: QuartetError) -> None:
        """Know of an entry that failed."""
        if self.spare:
            self.add(entry, error)
        else:
            self.fail(error)

    def add(self, entry: Entry, outcome: Ended) -> None:
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

    lane: "Lane"
    deadline: float = field(init=False)
    tokens: int = field(init=False)  # that still wait
    left: int = field(default=0, init=False)  # entries that still wait
    seated: int = field(
        default=0, init=False
    )  # the last batch of its flow that took an entry of it

    def __post_init__(self) -> None:
        self.deadline = min(entry.deadline for entry in self.entries)
        self.tokens = sum(entry.tokens for entry in self.entries)
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
    """What all that waits of one bundle has in common.

    estimators: what its batches cost, by the slots that they take
    alone: whether each entry gets a batch of its own
    area: limit of B * S * S of a batch, see `Budget`
    `tokens` and `size` count from admission until an entry is taken or dropped.
    """

    def __init__(
        self, estimators: Mapping[int, Estimator], alone: bool = False, area: float = math.inf
    ) -> None:
        self.estimators = estimators
        self.alone = alone
        self.area = area
        self.tokens = 0
        self.size = 0
        self._batch_size = 0.0
        self._choices = 0
        self._next_trial = FIRST_TRIAL

    def count_choice(self) -> bool:
        """Count a choice between one slot and many; whether it is a trial, which goes the other way than is cheapest.

        For what that costs may have changed, and the warm-up may have been measured in a bad moment: so trials are
        frequent at first.
        """
        self._choices += 1
        if self._choices < self._next_trial:
            return False
        self._next_trial += min(self._choices, TRIAL_EVERY)
        return True

    def took(self, size: int) -> None:
        """A batch of so many leaves."""
        self._batch_size += SMOOTH * (size - self._batch_size)

    @property
    def pool_size(self) -> int:
        return min(max(round(POOL_BATCHES * self._batch_size), POOL_LEAST), POOL_MOST)

    @property
    def mean_length(self) -> int:
        return round(self.tokens / self.size) if self.size else TYPICAL_LENGTH

    @property
    def price(self) -> float:
        """Seconds that a token of it costs one slot, in company if it may have any."""
        lengths = [self.mean_length] * (1 if self.alone else POOL_BATCHES)
        return 1 / self.estimators[1].tokens_per_second(lengths)


class Lane:
    """The entries of one flow by virtual start: a sorted front to plan from, a heap behind it.

    charged: seconds computed for it by its weight; backlog: what was admitted and waits
    """

    def __init__(self, flow: Flow, queue: Queue) -> None:
        self.flow = flow
        self.queue = queue
        self.charged = 0.0
        self.backlog = Backlog()
        self.requests: OrderedDict[Request, None] = OrderedDict()  # longest without a seat first
        self._batches = 0
        self._virtual = 0.0  # the smallest start when a batch left with some of it
        self._smallest = 0.0  # at the last look
        self._order = itertools.count()
        self._queued = 0
        self._front: list[tuple[float, int, Entry]] = []
        self._heap: list[tuple[float, int, Entry]] = []

    def __bool__(self) -> bool:
        return bool(self.requests)

    @property
    def longest(self) -> Request:
        """Who has gone longest without a seat; asked only while somebody waits."""
        return next(iter(self.requests))

    def admit(self, request: Request) -> None:
        """It is going to enter."""
        self.queue.tokens += request.tokens
        self.queue.size += len(request.entries)
        self.backlog.change(Left(), Left(request.tokens, len(request.entries)))

    def enter(self, request: Request) -> None:
        start = self._virtual
        for entry in request.entries:
            entry.start = start
            self.push(entry)
            start += entry.tokens
        request.left = len(request.entries)
        request.seated = self._batches
        self.requests[request] = None

    def push(self, entry: Entry) -> None:
        entry.queued = True
        self._queued += 1
        heappush(self._heap, (entry.start, next(self._order), entry))

    def leave(self, request: Request) -> None:
        """Drop what still waits of a request, if anything does."""
        if request.left:
            self._shrink(request, [entry for entry in request.entries if entry.queued])
            self._forget(request)

    def take(self, request: Request, entries: Sequence[Entry]) -> None:
        """Seat some entries of a request, which now stands last in line."""
        self._shrink(request, entries)
        request.seated = self._batches
        if request.left:
            self.requests.move_to_end(request)
        else:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        """Nothing of it waits; when nothing waits at all, nothing is kept of those that did."""
        del self.requests[request]
        if not self.requests:
            self._front.clear()
            self._heap.clear()

    def _shrink(self, request: Request, entries: Sequence[Entry]) -> None:
        before = Left(request.tokens, request.left)
        for entry in entries:
            self.remove(entry)
            request.tokens -= entry.tokens
        request.left -= len(entries)
        self.backlog.change(before, Left(request.tokens, request.left))

    def remove(self, entry: Entry) -> None:
        entry.queued = False
        self._queued -= 1
        self.queue.tokens -= entry.tokens
        self.queue.size -= 1

    def charge(self, seconds: float) -> None:
        """A batch leaves in which it had a part."""
        self.charged += seconds
        self._batches += 1
        self._virtual = self._smallest

    def pool(self) -> list[Entry]:
        """Who may ride next, in order: the smallest starts, unless somebody was passed over too often."""
        front = self.front(self.queue.pool_size)
        self._smallest = front[0].start
        first = self.longest.first()
        first.passed = self._batches - self.longest.seated
        if first.passed <= MAX_PASSED:
            return front
        return [
            first,
            *(entry for entry in front if entry is not first),
        ]  # each once: it has one seat

    def front(self, size: int) -> list[Entry]:
        """So many smallest starts, in order; costs as much, and O(log n) per entry new to it."""
        front = [key for key in self._front if key[2].queued]
        if len(self._heap) > 2 * self._queued + size:  # most of it was dropped
            self._heap = [key for key in self._heap if key[2].queued]
            heapify(self._heap)
        while self._heap and (len(front) < size or self._heap[0] < front[-1]):
            key = heappop(self._heap)
            if key[2].queued:
                insort(front, key)
        for key in front[size:]:
            heappush(self._heap, key)
        self._front = front[:size]
        return [entry for _, _, entry in self._front]

    def due(self, rate: float) -> Iterator[tuple[float, Entry]]:
        """Who may ride next, with what it will have been charged by then at so much a token."""
        charged = self.charged
        for entry in self.pool():
            yield charged, entry
            charged += entry.tokens * rate


class Line:
    """Everything that waits, over all bundles."""

    def __init__(self) -> None:
        self.queues: dict[str, Queue] = {}
        self.requests_came = 0
        self.flows_came = 0  # of which nothing waited: such a one may be before all others
        self._lanes: dict[Flow, Lane] = {}
        self._charged = 0.0  # of the lane whose turn was last
        self._next_deadline = math.inf  # no request has an earlier one

    def __bool__(self) -> bool:
        return any(self._lanes.values())

    @property
    def tokens(self) -> int:
        return sum(queue.tokens for queue in self.queues.values())

    @property
    def size(self) -> int:
        return sum(queue.size for queue in self.queues.values())

    @property
    def waiting(self) -> dict[Flow, Backlog]:
        """What was admitted and waits, by flow, of the bundles that are served."""
        return {
            flow: lane.backlog
            for flow, lane in self._lanes.items()
            if lane.backlog.tokens and flow.bundle in self.queues
        }

    def lane(self, flow: Flow) -> Lane:
        """The lane of a flow whose bundle is served."""
        if flow not in self._lanes:
            idle = (known for known, lane in self._lanes.items() if self._forgettable(lane))
            for known in [*idle]:
                del self._lanes[known]
            self._lanes[flow] = Lane(flow, self.queues[flow.bundle])
        return self._lanes[flow]

    def _forgettable(self, lane: Lane) -> bool:
        return not lane.backlog.tokens and lane.charged <= self._charged

    def remove(self, bundle: str) -> list[Request]:
        """Forget the lanes of a bundle that is served no longer; returns what waits in them."""
        flows = [flow for flow in self._lanes if flow.bundle == bundle]
        return [request for flow in flows for request in self._lanes.pop(flow).requests]

    def enter(self, request: Request) -> None:
        lane = request.lane
        self.requests_came += 1
        if not lane:
            lane.charged = max(lane.charged, self._charged)
            self.flows_came += 1
        lane.enter(request)
        self._next_deadline = min(self._next_deadline, request.deadline)

    def late(self, now: float) -> list[Request]:
        """The waiting requests whose deadline has passed."""
        if now < self._next_deadline:
            return []
        waiting = [request for lane in self._lanes.values() for request in lane.requests]
        later = (request.deadline for request in waiting if request.deadline > now)
        self._next_deadline = min(later, default=math.inf)
        return [request for request in waiting if request.deadline <= now]

    def pool(self) -> tuple[Queue, list[Entry]]:
        """The bundle whose turn it is, and the entries that its next batch may be made from, in order."""
        lanes = [lane for lane in self._lanes.values() if lane]
        turn = min(lanes, key=lambda lane: (lane.charged, lane.longest.first().arrival))
        rivals = [lane for lane in lanes if lane.queue is turn.queue and lane is not turn]
        if not rivals:
            return turn.queue, turn.pool()
        shares, price = weights([lane.flow for lane in lanes]), turn.queue.price
        due = [lane.due(price / shares[lane.flow]) for lane in (turn, *rivals)]
        first = merge(*due, key=itemgetter(0))
        return turn.queue, [entry for _, entry in itertools.islice(first, turn.queue.pool_size)]

    def take(self, batch: Sequence[Entry], seconds: float) -> None:
        """Seat a batch that is going to take so long: its entries wait no longer, and their flows are charged."""
        tokens: Counter[Lane] = Counter()
        seats: dict[Request, list[Entry]] = {}
        for entry in batch:
            tokens[entry.owner.lane] += entry.tokens
            seats.setdefault(entry.owner, []).append(entry)
        shares = weights([flow for flow, lane in self._lanes.items() if lane])
        self._charged = batch[0].owner.lane.charged
        for lane, part in tokens.items():
            lane.charge(seconds * part / tokens.total() / shares[lane.flow])
        for request, entries in seats.items():
            request.lane.take(request, entries)
        batch[0].owner.lane.queue.took(len(batch))
