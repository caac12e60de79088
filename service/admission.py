"""Refusing early: what cannot be answered in time is told so before its body is read.

The batcher's own answer is exact, but it comes when the texts are tokens; by then a refusal has cost as much as an
answer. So a request is first judged by the size of its body.
"""

from starlette.datastructures import Headers
from starlette.types import Scope

from service.calls import TIMEOUT_HEADER, Service, timeout_s
from service.exchange import Exchange
from service.gate import permission
from service.load import Flow

LEARNING = 0.05  # what a request weighs beside those before it


class Admission:
    """A check that expects of a request the tokens that bodies of its size had, and knows what waits."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tokens: dict[int, float] = {}  # by the bits of a body's size

    def __call__(self, scope: Scope, headers: Headers, exchange: Exchange) -> None:
        """Raises Overloaded when even the bundle that is asked least would answer too late."""
        if scope["method"] != "POST" or permission(scope["path"]) != "inference":
            return  # who looks after the service is let in, above all when it is overloaded
        engines = self._service.engines
        if engines is None:
            return
        size = content_length(headers)
        exchange.settle.append(lambda tokens: self._learn(size, tokens))
        load = engines.load()
        flows = [
            Flow(bundle, exchange.priority, exchange.tenant)
            for bundle in engines.expected
            if bundle in load.rates
        ]
        if not load.waiting or not flows:
            return
        tokens = self.expect(size)
        soonest = flows[0]
        if len(flows) > 1:
            soonest = min(flows, key=lambda flow: load.wait_s(flow, tokens))
        left_s = timeout_s(headers.get(TIMEOUT_HEADER), self._service.settings)
        load.check_in_time(soonest, tokens, left_s)

    def expect(self, size: int) -> int:
        """The tokens of a body of so many bytes: those of the largest known that are no larger, or next to none."""
        known = [bits for bits in self._tokens if bits <= size.bit_length()]
        return max(1, round(self._tokens[max(known)])) if known else 1

    def _learn(self, size: int, tokens: int) -> None:
        if size and tokens:
            bits = size.bit_length()
            known = self._tokens.get(bits, tokens)
            self._tokens[bits] = known + LEARNING * (tokens - known)


def content_length(headers: Headers) -> int:
    """What the client says, or 0."""
    said = headers.get("content-length", "")
    return int(said[:19]) if said.isdecimal() else 0
