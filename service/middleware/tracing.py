"""Spans of requests for an OpenTelemetry collector, if the standard environment variables enable them.

The spans of a request are created at its end from its request context, so tracing adds no work before that. If tracing
is off, the SDK is not even imported. A thread of the SDK exports the spans, and drops spans that it cannot export in
time.
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
from opentelemetry.context import Context
from opentelemetry.trace import (
    Span,
    SpanKind,
    StatusCode,
    Tracer,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
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
METHODS = frozenset(  # the methods that the semantic conventions list
    ["CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"]
)
TRACE_STATE = 512  # characters, the least that W3C Trace Context asks a service to pass on
CLOSE_S = 1.0  # limit for the export of the last spans
EXPORTING = ("opentelemetry.sdk", "opentelemetry.exporter")  # loggers of lost spans
QUIET_S = 60.0  # between two log lines about lost spans


@asynccontextmanager
async def tracing() -> AsyncIterator[Trace | None]:
    """Yield the function that creates a request's spans, or None if spans are off or cannot be exported.

    Problems go to the log. They do not prevent the service from starting.
    """
    names = requested_exporters(os.environ)
    if not names:
        yield None
        return
    with limited_warnings():
        try:
            provider = open_provider(names)
        except ImportError:
            log.warning(
                "OTEL_ variables request spans, but the extra quartet-serving[otel] is not installed"
            )
            yield None
            return
        except Exception as error:  # exporters are plug-ins and raise anything
            log.warning("spans cannot be exported", reason=str(error))
            yield None
            return
        log.info("tracing", exporters=names)
        try:
            yield RequestSpans(provider.get_tracer("quartet", __version__, schema_url=SCHEMA))
        finally:
            # The collector may be unreachable.
            ending = Thread(target=provider.shutdown, daemon=True)
            ending.start()
            await asyncio.to_thread(ending.join, CLOSE_S)


def parent_context(headers: Headers) -> Context:
    """Return the client's trace context. Baggage and a long trace state are not read: parsing takes quadratic time."""
    names = ("traceparent", "tracestate")
    carrier = {name: headers[name] for name in names if name in headers}
    if len(carrier.get("tracestate", "")) > TRACE_STATE:
        del carrier["tracestate"]
    return TraceContextTextMapPropagator().extract(carrier)


def requested_exporters(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the exporters that the environment selects, by name or by the endpoint variable of OTLP."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    by_default = "otlp" if any(map(environ.get, ENDPOINTS)) else "none"
    named = environ.get("OTEL_TRACES_EXPORTER", "").strip() or by_default
    return [name for name in map(str.strip, named.split(",")) if name not in ("", "none")]


def open_provider(names: list[str]) -> "TracerProvider":
    """Return a provider with these exporters.

    The SDK reads all other options from its environment variables: sampler, limits, resource, batches, endpoint. Raises
    ImportError without the SDK, LookupError for an exporter that is not installed, and the errors of an exporter.
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
    """Return an exporter by its name in `OTEL_TRACES_EXPORTER`. Raises LookupError."""
    if name == "otlp":
        protocol = next(filter(None, map(os.environ.get, PROTOCOLS)), "http/protobuf")
        name = OTLP.get(protocol, protocol)
    for found in entry_points(group="opentelemetry_traces_exporter", name=name):
        exporter: SpanExporter = found.load()()
        return exporter
    raise LookupError(f"no exporter {name!r} is installed")


class SdkWarnings(logging.Handler):
    """Logs the SDK's warnings at a limited rate, because an unreachable collector causes a warning for every batch.

    The warnings of other packages lose no spans. Clients can cause them, by a `tracestate` that is not valid.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._sparing = LogLimiter(1, QUIET_S)

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(EXPORTING):
            log.debug("warning about tracing", reason=record.getMessage())
        elif self._sparing.may_tell():
            untold = self._sparing.untold()
            log.warning("spans may be lost", reason=record.getMessage(), untold=untold)


@contextmanager
def limited_warnings() -> Iterator[SdkWarnings]:
    """Route the SDK's warnings to `SdkWarnings` instead of directly to the log."""
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
    """Creates a request's spans with a tracer. It catches all exceptions."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._failures = LogLimiter(1, QUIET_S)

    def __call__(
        self, method: str, route: str, scope: Scope, request_context: RequestContext
    ) -> None:
        try:
            self._make(method, route, scope, request_context)
        except Exception:  # a span must not cost the request
            if self._failures.may_tell():
                log.exception("spans could not be made", untold=self._failures.untold())

    def _make(self, method: str, route: str, scope: Scope, request_context: RequestContext) -> None:
        """Create a request's own span, and one for each stage it reached, end to end from its arrival."""
        end = time.time_ns()
        begin = end - nanoseconds(request_context.seconds)
        known = method if method in METHODS else "HTTP"
        span = self._tracer.start_span(
            known if route == OTHER else f"{known} {route}",
            parent_context(Headers(scope=scope)),
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
    """Return a request's attributes by the semantic conventions, others as `quartet.*`; no query and no text."""
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
    """Return whether the service failed. A client's mistake is not an error of a server span."""
    if request_context.status == OK:  # an NDJSON stream may end with an error
        return bool(request_context.code)
    return request_context.status >= InternalError.status


def nanoseconds(seconds: float) -> int:
    return int(1e9 * seconds)
