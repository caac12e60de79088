"""The life of each request: it is named and checked when it comes, answered, and recorded when it is over.

The middleware is the innermost of ours, around all routes, so an unexpected exception ends here: it is logged with its
traceback, and answered with the code of an internal error and nothing else.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Protocol
from urllib.parse import quote

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import ClientDisconnected, Draining, Overloaded, QuartetError
from service.middleware.client_address import ClientAddresses
from service.middleware.refusal_throttle import RefusalThrottle
from service.middleware.refusals import log_internal_error, refusal_response
from service.middleware.request_context import (
    CONTEXT,
    RequestContext,
    context_of,
    new_context,
)
from service.observability.logs import NAMES, QUIET_ROUTES, LogLimiter, log_request
from service.observability.metrics import Recorder

REFUSAL = "refusal"  # in a scope's state: the error of a request that was refused on its way here
CLIENT_GONE = 499  # in the log and the metrics: the client left before the answer
OTHER = "other"  # the route of what has none


Check = Callable[[Scope, RequestContext], None]  # raises a QuartetError to refuse a request


def check_refusal(scope: Scope, context: RequestContext) -> None:
    """The check of what the server itself has found: raises it."""
    if refusal := scope.get("state", {}).get(REFUSAL):
        raise refusal


# Called with each request that is logged, when it is over: its method, its route or `OTHER`, its scope.
Trace = Callable[[str, str, Scope, RequestContext], None]


class Process(Protocol):
    """Whether this process is shutting down."""

    @property
    def draining(self) -> bool: ...


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
            # Its traceback has frames that refer to the context: a cycle, which only the garbage collector would break.
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
    """Answers refused requests and unexpected exceptions, and records each request."""

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
