"""The queue in front of the replicas: requests in, batches out, one future per request.

Only `_serve` touches the queue. `submit` and the replica slots send it messages; it takes them in
order, then fills every idle slot. While all slots are busy the queue grows, and that is what
makes batches: nothing waits for company unless `max_wait_ms` says so. Where more waits than the next
batch holds, that is set out before a slot is idle, so that none waits for the event loop.

Who is next and who rides along is one pure function, `plan`. Slots belong to the device: the
bundles take turns in them. On a CPU a slot is a core. A batch takes one slot, which is how cores do
most work, or several, all by default, when too little waits to keep each busy, which is how a text
is answered soonest.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, NamedTuple

from service import errors
from service.cost import Cost, Drain, Estimator, Sample
from service.encode import Window
from service.load import MAX_QUEUE_TOKENS, PATIENCE, Backlog, Flow, Load, weights
from service.packing import CUDA_MULTIPLE, round_up
from service.slots import BatchStats, Job, Probe, Result, Run, Running, Threads, work
from service.waiting import Ended, Entry, Line, Outcome, Outputs, Queue, Request, Tell

__all__ = ["BatchStats", "Batcher", "Budget", "Entry", "Outcome", "Run", "plan"]

logger = logging.getLogger(__name__)

PLAIN = 0.5  # of the time that there is for an answer: one that takes no more needs no close look
LOOK_S = 0.02  # between looks for what is left of a bundle that goes
# Of the event loop, until an answer has left: who waits for its future sends it, and that is written.
TURNS_TO_LEAVE = 2
CHEAP_ENOUGH = 1.01  # a hundredth of the speed is not worth a batch many times as long


class Budget(NamedTuple):
    """What one batch may hold; a single entry of more tokens still runs, alone.

    tokens: that are computed, padding included where it is
    share: of the tokens that wait
    area: B * S * S of B sequences, S being the longest rounded up to `CUDA_MULTIPLE`; what attention may store on a GPU
    """

    tokens: int
    size: int
    share: float = math.inf
    area: float = math.inf


def plan(entries: Sequence[Entry], cost: Cost, budget: Budget, now: float) -> list[Entry]:
    """Choose the next batch from entries in the order of the line; empty when none is left to run.

    The first one is its head. Companions are entries of its bundle, nearest in length first, as few
    as make a token about as cheap as it gets: more would gain nothing, and everyone in the batch
    would wait for them. An entry that is to be alone has none, and is none.
    """
    live = [entry for entry in entries if not entry.done and entry.deadline > now]
    if not live:
        return []
    head = live[0]
    if head.alone:
        return [head]
    others = [e for e in live if e is not head and e.bundle == head.bundle and not e.alone]
    others.sort(key=lambda entry: abs(entry.tokens - head.tokens))
    return _cheapest(head, others, cost, budget)


def _cheapest(head: Entry, others: Sequence[Entry], cost: Cost, budget: Budget) -> list[Entry]:
    batch, tokens, longest = [head], head.tokens, head.tokens
    prices = [cost.seconds(tokens, 1, longest) / tokens]
    bounded = budget.area < math.inf
    for entry in others:
        if len(batch) >= budget.size:
            break
        together = tokens + entry.tokens, len(batch) + 1, max(longest, entry.tokens)
        if together[0] > budget.share or cost.computed(*together) > budget.tokens:
            continue
        if bounded and area(*together[1:]) > budget.area:
            continue
        batch.append(entry)
        tokens, _, longest = together
        prices.append(cost.seconds(*together) / tokens)
    enough = CHEAP_ENOUGH * min(prices)
    size = next(size for size, price in enumerate(prices, 1) if price <= enough)
    return batch[:size]


def area(size: int, longest: int) -> int:
    """B * S * S of a batch, as `Budget.area` counts it."""
    return size * round_up(longest, CUDA_MULTIPLE) ** 2


def call_after(turns: int, call: Callable[..., None], *args: Any) -> None:
    """Call when the event loop has come round so many times."""
    if turns:
        asyncio.get_running_loop().call_soon(call_after, turns - 1, call, *args)
    else:
        call(*args)


class Batcher:
    """Shares the device's slots among the requests of all bundles.

    `run(width, bundle, windows)` is called in a thread, with the number of slots that the batch
    takes: one, or `wide` of them. It returns one mapping per window. `observe` is told of every
    batch, after its answers are on their way. `running` are the batches in their threads.
    """

    def __init__(
        self,
        run: Run,
        *,
        slots: int = 1,
        wide: int = 1,
        max_batch_tokens: int = 16_384,
        max_batch_size: int = 64,
        max_queue_tokens: int = MAX_QUEUE_TOKENS,
        max_wait_ms: float = 0.0,
        observe: Callable[[BatchStats], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._budget = Budget(max_batch_tokens, max_batch_size)
        self.max_queue_tokens = max_queue_tokens
        self._max_wait_s = max_wait_ms / 1000
        self._observe = observe
        self._clock = clock
        self._slots = slots
        self._wide = wide
        self._drain = Drain()
        self._told: Mapping[str, float] = {}  # the rates, when somebody looked last
        self._busy_since = math.inf  # all slots, with more waiting
        self._started_s = (
            0.0  # what was started since then is expected to take, in full batches on all slots
        )
        self._threads = Threads(slots, self._hear)
        # What is set out waits in line until a thread has begun with it.
        self._ahead: Sequence[Entry] = ()
        self._ahead_is_part = False  # of a large request; what is left of one gives way to all
        self._ahead_since = 0  # so many had come then who may be before it
        self._ahead_from = 0  # so many have to wait before it is worth a look who could be set out
        self._state: Literal["new", "open", "draining", "failed"] = "new"
        self._over = False  # nothing is served any more
        self._inbox: deque[Callable[[], None]] = deque()
        self._turn: asyncio.Handle | None = None  # when messages that came are taken
        self._held: asyncio.TimerHandle | None = None  # until when a batch waits for company
        self._line = Line()
        self._unanswered: set[Request] = set()
        self.running: set[Running] = set()
        self._probes: deque[Probe] = deque()
        self._probe_wide = False

    def add_bundle(
        self,
        bundle: str,
        estimators: Mapping[int, Estimator],
        alone: bool = False,
        area: float = math.inf,
    ) -> None:
        """Serve a bundle whose batches cost what the estimators say, by the slots that they take.

        alone: each of its entries gets a batch of its own
        area: limit of B * S * S of its batches, see `Budget`
        """
        self._line.queues[bundle] = Queue(estimators, alone, area)

    def remove_bundle(self, bundle: str) -> None:
        """Serve it no longer: what waits for it fails with NotReady, what runs is answered."""
        del self._line.queues[bundle]
        self._post(partial(self._abandon, bundle))

    def requests(self, bundle: str) -> int:
        """How many requests for a bundle are not answered yet."""
        return sum(request.lane.flow.bundle == bundle for request in self._unanswered)

    async def drained(self, bundle: str) -> None:
        """Wait until nothing of a bundle waits or runs, which takes for ever while more comes."""
        while self.requests(bundle) or any(batch.bundle == bundle for batch in self.running):
            await asyncio.sleep(LOOK_S)

    async def start(self) -> None:
        self._threads.start()
        self._state = "open"

    async def stop(self, drain_s: float) -> None:
        """Refuse new requests, answer those accepted, fail what is left after `drain_s` seconds.

        A thread that is still busy then ends with its batch.
        """
        self._state = "draining"
        self._serve_soon()  # nobody is held for company any more
        try:
            if self._unanswered:
                futures = [request.future for request in self._unanswered]
                await asyncio.wait(futures, timeout=drain_s)
        finally:
            self._fail_all(partial(errors.Draining, "the server is shutting down"))
            self._over = True
            self._threads.stop()

    async def submit(
        self, entries: Sequence[Entry], tell: Tell | None = None, spare: bool = False
    ) -> list[Ended]:
        """Answer one request: entries of one bundle, in their order; admitted whole or refused.

        `tell(entry, outcome)` is called for each entry as soon as its batch is done. Cancelling
        drops what still waits. Raises NotReady, Draining, UnknownModel, TooLarge or Overloaded
        before anything is queued, DeadlineExceeded while it is, InferenceFailed after; with
        `spare`, that is the outcome of the entries that failed.
        """
        return await self.begin(entries, tell, spare)

    def begin(
        self, entries: Sequence[Entry], tell: Tell | None = None, spare: bool = False
    ) -> asyncio.Future[list[Ended]]:
        """The same without waiting for it; what is raised before anything is queued is raised here."""
        if not entries:
            nothing: asyncio.Future[list[Ended]] = asyncio.get_running_loop().create_future()
            nothing.set_result([])
            return nothing
        request = self._admit(entries, tell, spare)
        request.future.add_done_callback(partial(self._forget, request))
        self._post(partial(self._line.enter, request))
        return request.future

    def _forget(self, request: Request, future: asyncio.Future[list[Ended]]) -> None:
        if future.cancelled():
            self._post(partial(self._close, request))

    async def probe(self, bundle: str, window: Window) -> Outputs:
        """Every head's outputs for a window, before all that waits; on one slot or, by turns, where so many are idle,
        on `wide` of them.

        It teaches no cost, and nobody is told of it. Raises UnknownModel, and what the run raises.
        """
        future: asyncio.Future[Outputs] = asyncio.get_running_loop().create_future()
        self._post(partial(self._probes.append, Probe(bundle, window, future)))
        return await future

    @property
    def problem(self) -> str:
        """Why no request may come, if so."""
        return "" if self._state == "open" else f"the batcher is {self._state}"

    def load(self) -> Load:
        """What waits, and how fast all slots together drain it by the measured cost, in full batches."""
        return self._load({flow: own.copy() for flow, own in self._line.waiting.items()})

    def _load(self, waiting: dict[Flow, Backlog]) -> Load:
        self._told = {name: self._rate(queue) for name, queue in self._line.queues.items()}
        return Load(self._told, waiting, self.problem, self.max_queue_tokens)

    def _rate(self, queue: Queue) -> float:
        return self._drain.speed * self._expected_rate(queue)

    def _expected_rate(self, queue: Queue) -> float:
        size = min(self._size(queue), self._budget.tokens // queue.mean_length)
        if queue.area < math.inf:
            size = min(size, int(queue.area // area(1, queue.mean_length)))
        lengths = [queue.mean_length] * max(size, 1)
        return self._slots * queue.estimators[1].tokens_per_second(lengths)

    def _admit(self, entries: Sequence[Entry], tell: Tell | None, spare: bool) -> Request:
        if self._state == "draining":
            raise errors.Draining("the server is shutting down")
        if self.problem:
            raise errors.NotReady(self.problem)
        bundle = entries[0].bundle
        if bundle not in self._line.queues:
            raise errors.UnknownModel(f"no model {bundle!r} is served here")
        if any(entry.bundle != bundle for entry in entries):
            raise ValueError("the entries of a request belong to one bundle")
        if not entries[0].alone:
            self._check_room(entries)
        future = asyncio.get_running_loop().create_future()
        request = Request(entries, future, tell, spare, lane=self._line.lane(entries[0].flow))
        request.lane.admit(request)
        self._unanswered.add(request)
        return request

    def _check_room(self, entries: Sequence[Entry]) -> None:
        """Raises TooLarge for what could never wait here, Overloaded for what has no room or would come too late."""
        flow, tokens = entries[0].flow, sum(entry.tokens for entry in entries)
        limit = self.max_queue_tokens
        if tokens > limit:
            raise errors.TooLarge(f"{tokens} tokens are more than the {limit} that may ever wait")
        if not self._line.tokens:
            return
        left_s = min(entry.deadline for entry in entries) - self._clock()
        if self._has_room(tokens, left_s):
            return
        load = self._load(self._line.waiting)
        if self._is_full(load, flow, tokens):
            raise errors.Overloaded(
                f"{load.queue_tokens} tokens wait, and {tokens} more would pass the limit of {limit}",
                retry_after_s=load.drain_s,
            )
        if load.waiting:
            load.check_in_time(flow, tokens, left_s)

    def _has_room(self, tokens: int, left_s: float) -> bool:
        """Whether it is plain that so many more tokens have room and time, by the rates that were told last.

        Plain is what would be in time by half, if all that waits were of the slowest bundle, and all before it.
        """
        all_tokens = self._line.tokens + tokens
        enough = PLAIN * PATIENCE * left_s * min(self._told.values(), default=0.0)
        return all_tokens <= min(self.max_queue_tokens, enough)

    def _is_full(self, load: Load, flow: Flow, tokens: int) -> bool:
        """Whether the queue has no room; who waits for less than its part of it has room all the same."""
        if load.queue_tokens + tokens <= self.max_queue_tokens:
            return False
        shares = weights({*load.waiting, flow})
        part = shares[flow] / sum(shares.values())
        own = load.waiting[flow].tokens if flow in load.waiting else 0
        return own + tokens > part * self.max_queue_tokens

    def _post(self, message: Callable[[], None]) -> None:
        """Have a message taken, with all others that come in this turn of the event loop."""
        self._inbox.append(message)
        self._serve_soon()

    def _serve_soon(self) -> None:
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._serve)

    def _hear(self, message: Callable[[], None]) -> None:
        """Take a message of a thread at once: somebody waits for its answer, and its slot is idle."""
        self._inbox.append(message)
        self._serve()

    def _serve(self) -> None:
        for due in (self._turn, self._held):
            if due is not None:
                due.cancel()
        self._turn = self._held = None
        if self._over:
            return
        try:
            while self._inbox:
                self._inbox.popleft()()
            now = self._clock()
            hold = self._fill(now)
            self._watch_drain(now)
        except Exception:
            self._break()
        else:
            if hold is not None:
                self._held = asyncio.get_running_loop().call_later(hold, self._serve)

    def _watch_drain(self, now: float) -> None:
        """While all slots are busy and more waits, compare what is started with what was expected of the time."""
        if self._started_s and now > self._busy_since:
            self._drain.observe(self._started_s, now - self._busy_since)
        if self._threads.idle or not self._line:
            self._busy_since = math.inf
        elif self._started_s or self._busy_since == math.inf:
            self._busy_since = now
        self._started_s = 0.0

    def _break(self) -> None:
        """A bug of ours: nobody knows any more what waits and what runs, so nobody is left waiting."""
        self._state, self._over = "failed", True
        logger.critical("the batcher broke; nothing is served any more", exc_info=True)
        self._fail_all(partial(errors.InferenceFailed, "our bug: the batcher broke"))

    def _fill(self, now: float) -> float | None:
        """Give idle slots their batches; return the seconds to hold one for company, if any."""
        for request in self._line.late(now):
            self._fail(request, errors.DeadlineExceeded("the deadline passed in the queue"))
        if not self._keep_ahead(now):
            return None
        while self._threads.idle and self._probes:
            self._launch_probe(self._probes.popleft())
        while self._threads.idle and self._line:
            queue, pool = self._line.pool()
            width = self._width(queue, pool)
            cost = queue.estimators[width].cost
            batch = plan(pool, cost, self._budget_of(queue, width), now)
            if not batch:
                break  # all cancelled, and the messages that drop them are on their way
            if (hold := self._hold(queue, batch[0], cost, now)) > 0:
                return hold
            self._threads.run(self._job(queue, batch, width))
        self._plan_ahead(now)
        return None

    def _keep_ahead(self, now: float) -> bool:
        """Take back what is set out if others are to be before it; False when somebody has begun with it just now."""
        if not self._ahead:
            return True
        good = all(not entry.done and entry.deadline > now for entry in self._ahead)
        same = self._may_be_before == self._ahead_since
        if good and same and not (self._threads.idle or self._probes):
            return True
        if not self._threads.take_back():
            return False
        self._ahead = ()
        return True

    @property
    def _may_be_before(self) -> int:
        """How many came so far who may be before what is set out."""
        return self._line.requests_came if self._ahead_is_part else self._line.flows_came

    def _plan_ahead(self, now: float) -> None:
        """Set out the next batch where it needs no more company: twice as many wait as it takes.

        Who comes behind others of its flow changes nobody's turn. A flow of which nothing waited may be before it, and
        any request before a part of a large one; when such a one comes, it is taken back.
        """
        if self._ahead or self._threads.idle or self._probes:
            return
        if not self._line or self._line.size < self._ahead_from:
            return
        queue, pool = self._line.pool()
        cost = queue.estimators[1].cost
        batch = plan(pool, cost, self._budget_of(queue, 1), now)
        if not batch or batch[0].alone or self._hold(queue, batch[0], cost, now) > 0:
            return
        self._ahead_from = 2 * len(batch)
        if self._line.size >= self._ahead_from:
            left = sum(request.left for request in {entry.owner for entry in batch})
            self._ahead, self._ahead_is_part = batch, len(batch) < left
            self._ahead_since = self._may_be_before
            self._threads.set_out(self._job(queue, batch, 1))

    def _width(self, queue: Queue, waiting: Sequence[Entry]) -> int:
        """The slots that the next batch takes: many, where they are idle, fewer entries wait, and it ends sooner so.

        What was not chosen is tried now and then.
        """
        if not self._line.size < self._wide <= self._threads.idle:
            return 1
        waiting = waiting[: self._size(queue)]
        longest = max(entry.tokens for entry in waiting)
        together = sum(entry.tokens for entry in waiting), len(waiting), longest
        wide = queue.estimators[self._wide].cost.seconds(*together)
        narrow = queue.estimators[1].cost.seconds(longest, 1, longest)
        trial = queue.count_choice()
        return self._wide if (wide < narrow) is not trial else 1

    def _budget_of(self, queue: Queue, width: int) -> Budget:
        """A batch's budget, cut so that every idle slot, or every slot if none is, gets its part of what waits."""
        share = math.ceil(self._line.tokens * width / (self._threads.idle or self._slots))
        return Budget(self._budget.tokens, self._size(queue), share, queue.area)

    def _size(self, queue: Queue) -> int:
        """How many entries a batch of the bundle may hold."""
        return 1 if queue.alone else self._budget.size

    def _hold(self, queue: Queue, head: Entry, cost: Cost, now: float) -> float:
        full = queue.tokens >= self._budget.tokens or queue.size >= self._size(queue)
        if full or head.alone or self._state != "open":
            return 0.0
        if self._line.tokens > queue.tokens:
            return 0.0  # another bundle could use the slot
        spare = head.deadline - now - cost.seconds(head.tokens, 1, head.tokens)
        return min(self._max_wait_s, head.arrival + self._max_wait_s - now, spare)

    def _job(self, queue: Queue, batch: Sequence[Entry], width: int) -> Job:
        """A batch for one of the threads; its entries have their seats from when it began."""
        tokens = [entry.tokens for entry in batch]
        seconds = queue.estimators[width].cost.seconds(sum(tokens), len(tokens), max(tokens))
        running = Running(batch[0].bundle, len(batch), sum(tokens), seconds)

        def started() -> None:
            self._ahead, self._ahead_from = (), 2 * len(batch)
            self._started_s += sum(tokens) / self._expected_rate(queue)
            self.running.add(running)
            # Who left since it was set out has no seat any more.
            if waiting := [entry for entry in batch if entry.queued]:
                self._line.take(waiting, width * seconds)

        def ended(ran: Future[tuple[list[Result], BatchStats]]) -> None:
            self.running.discard(running)
            self._finish(width, queue, batch, ran)

        return Job(width, partial(work, self._run, width, batch, self._clock), started, ended)

    def _launch_probe(self, probe: Probe) -> None:
        if probe.bundle not in self._line.queues:
            return probe.future.set_exception(errors.UnknownModel(f"no model {probe.bundle!r}"))
        width = self._wide if self._probe_wide and self._wide <= self._threads.idle else 1
        self._probe_wide = not self._probe_wide
        tokens = len(probe.window)
        cost = self._line.queues[probe.bundle].estimators[width].cost
        running = Running(probe.bundle, 1, tokens, cost.seconds(tokens, 1, tokens))

        def ended(ran: Future[list[Outputs]]) -> None:
            self.running.discard(running)
            probe.settle(ran)

        run = partial(self._run, width, probe.bundle, [probe.window])
        return self._threads.run(Job(width, run, partial(self.running.add, running), ended))

    def _finish(
        self,
        width: int,
        queue: Queue,
        batch: Sequence[Entry],
        ran: Future[tuple[list[Result], BatchStats]],
    ) -> None:
        try:
            results, stats = ran.result()
        except Exception as error:
            logger.exception("a batch was lost", exc_info=error)
            for entry in batch:
                self._fail(entry.owner, errors.InferenceFailed("our bug: the batch was lost"))
            return
        for index, (entry, result) in enumerate(zip(batch, results, strict=True)):
            self._answer(entry, result, stats, index)
        call_after(TURNS_TO_LEAVE, self._learn, queue.estimators[width], stats)

    def _learn(self, estimator: Estimator, stats: BatchStats) -> None:
        """Learn what a batch cost, and tell of it. It takes its time, so whoever waits for an answer goes first."""
        if not stats.failed:
            shape = (stats.tokens, stats.size, stats.longest)
            estimator.refine(Sample(*shape, stats.inference_s))
        try:
            if self._observe is not None:
                self._observe(stats)
        except Exception:
            logger.exception("an observer failed")

    def _answer(self, entry: Entry, result: Result, stats: BatchStats, index: int) -> None:
        request = entry.owner
        if request.future.done():
            return
        if isinstance(result, errors.InferenceFailed):
            request.miss(entry, result)
        else:
            request.add(entry, self._outcome(result, stats, index))
        if request.future.done():
            self._close(request)

    def _outcome(self, outputs: Outputs, stats: BatchStats, index: int) -> Outcome:
        return Outcome(
            outputs=outputs,
            queue_s=stats.queue_s[index],
            inference_s=stats.inference_s,
            batch_size=stats.size,
            batch_tokens=stats.tokens,
            padding_ratio=stats.padding_ratio,
        )

    def _fail(self, request: Request, error: errors.QuartetError) -> None:
        request.fail(error)
        self._close(request)

    def _close(self, request: Request) -> None:
        request.lane.leave(request)
        self._unanswered.discard(request)
        request.release()

    def _abandon(self, bundle: str) -> None:
        for request in self._line.remove(bundle):
            self._fail(request, errors.NotReady(f"{bundle} is served no longer"))

    def _fail_all(self, error: Callable[[], errors.QuartetError]) -> None:
        for request in self._unanswered:
            request.fail(error())
        self._unanswered.clear()
