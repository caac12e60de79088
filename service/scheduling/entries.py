"""The entries of requests, and their outcomes.

Nothing here depends on time, threads or tasks.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from service.core.encode import Window
from service.core.manifest import ATTENTION
from service.errors import InternalError, QuartetError
from service.scheduling.load import Flow

Outputs = Mapping[str, NDArray[np.float32]]
Heads = tuple[str, ...]  # empty for all heads of the bundle


@dataclass(slots=True)
class Outcome:
    """An entry's own rows by head ([C], [n, C], [n, 2] or [D]), and the figures of its batch.

    outputs: of k sequences `[k, ...]`
    failed: the errors of single sequences of several, by index; their rows are zeros
    """

    outputs: Outputs
    queue_s: float
    inference_s: float
    batch_size: int
    batch_tokens: int
    padding_ratio: float
    failed: Mapping[int, QuartetError] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Entry:
    """One window of a request, which may have several of its texts (`Load.entry_tokens`)."""

    bundle: str
    window: Window
    request_id: str
    # arrival, deadline: in seconds of `time.monotonic`
    arrival: float
    deadline: float
    priority: int = 0  # the index of its class in `priority.CLASSES`
    tenant: str = ""
    heads: Heads = ()  # the heads whose outputs are computed, checked and returned; empty for all
    # Its batch holds no other entry, and admission control does not refuse it, because an inference process admitted it
    # before and then crashed, perhaps because of it.
    unbatched: bool = False
    # Its batch holds the entries of its request with this number, and no others; 0 for any batch.
    batch: int = field(default=0, init=False)
    tokens: int = field(init=False)
    size: int = field(init=False)  # sequences
    longest: int = field(init=False)  # tokens of the longest sequence
    masks: int = field(default=0, init=False)  # mask tokens whose logits are computed for it
    single: bool = field(init=False)  # whether its batch holds no other entry
    # The fields below belong to the fair queue.
    virtual_start: float = field(default=0.0, init=False)  # in tokens
    # Batches of its flow without an entry of its request.
    skipped: int = field(default=0, init=False)
    queued: bool = field(default=False, init=False)
    request: "PendingRequest | None" = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        lengths = self.window.lengths
        self.tokens = max(len(self.window), 1)
        self.size, self.longest = (len(lengths), max(lengths)) if lengths else (1, self.tokens)
        self.single = self.unbatched or ATTENTION in self.heads

    @property
    def shape(self) -> tuple[int, int, int]:
        """Its tokens, its sequences and the tokens of its longest sequence."""
        return self.tokens, self.size, self.longest

    @property
    def flow(self) -> Flow:
        return Flow(self.bundle, self.priority, self.tenant)

    @property
    def done(self) -> bool:
        """Whether its request has ended: answered, failed or cancelled."""
        return self.request is not None and self.request.future.done()


EntryOutcome = Outcome | QuartetError
OnOutcome = Callable[[Entry, EntryOutcome], None]


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request's entries and their outcomes; the last outcome completes the future with all of them.

    on_outcome: called with each entry and its outcome as soon as the outcome arrives
    """

    entries: Sequence[Entry]
    future: asyncio.Future[list[EntryOutcome]]
    on_outcome: OnOutcome | None = None
    outcomes: dict[Entry, EntryOutcome] = field(default_factory=dict)

    @property
    def missing(self) -> list[Entry]:
        """The entries that have no outcome yet."""
        return [entry for entry in self.entries if entry not in self.outcomes]

    def add(self, entry: Entry, outcome: EntryOutcome) -> None:
        """Add an entry's outcome. The request fails if `on_outcome` raises an error."""
        if self.future.done():
            return
        self.outcomes[entry] = outcome
        if self.on_outcome is not None:
            try:
                self.on_outcome(entry, outcome)
            except QuartetError as error:
                self.fail(error)
                return
            except Exception as error:  # a callback fails its own request only
                failure = InternalError("our bug: an outcome could not be handled")
                failure.__cause__ = error
                self.fail(failure)
                return
        if len(self.outcomes) == len(self.entries):
            self.future.set_result([self.outcomes[entry] for entry in self.entries])

    def fail(self, error: QuartetError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
