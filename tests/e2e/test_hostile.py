"""A thousand bodies that mean no good, sent to a real server, which others go on using."""

import base64
import gzip
import http.client
import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from benchmarks.lib.processes import resident_mb
from service.keys import make_key
from tests import hostile, samples
from tests.e2e.conftest import Reply, Server, children, serving, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CLIENTS = 4
GOOD = {"inputs": samples.text(12, seed=5), "encoding_format": "base64"}
SCHEMAS = {
    "/classify": "ClassifyRequest",
    "/ner": "NerRequest",
    "/qa": "QaRequest",
    "/embed": "EmbedRequest",
}
INFLATE = {"gzip": gzip.decompress, "deflate": zlib.decompress, "identity": bytes}


def ask(port: int, cases: Sequence[hostile.Case]) -> list[Reply]:
    """The answers, over one connection for as long as the server keeps it."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        return [answer(connection, case) for case in cases]


def answer(connection: http.client.HTTPConnection, case: hostile.Case) -> Reply:
    headers = {name: value.encode("latin-1") for name, value in case.headers.items()}
    connection.request("POST", case.path, case.body, headers)
    told = connection.getresponse()
    return Reply(told.status, dict(told.headers), told.read())


def is_valid(case: hostile.Case, document: dict[str, Any]) -> bool:
    """Whether a body is what the service's own description asks for, by other libraries than its own."""
    encoding = case.headers.get("Content-Encoding", "identity").strip().lower()
    try:
        text = INFLATE[encoding](case.body).decode("utf-8")
        body = json.loads(text, parse_constant=refuse)
        json.dumps(body, ensure_ascii=False).encode()  # has no half characters
        components = {"components": document["components"]}
        schema = {"$ref": f"#/components/schemas/{SCHEMAS[case.path]}", **components}
        jsonschema.validate(body, schema)
    except (ValueError, KeyError, EOFError, OSError, zlib.error, RecursionError):
        return False
    except jsonschema.ValidationError:
        return False
    return True


def refuse(constant: str) -> float:
    raise ValueError(constant)


def fault(case: hostile.Case, reply: Reply, document: dict[str, Any]) -> str:
    """The fault of a response, or an empty text."""
    if reply.status == 200:
        return "" if is_valid(case, document) else "accepted"
    if not 400 <= reply.status < 500:
        return f"answered {reply.status}"
    return shape(reply)


def shape(reply: Reply) -> str:
    """What is wrong with the form of an error response; empty if nothing is."""
    if reply.headers.get("content-type") != "application/json":
        return "not JSON"
    (error,) = reply.json().values()
    if [*error] != ["code", "message", "param"] or not error["code"] or not error["message"]:
        return f"of another shape: {error}"
    if len(reply.body) > 50_000:
        return f"told in {len(reply.body)} bytes"
    return "" if "x-request-id" in reply.headers else "without its name"


def embedding(reply: Reply) -> np.ndarray[Any, np.dtype[np.float32]]:
    assert reply.status == 200, reply.body
    return np.frombuffer(base64.b64decode(reply.json()["embeddings"][0]), dtype="<f4")


@pytest.mark.promise("A hostile request is refused in the usual shape, and does not affect others.")
def test_a_thousand_hostile_bodies(tiny):
    """Each is refused in the one shape, or answered if there is nothing wrong with it; a good one is always answered.

    None is answered 5xx, none is left without an answer, and nothing is logged as our fault.
    """
    cases = hostile.cases(seed=2026)
    assert len(cases) >= 1000
    document = tiny.get("/openapi.json").json()
    expected = embedding(tiny.post("/embed", GOOD))
    seen = len(tiny.log)
    over = threading.Event()
    differences = []

    def go_on_asking():
        while not over.is_set():
            found = embedding(tiny.post("/embed", GOOD))
            differences.append(float(np.abs(found - expected).max()))
            time.sleep(0.01)

    shares = [cases[client::CLIENTS] for client in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS + 1) as threads:
        asking = threads.submit(go_on_asking)
        try:
            replies = [*threads.map(partial(ask, tiny.port), shares)]
        finally:
            over.set()
        asking.result()

    answered = [*zip(chain(*shares), chain(*replies), strict=True)]
    faults = {
        f"{case.path} {case.name}": f"{told}: {reply.status} {reply.body[:100]!r}"
        for case, reply in answered
        if (told := fault(case, reply, document))
    }
    assert {} == faults
    assert {200, 400, 413, 415, 422, 431} <= {reply.status for _, reply in answered}
    assert len(differences) > 10
    assert max(differences) < 1e-5
    loud = [line for line in tiny.log[seen:] if '"error"' in line or "Traceback" in line]
    assert [] == loud
    assert 200 == tiny.get("/health/ready").status


