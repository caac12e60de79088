"""Spans of requests for an OpenTelemetry collector, where the standard variables ask for them.

A request's spans are made when it is over, from what its request context has by then: while it is answered nothing is
carried along, and where nobody asks, nothing is done and the SDK is not imported. A thread of the SDK delivers them;
what it cannot deliver in time is dropped.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import entry_points
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import quote

import structlog
from opentelemetry import propagate
from opentelemetry.trace import (
    Span,
    SpanKind,
    StatusCode,
    Tracer,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers
from starlette.types import Scope

from service import __version__
from service.errors import InternalError
from service.middleware.request_context import RequestContext
from service.middleware.request_lifecycle import CLIENT_GONE, OTHER, Trace
from service.observability.logs import LogLimiter
from service.observability.metrics import OK, STAGES

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

log = structlog.get_logger()

SCHEMA = "https://opentelemetry.io/schemas/1.44.0"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}  # exporters by protocol
METHODS = frozenset(  # that the conventions know
    ["CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"]
)
CLOSE_S = 1.0  # for the last spans to be delivered
QUIET_S = 60.0  # between two lines about spans that are lost


@asynccontextmanager
async def tracing() -> AsyncIterator[Trace | None]:
    """What makes the spans of a request while they are exported; None where nobody asks for them, or nothing can.

    What is wrong is told to the log: it keeps nobody from being served.
    """
    names = requested_exporters(os.environ)
    if not names:
        yield None
        return
    with limited_warnings():
        try:
            provider = open_provider(names)
        except ImportError:
            log.warning("spans are asked for, and nothing is installed for it: quartet[otel]")
            yield None
            return
        except Exception as error:
            log.warning("spans cannot be exported", reason=str(error))
            yield None
            return
        log.info("tracing", exporters=names)
        try:
            yield RequestSpans(provider.get_tracer("quartet", __version__, schema_url=SCHEMA))
        finally:
            ending = Thread(target=provider.shutdown, daemon=True)  # a collector may be away
            ending.start()
            await asyncio.to_thread(ending.join, CLOSE_S)


def requested_exporters(environ: Mapping[str, str]) -> list[str]:
    """Return the exporters that the environment requests by name, or by the endpoint that one needs."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    by_default = "otlp" if any(map(environ.get, ENDPOINTS)) else "none"
    named = environ.get("OTEL_TRACES_EXPORTER", "").strip() or by_default
    return [name for name in map(str.strip, named.split(",")) if name not in ("", "none")]


def open_provider(names: list[str]) -> "TracerProvider":
    """Everything else is as the SDK reads it from its variables: sampler, limits, resource, batches, endpoint.

    Raises ImportError without the SDK, LookupError for an exporter that is not installed, and what an exporter raises.
    """
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    ours: dict[str, AttributeValue] = {"service.name": "quartet", "service.version": __version__}
    resource = Resource.create({**ours, **OTELResourceDetector().detect().attributes})
    exporters = [open_exporter(name) for name in names]
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def open_exporter(name: str) -> "SpanExporter":
    """An exporter by its name in `OTEL_TRACES_EXPORTER`. Raises LookupError."""
    if name == "otlp":
        protocol = next(filter(None, map(os.environ.get, PROTOCOLS)), "http/protobuf")
        name = OTLP.get(protocol, protocol)
    for found in entry_points(group="opentelemetry_traces_exporter", name=name):
        exporter: SpanExporter = found.load()()
        return exporter
    raise LookupError(f"no exporter {name!r} is installed")


class SdkWarnings(logging.Handler):
    """Tells what the SDK warns of, now and then: a collector that is away is found away again for every batch."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._sparing = LogLimiter(1, QUIET_S)

    def emit(self, record: logging.LogRecord) -> None:
        if self._sparing.may_tell():
            untold = self._sparing.untold()
            log.warning("spans may be lost", reason=record.getMessage(), untold=untold)


@contextmanager
def limited_warnings() -> Iterator[SdkWarnings]:
    """Hear what the SDK has to say, instead of all that the log would."""
    loggers, handler = logging.getLogger("opentelemetry"), SdkWarnings()
    before = loggers.propagate
    loggers.propagate = False
    loggers.addHandler(handler)
    try:
        yield handler
    finally:
        loggers.removeHandler(handler)
        loggers.propagate = before


class RequestSpans:
    """Makes a request's spans with a tracer, and never fails."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._failures = LogLimiter(1, QUIET_S)

    def __call__(
        self, method: str, route: str, scope: Scope, request_context: RequestContext
    ) -> None:
        try:
            self._make(method, route, scope, request_context)
        except Exception:
            if self._failures.may_tell():
                log.exception("spans could not be made", untold=self._failures.untold())

    def _make(self, method: str, route: str, scope: Scope, request_context: RequestContext) -> None:
        """The request's own span, and one for each stage that it came through.

        The stages are laid end to end from the request's arrival on: how long each took is known, not when it began.
        """
        end = time.time_ns()
        begin = end - nanoseconds(request_context.seconds)
        known = method if method in METHODS else "HTTP"
        span = self._tracer.start_span(
            known if route == OTHER else f"{known} {route}",
            propagate.extract(Headers(scope=scope)),
            SpanKind.SERVER,
            attributes(method, route, scope, request_context),
            start_time=begin,
        )
        if span.is_recording():
            request_context.trace_id = format_trace_id(span.get_span_context().trace_id)
            if failed(request_context):
                span.set_status(StatusCode.ERROR)
            self._make_stages(span, begin, end, request_context)
        span.end(end)

    def _make_stages(
        self, parent: Span, begin: int, end: int, request_context: RequestContext
    ) -> None:
        context = set_span_in_context(parent)
        for stage, seconds in zip(STAGES, request_context.stages, strict=False):
            until = min(begin + nanoseconds(seconds), end)
            self._tracer.start_span(stage, context, start_time=begin).end(until)
            begin = until


def attributes(
    method: str, route: str, scope: Scope, request_context: RequestContext
) -> dict[str, AttributeValue]:
    """What is known of a request, by the semantic conventions and, beyond them, as `quartet.`: no query, no text."""
    status = request_context.status or CLIENT_GONE
    given = {
        "http.request.method": method if method in METHODS else "_OTHER",
        "http.request.method_original": "" if method in METHODS else method,
        "http.route": "" if route == OTHER else route,
        "http.response.status_code": 0 if status == CLIENT_GONE else status,
        "error.type": request_context.code or str(status) if failed(request_context) else "",
        "url.scheme": scope.get("scheme", "http"),
        "url.path": quote(scope["path"]),
        "network.protocol.version": scope.get("http_version", ""),
        "quartet.request_id": request_context.request_id,
        "quartet.tenant": request_context.tenant,
        "quartet.model": request_context.model,
        "quartet.task": request_context.task,
        "quartet.inputs": request_context.inputs,
        "quartet.tokens": request_context.tokens,
        "quartet.batch.size": request_context.batch_size,
        "quartet.batch.tokens": request_context.batch_tokens,
        "quartet.code": request_context.code,
    }
    return {name: value for name, value in given.items() if value}


def failed(request_context: RequestContext) -> bool:
    """Whether the service failed: what the client did wrong is no error of a server's span."""
    broken = request_context.status == OK and bool(
        request_context.code
    )  # in lines that ended with an error
    return broken or request_context.status >= InternalError.status


def nanoseconds(seconds: float) -> int:
    return int(1e9 * seconds)
