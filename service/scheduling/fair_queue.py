"""The order of entries: start-time fair queueing of the requests in each flow, whose turns `flow_turns` decides.

In a flow, each request's entries get consecutive virtual starts, in tokens, from the virtual start at which the request
arrived. The entry with the smallest start is next, so that a single text never waits behind a thousand. Small requests
that keep arriving could delay a large one without end, so a flow also records which request has waited longest without
being scheduled.

Nothing here depends on time, threads or tasks.
"""

import itertools
import math
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, merge
from operator import itemgetter

from service.core.encode import Window
from service.scheduling.cost_model import Estimator
from service.scheduling.entries import Entry, Heads, PendingRequest
from service.scheduling.flow_turns import FlowTurns, FlowWork
from service.scheduling.load import Backlog, Flow, RemainingWork

MAX_SKIPPED = 16  # batches of a flow without an entry of a request before that request goes first
# The planner chooses the next batch from the entries of this many batches. A larger pool contains more entries of
# similar length, but an entry of unusual length is skipped for longer. With all of 160 entries instead of 32, the
# throughput is 1 % higher and the longest wait 50 % longer.
POOL_BATCHES = 8
POOL_LEAST, POOL_MOST = 32, 256
FIRST_TRIAL, TRIAL_EVERY = 4, 64  # choices between one slot and several
SMOOTH = 0.1  # weight of the newest batch in the mean batch size
TYPICAL_LENGTH = 64  # tokens of an entry, where none waits


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedRequest(PendingRequest):
    """A request in the queue. tokens, left: those that wait; scheduled: the flow's last batch with an entry of it"""

    flow_queue: "FlowQueue"
    deadline: float = field(init=False)
    tokens: int = field(init=False)
    left: int = field(default=0, init=False)
    scheduled: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.deadline = min(entry.deadline for entry in self.entries)
        self.tokens = sum(entry.tokens for entry in self.entries)
        for entry in self.entries:
            entry.request = self

    def first(self) -> Entry:
        """Return the first entry that still waits; requires that one does."""
        return next(entry for entry in self.entries if entry.queued)

    def release(self) -> None:
        """Drop the entries, which refer to the request, so that no reference cycle is left."""
        self.entries = ()
        self.outcomes = {}


CountMasks = Callable[[Window, Heads], int]  # mask tokens of a window, for these heads


def no_masks(window: Window, heads: Heads) -> int:
    """Return 0: a model without a fill-mask head."""
    return 0


class ModelStatistics:
    """The planner's data about one served model.

    estimators: the cost of its batches, by the number of slots that a batch takes
    unbatched: each entry gets a batch of its own
    area: the limit of B * S * S of a batch, see `planner.Budget`
    count_masks: returns the mask tokens of a window whose logits are computed for these heads
    tokens, masks, size: tokens, mask tokens and sequences that wait, from admission until they are taken or dropped
    """

    def __init__(
        self,
        estimators: Mapping[int, Estimator],
        unbatched: bool = False,
        area: float = math.inf,
        count_masks: CountMasks = no_masks,
    ) -> None:
        self.estimators = estimators
        self.unbatched = unbatched
        self.area = area
        self.count_masks = count_masks
        self.tokens = 0
        self.masks = 0
        self.size = 0
        self._batch_size = 0.0
        self._choices = 0
        self._next_trial = FIRST_TRIAL

    def count_choice(self) -> bool:
        """Count a choice between one slot and several; return whether to try the more expensive one.

        Trials measure it; they are frequent at first, because the warm-up may have been disturbed.
        """
        self._choices += 1
        if self._choices < self._next_trial:
            return False
        self._next_trial += min(self._choices, TRIAL_EVERY)
        return True

    def count_batch(self, size: int) -> None:
        """Count a batch of this many entries."""
        self._batch_size += SMOOTH * (size - self._batch_size)

    @property
    def pool_size(self) -> int:
        return min(max(round(POOL_BATCHES * self._batch_size), POOL_LEAST), POOL_MOST)

    @property
    def mean_length(self) -> int:
        return round(self.tokens / self.size) if self.size else TYPICAL_LENGTH

    @property
    def mean_masks(self) -> float:
        """Mask tokens of a waiting sequence."""
        return self.masks / self.size if self.size else 0.0

    @property
    def price(self) -> float:
        """Seconds of one slot per token in a typical batch."""
        lengths = [self.mean_length] * (1 if self.unbatched else POOL_BATCHES)
        masks = round(len(lengths) * self.mean_masks)
        return 1 / self.estimators[1].cost.tokens_per_second(lengths, masks)


