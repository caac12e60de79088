import asyncio
import gc
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Scope

from service.errors import Overloaded, RequestTimeout
from service.keys import Key
from service.middleware.refusals import refusal_response
from service.middleware.request_context import RequestContext
from service.middleware.request_lifecycle import (
    CLIENT_GONE,
    PATH_CHARACTERS,
    LifecycleMiddleware,
    RequestLifecycle,
)
from service.observability.metrics import Metrics
from service.shutdown import Stage

BODY = {"inputs": "a text"}


@pytest.mark.parametrize(
    "given",
    [
        "a",
        "order-66_v1.2",
        "x" * 128,
        "0A000001:C5B2_0A000002:1F40_67891233_01AF:7D1B",  # HAProxy's
        "Root=1-67891233-abcdef012345678912345678",  # AWS's
        "Self=1-67891234-12456789abcdef012345678;Root=1-67891233-abcdef012345678912345678",
        'a b "c" {d} \\e',
    ],
)
async def test_a_sane_request_id_is_kept(client, given):
    """The client's own name for a request is answered and passed to the engine."""
    response = await client.get("/health/live", headers={"X-Request-Id": given})
    assert response.headers["X-Request-Id"] == given


@pytest.mark.parametrize(
    "given",
    ["", "x" * 129, "a\tb", "a\x1b[0m", "a\x7f", "a\r\nb: c", " a", "é".encode().decode("latin-1")],
)
async def test_other_request_ids_are_replaced(client, given):
    """What could break a log or a header is not repeated."""
    header = {b"X-Request-Id": given.encode("latin-1")}
    response = await client.get("/health/live", headers=header)
    assert len(response.headers["X-Request-Id"]) == 32


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("traceparent", "trace"),
    [
        (f"00-{TRACE}-{SPAN}-01", TRACE),
        (f"00-{TRACE}-{SPAN}-00", TRACE),
        (f"01-{TRACE}-{SPAN}-01-and-more", TRACE),
        ("", None),
        ("a trace", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"00-{TRACE}-{SPAN}", None),
        (f"01-{TRACE}-{SPAN}-01more", None),
    ],
)
async def test_a_trace_is_named_in_the_log(client, lines, traceparent, trace):
    """The log line has the trace next to the request's id, if the header is valid."""
    headers = {"traceparent": traceparent, "X-Request-Id": "abc"}
    await client.post("/classify", json=BODY, headers=headers)
    assert (lines[-1]["request_id"], lines[-1].get("trace_id")) == ("abc", trace)


