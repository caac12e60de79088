"""Admit a request if the queue has room for it and it would be answered in time, or refuse it whole.

The HTTP process refuses by the size of a body before it is read (`service.middleware.early_rejection`); this is the
exact check, when the texts are tokens.
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
    """Knows how fast the device drains the queue, and refuses what would not fit or be too late.

    The drain rate of a model is the rate that its measured cost predicts, times the speed at which the device really
    works: less than 1 where other processes use the cores or batches are small.
    """

    def __init__(
        self,
        queue: FairQueue,
        planner: Planner,
        max_queue_tokens: int,
        clock: Callable[[], float],
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
        """Raise TooLarge for a request that an empty queue could not hold, Overloaded for one without room or time."""
        flow, tokens = entries[0].flow, sum(entry.tokens for entry in entries)
        limit = self.max_queue_tokens
        if tokens > limit:
            raise errors.TooLarge(f"{tokens} tokens are more than the {limit} that may ever wait")
        if not self._queue.tokens:
            return
        left_s = min(entry.deadline for entry in entries) - self._clock()
        if self._is_clearly_fine(tokens, left_s):
            return
        load = self.load(self._queue.waiting)
        if self._is_full(load, flow, tokens):
            raise errors.Overloaded(
                f"{load.queue_tokens} tokens wait, and {tokens} more would pass the limit of {limit}",
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
        return Load(self._rates, waiting, problem, self.max_queue_tokens)

    def batch_started(self, model: ModelStatistics, tokens: int) -> None:
        """Count a batch that begins towards the drain speed."""
        self._started_s += tokens / self._planner.expected_rate(model)

    def observe(self, now: float, idle: int) -> None:
        """While all slots are busy and entries wait, compare the expected seconds of new batches with the clock."""
        if self._started_s and now > self._busy_since:
            self._drain.observe(self._started_s, now - self._busy_since)
        if idle or not self._queue:
            self._busy_since = math.inf
        elif self._started_s or self._busy_since == math.inf:
            self._busy_since = now
        self._started_s = 0.0

    def _is_clearly_fine(self, tokens: int, left_s: float) -> bool:
        """Whether a request has room and time even if all waiting tokens went first at the slowest model's rate."""
        all_tokens = self._queue.tokens + tokens
        in_time = CLEAR_SHARE * left_s * min(self._rates.values(), default=0.0)
        return all_tokens <= min(self.max_queue_tokens, in_time)

    def _is_full(self, load: Load, flow: Flow, tokens: int) -> bool:
        """Whether the queue has no room; a flow below its share of the queue always has."""
        if load.queue_tokens + tokens <= self.max_queue_tokens:
            return False
        shares = weights({*load.waiting, flow})
        part = shares[flow] / sum(shares.values())
        own = load.waiting[flow].tokens if flow in load.waiting else 0
        return own + tokens > part * self.max_queue_tokens