class FlowQueue(FlowWork):
    """The entries of one flow by virtual start: a sorted front to plan from, and a heap behind it.

    backlog: admitted entries that wait
    requests: the request that has waited longest without being scheduled comes first
    """

    def __init__(self, flow: Flow, statistics: ModelStatistics) -> None:
        super().__init__(flow)
        self.statistics = statistics
        self.backlog = Backlog()
        self.requests: OrderedDict[QueuedRequest, None] = OrderedDict()
        self._batches = 0
        # Of the next request: the smallest start at the flow's last batch.
        self._virtual_start = 0.0
        self._smallest = 0.0  # start in the last pool
        self._order = itertools.count()
        self._queued = 0
        self._front: list[tuple[float, int, Entry]] = []
        self._heap: list[tuple[float, int, Entry]] = []

    def __bool__(self) -> bool:
        return bool(self.requests)

    @property
    def arrival(self) -> float:
        return self.longest.first().arrival

    @property
    def is_idle(self) -> bool:
        return not self.backlog.tokens

    @property
    def longest(self) -> QueuedRequest:
        """The request that has waited longest without being scheduled; requires that one waits."""
        return next(iter(self.requests))

    def admit(self, request: QueuedRequest) -> None:
        """Count a request that is admitted and will enter."""
        self.statistics.tokens += request.tokens
        self.statistics.masks += sum(entry.masks for entry in request.entries)
        self.statistics.size += sum(entry.size for entry in request.entries)
        self.backlog.change(RemainingWork(), RemainingWork(request.tokens, len(request.entries)))

    def enter(self, request: QueuedRequest) -> None:
        start = self._virtual_start
        for entry in sorted(request.entries, key=lambda entry: entry.batch):
            entry.virtual_start = start
            self.push(entry)
            start += entry.tokens
        request.left = len(request.entries)
        request.scheduled = self._batches
        self.requests[request] = None

    def push(self, entry: Entry) -> None:
        entry.queued = True
        self._queued += 1
        heappush(self._heap, (entry.virtual_start, next(self._order), entry))

    def leave(self, request: QueuedRequest) -> None:
        """Drop the entries of a request that still wait."""
        if request.left:
            self._shrink(request, [entry for entry in request.entries if entry.queued])
            self._forget(request)

    def take(self, request: QueuedRequest, entries: Sequence[Entry]) -> None:
        """Schedule entries of a request, and put it last among the flow's requests."""
        self._shrink(request, entries)
        request.scheduled = self._batches
        if request.left:
            self.requests.move_to_end(request)
        else:
            self._forget(request)

    def _forget(self, request: QueuedRequest) -> None:
        """Forget a request without waiting entries; clear the heap when no request is left."""
        del self.requests[request]
        if not self.requests:
            self._front.clear()
            self._heap.clear()

    def _shrink(self, request: QueuedRequest, entries: Sequence[Entry]) -> None:
        before = RemainingWork(request.tokens, request.left)
        for entry in entries:
            self.remove(entry)
            request.tokens -= entry.tokens
        request.left -= len(entries)
        self.backlog.change(before, RemainingWork(request.tokens, request.left))

    def remove(self, entry: Entry) -> None:
        entry.queued = False
        self._queued -= 1
        self.statistics.tokens -= entry.tokens
        self.statistics.masks -= entry.masks
        self.statistics.size -= entry.size

    def count_batch(self) -> None:
        """Count a batch with entries of the flow."""
        self._batches += 1
        self._virtual_start = self._smallest

    def pool(self) -> list[Entry]:
        """Return the candidates for the next batch, in order; a request skipped too often goes first."""
        front = self.front(self.statistics.pool_size)
        self._smallest = front[0].virtual_start
        first = self.longest.first()
        first.skipped = self._batches - self.longest.scheduled
        if first.skipped <= MAX_SKIPPED:
            return front
        return [first, *(entry for entry in front if entry is not first)]

    def front(self, size: int) -> list[Entry]:
        """Return the `size` entries of smallest start, in O(size), plus O(log n) for each entry new to the front."""
        front = [key for key in self._front if key[2].queued]
        if len(self._heap) > 2 * self._queued + size:  # most of its entries have left the queue
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
        """Yield the candidates with the flow's virtual time before each, at `rate` seconds per token."""
        virtual_time = self.virtual_time
        for entry in self.pool():
            yield virtual_time, entry
            virtual_time += entry.tokens * rate