HEAD = b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


CONNECTIONS = 40
AHEAD_S = 3.0
ALLOWED_MB = 40.0
REFUSED = b"POST /classify HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"
ENDLESS = HEAD + b"Content-Length: 1000000000000\r\n\r\n"


def environment_with_key() -> dict[str, str]:
    return {**os.environ, "QUARTET_API_KEY": make_key()}


@pytest.fixture(scope="module")
def locked(tiny_bundle: Path) -> Iterator[Server]:
    """A server that answers 401 without a key."""
    with serving(tiny_bundle, env=environment_with_key()) as server:
        yield server


@pytest.mark.promise(
    "Requests and bodies sent ahead of answers cannot fill the memory, with a key or without."
)
@pytest.mark.parametrize("ahead", [0, 99], ids=["control", "ahead"])
def test_bodies_sent_ahead_take_little_memory(locked, ahead):
    """Clients without a key push endless bodies: alone, and behind requests that are refused."""
    (http_process,) = children(locked)["http"]
    before = resident_mb(http_process)
    with ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", locked.port)))
            for _ in range(CONNECTIONS)
        ]
        for client in clients:
            client.setblocking(False)
            client.send(REFUSED * ahead + ENDLESS)
        most, end = before, time.monotonic() + AHEAD_S
        while time.monotonic() < end:
            for client in clients:
                with suppress(BlockingIOError):
                    client.send(b"x" * (1 << 20))
            most = max(most, resident_mb(http_process))
        assert 200 == locked.get("/health/live").status
    assert most - before < ALLOWED_MB
    until(lambda: locked.get("/health/ready").status == 200)


def send_chunks(port: int, size: int, stop: threading.Event) -> None:
    """Send an endless body in chunks of a size, on one connection after the other."""
    chunk = b"%x\r\n%s\r\n" % (size, b" " * size)
    data = chunk * max(1, 65_536 // len(chunk))
    head = b"POST /classify HTTP/1.1\r\nHost: quartet\r\nContent-Type: application/json\r\n"
    while not stop.is_set():
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
            while not stop.is_set():
                client.sendall(data)


def slowest_half(server: Server, size: int, connections: int) -> float:
    """Return the median seconds of a small request next to clients that send chunks of a size."""
    stop = threading.Event()
    with ThreadPoolExecutor(connections) as pool:
        senders = [pool.submit(send_chunks, server.port, size, stop) for _ in range(connections)]
        try:
            time.sleep(1)
            lasted = []
            for _ in range(20):
                began = time.monotonic()
                assert 200 == server.get("/health/live").status
                lasted.append(time.monotonic() - began)
        finally:
            stop.set()
    for sender in senders:
        sender.result()
    return float(np.median(lasted))


@pytest.mark.promise("A client that sends its body in small chunks slows down itself, not others.")
def test_small_chunks_slow_down_their_sender(tiny_bundle):
    """Next to one-byte chunks, others wait about as long as next to large chunks; it had been seconds."""
    with serving(tiny_bundle, "--body-timeout-s", 5) as server:
        control, small = (slowest_half(server, size, 20) for size in (16_384, 1))
    assert small < 0.2 + 2 * control


FLOOD = 1500
LINES_PER_S = 10


@pytest.mark.promise("Refused requests cannot fill the log.")
def test_a_flood_of_refusals_has_few_log_lines(tiny_bundle):
    """Of thousands of requests without a key, the log has ten lines a second, which count the others."""
    with serving(tiny_bundle, env=environment_with_key()) as server:
        began = time.monotonic()
        with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as client:
            for _ in range(FLOOD):
                client.request("GET", "/" + "%ff" * 680)
                reply = client.getresponse()
                reply.read()
                assert 401 == reply.status
        lasted_s = time.monotonic() - began
        time.sleep(1.1)
        server.get("/nothing")
        until(lambda: len(refused_lines(server)) > 0 and '"/nothing"' in server.log[-1])
        told = refused_lines(server)
    assert len(told) <= LINES_PER_S * (lasted_s + 2)
    assert FLOOD + 1 == len(told) + sum(line["untold"] for line in told)
    assert max(map(len, server.log)) < 2000


def refused_lines(server: Server) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in server.log if '"status":401' in line]
    return [line for line in lines if line["event"] == "request"]


