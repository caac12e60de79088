"""Early rejection: refuses a request that the service cannot answer in time, before it reads the request's body.

The batcher's own check is exact, but it runs after tokenization. At that point, a refusal has cost as much as an
answer. This check therefore estimates a request's tokens from the size of its body.
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

LEARNING = 0.05  # weight of a new request in the moving average of tokens per body size
COMING_S = 0.5  # largest time from arrival to the batcher; a body may be slow, or never end


Who = tuple[int, str]  # a request's priority class and tenant


class ExpectedRequest(NamedTuple):
    """An admitted request and its expected tokens."""

    since: float
    who: Who
    tokens: int


class EarlyRejection:
    """A check that estimates a request's tokens from earlier bodies of its size, and compares them with the load."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tokens: dict[int, float] = {}  # by bit length of a body's size
        self._coming: dict[int, ExpectedRequest] = {}  # oldest first
        self._coming_tokens = Counter[Who]()

    def __call__(self, scope: Scope, context: RequestContext) -> None:
        """Check a request.

        Raises TooLarge if Content-Length exceeds the limit, and Overloaded if even the least loaded bundle would be too
        late.
        """
        if scope["method"] != "POST" or permission(scope["path"]) != "inference":
            return  # monitoring and administration requests always pass, above all during overload
        engines = self._service.engines
        if engines is None:
            return
        left_s = timeout_s(context.headers, self._service.settings)
        context.client_deadline = 1000 * left_s < self._service.settings.deadline_ms
        size = content_length(context.headers)
        check_size(size, self._service.settings.max_body_bytes)  # independent of the load
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
            # With several bundles, the bundle of the admitted requests is not known yet: it may be another one.
            known = len(flows) == 1
            coming = self._coming_tokens[context.priority, context.tenant] if known else 0
            load.check_in_time(soonest, tokens, left_s, EARLY_SHARE, coming)
        self._come(context, tokens)

    def _come(self, context: RequestContext, tokens: int) -> None:
        """Count a request until the batcher counts it or it is over.

        Many requests may arrive before the first is submitted.
        """
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
        """Stop counting requests that have not reached the batcher within COMING_S."""
        while self._coming:
            oldest = next(iter(self._coming))
            if now - self._coming[oldest].since < COMING_S:
                break
            self._arrive(oldest)

    def expect(self, size: int) -> int:
        """Return the expected tokens of a body of this many bytes.

        It is the average of the largest known size class that is not larger, or 1 if there is none.
        """
        known = [bits for bits in self._tokens if bits <= size.bit_length()]
        return max(1, round(self._tokens[max(known)])) if known else 1

    def _learn(self, size: int, tokens: int) -> None:
        if size and tokens:
            bits = size.bit_length()
            known = self._tokens.get(bits, tokens)
            self._tokens[bits] = known + LEARNING * (tokens - known)