class FairQueue:
    """All waiting entries of all models.

    requests_entered, flows_entered: requests so far, and flows that had no waiting entry when a request entered
    """

    def __init__(self) -> None:
        self.models: dict[str, ModelStatistics] = {}
        self.requests_entered = 0
        self.flows_entered = 0
        self._turns = FlowTurns(lambda flow: FlowQueue(flow, self.models[flow.bundle]))
        self._next_deadline = math.inf  # no waiting request has an earlier deadline

    def __bool__(self) -> bool:
        return any(self._turns)

    @property
    def tokens(self) -> int:
        return sum(statistics.tokens for statistics in self.models.values())

    @property
    def size(self) -> int:
        return sum(statistics.size for statistics in self.models.values())

    @property
    def waiting(self) -> dict[Flow, Backlog]:
        """The admitted backlog of each flow, of models that are served."""
        return {
            queue.flow: queue.backlog
            for queue in self._turns
            if queue.backlog.tokens and queue.flow.bundle in self.models
        }

    def flow_queue(self, flow: Flow) -> FlowQueue:
        """Return the queue of a flow whose model is served."""
        return self._turns.get(flow)

    def remove(self, bundle: str) -> list[QueuedRequest]:
        """Forget a model that is no longer served; return its waiting requests."""
        return [request for queue in self._turns.remove(bundle) for request in queue.requests]

    def enter(self, request: QueuedRequest) -> None:
        flow_queue = request.flow_queue
        self.requests_entered += 1
        if not flow_queue:
            self.flows_entered += 1
        flow_queue.enter(request)
        self._next_deadline = min(self._next_deadline, request.deadline)

    def late(self, now: float) -> list[QueuedRequest]:
        """Return the waiting requests whose deadline has passed."""
        if now < self._next_deadline:
            return []
        waiting = [request for queue in self._turns for request in queue.requests]
        later = (request.deadline for request in waiting if request.deadline > now)
        self._next_deadline = min(later, default=math.inf)
        return [request for request in waiting if request.deadline <= now]

    def pool(self) -> tuple[ModelStatistics, list[Entry]]:
        """Return the model that is next, and the candidates for its next batch, in order; requires a waiting entry."""
        turn = self._turns.next()
        assert turn is not None, "our bug: a batch is planned while no entry waits"
        model = turn.statistics
        rivals = [q for q in self._turns if q and q.statistics is model and q is not turn]
        if not rivals:
            return model, turn.pool()
        shares, price = self._turns.weights(), model.price
        due = [queue.due(price / shares[queue.flow]) for queue in (turn, *rivals)]
        first = merge(*due, key=itemgetter(0))
        return model, [entry for _, entry in itertools.islice(first, model.pool_size)]

    def take(self, batch: Sequence[Entry], seconds: float) -> None:
        """Take the entries of a batch of this many expected seconds, and advance the virtual times of its flows."""
        tokens: Counter[FlowQueue] = Counter()
        scheduled: dict[QueuedRequest, list[Entry]] = {}
        for entry in batch:
            tokens[request_of(entry).flow_queue] += entry.tokens
            scheduled.setdefault(request_of(entry), []).append(entry)
        total = tokens.total()
        self._turns.charge({queue: seconds * own / total for queue, own in tokens.items()})
        for flow_queue in tokens:
            flow_queue.count_batch()
        for request, entries in scheduled.items():
            request.flow_queue.take(request, entries)
        request_of(batch[0]).flow_queue.statistics.count_batch(len(batch))


def request_of(entry: Entry) -> QueuedRequest:
    """Return the request of an admitted entry."""
    request = entry.request
    assert isinstance(request, QueuedRequest), "our bug: this entry was never admitted"
    return request
