"""Refusing early: what cannot be answered in time is told so before its body is read.

The batcher's own answer is exact, but it comes when the texts are tokens; by then a refusal has cost as much as an
answer. So a request is first judged by the size of its body.
"""

from collections import Counter
from functools import partial
from typing import NamedTuple

from starlette.types import Scope

from service.middleware.access_control import permission
from service.middleware.body_memory import check_size, content_length
from service.middleware.request_context import RequestContext
from service.middleware.service_state import Service, timeout_s
from service.scheduling.load import EARLY_SHARE, Flow

LEARNING = 0.05  # what a request weighs beside those before it
COMING_S = 0.5  # that a request is reckoned with which is not with the batcher yet: its body may be slow, or never end


Who = tuple[int, str]  # a request's class and tenant


class ExpectedRequest(NamedTuple):
    """A request that was let in, and so many tokens that are expected of it."""

    since: float
    who: Who
    tokens: int


class EarlyRejection:
    """A check that expects of a request the tokens that bodies of its size had, and knows what waits."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tokens: dict[int, float] = {}  # by the bits of a body's size
        self._coming: dict[int, ExpectedRequest] = {}  # oldest first
        self._coming_tokens = Counter[Who]()

    def __call__(self, scope: Scope, context: RequestContext) -> None:
        """Raises TooLarge by Content-Length, and Overloaded when even the least loaded bundle would be too late."""
        if scope["method"] != "POST" or permission(scope["path"]) != "inference":
            return  # who looks after the service is let in, above all when it is overloaded
        engines = self._service.engines
        if engines is None:
            return
        left_s = timeout_s(context.headers, self._service.settings)
        context.client_deadline = 1000 * left_s < self._service.settings.deadline_ms
        size = content_length(context.headers)
        check_size(size, self._service.settings.max_body_bytes)  # whatever the load is
        context.on_finish.append(lambda over: self._learn(size, over.tokens))
        load = engines.load()
        flows = [
            Flow(bundle, context.priority, context.tenant)
            for bundle in engines.expected
            if bundle in load.rates
        ]
        tokens = self.expect(size)
        if flows:
            soonest = flows[0]
            if len(flows) > 1:
                soonest = min(flows, key=lambda flow: load.wait_s(flow, tokens))
            self._forget_slow(context.arrival)
            # Of several bundles nobody knows yet which one those on the way ask, and they may all ask another.
            known = len(flows) == 1
            coming = self._coming_tokens[context.priority, context.tenant] if known else 0
            load.check_in_time(soonest, tokens, left_s, EARLY_SHARE, coming)
        self._come(context, tokens)

    def _come(self, context: RequestContext, tokens: int) -> None:
        """Reckon with a request until the batcher does, or it is over: many may come before one gets there."""
        number, who = id(context), (context.priority, context.tenant)
        self._coming[number] = ExpectedRequest(context.arrival, who, tokens)
        self._coming_tokens[who] += tokens
        context.on_submit = partial(self._arrive, number)
        context.on_finish.append(lambda _: self._arrive(number))

    def _arrive(self, number: int) -> None:
        if number in self._coming:
            _, who, tokens = self._coming.pop(number)
            self._coming_tokens[who] -= tokens

    def _forget_slow(self, now: float) -> None:
        """Reckon no longer with who takes too long to come."""
        while self._coming:
            oldest = next(iter(self._coming))
            if now - self._coming[oldest].since < COMING_S:
                break
            self._arrive(oldest)

    def expect(self, size: int) -> int:
        """The tokens of a body of so many bytes: those of the largest known that are no larger, or next to none."""
        known = [bits for bits in self._tokens if bits <= size.bit_length()]
        return max(1, round(self._tokens[max(known)])) if known else 1

    def _learn(self, size: int, tokens: int) -> None:
        if size and tokens:
            bits = size.bit_length()
            known = self._tokens.get(bits, tokens)
            self._tokens[bits] = known + LEARNING * (tokens - known)
