"""The flows that share the device, their backlog, and the expected wait of one more request.

A flow is the requests of one bundle, class and tenant. Each flow with waiting entries gets its share of the device
(`weights`). Within a flow, requests of a single text run in their order of arrival. A small request waits for at most
as many tokens of a larger request as it has itself. The expected wait is computed in the fluid model that fair queueing
approximates, generalized processor sharing (Parekh and Gallager, 1993).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from service.errors import Overloaded

# Tokens that may wait, where `max_queue_tokens` is unset and a GPU's rate does not give a larger limit.
MAX_QUEUE_TOKENS = 262_144
# The weight of each class: if both could use more than their share, they get eight ninths and one ninth of the device.
WEIGHTS = (8.0, 1.0)
# The share of the time left before its deadline that a request's expected completion may take; the rest is a reserve.
QUEUE_SHARE = 0.6  # for the exact check, by the request's tokens
# For the early check, by the size of its body. It is smaller, so that few requests pass the early check and are refused
# by the exact one, at full cost.
EARLY_SHARE = 0.5
# Seconds of a slot for the texts of one entry. A batch has many entries, so a text of another request waits longer for
# the batch that runs than for an entry before it.
ENTRY_S = 0.001
CLEAR_SHARE = 0.3  # below this share, a request needs no exact check


class Flow(NamedTuple):
    """The requests of one model, class and tenant; priority: an index of `priority.CLASSES`."""

    bundle: str
    priority: int = 0
    tenant: str = ""
    # Whether these are long texts in the text threads, which take turns like another model.
    is_long: bool = False


def weights(flows: Collection[Flow]) -> dict[Flow, float]:
    """Return the weight of each flow: a class splits its weight evenly over its tenants, a tenant over its bundles."""
    bundles = Counter((flow.priority, flow.tenant) for flow in flows)
    tenants = Counter(priority for priority, _ in bundles)
    return {
        flow: WEIGHTS[flow.priority] / tenants[flow.priority] / bundles[flow.priority, flow.tenant]
        for flow in flows
    }


class RemainingWork(NamedTuple):
    """The remaining tokens and windows of a request; both are 0 where there is no request."""

    tokens: int = 0
    windows: int = 0

    @property
    def bits(self) -> int:
        """The bit length of the remaining tokens; 0 for a last window, which no other request of the flow passes."""
        return self.tokens.bit_length() if self.windows > 1 else 0


@dataclass(slots=True)
class Backlog:
    """The waiting requests and tokens of one flow, by the bits of each request's remaining work."""

    requests: Counter[int] = field(default_factory=Counter)
    # Tokens of all requests with the same number of bits.
    sizes: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, *requests: RemainingWork) -> "Backlog":
        """Return the backlog of some requests."""
        backlog = cls()
        for request in requests:
            backlog.change(RemainingWork(), request)
        return backlog

    @property
    def tokens(self) -> int:
        return self.sizes.total()

    def copy(self) -> "Backlog":
        return Backlog(self.requests.copy(), self.sizes.copy())

    def change(self, before: RemainingWork, after: RemainingWork) -> None:
        """Change the remaining work of a request."""
        for left, sign in ((before, -1), (after, 1)):
            if left.windows:
                self.requests[left.bits] += sign
                self.sizes[left.bits] += sign * left.tokens

    def ahead(self, tokens: int) -> int:
        """Return the tokens that run before a new request; a larger request counts as `tokens` only."""
        own = tokens.bit_length()
        return sum(
            waiting if bits <= own else tokens * self.requests[bits]
            for bits, waiting in self.sizes.items()
        )


@dataclass(frozen=True, slots=True)
class Load:
    """The device's drain rate of each bundle, and the backlog of each flow."""

    # Tokens per second of all slots together, if only this bundle waits.
    rates: Mapping[str, float] = field(default_factory=dict)
    # The backlog, without running batches.
    waiting: dict[Flow, Backlog] = field(default_factory=dict)
    problem: str = ""  # why the device accepts no requests; empty if it accepts them
    # Tokens that may wait, including the tokens of a new request.
    max_queue_tokens: int = MAX_QUEUE_TOKENS
    slots: int = 1  # of all devices
    entry_size: int = 1  # texts that an entry may have
    batch_tokens: int = 0  # that a batch may have

    @property
    def ready(self) -> bool:
        return not self.problem

    @property
    def queue_tokens(self) -> int:
        return sum(backlog.tokens for backlog in self.waiting.values())

    @property
    def drain_s(self) -> float:
        """Seconds until the whole backlog is computed."""
        return sum(
            backlog.tokens / self.rates[flow.bundle] for flow, backlog in self.waiting.items()
        )

    def entry_tokens(self, bundle: str) -> int:
        """Return how many tokens the texts of an entry may have together.

        So a model that computes a text in microseconds does not need the queue's work for each text.
        """
        rate = self.rates.get(bundle, 0.0) / self.slots
        return min(int(ENTRY_S * rate), self.batch_tokens)

    def add(self, flow: Flow, request: RemainingWork) -> None:
        """Add a request that was sent after the device reported this load, unless its bundle is newer."""
        if flow.bundle not in self.rates:
            return
        self.waiting.setdefault(flow, Backlog()).change(RemainingWork(), request)

    def wait_s(self, flow: Flow, tokens: int, coming: int = 0) -> float:
        """Return the seconds until `tokens` more tokens of a flow are computed, after `coming` ones; 0 if unknown."""
        rate = self.rates.get(flow.bundle)
        if not rate:
            return 0.0
        own, backlog = tokens + coming, self.waiting.get(flow)
        if backlog is not None:
            own += backlog.ahead(tokens)
        if len(self.waiting) == (backlog is not None):  # no other flow waits
            return own / rate
        work = {
            other: backlog.tokens / self.rates[other.bundle]
            for other, backlog in self.waiting.items()
        }
        work[flow] = own / rate
        shares = weights(work)
        span = work[flow] / shares[flow]  # virtual time in which each flow gets its share
        return sum(min(seconds, span * shares[other]) for other, seconds in work.items())

    def check_in_time(
        self,
        flow: Flow,
        tokens: int,
        left_s: float,
        share: float = QUEUE_SHARE,
        coming: int = 0,
        before_s: float = 0.0,
    ) -> None:
        """Raise Overloaded if a request's expected completion takes more than a share of the `left_s` seconds left.

        An empty queue accepts every request. before_s: until its tokens reach the queue
        """
        wait_s = before_s + self.wait_s(flow, tokens, coming)
        if wait_s > share * left_s and (self.queue_tokens or coming or before_s):
            raise Overloaded(
                f"estimated completion in {wait_s:.1f} s is too late: the deadline is in {left_s:.1f} s",
                retry_after_s=wait_s - share * left_s,
            )


def total_load(loads: Sequence[Load]) -> Load:
    """Return the load of several devices together. If none is ready, it is the first one's, with its problem."""
    ready = [load for load in loads if load.ready]
    if not ready or len(loads) == 1:
        return loads[0] if loads else Load()
    rates: dict[str, float] = {}
    waiting: dict[Flow, Backlog] = {}
    for load in ready:
        for bundle, rate in load.rates.items():
            rates[bundle] = rates.get(bundle, 0.0) + rate
        for flow, backlog in load.waiting.items():
            total = waiting.setdefault(flow, Backlog())
            total.requests.update(backlog.requests)
            total.sizes.update(backlog.sizes)
    return Load(
        rates,
        waiting,
        "",
        sum(load.max_queue_tokens for load in ready),
        sum(load.slots for load in ready),
        min(load.entry_size for load in ready),
        min(load.batch_tokens for load in ready),
    )
