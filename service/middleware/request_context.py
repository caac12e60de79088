"""One request and its response as seen from outside: its id, its times, its line in the log.

Its middleware is the innermost of ours, around all routes, so it is also where an unexpected exception ends: logged
with its traceback, answered with our bug's code and nothing else.
"""

import asyncio
import random
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import quote

import orjson
import structlog
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import ClientDisconnected, Draining, InternalError, Overloaded, QuartetError
from service.middleware.refusal_throttle import RefusalThrottle
from service.observability.logs import NAMES, QUIET_ROUTES, Sparing, log_request
from service.observability.metrics import REFUSALS, Recorder

log = structlog.get_logger()

CONTEXT = "exchange"  # in the state of a scope
REFUSAL = "refusal"  # in a scope's state: the error of a request that was refused on its way here
SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
TRACEPARENT = re.compile(  # W3C Trace Context, of which later versions may say more at the end
    r"(?P<version>(?!ff)[0-9a-f]{2})-(?P<trace_id>(?!0{32})[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?"
)
CLIENT_GONE = 499  # for the log and the metrics: nobody was left to be answered
OTHER = "other"  # the route of what has none


@dataclass(slots=True)
class RequestContext:
    """What becomes known of a request while it is answered; `arrival` is by `time.monotonic`.

    headers: the first value of each, by its name in lower case
    trace_id: of the trace that the client says it is part of, or that was begun here; or empty
    settle: are told of the request's tokens when it is over, 0 if it had none; refusal: why it must not come in;
    submitted: is called when its texts go to the device; asked: of so many tokens
    stages: seconds of each, as far in `metrics.STAGES` as it came; leaving: is done when the client has left, where the
    server tells
    """

    request_id: str
    arrival: float
    headers: Mapping[str, str] = field(default_factory=dict)
    trace_id: str = ""
    tenant: str = ""
    priority: int = 0
    settle: list[Callable[[int], None]] = field(default_factory=list)
    submitted: Callable[[], object] | None = None
    asked: int = 0
    model: str = ""
    task: str = ""
    inputs: int = 0
    tokens: int = 0
    batch_size: int = 0
    batch_tokens: int = 0
    stages: tuple[float, ...] = ()
    status: int = 0
    code: str = ""
    refusal: QuartetError | None = None
    leaving: asyncio.Future[None] | None = None

    def submit(self, tokens: int) -> None:
        """Its texts go to the device."""
        self.asked = tokens
        if self.submitted is not None:
            self.submitted()

    @property
    def names(self) -> dict[str, str]:
        """What the log's lines of a request have in common."""
        names = {"request_id": self.request_id}
        return {**names, "trace_id": self.trace_id} if self.trace_id else names

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.arrival


def context_of(scope: Scope) -> RequestContext:
    context = scope["state"][CONTEXT]
    assert isinstance(context, RequestContext), "our bug: the lifecycle middleware is not installed"
    return context


def new_context(scope: Scope) -> RequestContext:
    headers = headers_of(scope)
    request_id = headers.get("x-request-id")
    if request_id is None or not SANE_ID.fullmatch(request_id):
        request_id = f"{random.getrandbits(128):032x}"
    trace = trace_id(headers["traceparent"]) if "traceparent" in headers else ""
    return RequestContext(request_id, time.monotonic(), headers, trace)


def headers_of(scope: Scope) -> dict[str, str]:
    """A request's headers, the first of each name: read once, for they are asked for a dozen times."""
    pairs = reversed(scope["headers"])
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}


def trace_id(traceparent: str) -> str:
    """The trace that the header names, or nothing where it is not valid."""
    found = TRACEPARENT.fullmatch(traceparent)
    return (
        found["trace_id"] if found and (found["more"] is None or found["version"] != "00") else ""
    )


def refuse(scope: Scope, error: QuartetError) -> Response:
    """An error as a response, remembered for the log and the metrics."""
    context_of(scope).code = error.code
    return Response(
        orjson.dumps(error.body),
        error.status,
        error.headers,
        media_type="application/json",
    )


Check = Callable[[Scope, RequestContext], None]  # raises a QuartetError to refuse a request


def check_refusal(scope: Scope, context: RequestContext) -> None:
    """The check of what the server itself has found: raises it."""
    if refusal := scope.get("state", {}).get(REFUSAL):
        raise refusal


# Is told of each request that is logged, when it is over: its method, its route or `OTHER`, its scope.
Trace = Callable[[str, str, Scope, RequestContext], None]


class Process(Protocol):
    """Whoever knows that this process is on its way out."""

    @property
    def draining(self) -> bool: ...


def our_bug() -> InternalError:
    """What the client is told of the exception that is being handled; the log gets the rest."""
    log.exception("unexpected error")
    return InternalError("our bug: the server's log tells more under this request's id")


