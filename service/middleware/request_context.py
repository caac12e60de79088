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
from typing import NamedTuple, Protocol
from urllib.parse import quote

import orjson
import structlog
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import ClientDisconnected, Draining, InternalError, Overloaded, QuartetError
from service.middleware.client_address import ClientAddresses
from service.middleware.refusal_throttle import RefusalThrottle
from service.observability.logs import NAMES, QUIET_ROUTES, LogLimiter, log_request
from service.observability.metrics import Recorder

log = structlog.get_logger()

CONTEXT = "exchange"  # in the state of a scope
REFUSAL = "refusal"  # in a scope's state: the error of a request that was refused on its way here
SANE_ID = re.compile(r"[!-~](?:[ -~]{0,126}[!-~])?")  # printable ASCII
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
    on_submit: called when the request's texts go to the device; on_finish: each is called with this context when the
    request is over
    submitted_tokens: tokens of those texts; tokens: those that count as computed for the client, 0 if it got no answer
    stages: seconds of each, as far in `metrics.STAGES` as the request came
    client_deadline: whether the client set a shorter deadline than the server's
    refusal: why it must not come in; closes: whether its connection closes after the answer
    leaving: done when the client has left, where the server reports it
    """

    request_id: str
    arrival: float
    headers: Mapping[str, str] = field(default_factory=dict)
    trace_id: str = ""
    tenant: str = ""
    priority: int = 0
    on_submit: Callable[[], object] | None = None
    on_finish: list[Callable[["RequestContext"], object]] = field(default_factory=list)
    submitted_tokens: int = 0
    model: str = ""
    task: str = ""
    inputs: int = 0
    tokens: int = 0
    batch_size: int = 0
    batch_tokens: int = 0
    stages: tuple[float, ...] = ()
    status: int = 0
    code: str = ""
    client_deadline: bool = False
    refusal: QuartetError | None = None
    closes: bool = False
    leaving: asyncio.Future[None] | None = None

    def submit(self, tokens: int) -> None:
        """Record that the request's texts, of this many tokens, go to the device."""
        self.submitted_tokens = tokens
        if self.on_submit is not None:
            self.on_submit()

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


class Refusal(NamedTuple):
    """The answer to a request that fails, without the headers that every answer carries."""

    status: int
    headers: dict[str, str]
    body: bytes


def refuse(context: RequestContext, error: QuartetError) -> Refusal:
    """Make the answer to a request that fails, and record the error for the log and the metrics."""
    context.code = error.code
    context.closes |= error.closes_connection
    headers = {**error.headers, "Content-Type": "application/json"}
    return Refusal(error.status, headers, orjson.dumps(error.body))


def refusal_response(scope: Scope, error: QuartetError) -> Response:
    """The refusal of a request as a response of the framework."""
    status, headers, body = refuse(context_of(scope), error)
    return Response(body, status, headers)


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


def log_internal_error() -> InternalError:
    """What the client is told of the exception that is being handled; the log gets the rest."""
    log.exception("unexpected error")
    return InternalError("our bug: the server's log tells more under this request's id")


class RequestLifecycle:
    """Where every request is named and checked when it comes, and recorded when it is over.

    routes: the paths that the log and the metrics call by their name; trace: makes their spans, while that is wanted
    trusted: the proxies whose headers name the client, as `forwarded_allow_ips` lists them
    """

    trace: Trace | None = None

    def __init__(
        self,
        *,
        metrics: Recorder,
        process: Process,
        checks: Sequence[Check] = (),
        routes: Collection[str] = (),
        trusted: str = "",
    ) -> None:
        self.throttle = RefusalThrottle()
        self._metrics = metrics
        self._process = process
        self._checks = checks
        self._routes = routes
        self._refusals = LogLimiter()
        self._client_of = ClientAddresses(trusted)
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
            context.refusal = log_internal_error()
        return context

    def headers(self, context: RequestContext) -> dict[str, str]:
        """The headers that every answer carries. While the process drains, every answer closes its connection."""
        headers = {"X-Request-Id": context.request_id, "X-Content-Type-Options": "nosniff"}
        context.closes |= self._process.draining
        if context.closes:
            headers["Connection"] = "close"
        return headers

    def record(self, method: str, scope: Scope, context: RequestContext) -> None:
        """Finish, count and log a request that is over. A failure is our bug; it changes no answer."""
        try:
            self._record(method, scope, context)
        except Exception:
            log_internal_error()

    def _record(self, method: str, scope: Scope, context: RequestContext) -> None:
        for finish in context.on_finish:
            finish(context)
        path = scope["path"]
        route = path if path in self._routes else getattr(scope.get("route"), "path", OTHER)
        status, seconds = context.status or CLIENT_GONE, context.seconds
        self._metrics.observe_request(route, context.model, status, seconds, context.priority)
        if context.stages:
            self._metrics.observe_answer(
                context.model, context.tenant, context.tokens, context.stages
            )
        if context.code:
            self._metrics.observe_error(context.code, context.client_deadline)
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
            client=self._client_of(scope),
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

    def __init__(self, app: ASGIApp, *, lifecycle: RequestLifecycle, process: Process) -> None:
        self.app = app
        self.lifecycle = lifecycle
        self.process = process

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.get("state", {})
        context, inner = state.get(CONTEXT), scope
        if context is None:
            context = self.lifecycle.receive(scope)
            inner = {**inner, "state": {**state, CONTEXT: context}}
        if scope["method"] == "HEAD":  # answered as GET is, without the body
            inner = {**inner, "method": "GET"}
        named = NAMES.set(context.names)
        try:
            await self.answer(inner, receive, self.sender(scope, context, send))
        finally:
            self.lifecycle.record(scope["method"], inner, context)
            NAMES.reset(named)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        try:
            if context.refusal is not None:
                await refusal_response(scope, context.refusal)(scope, receive, send)
            else:
                await self.app(scope, receive, send)
        except ClientDisconnected:
            context.status = CLIENT_GONE
        except asyncio.CancelledError:
            if context.status or not self.process.draining:
                raise
            draining = Draining("the server is shutting down")
            await refusal_response(scope, draining)(scope, receive, send)
        except Exception:
            error = log_internal_error()
            if context.status:
                context.code = error.code
                raise  # the answer is half sent: the server must cut the connection
            await refusal_response(scope, error)(scope, receive, send)

    def sender(self, scope: Scope, context: RequestContext, send: Send) -> Send:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                if context.status == Overloaded.status:
                    await self.lifecycle.throttle.turn()
                common = self.lifecycle.headers(context).items()
                own = [(name.lower().encode(), value.encode()) for name, value in common]
                message["headers"] = [*message.get("headers", ()), *own]
            elif scope["method"] == "HEAD":
                message = {**message, "body": b""}
            await send(message)

        return send_named