FEW_FILES = ["sh", "-c", 'ulimit -n 330; exec "$@"', "sh"]
SILENT = 500  # connections, more than the process may open files
BEGINNINGS = {"silent": b"", "slow headers": b"GET / HTTP/1.1\r\nX: "}


def status_of(port: int, method: str, path: str) -> int:
    """Return the status of a request on a new connection; 0 if it is not answered."""
    body = json.dumps(GOOD) if method == "POST" else None
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        try:
            connection.request(method, path, body, hostile.JSON)
            return connection.getresponse().status
        except OSError:
            return 0


@pytest.mark.promise(
    "Connections without a request do not keep other clients out, and do not make the service unready."
)
@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("said", BEGINNINGS)
def test_connections_without_a_request_keep_no_client_out(tiny_bundle, protocol, said):
    """Next to more of them than there are places or files: requests, probes and scrapes are answered on new ones."""
    options = []
    if protocol == "grpc":
        pytest.importorskip("grpc")
        options = ["--grpc-port", "0"]
    with (
        serving(
            *(tiny_bundle, "--max-connections", "20", "--metrics-port", "0", *options),
            under=FEW_FILES,
        ) as server,
        ExitStack() as stack,
    ):
        grpc_port = int(server.grpc_address.rpartition(":")[2]) if options else server.port
        for _ in range(SILENT):
            with suppress(OSError):
                client = socket.create_connection(("127.0.0.1", grpc_port), timeout=5)
                stack.enter_context(closing(client)).sendall(BEGINNINGS[said])
        for _ in range(5):
            assert 200 == status_of(server.port, "POST", "/embed")
            for port in (server.port, server.metrics_port):
                assert 200 == status_of(port, "GET", "/health/live")
                assert 200 == status_of(port, "GET", "/health/ready")
            assert 200 == status_of(server.metrics_port, "GET", "/metrics")


@pytest.mark.promise("A service that refuses new connections is not ready.")
def test_a_service_without_places_is_not_ready(tiny_bundle):
    """While requests use all connections, a new client gets 503, and so does a readiness probe."""
    with (
        serving(tiny_bundle, "--max-connections", "5", "--metrics-port", "0") as server,
        ExitStack() as stack,
    ):
        assert 200 == status_of(server.metrics_port, "GET", "/health/ready")
        for _ in range(5):
            client = socket.create_connection(("127.0.0.1", server.port))
            stack.enter_context(closing(client)).sendall(HEAD + b"Content-Length: 9\r\n\r\n{")
        until(lambda: status_of(server.metrics_port, "GET", "/health/ready") == 503)
        assert 503 == status_of(server.port, "POST", "/embed")
        assert 503 == status_of(server.port, "GET", "/health/ready")
        assert 200 == status_of(server.port, "GET", "/health/live")
        stack.close()
        until(lambda: status_of(server.metrics_port, "GET", "/health/ready") == 200)
        assert 200 == status_of(server.port, "POST", "/embed")


PAGE = b"GET /openapi.json HTTP/1.1\r\nHost: quartet\r\n\r\n"
READERS = 600
READERS_AT_ONCE = 100  # responses of the last second come on top of the limit
UNREAD_MB = 160.0  # `UNREAD_BYTES`, what the connections themselves take, and pages that are younger than a second


@pytest.mark.promise("Responses that clients do not read cannot fill the memory.")
def test_unread_responses_take_little_memory(tiny_bundle):
    """Of clients that read nothing, some are closed at once; one that reads has its page."""
    with serving(tiny_bundle) as server, ExitStack() as stack:
        page = server.get("/openapi.json").body
        (http_process,) = children(server)["http"]
        before = resident_mb(http_process)
        clients = []
        for number in range(READERS):
            if number % READERS_AT_ONCE == 0:
                time.sleep(1.2)
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            client.sendall(PAGE * 4)
            clients.append(client)
        dropped = "clients do not read their responses"
        until(lambda: any(dropped in line for line in server.log))
        time.sleep(2)
        assert page == server.get("/openapi.json").body
        assert resident_mb(http_process) - before < UNREAD_MB
