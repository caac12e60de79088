"""The queue in front of a device's slots: requests in, batches out, one future per request.

Only `_serve` changes the queue. `submit` and the slots' threads post messages; `_serve` handles them in order, then
starts a batch on every idle slot. While all slots are busy the queue grows, and batches are made from the entries that
wait. No entry waits for others unless `max_wait_ms` is set. `planner` decides which entries are next, and
`admission_control` decides which requests are admitted. `prefetch` plans one batch ahead under load.

Slots belong to the device, and the models share them. On a CPU a slot is a core. A batch on one slot gives the highest
throughput; a batch on several slots gives the lowest latency when few entries wait.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from service import errors
from service.core.encode import Window
from service.scheduling.admission_control import AdmissionControl
from service.scheduling.cost_model import Estimator, Sample
from service.scheduling.entries import Entry, EntryOutcome, OnOutcome, Outputs
from service.scheduling.executor import (
    BatchStats,
    Ended,
    Job,
    Probe,
    RunBatch,
    Running,
    Threads,
    work,
)
from service.scheduling.fair_queue import (
    CountMasks,
    FairQueue,
    ModelStatistics,
    QueuedRequest,
    no_masks,
    request_of,
)
from service.scheduling.load import MAX_QUEUE_TOKENS, Load
from service.scheduling.planner import Budget, Planned, Planner, shape
from service.scheduling.prefetch import Prefetch

logger = logging.getLogger(__name__)

DRAINED_POLL_S = 0.02  # between checks for remaining work of a model that is unloaded
# Turns of the event loop until the response of a resolved future has been written.
TURNS_TO_SEND = 2


def call_after(turns: int, call: Callable[..., None], *args: Any) -> None:
    """Call a function after this many turns of the event loop."""
    if turns:
        asyncio.get_running_loop().call_soon(call_after, turns - 1, call, *args)
    else:
        call(*args)


class Batcher:
    """The scheduler that shares the device's slots among the requests of all models.

    run: `run(width, model, windows)` is called in a thread, with the number of slots that the batch takes (one, or
        `wide`), and returns one mapping of outputs per window
    fixed_batches: whether the batches of a request depend on its own entries alone
    observe: called with the statistics of each batch, after its responses are sent
    running: the batches in their threads
    admission: the check of new requests, with the limit of the queue
    """

    def __init__(
        self,
        run: RunBatch,
        *,
        slots: int = 1,
        wide: int = 1,
        max_batch_tokens: int = 16_384,
        max_batch_size: int = 64,
        max_queue_tokens: int = MAX_QUEUE_TOKENS,
        max_batch_ms: float = math.inf,
        max_wait_ms: float = 0.0,
        fixed_batches: bool = False,
        observe: Callable[[BatchStats], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._wide = wide
        self._fixed_batches = fixed_batches
        self._observe = observe
        self._clock = clock
        self._queue = FairQueue()
        self._threads = Threads(slots, self._receive)
        budget = Budget(max_batch_tokens, max_batch_size, seconds=max_batch_ms / 1000)
        self.planner = Planner(self._queue, budget, slots, wide, max_wait_ms / 1000)
        if fixed_batches:
            self.planner.entry_size = 1
        self.admission = AdmissionControl(self._queue, self.planner, max_queue_tokens, clock)
        self._prefetch = Prefetch(self._queue, self.planner, self._threads)
        self._state: Literal["new", "open", "draining", "failed"] = "new"
        self._stopped = False
        self._inbox: deque[Callable[[], None]] = deque()
        self._turn: asyncio.Handle | None = None  # the next call of `_serve`
        self._hold: asyncio.TimerHandle | None = None  # the end of a wait for more entries
        self._unanswered: set[QueuedRequest] = set()
        self.running: set[Running] = set()
        self._probes: deque[Probe] = deque()
        self._probe_wide = False

    # -- models -----------------------------------------------------------------------------------

    def add_bundle(
        self,
        bundle: str,
        estimators: Mapping[int, Estimator],
        unbatched: bool = False,
        area: float = math.inf,
        count_masks: CountMasks = no_masks,
    ) -> None:
        """Serve a model whose batches cost what the estimators predict, by the number of slots.

        unbatched: each of its entries gets a batch of its own
        area: the limit of B * S * S of its batches, see `Budget`
        count_masks: returns the mask tokens of a window whose logits are computed for these heads
        """
        self._queue.models[bundle] = ModelStatistics(estimators, unbatched, area, count_masks)

    def remove_bundle(self, bundle: str) -> None:
        """Stop serving a model: its waiting requests fail with NotReady, its running batches complete."""
        # Requests that have ended may be kept for a while, and must not keep the model's sessions.
        self._queue.models.pop(bundle).count_masks = no_masks
        self._post(partial(self._abandon, bundle))

    def requests(self, bundle: str, heads: frozenset[str] = frozenset()) -> int:
        """Return the number of unanswered requests for a model, or for one of its heads."""
        return sum(
            request.flow_queue.flow.bundle == bundle
            and (not heads or not heads.isdisjoint(request.entries[0].heads))
            for request in self._unanswered
        )

    async def drained(self, bundle: str, heads: frozenset[str] = frozenset()) -> None:
        """Wait until no entry of a model waits or runs; this does not end while more requests arrive.

        heads: wait for requests for these heads only, not for a batch whose requests were cancelled
        """
        while self.requests(bundle, heads) or (
            not heads and any(batch.bundle == bundle for batch in self.running)
        ):
            await asyncio.sleep(DRAINED_POLL_S)

    # -- lifecycle --------------------------------------------------------------------------------

    async def start(self) -> None:
        self._threads.start()
        self._state = "open"

    async def stop(self, drain_s: float) -> None:
        """Refuse new requests, answer the admitted ones, and fail those left after `drain_s` seconds."""
        self._state = "draining"
        self._serve_soon()  # a batch that waits for more entries runs now
        try:
            if self._unanswered:
                futures = [request.future for request in self._unanswered]
                await asyncio.wait(futures, timeout=drain_s)
        finally:
            self._fail_all(partial(errors.Draining, "the server is shutting down"))
            self._stopped = True
            self._threads.stop()

    @property
    def problem(self) -> str:
        """The reason why no request is accepted; empty if requests are accepted."""
        return "" if self._state == "open" else f"the batcher is {self._state}"

    def load(self) -> Load:
        """Return the backlog of each flow, and the rate at which all slots drain each model."""
        waiting = {flow: backlog.copy() for flow, backlog in self._queue.waiting.items()}
        return self.admission.load(waiting, self.problem)

    # -- requests ---------------------------------------------------------------------------------

    def submit(
        self, entries: Sequence[Entry], on_outcome: OnOutcome | None = None
    ) -> asyncio.Future[list[EntryOutcome]]:
        """Admit one request whole, and return a future of its outcomes: one per entry, in order.

        InferenceFailed is the outcome of an entry that fails. Cancellation of the future drops the entries that still
        wait. Its exceptions are DeadlineExceeded while entries wait, and InferenceFailed when a batch is lost. Raises
        NotReady, Draining, UnknownModel, TooLarge or Overloaded for a request that is refused.

        entries: of one model
        on_outcome: called with each entry and its outcome as soon as the entry's batch is done
        """
        if not entries:
            nothing: asyncio.Future[list[EntryOutcome]] = asyncio.get_running_loop().create_future()
            nothing.set_result([])
            return nothing
        request = self._admit(entries, on_outcome)
        request.future.add_done_callback(partial(self._drop_cancelled, request))
        self._post(partial(self._queue.enter, request))
        return request.future

    async def probe(self, bundle: str, window: Window) -> Outputs:
        """Compute every head's outputs of a window before all entries, without effect on the measured cost.

        Where `wide` slots are idle, every second probe takes them. Raises UnknownModel and the errors of the run.
        """
        future: asyncio.Future[Outputs] = asyncio.get_running_loop().create_future()
        self._post(partial(self._probes.append, Probe(bundle, window, future)))
        return await future

    def _admit(self, entries: Sequence[Entry], on_outcome: OnOutcome | None) -> QueuedRequest:
        if self._state == "draining":
            raise errors.Draining("the server is shutting down")
        if self.problem:
            raise errors.NotReady(self.problem)
        bundle = entries[0].bundle
        if bundle not in self._queue.models:
            raise errors.UnknownModel(f"no model {bundle!r} is served here")
        if any(entry.bundle != bundle for entry in entries):
            raise ValueError("the entries of a request belong to one bundle")
        count_masks = self._queue.models[bundle].count_masks
        for entry in entries:
            entry.masks = count_masks(entry.window, entry.heads)
        if not entries[0].unbatched:
            self.admission.check(entries)
        if self._fixed_batches:
            self.planner.fix_batches(entries)
        future = asyncio.get_running_loop().create_future()
        flow_queue = self._queue.flow_queue(entries[0].flow)
        request = QueuedRequest(entries, future, on_outcome, flow_queue=flow_queue)
        flow_queue.admit(request)
        self._unanswered.add(request)
        return request

    def _drop_cancelled(
        self, request: QueuedRequest, future: asyncio.Future[list[EntryOutcome]]
    ) -> None:
        if future.cancelled():
            self._post(partial(self._close, request))

    # -- the loop ---------------------------------------------------------------------------------

    def _post(self, message: Callable[[], None]) -> None:
        """Queue a message for the next turn of the event loop, which handles all messages of this turn together."""
        self._inbox.append(message)
        self._serve_soon()

    def _serve_soon(self) -> None:
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._serve)

    def _receive(self, message: Callable[[], None]) -> None:
        """Handle a thread's message at once, because a client waits for its result and its slot is idle."""
        self._inbox.append(message)
        self._serve()

    def _serve(self) -> None:
        for due in (self._turn, self._hold):
            if due is not None:
                due.cancel()
        self._turn = self._hold = None
        if self._stopped:
            return
        try:
            while self._inbox:
                self._inbox.popleft()()
            now = self._clock()
            hold_s = self._fill(now)
            self.admission.observe(now, self._threads.idle)
        except Exception:  # the queue may be inconsistent after any bug
            self._break()
        else:
            if hold_s:
                self._hold = asyncio.get_running_loop().call_later(hold_s, self._serve)

    def _fill(self, now: float) -> float:
        """Start a batch on every idle slot; return the seconds to hold the next one, 0 for none."""
        for request in self._queue.late(now):
            self._fail(request, errors.DeadlineExceeded("the deadline passed in the queue"))
        if not self._prefetch.keep_or_cancel(now, bool(self._probes)):
            return 0.0
        while self._threads.idle and self._probes:
            self._start_probe(self._probes.popleft())
        may_hold = self._state == "open"
        while self._threads.idle and self._queue:
            planned = self.planner.next(now, self._threads.idle, may_hold)
            if planned is None:
                break  # all candidates are cancelled; the messages that drop them are in the inbox or will be posted
            if planned.hold_s:
                return planned.hold_s
            self._threads.run(self._job(planned))
        if not (self._threads.idle or self._probes):
            self._prefetch.prefetch(now, may_hold, self._job)
        return 0.0

    def _break(self) -> None:
        """Stop after a bug of ours, and fail every waiting request."""
        self._state, self._stopped = "failed", True
        logger.critical("the batcher broke; nothing is served any more", exc_info=True)
        self._fail_all(partial(errors.InferenceFailed, "our bug: the batcher broke"))

    # -- batches ----------------------------------------------------------------------------------

    def _job(self, planned: Planned) -> Job:
        """Make a job of a planned batch; its entries are scheduled when a thread begins with it."""
        model, batch, width, _ = planned
        tokens, size, longest = shape(batch)
        masks = sum(entry.masks for entry in batch)
        seconds = model.estimators[width].cost.seconds(tokens, size, longest, masks)
        running = Running(batch[0].bundle, size, tokens, seconds)

        def started() -> None:
            self._prefetch.batch_started(size)
            self.admission.batch_started(model, running.tokens)
            self.running.add(running)
            # An entry that was cancelled since the prefetch is not scheduled.
            if waiting := [entry for entry in batch if entry.queued]:
                self._queue.take(waiting, width * seconds)

        def ended(end: Ended) -> None:
            self.running.discard(running)
            self._finish(model.estimators[width], batch, end)

        return Job(width, partial(work, self._run, width, batch, self._clock), started, ended)

    def _start_probe(self, probe: Probe) -> None:
        if probe.bundle not in self._queue.models:
            return probe.future.set_exception(errors.UnknownModel(f"no model {probe.bundle!r}"))
        width = self._wide if self._probe_wide and self._wide <= self._threads.idle else 1
        self._probe_wide = not self._probe_wide
        tokens = len(probe.window)
        cost = self._queue.models[probe.bundle].estimators[width].cost
        running = Running(probe.bundle, 1, tokens, cost.seconds(tokens, 1, tokens))

        def ended(end: Ended) -> None:
            self.running.discard(running)
            probe.settle(end)

        run = partial(self._run, width, probe.bundle, [probe.window], ())
        return self._threads.run(Job(width, run, partial(self.running.add, running), ended))

    def _finish(self, estimator: Estimator, batch: Sequence[Entry], ended: Ended) -> None:
        if ended.error is not None:
            logger.error("a batch was lost", exc_info=ended.error)
            for entry in batch:
                lost = errors.InferenceFailed("our bug: the batch was lost")
                self._fail(request_of(entry), lost)
            return
        outcomes, stats = ended.value
        for entry, outcome in zip(batch, outcomes, strict=True):
            request = request_of(entry)
            if not request.future.done():
                request.add(entry, outcome)
                if request.future.done():
                    self._close(request)
        call_after(TURNS_TO_SEND, self._learn, estimator, stats)

    def _learn(self, estimator: Estimator, stats: BatchStats) -> None:
        """Refine the cost from a batch, and call the observer. This takes time, so responses are sent first."""
        if not stats.failed:
            figures = stats.tokens, stats.size, stats.longest, stats.inference_s, stats.masks
            estimator.refine(Sample(*figures))
        if self._observe is not None:
            self._observe(stats)  # the event loop logs an error

    # -- ends of requests -------------------------------------------------------------------------

    def _fail(self, request: QueuedRequest, error: errors.QuartetError) -> None:
        request.fail(error)
        self._close(request)

    def _close(self, request: QueuedRequest) -> None:
        request.flow_queue.leave(request)
        self._unanswered.discard(request)
        request.release()

    def _abandon(self, bundle: str) -> None:
        for request in self._queue.remove(bundle):
            self._fail(request, errors.NotReady(f"{bundle} is served no longer"))

    def _fail_all(self, error: Callable[[], errors.QuartetError]) -> None:
        for request in self._unanswered:
            request.fail(error())
        self._unanswered.clear()