class RequestLifecycle:
    """Where every request is named and checked when it comes, and recorded when it is over.

    routes: the paths that the log and the metrics call by their name; trace: makes their spans, while that is wanted
    """

    trace: Trace | None = None

    def __init__(
        self,
        *,
        metrics: Recorder,
        process: Process,
        checks: Sequence[Check] = (),
        routes: Collection[str] = (),
    ) -> None:
        self.pace = RefusalThrottle()
        self._metrics = metrics
        self._process = process
        self._checks = checks
        self._routes = routes
        self._refusals = Sparing()
        self._log = structlog.get_logger().bind()

    def receive(self, scope: Scope) -> RequestContext:
        """Name and check a request; what must not come in has its `refusal`."""
        context = new_context(scope)
        try:
            for check in self._checks:
                check(scope, context)
        except QuartetError as error:
            # Its traceback has frames that know the exchange: a circle, which only the garbage collector would break.
            context.refusal = error.with_traceback(None)
        except Exception:
            context.refusal = our_bug()
        return context

    def headers(self, context: RequestContext) -> dict[str, str]:
        """What every answer carries."""
        named = {"X-Request-Id": context.request_id, "X-Content-Type-Options": "nosniff"}
        if self._process.draining:  # the next request on this connection should find another server
            named["Connection"] = "close"
        return named

    def record(self, method: str, scope: Scope, context: RequestContext) -> None:
        """Settle, count and log a request that is over. A failure is our bug; it changes no answer."""
        try:
            self._record(method, scope, context)
        except Exception:
            our_bug()

    def _record(self, method: str, scope: Scope, context: RequestContext) -> None:
        for settle in context.settle:
            settle(context.tokens)
        path = scope["path"]
        route = path if path in self._routes else getattr(scope.get("route"), "path", OTHER)
        status, seconds = context.status or CLIENT_GONE, context.seconds
        self._metrics.observe_request(route, context.model, status, seconds)
        if context.stages:
            self._metrics.observe_answer(
                context.model, context.tenant, context.tokens, context.stages
            )
        if context.code in REFUSALS:
            self._metrics.observe_rejection(context.code)
        facts: dict[str, object] = {}
        if status == Overloaded.status:
            if not self._refusals.may_tell():
                return
            facts["untold"] = self._refusals.untold()
        if self.trace is not None and route not in QUIET_ROUTES:
            self.trace(method, route, scope, context)
        log_request(
            self._log,
            route,
            method=method,
            path=path if route == path else quote(path),
            status=status,
            ms=round(1000 * seconds, 3),
            tenant=context.tenant,
            model=context.model,
            inputs=context.inputs,
            tokens=context.tokens,
            code=context.code,
            **context.names,
            **facts,
        )


class LifecycleMiddleware:
    """Answers what was refused and what nobody else caught, and has each request recorded."""

    def __init__(self, app: ASGIApp, *, reception: RequestLifecycle, process: Process) -> None:
        self.app = app
        self.reception = reception
        self.process = process

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.get("state", {})
        context, inner = state.get(CONTEXT), scope
        if context is None:
            context = self.reception.receive(scope)
            inner = {**inner, "state": {**state, CONTEXT: context}}
        if scope["method"] == "HEAD":  # answered as GET is, without the body
            inner = {**inner, "method": "GET"}
        named = NAMES.set(context.names)
        try:
            await self.answer(inner, receive, self.sender(scope, context, send))
        finally:
            self.reception.record(scope["method"], inner, context)
            NAMES.reset(named)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        try:
            if context.refusal is not None:
                await refuse(scope, context.refusal)(scope, receive, send)
            else:
                await self.app(scope, receive, send)
        except ClientDisconnected:
            context.status = CLIENT_GONE
        except asyncio.CancelledError:
            if context.status or not self.process.draining:
                raise
            await refuse(scope, Draining("the server is shutting down"))(scope, receive, send)
        except Exception:
            error = our_bug()
            if context.status:
                raise  # the answer is half sent: the server must cut the connection
            await refuse(scope, error)(scope, receive, send)

    def sender(self, scope: Scope, context: RequestContext, send: Send) -> Send:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                if context.status == Overloaded.status:
                    await self.reception.pace.turn()
                others = message.get("headers", ())
                if self.process.draining:  # of which every answer tells, once
                    others = [pair for pair in others if pair[0] != b"connection"]
                named = self.reception.headers(context).items()
                own = [(name.lower().encode(), value.encode()) for name, value in named]
                message["headers"] = [*others, *own]
            elif scope["method"] == "HEAD":
                message = {**message, "body": b""}
            await send(message)

        return send_named
