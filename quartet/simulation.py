"""A simulation of replicas: the fair queue and the planner of the service, with the measured cost in place of batches.

A replica has one HTTP process, which handles requests one after the other, and slots that share its cores with it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from types import SimpleNamespace
from typing import Any, NamedTuple, Self, cast

import numpy as np

from service.core.encode import Window
from service.scheduling.cost_model import Cost, Estimator
from service.scheduling.entries import Entry
from service.scheduling.fair_queue import FairQueue, ModelStatistics, QueuedRequest
from service.scheduling.planner import Budget, Planner

MODEL = "model"
PAUSE_S = 0.02
DRAWN = 20_000  # requests to one replica, where times are drawn


class Arrival(NamedTuple):
    """A request of one text: when it arrives, in seconds, and its tokens."""

    at: float
    tokens: int


@dataclass(frozen=True)
class Replica:
    """The measured figures of a replica.

    costs: of a batch, by the slots that it takes
    request_s: seconds that the HTTP process takes for a request: HTTP, tokenizer, decoding
    hop_s: further seconds of a request between the client and the processes
    wake_s: further seconds after a pause of `PAUSE_S`, because processes are woken and caches are cold
    tokens, size: the limits of a batch
    max_length: the tokens at which a text is truncated
    """

    model: str
    costs: Mapping[int, Cost]
    slots: int
    request_s: float
    hop_s: float
    wake_s: float
    tokens: int
    size: int
    max_length: int
    unbatched: bool

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Self:
        """Return the replica of `asdict`, from JSON."""
        costs = {int(width): Cost(**cost) for width, cost in record["costs"].items()}
        return cls(**{**record, "costs": costs})


class Simulation:
    """One replica, at a mean rate of requests. busy_s: seconds of slots in batches so far"""

    def __init__(self, replica: Replica, rate: float) -> None:
        self._replica = replica
        # The work outside batches takes its time from the batches where these use all cores.
        outside_s = replica.request_s + replica.hop_s
        self._slowdown = 1 / max(1 - rate * outside_s / replica.slots, 0.01)
        estimators = {width: Estimator() for width in replica.costs}
        for width, cost in replica.costs.items():
            estimators[width].cost = cost
        self._queue = FairQueue()
        self._queue.models[MODEL] = ModelStatistics(estimators, replica.unbatched)
        budget = Budget(replica.tokens, replica.size)
        self._planner = Planner(self._queue, budget, replica.slots, max(replica.costs), 0.0)
        self._idle = replica.slots
        self._running: list[tuple[float, int, int, list[Entry]]] = []
        self._batches = 0
        self._pending: Any = SimpleNamespace(done=lambda: False)  # no request ends before its batch
        self.busy_s = 0.0

    def latencies(self, arrivals: Iterable[Arrival]) -> Iterator[float]:
        """Yield the seconds from arrival to answer of each request, in the order of the answers."""
        free = 0.0  # when the HTTP process has handled all requests so far
        for arrival in arrivals:
            pause = min(max(arrival.at - free, 0.0) / PAUSE_S, 1.0)
            free = max(free, arrival.at) + self._replica.request_s + pause * self._replica.wake_s
            yield from self._run_until(free)
            self._enter(arrival)
            self._start(free)
        yield from self._run_until(math.inf)

    def _enter(self, arrival: Arrival) -> None:
        tokens = min(arrival.tokens, self._replica.max_length)
        entry = Entry(
            MODEL, Window(cast(Any, range(tokens)), cast(Any, ())), "", arrival.at, math.inf
        )
        flow_queue = self._queue.flow_queue(entry.flow)
        request = QueuedRequest([entry], self._pending, flow_queue=flow_queue)
        flow_queue.admit(request)
        self._queue.enter(request)

    def _run_until(self, now: float) -> Iterator[float]:
        while self._running and self._running[0][0] <= now:
            end, _, width, batch = heappop(self._running)
            self._idle += width
            yield from (end - entry.arrival + self._replica.hop_s for entry in batch)
            self._start(end)

    def _start(self, now: float) -> None:
        """Start a batch on every idle slot, as `Batcher` does."""
        while self._idle and self._queue:
            planned = self._planner.next(now, self._idle, may_hold=False)
            assert planned is not None, "our bug: entries without a deadline always run"
            model, batch, width, _ = planned
            lengths = [entry.tokens for entry in batch]
            shape = sum(lengths), len(lengths), max(lengths)
            seconds = model.estimators[width].cost.seconds(*shape)
            self._idle -= width
            self._queue.take(batch, width * seconds)
            took = seconds if self._idle else seconds * self._slowdown
            self.busy_s += width * took
            self._batches += 1
            heappush(self._running, (now + took, self._batches, width, batch))


class Predicted(NamedTuple):
    """The latencies of some replicas, in milliseconds, and the share of their slots' time in batches."""

    replicas: int
    p50: float
    p99: float
    busy: float


def predict(
    replica: Replica,
    number: int,
    rate: float,
    lengths: Sequence[int],
    moments: Sequence[float] = (),
    seed: int = 0,
) -> Predicted:
    """Simulate a number of replicas, to which requests go at random.

    rate: of all requests together, per second
    lengths: tokens of the requests; in any order without `moments`
    moments: of the requests, in seconds. Without them, the requests of a replica are a Poisson process, so one replica
        stands for all.
    """
    rng = np.random.default_rng(seed)
    if not len(moments):
        pauses = rng.exponential(number / rate, DRAWN)
        drawn = rng.choice(np.asarray(lengths), DRAWN)
        parts = [[*map(Arrival, np.cumsum(pauses).tolist(), drawn.tolist())]]
    else:
        times = np.asarray(moments, float) - moments[0]
        times *= (len(times) - 1) / max(times[-1], 1e-9) / rate
        parts = [[] for _ in range(number)]
        for at, tokens, goes in zip(
            times.tolist(), lengths, rng.integers(number, size=len(times)), strict=True
        ):
            parts[goes].append(Arrival(at, tokens))
    found: list[float] = []
    busy_s = whole_s = 0.0
    for part in filter(None, parts):
        simulation = Simulation(replica, rate / number)
        found += simulation.latencies(part)
        busy_s += simulation.busy_s
        whole_s = max(whole_s, part[-1].at)
    p50, p99 = 1000 * np.quantile(found, (0.5, 0.99))
    busy = busy_s / (replica.slots * len(parts) * max(whole_s, 1e-9))
    return Predicted(number, float(p50), float(p99), busy)