async def test_an_unexpected_error_is_in_the_log_only(client, engine, lines):
    """The client gets a code and an id, the log the traceback under the same id."""
    engine.error = RuntimeError("secret")
    response = await client.post("/classify", json=BODY, headers={"X-Request-Id": "abc"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (500, "internal", None)
    assert "secret" not in response.text
    logged = next(line for line in lines if line["event"] == "unexpected error")
    assert (logged["request_id"], logged["exc_info"]) == ("abc", True)


async def test_head_is_get_without_the_body(client):
    """A HEAD request has the headers of GET, its length included. A browser takes the content type at its word."""
    get, head = await client.get("/models"), await client.head("/models")
    assert get.headers["X-Content-Type-Options"] == "nosniff"
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["Content-Length"] == get.headers["Content-Length"]


async def test_a_draining_server_closes_connections(client, app):
    """From the signal on, the answer sends the client's next request elsewhere."""
    app.state.service.shutdown.advance(Stage.DRAINING)
    response = await client.post("/classify", json=BODY)
    assert (response.status_code, response.headers["Connection"]) == (200, "close")


async def test_a_request_is_one_line_without_its_texts(client, engine, lines):
    """The line has the key, the route and the duration, but not the text.

    The client's address is by default from a proxy on the same machine only. The engine gets the id of the request.
    """
    headers = {"X-Request-Id": "abc", "X-Forwarded-For": "203.0.113.7"}
    await client.post("/classify?q=secret", json={"inputs": ["secret", "b"]}, headers=headers)
    assert engine.ticket.request_id == "abc"
    (line,) = (line for line in lines if line["event"] == "request")
    assert line.pop("ms") > 0
    assert line == {
        "request_id": "abc",
        "event": "request",
        "log_level": "info",
        "method": "POST",
        "path": "/classify",
        "status": 200,
        "client": "203.0.113.7",
        "tenant": "",
        "model": "tiny@1",
        "inputs": 2,
        "tokens": 7,
        "code": "",
    }


@pytest.mark.parametrize(
    ("path", "logged"),
    [
        ("/%0Aforged", "/%0Aforged"),
        ("/" + "%ff" * 2000, ("/" + "%EF%BF%BD" * 100)[:PATH_CHARACTERS] + "..."),
        ("/" + "x" * (PATH_CHARACTERS - 1), "/" + "x" * (PATH_CHARACTERS - 1)),
    ],
    ids=["line break", "too long", "nearly too long"],
)
async def test_paths_in_the_log(client, lines, path, logged):
    """A path is logged as it stands in a URL. It may have 8 KiB, and each of its bytes three characters in the log."""
    await client.get(path)
    assert lines[-1]["path"] == logged


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/classify", 401), ("GET", "/nothing", 401), ("GET", "/static/nothing", 404)],
)
async def test_requests_that_cost_a_client_nothing_have_few_lines(
    client_with, lines, method, path, status
):
    """Ten lines in a second, of which a later one counts the others. All are in the metrics."""
    async with client_with(keys={"a": Key(sha256="1" * 64)}) as client:
        began = time.monotonic()
        for _ in range(40):
            assert status == (await client.request(method, path)).status_code
    told = [line for line in lines if line["event"] == "request"]
    periods = int(time.monotonic() - began) + 2  # of a second, in which the requests may have been
    assert 10 <= len(told) <= 10 * periods
    assert {status} == {line["status"] for line in told}
    assert all("untold" in line for line in told)


async def test_refusals_of_keys_are_held_back(client_with):
    """Beyond 200 per second, clients without a key wait, and do not make others wait."""
    async with client_with(keys={"a": Key(sha256="1" * 64)}) as client:
        began = time.monotonic()
        replies = await asyncio.gather(*(client.post("/classify") for _ in range(400)))
        assert time.monotonic() - began > 0.4
        assert {401} == {reply.status_code for reply in replies}
        lasted = []
        for _ in range(3):  # one of them meets no stall of the machine
            began = time.monotonic()
            assert 200 == (await client.get("/health/live")).status_code
            lasted.append(time.monotonic() - began)
        assert min(lasted) < 0.4


async def test_requests_with_work_each_have_a_line(client, lines):
    """Also those whose body is wrong."""
    for body in [BODY, {"inputs": 1}] * 15:
        await client.post("/classify", json=body)
    assert [200, 422] * 15 == [line["status"] for line in lines if line["event"] == "request"]


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/metrics"])
async def test_probes_are_quiet(client, lines, path):
    """Routes that are polled every few seconds are logged at the level debug only."""
    await client.get(path)
    assert lines[-1]["log_level"] == "debug"


async def test_a_client_that_left_is_answered_nothing(client, engine, app, lines):
    """A disconnect cancels the engine's work and sends nothing."""
    engine.hold = asyncio.Event()
    body = iter([{"type": "http.request", "body": b'{"inputs": "a"}'}])

    async def receive():
        if message := next(body, None):
            return message
        await engine.reached.wait()
        return {"type": "http.disconnect"}

    sent = []

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/classify",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
    assert (engine.cancelled.is_set(), sent) == (True, [])
    assert lines[-1]["status"] == CLIENT_GONE


def lifecycle(draining: bool = False, **options: Any) -> RequestLifecycle:
    service = SimpleNamespace(draining=draining)
    return RequestLifecycle(metrics=Metrics(), service=service, **options)


async def respond(inner: ASGIApp, draining: bool = False) -> list[Message]:
    """The messages of one request to an application behind the middleware."""

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    await LifecycleMiddleware(inner, lifecycle=lifecycle(draining))(scope, receive, send)
    return sent


async def test_half_an_answer_is_not_mended(lines):
    """An error after the first byte is raised, so that the server cuts the connection."""

    async def inner(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("torn")

    with pytest.raises(RuntimeError, match="torn"):
        await respond(inner)
    assert lines[0]["event"] == "unexpected error"


def test_the_first_of_several_headers_of_one_name_counts():
    """As the framework has it."""
    pairs = [(b"x-priority", b"bulk"), (b"x-request-id", b"a"), (b"x-priority", b"interactive")]
    scope = {"type": "http", "method": "POST", "path": "/embed", "headers": pairs}
    context = lifecycle().receive(scope)
    assert context.headers == {"x-priority": "bulk", "x-request-id": "a"}
    assert context.request_id == "a"


async def test_a_connection_is_closed_by_one_header():
    """The server drains, and the refusal closes the connection too: both are one header."""

    async def asking(scope, receive, send):
        await refusal_response(scope, RequestTimeout("slow"))(scope, receive, send)

    sent = await respond(asking, draining=True)
    names = [name for name, _ in sent[0]["headers"]]
    assert names.count(b"connection") == 1
    assert b"x-request-id" in names


def test_a_refusal_leaves_no_garbage():
    """Nothing that only the collector could free: in a flood it would have to all the time."""

    def refuse(scope: Scope, context: RequestContext) -> None:
        raise Overloaded("too much", retry_after_s=1.0)

    refusing = lifecycle(checks=[refuse])
    scope = {"type": "http", "method": "POST", "path": "/embed", "headers": []}
    gc.disable()
    try:
        context = refusing.receive(scope)
        assert isinstance(context.refusal, Overloaded)
        refusal = weakref.ref(context.refusal)
        del context
        assert refusal() is None
    finally:
        gc.enable()
