"""Weighted fair queueing: which flow is next, on the device and in the text threads.

A flow is the requests of one model, class and tenant (`service.scheduling.load`). The work that runs for a flow adds
its seconds, divided by the flow's weight, to the flow's virtual time. The flow with the smallest virtual time is next.
A new flow starts at the virtual time of the others, so that idle time earns no credit.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from service.scheduling.load import Flow, weights


class FlowWork(ABC):
    """The waiting work of one flow; true if some waits. virtual_time: its computed seconds over its weight"""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.virtual_time = 0.0

    @abstractmethod
    def __bool__(self) -> bool: ...

    @property
    @abstractmethod
    def arrival(self) -> float:
        """The arrival of the work that is next; requires that some waits."""

    @property
    def is_idle(self) -> bool:
        """Whether no work waits or is about to."""
        return not self


F = TypeVar("F", bound=FlowWork)


class FlowTurns(Generic[F]):
    """The flows that take turns; make: returns the work of a new flow."""

    def __init__(self, make: Callable[[Flow], F]) -> None:
        self._make = make
        self._flows: dict[Flow, F] = {}
        self._virtual_time = 0.0  # of the flow that was next last

    def __iter__(self) -> Iterator[F]:
        return iter(self._flows.values())

    def get(self, flow: Flow) -> F:
        """Return the work of a flow, to add to it. Forget idle flows without time to make up for if the flow is new."""
        if flow not in self._flows:
            self._flows = {
                known: work
                for known, work in self._flows.items()
                if not work.is_idle or work.virtual_time > self._virtual_time
            }
            self._flows[flow] = self._make(flow)
        work = self._flows[flow]
        if not work:
            work.virtual_time = max(work.virtual_time, self._virtual_time)
        return work

    def remove(self, bundle: str) -> list[F]:
        """Forget the flows of a model, and return them."""
        flows = [flow for flow in self._flows if flow.bundle == bundle]
        return [self._flows.pop(flow) for flow in flows]

    def next(self, may_run: Callable[[F], bool] = lambda _: True) -> F | None:
        """Return the flow that is next among those that may run; None if none of them waits."""
        waiting = (work for work in self._flows.values() if work and may_run(work))
        return min(waiting, key=lambda work: (work.virtual_time, work.arrival), default=None)

    def weights(self) -> Mapping[Flow, float]:
        """Return the weights of the flows with waiting work."""
        return weights([work.flow for work in self._flows.values() if work])

    def charge(self, seconds: Mapping[F, float]) -> None:
        """Add the seconds of work that begins to the virtual times of its flows; the first one was next."""
        shares = self.weights()
        self._virtual_time = next(iter(seconds)).virtual_time
        for work, own_s in seconds.items():
            work.virtual_time += own_s / shares[work.flow]
