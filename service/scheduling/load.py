"""Who shares the device, what waits for it, and how long one more request would.

Those who share are flows: the requests of one bundle, class and tenant. Each flow has its part of the device for as
long as it wants it (`weights`); within one, single texts are served as they come, and of a request of several they wait
for no more tokens than they bring. How long a request would wait is read off the fluid that this is the packets of:
generalized processor sharing (Parekh and Gallager, 1993).
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from service.errors import Overloaded

# Tokens that may wait, where neither a setting nor a GPU's rate says more.
MAX_QUEUE_TOKENS = 262_144
# Of each class: so one that could use more than it gets has eight ninths, or one ninth, of the device.
WEIGHTS = (8.0, 1.0)
# The share of the time left before its deadline that a request's expected completion may take; the rest is a reserve.
QUEUE_SHARE = 0.6  # judged exactly, when its texts are tokens
# Judged by the size of its body: less, so that a request that is let in is not refused in the queue at full cost.
EARLY_SHARE = 0.5
CLEAR_SHARE = 0.3  # within it, a request needs no exact judgment in the queue


class Flow(NamedTuple):
    """The requests of one model, class and tenant; priority: an index of `priority.CLASSES`."""

    bundle: str
    priority: int = 0
    tenant: str = ""


def weights(flows: Collection[Flow]) -> dict[Flow, float]:
    """Each one's part of the device: a class's is split evenly over its tenants, a tenant's over its bundles."""
    bundles = Counter((flow.priority, flow.tenant) for flow in flows)
    tenants = Counter(priority for priority, _ in bundles)
    return {
        flow: WEIGHTS[flow.priority] / tenants[flow.priority] / bundles[flow[1:]] for flow in flows
    }


class RemainingWork(NamedTuple):
    """What is left of a request; nothing is left of none."""

    tokens: int = 0
    windows: int = 0

    @property
    def bits(self) -> int:
        """Of the tokens that others of the flow may pass; a last window is passed by nobody."""
        return self.tokens.bit_length() if self.windows > 1 else 0


@dataclass(slots=True)
class Backlog:
    """What waits of one flow: requests and tokens, by the bits of what is left of each request."""

    requests: Counter[int] = field(default_factory=Counter)
    sizes: Counter[int] = field(
        default_factory=Counter
    )  # in tokens, all requests of as many bits together

    @classmethod
    def of(cls, *requests: RemainingWork) -> "Backlog":
        """The backlog of some requests."""
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
        """What is left of a request changes."""
        for left, sign in ((before, -1), (after, 1)):
            if left.windows:
                self.requests[left.bits] += sign
                self.sizes[left.bits] += sign * left.tokens

    def ahead(self, tokens: int) -> int:
        """The tokens that are served before so many new ones: of larger requests of several windows as many each."""
        own = tokens.bit_length()
        return sum(
            waiting if bits <= own else tokens * self.requests[bits]
            for bits, waiting in self.sizes.items()
        )


@dataclass(frozen=True, slots=True)
class Load:
    """How fast the device drains each bundle, what waits of each flow, and why no more should come, if so.

    rates: tokens per second, all slots together, if nothing but this bundle waits; waiting: running batches not counted
    max_queue_tokens: tokens that may wait, those of one request included
    """

    rates: Mapping[str, float] = field(default_factory=dict)
    waiting: dict[Flow, Backlog] = field(default_factory=dict)
    problem: str = ""
    max_queue_tokens: int = MAX_QUEUE_TOKENS

    @property
    def ready(self) -> bool:
        return not self.problem

    @property
    def queue_tokens(self) -> int:
        return sum(backlog.tokens for backlog in self.waiting.values())

    @property
    def drain_s(self) -> float:
        """Seconds until all that waits would be computed."""
        return sum(
            backlog.tokens / self.rates[flow.bundle] for flow, backlog in self.waiting.items()
        )

    def add(self, flow: Flow, request: RemainingWork) -> None:
        """Count what was sent to the device since it told its load, unless it is for a bundle that came since then."""
        if flow.bundle not in self.rates:
            return
        self.waiting.setdefault(flow, Backlog()).change(RemainingWork(), request)

    def wait_s(self, flow: Flow, tokens: int, coming: int = 0) -> float:
        """Seconds until so many more tokens of this flow would be computed; 0 where the bundle's speed is not known.

        coming: tokens of the flow that wait nowhere yet, and will be before it
        """
        rate = self.rates.get(flow.bundle)
        if not rate:
            return 0.0
        own, backlog = tokens + coming, self.waiting.get(flow)
        if backlog is not None:
            own += backlog.ahead(tokens)
        if len(self.waiting) == (backlog is not None):  # nobody else waits
            return own / rate
        work = {
            other: backlog.tokens / self.rates[other.bundle]
            for other, backlog in self.waiting.items()
        }
        work[flow] = own / rate
        shares = weights(work)
        span = work[flow] / shares[flow]  # of virtual time, in which each is served by its share
        return sum(min(seconds, span * shares[other]) for other, seconds in work.items())

    def check_in_time(
        self, flow: Flow, tokens: int, left_s: float, share: float = QUEUE_SHARE, coming: int = 0
    ) -> None:
        """Raise Overloaded if a request is expected to take more than a share of the `left_s` seconds that it has.

        Where nothing waits every request is tried, since running batches correct the expected rate.
        """
        wait_s = self.wait_s(flow, tokens, coming)
        if wait_s > share * left_s and (self.queue_tokens or coming):
            raise Overloaded(
                f"the answer would take {wait_s:.1f} s, and {left_s:.1f} s are left for it",
                retry_after_s=wait_s - share * left_s,
            )
