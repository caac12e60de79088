"""Plan the next batch: which entries, on how many slots, and whether to wait for more entries first."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from service.core.packing import SLOT_MULTIPLE, round_up
from service.scheduling.cost_model import Cost
from service.scheduling.entries import Entry
from service.scheduling.fair_queue import FairQueue, ModelStatistics

CHEAP_ENOUGH = 1.01  # ratio to the lowest price per token; a larger batch would add latency for a gain below 1 %


class Budget(NamedTuple):
    """The limits of one batch; a single entry above them still runs, unbatched."""

    tokens: int  # computed tokens, padding included where the graph computes it
    size: int  # sequences
    share: float = math.inf  # tokens of the batch's share of the waiting tokens
    # B * S * S of B sequences, which limits the memory of attention on a GPU; S is the longest, rounded up to
    # `SLOT_MULTIPLE`.
    area: float = math.inf
    seconds: float = math.inf  # expected; other entries wait for this long, or ride in the batch


class Planned(NamedTuple):
    """A batch to run."""

    model: ModelStatistics
    batch: list[Entry]
    width: int  # the slots that it takes
    hold_s: float  # seconds to wait for more entries before it runs; 0 to run at once


def plan(entries: Sequence[Entry], cost: Cost, budget: Budget, now: float) -> list[Entry]:
    """Choose the next batch from candidates in the order of the fair queue; empty when no candidate is left to run.

    The first candidate leads the batch. The others are entries of its model, nearest in length first. The batch ends at
    the size at which the price per token is within 1 % of the lowest, because all entries of a larger batch would wait
    longer for no gain. The price is without mask tokens, which cost the same in any batch. A single entry runs in a
    batch of its own, and an entry with a number of a batch in this one.
    """
    live = [entry for entry in entries if not entry.done and entry.deadline > now]
    if not live:
        return []
    lead = live[0]
    if lead.single:
        return [lead]
    if lead.batch and lead.request:
        return [entry for entry in lead.request.entries if entry.batch == lead.batch]
    others = [e for e in live if e is not lead and e.bundle == lead.bundle and not e.single]
    others.sort(key=lambda entry: abs(entry.longest - lead.longest))
    return _cheapest(lead, others, cost, budget)


def _cheapest(lead: Entry, others: Sequence[Entry], cost: Cost, budget: Budget) -> list[Entry]:
    batch, tokens, size, longest = [lead], lead.tokens, lead.size, lead.longest
    prices = [cost.seconds(tokens, size, longest) / tokens]
    bounded = budget.area < math.inf
    for entry in others:
        if size + entry.size > budget.size:
            continue
        together = tokens + entry.tokens, size + entry.size, max(longest, entry.longest)
        if together[0] > budget.share or cost.computed(*together) > budget.tokens:
            continue
        if bounded and area(*together[1:]) > budget.area:
            continue
        if (seconds := cost.seconds(*together)) > budget.seconds:
            continue
        batch.append(entry)
        tokens, size, longest = together
        prices.append(seconds / tokens)
    enough = CHEAP_ENOUGH * min(prices)
    return batch[: next(end for end, price in enumerate(prices, 1) if price <= enough)]


def shape(entries: Sequence[Entry]) -> tuple[int, int, int]:
    """Return the tokens and the sequences of a batch, and the tokens of its longest sequence."""
    if len(entries) == 1:
        return entries[0].shape
    tokens, size, longest = zip(*[entry.shape for entry in entries], strict=True)
    return sum(tokens), sum(size), max(longest)


def area(size: int, longest: int) -> int:
    """Return B * S * S of a batch, as `Budget.area` counts it."""
    return size * round_up(longest, SLOT_MULTIPLE) ** 2


class Planner:
    """The planner of batches from a fair queue for the slots of a device.

    budget: the limits of every batch
    entry_size: sequences that one entry may have
    slots: of the device
    wide: the slots of an intra-op parallel batch
    max_wait_s: how long a batch may wait for more entries
    """

    def __init__(
        self, queue: FairQueue, budget: Budget, slots: int, wide: int, max_wait_s: float
    ) -> None:
        self._queue = queue
        self.budget = budget
        self.entry_size = budget.size
        self.slots = slots
        self._wide = wide
        self._max_wait_s = max_wait_s

    def next(self, now: float, idle: int, may_hold: bool) -> Planned | None:
        """Plan the next batch for `idle` slots, or if 0 for the next idle slot; None if no candidate is left."""
        model, pool = self._queue.pool()
        width = self._width(model, pool, idle)
        cost = model.estimators[width].cost
        share = math.ceil(self._queue.tokens * width / (idle or self.slots))
        limits = self.budget._replace(size=self._size(model), share=share, area=model.area)
        batch = plan(pool, cost, limits, now)
        if not batch:
            return None
        hold_s = self._hold_s(model, batch[0], cost, now) if may_hold else 0.0
        return Planned(model, batch, width, max(hold_s, 0.0))

    def fix_batches(self, entries: Sequence[Entry]) -> None:
        """Number the batches of a request's entries by these alone: nearest lengths together, up to the budget."""
        model = self._queue.models[entries[0].bundle]
        number, size, tokens = 1, 0, 0
        for entry in sorted(entries, key=lambda entry: entry.tokens):
            size, tokens = size + 1, tokens + entry.tokens
            fits = size <= self._size(model) and tokens <= self.budget.tokens
            if size > 1 and not (fits and area(size, entry.tokens) <= model.area):
                number, size, tokens = number + 1, 1, entry.tokens
            entry.batch = number

    def expected_rate(self, model: ModelStatistics) -> float:
        """Return the tokens per second of all slots in full batches of a model, by its measured cost."""
        mean, cost = model.mean_length, model.estimators[1].cost
        size = min(self._size(model), self.budget.tokens // mean)
        if self.budget.seconds < math.inf:
            size = min(size, int(self.budget.seconds // cost.seconds(mean, 1, mean)))
        if model.area < math.inf:
            size = min(size, int(model.area // area(1, mean)))
        lengths = [mean] * max(size, 1)
        masks = round(len(lengths) * model.mean_masks)
        return self.slots * cost.tokens_per_second(lengths, masks)

    def _width(self, model: ModelStatistics, pool: Sequence[Entry], idle: int) -> int:
        """Return the slots of the next batch: several if idle, few entries wait, and it ends earlier, or as a trial."""
        if not self._queue.size < self._wide <= idle or pool[0].batch:
            return 1
        pool = pool[: self._size(model)]
        lead = max(pool, key=lambda entry: entry.tokens)
        masks = [entry.masks for entry in pool]
        wide = model.estimators[self._wide].cost.seconds(*shape(pool), sum(masks))
        narrow = model.estimators[1].cost.seconds(*lead.shape, max(masks))
        trial = model.count_choice()
        return self._wide if (wide < narrow) is not trial else 1

    def _size(self, model: ModelStatistics) -> int:
        """Return how many entries a batch of the model may hold."""
        return 1 if model.unbatched else self.budget.size

    def _hold_s(self, model: ModelStatistics, lead: Entry, cost: Cost, now: float) -> float:
        """Return how long to wait for more entries; not positive if the batch is full or due."""
        full = model.tokens >= self.budget.tokens or model.size >= self._size(model)
        if full or lead.single or lead.batch:
            return 0.0
        if self._queue.tokens > model.tokens:
            return 0.0  # another model could use the slot
        slack_s = lead.deadline - now - cost.seconds(*lead.shape, lead.masks)
        return min(self._max_wait_s, lead.arrival + self._max_wait_s - now, slack_s)
