"""Copies of requests for a version that is to come: how its answers differ is counted, and nobody waits for them.

A copy is made of a request that has its answer, of a sampled share of them, at bulk priority, one at a time, and only
where the request itself waited no longer than it was computed: else others wait now, which is known sooner from it than
from the device's load. Whatever becomes of a copy, the request has been answered.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import structlog

from service.core.bundle import cosine
from service.core.decode import AnswerSpan, EntitySpan, LabelScore
from service.engines.engine import INLINE_TOKENS, Engine, Method, Reply, Ticket
from service.errors import Overloaded, QuartetError
from service.priority import CLASSES
from service.scheduling.load import Load

log = structlog.get_logger()

CLOSE = 0.99  # the cosine from which on two vectors count as the same answer
PATIENCE_S = 10.0
BULK = CLASSES.index("bulk")

# Is told of a model, a head, what became of some answers ("same", "changed", "failed", "dropped"), and how many.
Compared = Callable[[str, str, str, int], None]


class MirroredTraffic:
    """What an engine hands its requests to, of which another is to get a share."""

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

    def __call__(
        self, task: Method[Any, Any], args: Sequence[Any], options: Any, reply: Reply[Any]
    ) -> None:
        """Copy a request that was answered so, if it is its turn and there is room for it."""
        if self._draw() >= self._share:
            return
        waited = reply.timing.queue_s > reply.timing.inference_s
        large = reply.usage.tokens > INLINE_TOKENS
        if self.copying or waited or large or self._load().problem:
            self._compared(self._engine.id, reply.head, "dropped", len(reply.results))
            return
        self._engine.acquire()
        self.copying = asyncio.create_task(self._copy(task, args, options, reply))

    async def _copy(
        self, task: Method[Any, Any], args: Sequence[Any], options: Any, reply: Reply[Any]
    ) -> None:
        answered = sum(one is not None for one in reply.results)
        try:
            copied = [bulk(arg) if isinstance(arg, Ticket) else arg for arg in args]
            other = await task(self._engine, *copied, **{**options, "head": reply.head})
            counts = Counter(
                outcome(one, another)
                for one, another in zip(reply.results, other.results, strict=True)
                if one is not None
            )
            self._tell(reply, **counts)
        except Overloaded:
            self._tell(reply, dropped=len(reply.results))
        except QuartetError as error:
            log.debug("a copy failed", model=self._engine.id, problem=error.message)
            self._tell(reply, failed=answered)
        except Exception:
            log.exception("unexpected error")
            self._tell(reply, failed=answered)
        finally:
            self.copying = None
            self._engine.release()

    def _tell(self, reply: Reply[Any], **numbers: int) -> None:
        for outcome, number in numbers.items():
            if number:
                self._compared(self._engine.id, reply.head, outcome, number)


def bulk(ticket: Ticket) -> Ticket:
    """Of nobody, in no haste, for all its inputs that can be answered; nobody is told when it goes to the device."""
    deadline = time.monotonic() + PATIENCE_S
    return replace(
        ticket, deadline=deadline, priority=BULK, tenant="", isolate_errors=True, on_submit=None
    )


def outcome(one: Any, other: Any) -> str:
    """What became of the answer to a copy of an input that has one; `other` is None where there is none."""
    if other is None:
        return "failed"
    return "same" if same_answer(one, other) else "changed"


def same_answer(one: Any, other: Any) -> bool:
    """Whether two answers to one input have the same best label, entities or best span, or nearly the same vector."""
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and cosine(one, other) >= CLOSE
    return essence(one) == essence(other)


def essence(answer: Sequence[LabelScore | EntitySpan | AnswerSpan]) -> object:
    """What an answer says, but for how sure it is."""
    match answer:
        case [LabelScore(label, _), *_]:
            return label
        case [AnswerSpan(text, _, start, end), *_]:
            return text, start, end
        case _:
            return [one._replace(score=0.0) for one in answer]
