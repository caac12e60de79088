"""Spans as a collector gets them: a real service, and a collector that reads what is posted to it."""

import gzip
import json
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from tests.e2e.conftest import serving, until
from tests.http_thread import QuietHandler, serving_in_thread

service_pb2 = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
    reason="the otel extra is not installed",
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TEXT = "a confidential text"
STAGES = ["parse", "encode", "queue", "inference", "return", "decode", "serialise"]
SERVER = 2  # the kind of a span


class Collector(ThreadingHTTPServer):
    """Takes spans by OTLP over HTTP; `delay_s`: before it answers."""

    delay_s = 0.0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Taking)
        self.paths: set[str] = set()
        self.bodies: list[bytes] = []
        self.spans: list[Any] = []
        self.services: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def take(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        self.bodies.append(body)
        for resource in service_pb2.ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services.add(facts(resource.resource)["service.name"])
            for scope in resource.scope_spans:
                self.spans += scope.spans


class Taking(QuietHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.read_body()
        if self.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        self.server.take(self.path, body)
        time.sleep(self.server.delay_s)
        self.reply(b"")


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    with serving_in_thread(collector):
        yield collector


def facts(described: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value"))
        for pair in described.attributes
    }


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collector_gets_the_spans_of_a_request(tiny_bundle, collector, monkeypatch, workers):
    """From one process or several: the request under its client's span, its stages under it, and no text."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with serving(tiny_bundle, "--http-workers", str(workers)) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "abc"}
        body = {"inputs": [TEXT, TEXT]}
        assert 200 == server.post("/embed?q=secret", body, headers).status
        server.get("/health/ready")
        until(lambda: len(collector.spans) == 1 + len(STAGES))
    assert collector.paths == {"/v1/traces"}
    assert collector.services == {"quartet"}
    (request,) = [span for span in collector.spans if span.kind == SERVER]
    inner = [span for span in collector.spans if span.kind != SERVER]
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    assert [span.name for span in sorted(inner, key=lambda span: span.start_time_unix_nano)] == (
        STAGES
    )
    assert {(span.trace_id, span.parent_span_id) for span in inner} == {
        (request.trace_id, request.span_id)
    }
    told = facts(request)
    assert (told["http.route"], told["http.response.status_code"]) == ("/embed", 200)
    assert (told["quartet.task"], told["quartet.inputs"]) == ("embedding", 2)
    assert told["quartet.batch.size"] >= 1
    assert told["quartet.tokens"] > 2
    assert not any(
        text in body for text in (b"confidential", b"secret") for body in collector.bodies
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_the_last_spans_are_delivered_at_the_end(tiny_bundle, collector, monkeypatch, workers):
    """What was answered just before SIGTERM is not lost, though a batch would have waited for a minute."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    with serving(tiny_bundle, "--http-workers", str(workers)) as server:
        server.answer("/embed", {"inputs": TEXT})
    assert [span.name for span in collector.spans if span.kind == SERVER] == ["POST /embed"]


@pytest.mark.parametrize("collects", ["nobody", "a sloth"])
def test_an_unreachable_or_slow_collector_delays_no_request(
    tiny_bundle, collector, monkeypatch, collects
):
    """Requests are answered as ever, the log says it once, and the end does not wait."""
    collector.delay_s = 300.0
    url = collector.url if collects == "a sloth" else "http://127.0.0.1:9"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    with serving(tiny_bundle) as server:
        for _ in range(50):
            server.answer("/embed", {"inputs": TEXT})
        until(lambda: any("spans may be lost" in line for line in server.log))
        server.answer("/embed", {"inputs": TEXT})
        server.process.terminate()
        server.process.wait(60)
    told = [json.loads(line) for line in server.log if "opentelemetry" in line or "spans" in line]
    assert 1 == len([line for line in told if line["event"] == "spans may be lost"])
    collector.delay_s = 0.0
