import asyncio
import logging
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from service.errors import DeadlineExceeded, Overloaded
from service.middleware import tracing
from service.middleware.request_context import RequestContext
from service.middleware.tracing import RequestSpans, limited_warnings, requested_exporters

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="the otel extra is not installed")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

BODY = {"inputs": ["a secret", "another"]}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
STAGES = ["parse", "encode", "queue", "inference", "return", "decode", "serialise"]
AWAY = "http://127.0.0.1:9"  # a port without a listener
LATE = DeadlineExceeded("too late")


@pytest.fixture(autouse=True)
def _nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test alone requests exporters."""
    for name in (*tracing.ENDPOINTS, *tracing.PROTOCOLS, "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def made(app: FastAPI, client: httpx.AsyncClient) -> AsyncIterator[Any]:
    """The spans that are made for what the client asks."""
    exporter = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    app.state.lifecycle.trace = RequestSpans(provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def server_span(made: Any) -> Any:
    (span,) = [span for span in made.get_finished_spans() if span.kind.name == "SERVER"]
    return span


def stages(made: Any) -> list[Any]:
    return [span for span in made.get_finished_spans() if span.kind.name == "INTERNAL"]


async def test_a_request_is_a_span_by_the_semantic_conventions(client, made):
    """What was requested, how it ended, and what it took of which model."""
    await client.post("/classify?q=secret", json=BODY, headers={"X-Request-Id": "abc"})
    span = server_span(made)
    assert (span.name, span.status.status_code.name) == ("POST /classify", "UNSET")
    assert dict(span.attributes) == {
        "http.request.method": "POST",
        "http.route": "/classify",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "url.path": "/classify",
        "network.protocol.version": "1.1",
        "quartet.request_id": "abc",
        "quartet.model": "tiny@1",
        "quartet.task": "classification",
        "quartet.inputs": 2,
        "quartet.tokens": 7,
        "quartet.batch.size": 8,
        "quartet.batch.tokens": 312,
    }


@pytest.mark.parametrize(
    ("path", "body", "task"),
    [
        ("/ner", {"inputs": "a"}, "ner"),
        ("/qa", {"question": "a", "context": "b"}, "qa"),
        ("/embed", {"inputs": "a"}, "embedding"),
    ],
)
async def test_each_task_is_named(client, made, path, body, task):
    """As the contract has it, which is the same for every dialect."""
    await client.post(path, json=body)
    assert server_span(made).attributes["quartet.task"] == task


async def test_its_stages_are_spans_within_it(client, made):
    """End to end from its arrival on, each as long as it took, none beyond the end."""
    await client.post("/classify", json=BODY)
    span, inner = server_span(made), stages(made)
    assert [stage.name for stage in inner] == STAGES
    assert {stage.parent.span_id for stage in inner} == {span.context.span_id}
    assert inner[0].start_time == span.start_time
    assert [stage.start_time for stage in inner[1:]] == [stage.end_time for stage in inner[:-1]]
    assert all(stage.end_time <= span.end_time for stage in inner)
    assert span.end_time - span.start_time > 0
    assert abs(span.end_time - time.time_ns()) < 60e9


def test_stages_are_as_long_as_they_took(app, made):
    """But for what would be beyond the end, as the slowest of several windows may be."""
    request_context = RequestContext(
        "abc", time.monotonic() - 1.0, stages=(0.125, 0.25, 2.0), status=200
    )
    app.state.lifecycle.trace("POST", "/embed", {"path": "/embed", "headers": []}, request_context)
    parse, encode, queue = [stage.end_time - stage.start_time for stage in stages(made)]
    assert (parse, encode) == (125_000_000, 250_000_000)
    assert 0.6e9 < queue < 2e9
    assert stages(made)[-1].end_time == server_span(made).end_time


async def test_no_text_is_in_any_span(client, made, engine):
    """Neither of the body nor of the query, whether it is answered, refused or fails."""
    await client.post("/classify?q=secret", json=BODY)
    await client.post("/classify?q=secret", json={"inputs": "secret", "secret": 1})
    engine.error = RuntimeError("secret")
    await client.post("/classify?q=secret", json=BODY)
    spans = made.get_finished_spans()
    assert len([span for span in spans if span.kind.name == "SERVER"]) == 3
    assert "secret" not in "".join(span.to_json() for span in spans)


async def test_it_is_part_of_the_trace_of_its_client(client, made):
    """The span's parent is the client's, and its state goes along."""
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=value"}
    await client.post("/classify", json=BODY, headers=headers)
    span = server_span(made)
    assert f"{span.context.trace_id:032x}" == TRACE
    assert (f"{span.parent.span_id:016x}", span.parent.is_remote) == (PARENT, True)
    assert span.context.trace_state.get("vendor") == "value"


@pytest.mark.parametrize("name", ["baggage", "tracestate"])
async def test_long_headers_cost_no_time(client, made, name):
    """The library's parsers take time that grows with the square of these headers' length: neither is parsed."""
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", name: "a=1" + "\t" * 8000 + "b"}
    began = time.process_time()
    for _ in range(10):
        await client.post("/classify", json=BODY, headers=headers)
    assert time.process_time() - began < 0.5
    spans = [span for span in made.get_finished_spans() if span.kind.name == "SERVER"]
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}


async def test_a_client_that_does_not_sample_is_heeded(client, made):
    """By default, an unsampled trace of the client is not recorded either."""
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    assert (await client.post("/classify", json=BODY, headers=headers)).status_code == 200
    assert made.get_finished_spans() == ()


async def test_a_trace_that_begins_here_is_named_in_the_log(client, made, lines):
    """So the span leads to the log line, and the log line to the span."""
    await client.post("/classify", json=BODY, headers={"traceparent": "not valid"})
    span = server_span(made)
    assert span.parent is None
    assert lines[-1]["trace_id"] == f"{span.context.trace_id:032x}"


@pytest.mark.parametrize(
    ("body", "error", "accept", "status", "ending"),
    [
        ({"inputs": 5}, None, "*/*", 422, ("UNSET", "quartet.code", "invalid")),
        (BODY, LATE, "*/*", 504, ("ERROR", "error.type", LATE.code)),
        (BODY, LATE, "application/x-ndjson", 200, ("ERROR", "error.type", LATE.code)),
    ],
    ids=["mistake of the client", "too late", "too late, in lines"],
)
async def test_a_span_has_the_error_of_its_request(
    client, made, engine, body, error, accept, status, ending
):
    """A 4xx has its code, and no error of the server; a 5xx has its code as the type of the error, also after a 200."""
    engine.error, engine.tell_first = error, 1
    response = await client.post("/classify", json=body, headers={"Accept": accept})
    span, (_, name, _) = server_span(made), ending
    assert status == response.status_code == span.attributes["http.response.status_code"]
    assert ending == (span.status.status_code.name, name, span.attributes[name])
    assert ("error.type" in span.attributes) is (error is not None)
    if status != 200:
        assert [stage.name for stage in stages(made)] == ([] if error is None else ["parse"])


async def test_a_path_that_is_none_makes_no_name(client, made):
    """Names come from a small closed set, whatever clients write."""
    await client.request("BREW", "/any thing")
    span = server_span(made)
    assert span.name == "HTTP"
    assert span.attributes["http.request.method"] == "_OTHER"
    assert span.attributes["http.request.method_original"] == "BREW"
    assert span.attributes["url.path"] == "/any%20thing"
    assert "http.route" not in span.attributes


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/metrics"])
async def test_probes_are_not_traced(client, made, path):
    """Probes come every few seconds and describe no request."""
    await client.get(path)
    assert made.get_finished_spans() == ()


async def test_of_a_flood_no_more_is_traced_than_logged(client, made, engine, lines):
    """A refusal must cost next to nothing."""
    engine.error = Overloaded("the queue is full", retry_after_s=1)
    await asyncio.gather(*(client.post("/classify", json=BODY) for _ in range(40)))
    logged = [line for line in lines if line["event"] == "request"]
    spans = [span for span in made.get_finished_spans() if span.kind.name == "SERVER"]
    assert len(spans) == len(logged) < 40


async def test_a_failing_tracer_fails_no_request(client, app, lines):
    """The request is answered and logged, and the failure is logged once."""

    class Broken:
        def start_span(self, *_: object, **__: object) -> None:
            raise RuntimeError("broken")

    app.state.lifecycle.trace = RequestSpans(Broken())
    for _ in range(3):
        assert (await client.post("/classify", json=BODY)).status_code == 200
    assert [line["event"] for line in lines].count("request") == 3
    assert [line["event"] for line in lines].count("spans could not be made") == 1


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318"}, ["otlp"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a/v1/traces"}, ["otlp"]),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://a/v1/metrics"}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, []),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, ["otlp"]),
        ({"OTEL_TRACES_EXPORTER": "otlp, console"}, ["otlp", "console"]),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318"}, []),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318"}, []),
        ({"OTEL_SDK_DISABLED": "false", "OTEL_TRACES_EXPORTER": "otlp"}, ["otlp"]),
    ],
)
def test_the_standard_variables_ask(environ, names):
    """An exporter by name, or an endpoint for one; and nothing of ours."""
    assert requested_exporters(environ) == names


async def test_the_resource_is_ours_unless_it_is_named(monkeypatch):
    """The service is called quartet, or what the variables call it."""
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES", raising=False)
    assert tracing.open_provider([]).resource.attributes["service.name"] == "quartet"
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=search,deployment=test")
    named = tracing.open_provider([]).resource.attributes
    assert (named["service.name"], named["deployment"]) == ("search", "test")
    assert "service.version" in named


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"OTEL_TRACES_EXPORTER": "carrier-pigeon"}, "no exporter 'carrier-pigeon' is installed"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": AWAY, "OTEL_EXPORTER_OTLP_PROTOCOL": "morse"},
            "no exporter 'morse' is installed",
        ),
    ],
)
async def test_a_failing_span_export_stops_no_request(monkeypatch, lines, variables, reason):
    """There are no spans, and one line has the reason."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    async with tracing.tracing() as trace:
        assert trace is None
    assert [(line["event"], line["reason"]) for line in lines] == [
        ("spans cannot be exported", reason)
    ]


