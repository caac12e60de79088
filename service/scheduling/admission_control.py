"""Admit a request if the queue has room for it and its expected completion is in time, or refuse it whole.

The HTTP process refuses requests by the size of their bodies before it reads them
(`service.middleware.early_rejection`). This module makes the exact check, with the number of tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from service import errors
from service.scheduling.cost_model import Drain
from service.scheduling.entries import Entry
from service.scheduling.fair_queue import FairQueue, ModelStatistics
from service.scheduling.load import CLEAR_SHARE, Backlog, Flow, Load, weights
from service.scheduling.planner import Planner


class AdmissionControl:
    """The check of new requests against the limit of the queue and the expected completion.

    The drain rate of a model is the rate that its measured cost predicts, times the measured speed of the device. The
    speed is below 1 where other processes use the cores or batches are small.
    """

    def __init__(
        self, queue: FairQueue, planner: Planner, max_queue_tokens: int, clock: Callable[[], float]
    ) -> None:
        self._queue = queue
        self._planner = planner
        self.max_queue_tokens = max_queue_tokens
        self._clock = clock
        self._drain = Drain()
        self._rates: Mapping[str, float] = {}  # by model, when they were last computed
        self._busy_since = math.inf  # since when all slots are busy and entries wait
        self._started_s = 0.0  # expected seconds of the batches that began since then

    def check(self, entries: Sequence[Entry]) -> None:
        """Check a new request. Raises TooLarge if it never fits, Overloaded for a full queue or a late completion."""
        flow, tokens = entries[0].flow, sum(entry.tokens for entry in entries)
        limit = self.max_queue_tokens
        if tokens > limit:
            raise errors.TooLarge(f"{tokens} tokens exceed max_queue_tokens, {limit}")
        if not self._queue.tokens:
            return
        left_s = min(entry.deadline for entry in entries) - self._clock()
        if self._is_clearly_fine(tokens, left_s):
            return
        load = self.load(self._queue.waiting)
        if self._is_full(load, flow, tokens):
            raise errors.Overloaded(
                f"{load.queue_tokens} tokens wait, and {tokens} more would exceed max_queue_tokens, {limit}",
                retry_after_s=load.drain_s,
            )
        if load.waiting:
            load.check_in_time(flow, tokens, left_s)

    def load(self, waiting: dict[Flow, Backlog], problem: str = "") -> Load:
        """Return a backlog with the rate at which all slots drain each model."""
        self._rates = {
            name: self._drain.speed * self._planner.expected_rate(model)
            for name, model in self._queue.models.items()
        }
        planner = self._planner
        limits = planner.slots, planner.entry_size, planner.budget.tokens
        return Load(self._rates, waiting, problem, self.max_queue_tokens, *limits)

    def batch_started(self, model: ModelStatistics, tokens: int) -> None:
        """Add the expected seconds of a batch that starts to the measurement of the drain speed."""
        self._started_s += tokens / self._planner.expected_rate(model)

    def observe(self, now: float, idle: int) -> None:
        """Update the drain speed by the seconds in which all slots are busy and entries wait."""
        if self._started_s and now > self._busy_since:
            self._drain.observe(self._started_s, now - self._busy_since)
        if idle or not self._queue:
            self._busy_since = math.inf
        elif self._started_s or self._busy_since == math.inf:
            self._busy_since = now
        self._started_s = 0.0

    def _is_clearly_fine(self, tokens: int, left_s: float) -> bool:
        """Return whether a request has room and time even if all waiting tokens run first, at the slowest rate."""
        all_tokens = self._queue.tokens + tokens
        in_time = CLEAR_SHARE * left_s * min(self._rates.values(), default=0.0)
        return all_tokens <= min(self.max_queue_tokens, in_time)

    def _is_full(self, load: Load, flow: Flow, tokens: int) -> bool:
        """Return whether the queue has no room for a request; it always has room for a flow below its share."""
        if load.queue_tokens + tokens <= self.max_queue_tokens:
            return False
        shares = weights({*load.waiting, flow})
        part = shares[flow] / sum(shares.values())
        own = load.waiting[flow].tokens if flow in load.waiting else 0
        return own + tokens > part * self.max_queue_tokens
