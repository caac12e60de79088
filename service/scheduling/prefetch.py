"""Prefetch the next batch: plan it before a slot is idle, so that the slot does not wait for the event loop."""

from collections.abc import Callable, Sequence

from service.scheduling.entries import Entry
from service.scheduling.executor import Job, Threads
from service.scheduling.fair_queue import FairQueue, request_of
from service.scheduling.planner import Planned, Planner


class Prefetch:
    """At most one prefetched batch, with which the next idle thread begins.

    A later entry of the same flow never goes before the batch. An entry of a flow that had no waiting entries may go
    before it, and any request may go before a part of a large request. When such an entry enters, the prefetch is
    cancelled. The entries stay in the queue until a thread begins with them.
    """

    def __init__(self, queue: FairQueue, planner: Planner, threads: Threads) -> None:
        self._queue = queue
        self._planner = planner
        self._threads = threads
        self._batch: Sequence[Entry] = ()
        self._is_part = False  # of a large request
        self._entered = 0  # value of `_possible_predecessors` when the batch was planned
        self._worth_from = 0  # entries that must wait before planning can pay

    def batch_started(self, size: int) -> None:
        """Note that a thread has begun with a batch of this many entries, prefetched or not."""
        self._batch, self._worth_from = (), 2 * size

    def keep_or_cancel(self, now: float, probes: bool) -> bool:
        """Cancel an outdated prefetch; False if a thread has just begun with it. probes: self-tests wait"""
        if not self._batch:
            return True
        live = all(not entry.done and entry.deadline > now for entry in self._batch)
        first = self._possible_predecessors == self._entered
        if live and first and not (self._threads.idle or probes):
            return True
        if not self._threads.cancel_prefetch():
            return False
        self._batch = ()
        return True

    def prefetch(self, now: float, may_hold: bool, make_job: Callable[[Planned], Job]) -> None:
        """Prefetch the next batch once at least twice as many entries wait as it holds; requires no idle slot."""
        if self._batch or not self._queue or self._queue.size < self._worth_from:
            return
        planned = self._planner.next(now, 0, may_hold)
        if planned is None or planned.batch[0].single or planned.hold_s:
            return
        batch = planned.batch
        self._worth_from = 2 * len(batch)
        if self._queue.size >= self._worth_from:
            left = sum(request.left for request in {request_of(entry) for entry in batch})
            self._batch, self._is_part = batch, len(batch) < left
            self._entered = self._possible_predecessors
            self._threads.prefetch(make_job(planned))

    @property
    def _possible_predecessors(self) -> int:
        """The number of requests or flows so far that may go before the prefetched batch."""
        return self._queue.requests_entered if self._is_part else self._queue.flows_entered
