"""The lifecycle of each request: it gets an id, passes the checks, gets its response, and is recorded at its end.

This middleware is the innermost of the service's, around all routes, so it catches every unexpected exception. It logs
the exception with its traceback and responds with the code of an internal error and nothing else.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from urllib.parse import quote

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import (
    ClientDisconnected,
    Draining,
    ErrorForm,
    Forbidden,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    QuartetError,
    Unauthorized,
)
from service.middleware.client_address import ClientAddresses
from service.middleware.refusal_throttle import RefusalThrottle
from service.middleware.refusals import log_internal_error, refusal_response
from service.middleware.request_context import CONTEXT, RequestContext, context_of, new_context
from service.middleware.service_state import Service
from service.observability.logs import NAMES, QUIET_ROUTES, LogLimiter, log_bug, log_request
from service.observability.metrics import Recorder

# Key in a scope's state: the error of a request that the server refused before the application.
REFUSAL = "refusal"
PATH_CHARACTERS = 256  # of a path in the log; the rest is cut off
CLIENT_GONE = 499  # in the log and the metrics: the client disconnected before the response
# Errors that are raised without work on a body.
WITHOUT_WORK = frozenset({NotFound.status, MethodNotAllowed.status, Overloaded.status})
OTHER = "other"  # the route label of a request without a route


Check = Callable[[Scope, RequestContext], None]  # raises a QuartetError to refuse a request


def check_refusal(scope: Scope, context: RequestContext) -> None:
    """Raise the error that the server recorded for this request, if any."""
    if refusal := scope.get("state", {}).get(REFUSAL):
        raise refusal


# Called at the end of each logged request with its method, its route or `OTHER`, its scope and its context.
Trace = Callable[[str, str, Scope, RequestContext], None]


# Returns the path of the route that a request with a method and a path is for, and the form of its errors.
Resolve = Callable[[str, str], tuple[str, Callable[[QuartetError], ErrorForm]]]


class RequestLifecycle:
    """Identifies and checks every request at its arrival, and records it at its end.

    routes: paths that the log and the metrics use as labels
    trace: creates the spans of a request; None while tracing is off
    trusted: proxies whose headers identify the client, in the format of `forwarded_allow_ips`
    """

    trace: Trace | None = None

    def __init__(
        self,
        *,
        metrics: Recorder,
        service: Service,
        checks: Sequence[Check] = (),
        routes: Collection[str] = (),
        resolve: Resolve | None = None,
        trusted: str = "",
    ) -> None:
        self.service = service
        self.throttle = RefusalThrottle()
        # Apart, so that strangers do not delay the refusals of tenants.
        self.key_throttle = RefusalThrottle()
        self._metrics = metrics
        self._checks = checks
        self._routes = routes
        self._resolve = resolve
        self._refusals: dict[int, LogLimiter] = {}  # by status
        self._client_of = ClientAddresses(trusted)
        self._log = structlog.get_logger().bind()

    def receive(self, scope: Scope) -> RequestContext:
        """Create the context of a request and run the checks. A rejected request has its error in `refusal`."""
        context = new_context(scope)
        if self._resolve is not None:
            scope["path"], context.error_form = self._resolve(scope["method"], scope["path"])
        try:
            context.client = self._client_of(scope)
            for check in self._checks:
                check(scope, context)
        except QuartetError as error:
            # The traceback's frames refer to the context: a cycle, which only the garbage collector would break.
            context.refusal = error.with_traceback(None)
        except Exception:  # a bug in a check: the client gets our error
            context.refusal = log_internal_error()
        return context

    def headers(self, context: RequestContext) -> dict[str, str]:
        """Return the headers of every response at its beginning. While the process drains, connections close."""
        headers = {"X-Request-Id": context.request_id, "X-Content-Type-Options": "nosniff"}
        context.closes |= self.service.draining
        if context.drops_body is not None:
            context.closes |= context.drops_body()
        if context.closes:
            headers["Connection"] = "close"
        return headers

    async def delay_refusal(self, context: RequestContext) -> None:
        """Delay the response to a request that its client can repeat at almost no cost."""
        if context.status == Overloaded.status:
            await self.throttle.turn()
        elif isinstance(context.refusal, Unauthorized | Forbidden):
            await self.key_throttle.turn()

    def record(self, method: str, scope: Scope, context: RequestContext) -> None:
        """Call the callbacks of a finished request, count and log it. An exception here does not undo the response."""
        try:
            self._record(method, scope, context)
        except Exception:  # a bug in a callback must not undo the response
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
        # A client can repeat these requests at almost no cost, so that their log lines must be limited.
        if context.refusal is not None or status in WITHOUT_WORK:
            limiter = self._refusals.setdefault(status, LogLimiter())
            if not limiter.may_tell():
                return
            facts["untold"] = limiter.untold()
        if self.trace is not None and route not in QUIET_ROUTES:
            self.trace(method, route, scope, context)
        log_request(
            self._log,
            route,
            method=method,
            path=path if route == path else short(quote(path)),
            status=status,
            ms=round(1000 * seconds, 3),
            client=context.client,
            tenant=context.tenant,
            model=context.model,
            inputs=context.inputs,
            tokens=context.tokens,
            code=context.code,
            **context.names,
            **facts,
        )


def short(path: str) -> str:
    return path if len(path) <= PATH_CHARACTERS else f"{path[:PATH_CHARACTERS]}..."


class LifecycleMiddleware:
    """Responds to refused requests and unexpected exceptions, and records each request."""

    def __init__(self, app: ASGIApp, *, lifecycle: RequestLifecycle) -> None:
        self.app = app
        self.lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.get("state", {})
        context, inner = state.get(CONTEXT), scope
        if context is None:
            context = self.lifecycle.receive(scope)
            inner = {**inner, "state": {**state, CONTEXT: context}}
        if scope["method"] == "HEAD":  # processed as GET, but sent without the body
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
            if context.status or not self.lifecycle.service.draining:
                raise
            draining = Draining("the server is shutting down")
            await refusal_response(scope, draining)(scope, receive, send)
        except Exception as raised:
            if isinstance(raised, QuartetError) and not context.status:
                log_bug(raised)
                await refusal_response(scope, raised)(scope, receive, send)
                return
            error = log_internal_error()  # a bug in a route: the client gets our error
            if context.status:
                context.code = error.code
                raise  # the response is incomplete: the server must abort the connection
            await refusal_response(scope, error)(scope, receive, send)

    def sender(self, scope: Scope, context: RequestContext, send: Send) -> Send:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                await self.lifecycle.delay_refusal(context)
                common = self.lifecycle.headers(context).items()
                own = [(name.lower().encode(), value.encode()) for name, value in common]
                message["headers"] = [*message.get("headers", ()), *own]
            elif scope["method"] == "HEAD":
                message = {**message, "body": b""}
            await send(message)

        return send_named
