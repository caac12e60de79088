"""Mirrored traffic: copies of requests for a candidate version, whose results are compared with the current version's.

The engine copies a sampled share of the requests, one at a time and at bulk priority. It copies a request after its
response is computed, so that a copy never delays or fails that response. It drops the copy if the request waited in the
queue for longer than its inference took, because then other requests wait now. The queue time of that request shows
this earlier than the device's load does.
"""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import structlog

from service.core.agreement import same_answer
from service.engines.engine import INLINE_TOKENS, Engine, EngineTask, Reply, Ticket
from service.errors import Overloaded, QuartetError
from service.keys import CLASSES
from service.scheduling.load import Load

log = structlog.get_logger()

PATIENCE_S = 10.0
BULK = CLASSES.index("bulk")

# Called with a model, a head, an outcome ("same", "changed", "failed", "dropped"), and the number of such results.
Compared = Callable[[str, str, str, int], None]


class MirroredTraffic:
    """The sender of copies from the current version's engine to the candidate version's engine.

    engine: the candidate version's
    share: of the requests to copy, from 0 to 1
    load: returns the device's load
    compared: called with the results of each comparison
    """

    def __init__(
        self,
        engine: Engine,
        share: float,
        load: Callable[[], Load],
        compared: Compared,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._engine = engine
        self._share = share
        self._load = load
        self._compared = compared
        self._draw = draw
        self.copying: asyncio.Task[None] | None = None

    def __call__(self, task: EngineTask[Any], ticket: Ticket, reply: Reply[Any]) -> None:
        """Copy a completed request if it is sampled; count it as dropped if there is no capacity for the copy."""
        if self._draw() >= self._share:
            return
        waited = reply.timing.queue_s > reply.timing.inference_s
        large = reply.usage.tokens > INLINE_TOKENS
        if self.copying or waited or large or self._load().problem:
            self._tell(reply.heads, dropped=len(reply.results))
            return
        self._engine.acquire()
        self.copying = asyncio.create_task(self._copy(task, ticket, reply))

    async def _copy(self, task: EngineTask[Any], ticket: Ticket, reply: Reply[Any]) -> None:
        counts = [(reply.heads, Counter(failed=sum(one is not None for one in reply.results)))]
        try:
            other = await self._engine.answer(task, bulk(ticket), reply.heads)
            counts = [
                ((head,), Counter(outcome(*pair) for pair in pairs if pair[0] is not None))
                for head, pairs in by_head(reply, other).items()
            ]
        except Overloaded:
            counts = [(reply.heads, Counter(dropped=len(reply.results)))]
        except QuartetError as error:
            log.debug("a copy failed", model=self._engine.id, problem=error.message)
        finally:  # the event loop logs any other error
            for heads, numbers in counts:
                self._tell(heads, **numbers)
            self.copying = None
            self._engine.release()

    def _tell(self, heads: Sequence[str], **numbers: int) -> None:
        for head, (outcome, number) in itertools.product(heads, numbers.items()):
            if number:
                self._compared(self._engine.id, head, outcome, number)


def by_head(reply: Reply[Any], other: Reply[Any]) -> dict[str, list[tuple[Any, Any]]]:
    """Return the results of each input in both replies, by head; None for an input that failed."""
    pairs = [*zip(reply.results, other.results, strict=True)]
    # Vectors of several types are results by type, not by head.
    heads = {*reply.heads}
    if not any(isinstance(one, dict) and one.keys() == heads for one in reply.results):
        return {reply.heads[0]: pairs}
    return {
        head: [(one and one[head], another and another[head]) for one, another in pairs]
        for head in reply.heads
    }


def bulk(ticket: Ticket) -> Ticket:
    """Return the ticket of a copy: bulk priority, isolated errors, `PATIENCE_S` seconds, no tenant and no callback."""
    return replace(
        ticket,
        deadline=time.monotonic() + PATIENCE_S,
        priority=BULK,
        tenant="",
        isolate_errors=True,
        on_submit=None,
    )


def outcome(one: Any, other: Any) -> str:
    """Return the outcome of comparing an input's result with the copy's: "same", "changed", or "failed" for None."""
    if other is None:
        return "failed"
    return "same" if same_answer(one, other) else "changed"
