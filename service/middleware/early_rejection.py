"""Early rejection: refuses a request that the service cannot answer in time, before it reads the request's body.

The engine and the batcher check exactly, but they run after the body is parsed, or after tokenization. At that point, a
refusal has cost as much as an answer. This check therefore estimates a request's characters and tokens from the size of
its body.
"""

from collections import Counter
from functools import partial
from typing import NamedTuple

from starlette.types import Scope

from service.engines.engine import INLINE_CHARACTERS
from service.middleware.access_control import permission
from service.middleware.body_memory import check_size, content_length
from service.middleware.request_context import RequestContext
from service.middleware.service_state import Service, timeout_s
from service.scheduling.load import EARLY_SHARE, Flow
from service.scheduling.text_threads import TextThreads

LEARNING = 0.05  # weight of a new request in the moving averages by body size
COMING_S = 0.5  # largest time from arrival to the batcher; a body may be slow, or never end


Who = tuple[int, str]  # a request's priority class and tenant


class ExpectedRequest(NamedTuple):
    """An admitted request and its expected tokens."""

    since: float
    who: Who
    tokens: int


class BodySize(NamedTuple):
    """The `Content-Length` of a body, and whether the body is compressed."""

    size: int
    compressed: bool = False


class SizeAverage:
    """The moving average of a number, such as a request's tokens, by the bit length of the body's size."""

    def __init__(self) -> None:
        self._known: dict[tuple[bool, int], float] = {}

    def expect(self, body: BodySize) -> int:
        """Return the average of the largest known size class that is not larger; 0 if there is none."""
        for bits in range(body.size.bit_length(), -1, -1):
            if (known := self._known.get((body.compressed, bits))) is not None:
                return round(known)
        return 0

    def learn(self, body: BodySize, number: int) -> None:
        if body.size and number:
            key = body.compressed, body.size.bit_length()
            known = self._known.get(key, number)
            self._known[key] = known + LEARNING * (number - known)


class EarlyRejection:
    """A check that estimates a request from earlier bodies of its size, and compares the estimate with the load."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tokens = SizeAverage()
        self._characters = SizeAverage()
        self._coming: dict[int, ExpectedRequest] = {}  # oldest first
        self._coming_tokens = Counter[Who]()

    def __call__(self, scope: Scope, context: RequestContext) -> None:
        """Check a request. Raises TooLarge for its Content-Length, Overloaded if even the best bundle is too late."""
        if scope["method"] != "POST" or permission(scope["path"]) != "inference":
            return  # monitoring and administration requests always pass, above all during overload
        engines = self._service.engines
        if engines is None:
            return
        left_s = timeout_s(context.headers, self._service.settings)
        context.client_deadline = 1000 * left_s < self._service.settings.deadline_ms
        body = BodySize(content_length(context.headers), "content-encoding" in context.headers)
        check_size(body.size, self._service.settings.max_body_bytes)  # independent of the load
        context.on_finish.append(lambda over: self._learn(body, over.tokens, over.characters))
        load = engines.load()
        flows = [
            Flow(bundle, context.priority, context.tenant)
            for bundle in engines.expected
            if bundle in load.rates
        ]
        tokens = self.expect(body)
        if flows:
            soonest = flows[0]
            if len(flows) > 1:
                soonest = min(flows, key=lambda flow: load.wait_s(flow, tokens))
            self._forget_slow(context.arrival)
            # With several bundles, the bundle of the admitted requests is not known yet: it may be another one.
            known = len(flows) == 1
            coming = self._coming_tokens[context.priority, context.tenant] if known else 0
            encode_s = self._encode_s(engines.text_threads, soonest, body)
            load.check_in_time(soonest, tokens, left_s, EARLY_SHARE, coming, encode_s)
        self._come(context, tokens)

    def _come(self, context: RequestContext, tokens: int) -> None:
        """Count a request, of which many may arrive together, until the batcher counts it or it is over."""
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

    def _encode_s(self, text_threads: TextThreads, flow: Flow, body: BodySize) -> float:
        """Return the expected seconds until the texts of a request are encoded; 0 if they are short."""
        characters = self._characters.expect(body)
        return text_threads.wait_s(flow, [characters]) if characters > INLINE_CHARACTERS else 0.0

    def expect(self, body: BodySize) -> int:
        """Return the expected tokens of a body; at least 1."""
        return max(1, self._tokens.expect(body))

    def _learn(self, body: BodySize, tokens: int, characters: int) -> None:
        self._tokens.learn(body, tokens)
        self._characters.learn(body, characters)