async def test_without_the_extra_one_line_says_so(monkeypatch, lines):
    """A service with OTEL variables but without the extra logs a line and serves."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", AWAY)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    async with tracing.tracing() as trace:
        assert trace is None
    assert ["quartet-serving[otel]" in line["event"] for line in lines] == [True]


async def test_a_collector_that_is_away_holds_up_no_end(monkeypatch, client, app):
    """The end waits for CLOSE_S, and not until the SDK has given up what is still to be delivered."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", AWAY)
    monkeypatch.setattr(tracing, "CLOSE_S", 0.01)
    shutdown = sdk.TracerProvider.shutdown
    may_end, ended = threading.Event(), threading.Event()

    def slow(provider):
        may_end.wait(60)
        shutdown(provider)
        ended.set()

    monkeypatch.setattr(sdk.TracerProvider, "shutdown", slow)
    async with tracing.tracing() as trace:
        app.state.lifecycle.trace = trace
        assert (await client.post("/classify", json=BODY)).status_code == 200
    assert not ended.is_set()
    may_end.set()


@pytest.fixture
def propagating() -> Iterator[logging.Logger]:
    logger = logging.getLogger("opentelemetry")
    before = logger.propagate
    yield logger
    assert logger.propagate == before
    assert not any(isinstance(handler, tracing.SdkWarnings) for handler in logger.handlers)


def test_an_unreachable_collector_is_logged_at_intervals(propagating, lines):
    """One line per interval is written; messages below a warning are not."""
    inner = logging.getLogger("opentelemetry.exporter")
    with limited_warnings():
        for number in range(50):
            inner.error("failed to export batch %d", number)
            inner.info("nothing")
    (line,) = lines
    assert (line["event"], line["log_level"]) == ("spans may be lost", "warning")
    assert line["reason"] == "failed to export batch 0"


async def test_a_wrong_header_loses_no_spans(client, made, propagating, lines):
    """The library warns of a client's trace state that is not valid; the log reports no loss."""
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "no pair"}
    with limited_warnings():
        assert 200 == (await client.post("/classify", json=BODY, headers=headers)).status_code
    assert 1 == len([span for span in made.get_finished_spans() if span.kind.name == "SERVER"])
    assert "warning about tracing" in [line["event"] for line in lines]
    assert "spans may be lost" not in [line["event"] for line in lines]


def test_importing_the_app_loads_no_sdk():
    """Without OTEL variables, no SDK is imported."""
    script = (
        "import sys, service.api.app; print(*(m for m in sys.modules if 'opentelemetry.sdk' in m))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
