"""Connections over real sockets, on the loop that serves: what they may send, hold back and leave unread."""

import asyncio
import json
import re
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from service.api.app import create_app
from service.middleware.request_lifecycle import RequestLifecycle
from service.observability.metrics import Metrics
from service.scheduling.load import Backlog, Flow, Load, RemainingWork
from service.server import connection as connection_module
from service.server import connection_table as connection_table_module
from service.server import flow_control, unread_responses
from service.server.connection import Connection, State
from service.server.connection_limits import FEW
from service.server.connection_table import ConnectionTable
from service.server.flow_control import PIECE, piece_size
from service.server.server import connection_table, connections
from service.server.unread_responses import UnreadResponses
from service.settings import Settings
from tests.service.fakes import FakeEngines, until

BODY = b'{"inputs": "a"}'
HEAD = b"POST /classify HTTP/1.1\r\nHost: quartet\r\nContent-Type: application/json\r\n"
GET = b"GET /health/live HTTP/1.1\r\nHost: quartet\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def post(body: bytes = BODY, more: bytes = b"") -> bytes:
    return HEAD + more + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """Of an error, which has the one shape."""
        (error,) = json.loads(self.body).values()
        assert [*error] == ["code", "message", "param"]
        return error["code"]

    @property
    def closes(self) -> bool:
        return self.headers.get("connection") == "close"


class Client:
    """A connection, and the bytes received on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)

    async def answer(self) -> Answer:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        headers = {k.lower(): v for k, v in re.findall(r"(\S+): (.*)\r\n", head)}
        body = await self.reader.readexactly(int(headers["content-length"]))
        return Answer(int(head.split()[1]), headers, body)

    async def ask(self, *parts: bytes) -> Answer:
        self.send(*parts)
        return await self.answer()

    async def ended(self) -> bool:
        """Once the server has closed: whether it had said all."""
        return await self.reader.read() == b""


@dataclass
class Listening:
    """A server's connections, and how to make one more."""

    port: int
    state: ServerState

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Client(reader, writer)
        finally:
            writer.transport.abort()


Listen = Callable[..., AbstractAsyncContextManager[Listening]]


def bare() -> RequestLifecycle:
    """One for applications that are not ours."""
    return RequestLifecycle(metrics=Metrics(), service=SimpleNamespace(draining=False))


@asynccontextmanager
async def listening(
    app: ASGIApp,
    settings: Settings,
    idle_s: float = 75,
    lifecycle: RequestLifecycle | None = None,
    table: ConnectionTable | None = None,
) -> AsyncIterator[Listening]:
    config = uvicorn.Config(
        app,
        http=connections(settings, lifecycle or bare(), table or connection_table(settings)),
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_keep_alive=idle_s,
    )
    config.load()
    state = ServerState()

    def connect() -> asyncio.Protocol:
        return config.http_protocol_class(config=config, server_state=state, app_state={})

    server = await asyncio.get_running_loop().create_server(connect, "127.0.0.1", 0)
    try:
        yield Listening(server.sockets[0].getsockname()[1], state)
    finally:
        server.close()
        for task in state.tasks:
            task.cancel()
        await until(lambda: not state.connections)


@pytest.fixture
def listen(engines: FakeEngines) -> Listen:
    """A server of the whole application, over sockets."""

    @asynccontextmanager
    async def start(idle_s: float = 75, **settings: object) -> AsyncIterator[Listening]:
        app = create_app(Settings(**settings), engines.open, Metrics())
        table = connection_table(Settings(**settings))
        app.state.service.is_full = table.is_full
        async with (
            app.router.lifespan_context(app),
            listening(app, Settings(**settings), idle_s, app.state.lifecycle, table) as server,
        ):
            yield server

    return start


@pytest.fixture
async def client(listen: Listen) -> AsyncIterator[Client]:
    """A client of the whole application with the default settings."""
    async with listen() as server, server.client() as client:
        yield client


async def test_requests_follow_each_other(client):
    """A connection is kept for the next request."""
    for _ in range(3):
        answer = await client.ask(post())
        assert (200, False) == (answer.status, answer.closes)


OLD = [b"", b"Connection: keep-alive\r\n", b"Expect: 100-continue\r\n"]


@pytest.mark.parametrize("more", OLD)
async def test_lines_for_an_old_client(client, more):
    """To HTTP/1.0, a stream of lines is sent without chunk sizes, and ends with its connection."""
    body = b'{"inputs": ["a", "b", "c"]}'
    head = b"POST /classify HTTP/1.0\r\nContent-Type: application/json\r\nAccept: application/x-ndjson\r\n"
    client.send(b"%s%sContent-Length: %d\r\n\r\n%s" % (head, more, len(body), body))
    head, _, lines = (await client.reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert 4 == len([json.loads(line) for line in lines.splitlines()])


@pytest.mark.parametrize("more", OLD)
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/health/live", 200), ("HEAD", "/health/live", 200), ("GET", "/nothing", 404)],
)
async def test_an_old_client_is_answered(client, method, path, status, more):
    """An answer of known length to HTTP/1.0 has that length, and closes the connection."""
    client.send(f"{method} {path} HTTP/1.0\r\n".encode() + more + b"\r\n")
    head, _, body = (await client.reader.read()).partition(b"\r\n\r\n")
    assert status == int(head.split()[1])
    length = int(re.search(rb"content-length: (\d+)", head.lower())[1])
    assert (0 if method == "HEAD" else length) == len(body)
    assert b"connection: close" in head.lower()


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_an_answer_of_unknown_length_for_an_old_client(method):
    """Whatever application answers: parts come as they are, also empty ones."""

    async def parts():
        for part in (b"a", b"", b"bc"):
            yield part

    app = StreamingResponse(parts())
    async with listening(app, Settings()) as server, server.client() as client:
        client.send(method + b" / HTTP/1.0\r\n\r\n")
        head, _, body = (await client.reader.read()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert (b"" if method == b"HEAD" else b"abc") == body


async def test_a_head_may_come_in_pieces(client):
    """One byte at a time is as good as all at once."""
    for index in range(len(post())):
        client.send(post()[index : index + 1])
        await asyncio.sleep(0)
    assert 200 == (await client.answer()).status


async def test_an_answer_leaves_before_it_is_recorded(engines):
    """A response does not wait for the log and the metrics."""
    metrics, heard = Metrics(), []
    app = create_app(Settings(), engines.open, metrics)
    async with (
        app.router.lifespan_context(app),
        listening(app, Settings(), lifecycle=app.state.lifecycle) as server,
    ):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.setblocking(False)
            metrics.observe_request = lambda *_: heard.append(client.recv(1000))
            client.send(post())
            await until(lambda: bool(heard))
    assert heard[0].startswith(b"HTTP/1.1 200 OK")


async def test_an_answer_is_one_piece(listen, monkeypatch):
    """Its head is sent with its body, or alone where it has none: a client is woken once."""
    pieces = []
    made = Connection.connection_made

    class Wire:
        def __init__(self, wire: Any) -> None:
            self.wire = wire

        def __getattr__(self, name: str) -> Any:
            return getattr(self.wire, name)

        def write(self, data: bytes) -> None:
            pieces.append(data)
            self.wire.write(data)

    def spied(self, transport):
        made(self, Wire(transport))

    monkeypatch.setattr(Connection, "connection_made", spied)
    async with listen() as server, server.client() as client:
        for request in (post(), post()):
            assert 200 == (await client.ask(request)).status
        client.send(b"HEAD /health/live HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert (await client.reader.read()).startswith(b"HTTP/1.1 200")
    assert 3 == len(pieces)


LARGE_HEADS = {
    "header": HEAD + b"X: %s\r\n\r\n" % (b"a" * 70_000),
    "endless header": HEAD + b"X: " + b"a" * 400_000,
    "path": b"GET /%s HTTP/1.1\r\n\r\n" % (b"%ff" * 700),
    "query": b"GET /?%s HTTP/1.1\r\n\r\n" % (b"a" * 8192),
    "endless path": b"GET /" + b"a" * 400_000,
    "many headers": HEAD + b"".join(b"X%d: a\r\n" % n for n in range(200)) + b"\r\n",
    "behind the body": CHUNKED + b"1\r\n[\r\n0\r\n" + b"X: a\r\n" * 20_000,
    "endless behind the body": CHUNKED + b"1\r\n[\r\n0\r\nX: " + b"a" * 1_000_000,
    "endless extension": CHUNKED + b"1;" + b"a" * 1_000_000,
}
NOT_HTTP = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00",
    "words": b"hello\r\n\r\n",
    "no address": b"GET http://[ HTTP/1.1\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no number": HEAD + b"Content-Length: many\r\n\r\n{}",
    "negative length": HEAD + b"Content-Length: -1\r\n\r\n{}",
    "length with a sign": HEAD + b"Content-Length: +2\r\n\r\n{}",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
    "a list of lengths": HEAD + b"Content-Length: 2, 2\r\n\r\n{}",
    "more than can be counted": HEAD + b"Content-Length: %s\r\n\r\n{}" % (b"9" * 40),
    "length and chunks": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "unknown transfer": HEAD + b"Transfer-Encoding: rot13\r\n\r\n{}",
    "chunk of no length": CHUNKED + b"\r\n{}\r\n0\r\n\r\n",
    "chunk of words": CHUNKED + b"two\r\n{}\r\n0\r\n\r\n",
    "longer chunk": CHUNKED + b"2\r\n{}{}\r\n0\r\n\r\n",
    "endless chunk": CHUNKED + b"fffffffffffffffff\r\n{}",
}
REFUSED = {
    **{name: (431, "headers_too_large", head) for name, head in LARGE_HEADS.items()},
    **{name: (400, "bad_request", data) for name, data in NOT_HTTP.items()},
}


@pytest.mark.parametrize(("status", "code", "data"), REFUSED.values(), ids=REFUSED)
async def test_what_is_not_http_is_refused(client, lines, engine, status, code, data):
    """Invalid data and too large heads get an error of the one shape at once, are logged, and end the connection."""
    answer = await client.ask(data)
    assert (status, code, True) == (answer.status, answer.code, answer.closes)
    assert await client.ended()
    assert (status, code) == (lines[-1]["status"], lines[-1]["code"])
    assert answer.headers["x-request-id"] == lines[-1]["request_id"]
    assert engine.asked is None


async def test_a_head_of_nearly_the_limit_is_read(client):
    """What is allowed is answered, in pieces and behind a body, too."""
    large = post(more=b"X: %s\r\n" % (b"a" * 65_000))
    for _ in range(3):
        client.send(large[:200])
        await asyncio.sleep(0.01)
        client.send(large[200:40_000])
        await asyncio.sleep(0.01)
        assert 200 == (await client.ask(large[40_000:])).status
    answer = await client.ask(b"GET /health/live?%s HTTP/1.1\r\n\r\n" % (b"%ff" * 2700))
    assert 200 == answer.status


async def test_what_stands_behind_a_body_is_read_past(client):
    """A chunked body may have trailers, which are ignored."""
    behind = b"".join(b"X%d: a\r\n" % n for n in range(2 * connection_module.HEADERS))
    for _ in range(2):
        answer = await client.ask(CHUNKED + b"f\r\n%s\r\n0\r\n%s\r\n" % (BODY, behind))
        assert 200 == answer.status


async def drip(client: Client, piece: bytes) -> None:
    """Send a piece every hundredth of a second."""
    while piece:
        client.send(piece)
        await asyncio.sleep(0.01)


async def test_a_slow_head_is_given_up(listen):
    """A client that sends headers too slowly, at any steady rate, gets 408 and is disconnected."""
    async with listen(header_timeout_s=0.2) as server, server.client() as client:
        client.send(b"GET / HTTP/1.1\r\nX: ")
        dripping = asyncio.create_task(drip(client, b"a"))
        answer = await client.answer()
        assert (408, "slow_headers", True) == (answer.status, answer.code, answer.closes)
        assert await client.ended()
        dripping.cancel()


@pytest.mark.parametrize("said", [b"", b"\r\n"], ids=["nothing", "blank-lines"])
async def test_a_silent_connection_is_closed(listen, said):
    """A client that connects and sends nothing is disconnected without a response."""
    async with listen(idle_s=0.2) as server, server.client() as client:
        dripping = asyncio.create_task(drip(client, said))
        with suppress(ConnectionResetError):  # of a line that was on its way when it was closed
            assert await client.ended()
        dripping.cancel()


@pytest.mark.parametrize("drains", [False, True])
async def test_a_request_that_comes_as_its_connection_closes_is_answered(listen, drains):
    """Idle connections are closed by a timer or a drain, but not with a request that is not read yet."""
    async with listen(idle_s=0.05) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, GET)
            assert (await loop.sock_recv(client, 4096)).startswith(b"HTTP/1.1 200 ")
            if drains:
                client.send(GET)
                (connection,) = server.state.connections
                connection.shutdown()  # before the event loop reads
            else:
                loop.call_later(0.01, client.send, GET)
                time.sleep(
                    0.1
                )  # both timers are due, and the event loop calls them one after the other
            assert (await loop.sock_recv(client, 4096)).startswith(b"HTTP/1.1 200 ")


async def test_data_that_begins_no_request_does_not_keep_a_connection(listen, monkeypatch):
    """A line break that comes as the connection is closed puts that off for a moment only."""
    monkeypatch.setattr(connection_module, "ARRIVAL_S", 0.05)
    async with listen(idle_s=0.5) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.setblocking(False)
            await until(lambda: bool(server.state.connections))
            client.send(b"\r\n")
            time.sleep(0.6)
            async with asyncio.timeout(10):
                assert b"" == await asyncio.get_running_loop().sock_recv(client, 4096)


async def test_a_busy_connection_is_not_silent(listen, engine):
    """Neither one that waits for its answer nor one whose next request is on its way is closed."""
    engine.hold = asyncio.Event()
    async with listen(idle_s=0.1) as server, server.client() as client:
        client.send(post(), GET[:20])
        await asyncio.sleep(0.3)
        engine.hold.set()
        assert 200 == (await client.answer()).status
        await asyncio.sleep(0.3)
        assert 200 == (await client.ask(GET[20:])).status


@pytest.mark.parametrize("wrong", [b"and then nonsense\r\n\r\n", CHUNKED + b"not a length\r\n"])
async def test_a_refusal_waits_its_turn(client, engine, wrong):
    """What came whole before it is answered first."""
    engine.hold = asyncio.Event()
    client.send(post(), post(), wrong)
    await engine.reached.wait()
    engine.hold.set()
    assert [200, 200, 400] == [(await client.answer()).status for _ in range(3)]
    assert await client.ended()


@pytest.mark.parametrize(
    "body",
    [
        b"Content-Length: 15\r\n\r\n" + BODY,
        b"Transfer-Encoding: chunked\r\n\r\nf\r\n%s\r\n0\r\n\r\n" % BODY,
    ],
    ids=["length", "chunks"],
)
@pytest.mark.parametrize("pause_s", [0, 0.02], ids=["at-once", "head-first"])
async def test_another_protocol_is_not_taken_up(client, body, pause_s):
    """A request that offers HTTP/2 on the way, as Java's client does, is answered in HTTP/1.1, body and all."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    framing, _, rest = body.partition(b"\r\n\r\n")
    for _ in range(2):
        client.send(HEAD + offer + framing + b"\r\n\r\n")
        await asyncio.sleep(pause_s)
        assert 200 == (await client.ask(rest)).status
    websocket = GET.replace(b"Host", b"Connection: Upgrade\r\nUpgrade: websocket\r\nHost")
    assert 200 == (await client.ask(websocket)).status


@pytest.mark.parametrize("body", [BODY, b""], ids=["body", "none"])
async def test_what_comes_behind_an_offer_is_answered(client, body):
    """In the same piece, be it another offer or not."""
    offer = post(body, b"Connection: Upgrade\r\nUpgrade: h2c\r\n")
    status = 200 if body else 400
    client.send(offer + GET + offer + offer + post() + b"and then nonsense\r\n\r\n")
    answers = [await client.answer() for _ in range(6)]
    assert [status, 200, status, status, 200, 400] == [answer.status for answer in answers]
    assert await client.ended()


async def test_requests_may_be_sent_ahead(client):
    """Some are answered in order, and a flood only as far as the limit, whose last answer says so."""
    client.send(GET * 20)
    assert [200] * 20 == [(await client.answer()).status for _ in range(20)]
    client.send(GET * 5_000)
    answers = [await client.answer()]
    while not answers[-1].closes:
        answers.append(await client.answer())
    assert connection_module.PIPELINED + 1 == len(answers)
    assert await client.ended()


async def test_pipelined_requests_of_a_disconnected_client_are_dropped(listen, engine):
    """The request that is worked on is given up, though another was the last to come."""
    engine.hold = asyncio.Event()
    async with listen() as server, server.client() as client:
        client.send(post() + post())
        await engine.reached.wait()
        client.writer.transport.abort()
        await asyncio.wait_for(engine.cancelled.wait(), 30)
        await until(lambda: not server.state.tasks)


# -- refusals that must reach clients that still send -----------------------------------------------


async def test_a_refused_body_is_read_to_its_end(listen, engine):
    """A client that reads only after sending a large body gets the refusal, and may reuse the connection."""
    async with listen(max_body_bytes=1000) as server, server.client() as client:
        client.send(post(b"x" * 20_000_000))
        await client.writer.drain()
        answer = await client.answer()
        assert (413, "too_large", False) == (answer.status, answer.code, answer.closes)
        assert 200 == (await client.ask(post())).status


async def test_a_refused_body_of_unknown_length_ends_the_connection(listen):
    """The refusal announces the end with `Connection: close`, so that a proxy does not reuse the connection."""
    chunk = b"400\r\n%s\r\n" % (b"x" * 1024)
    async with listen(max_body_bytes=1000) as server, server.client() as client:
        answer = await client.ask(CHUNKED + chunk * 10)
        assert (413, "too_large", True) == (answer.status, answer.code, answer.closes)
        assert await client.ended()


async def test_a_refused_body_does_not_count_as_silence(listen, monkeypatch):
    """Once the last of it has come, the connection may be idle for as long as any."""
    body = post(b"x" * 5000)
    waits = []
    monkeypatch.setattr(Connection, "expect_request", lambda _, seconds: waits.append(seconds))
    async with listen(max_body_bytes=1000) as server, server.client() as client:
        assert 413 == (await client.ask(body[:2000])).status
        assert [75, 75] == waits
        client.send(body[2000:])
        await until(lambda: [75, 75, 75] == waits)


async def test_a_refused_body_without_end_is_not(listen, monkeypatch):
    """The connection is closed if a refused body continues without end."""
    monkeypatch.setattr(connection_module, "LINGER_S", 0.2)
    async with listen(idle_s=0.2, max_body_bytes=1000) as server, server.client() as client:

        async def go_on():
            client.send(CHUNKED)
            while True:
                client.send(b"400\r\n%s\r\n" % (b"x" * 1024))
                await client.writer.drain()
                await asyncio.sleep(0.001)

        with pytest.raises(ConnectionError):
            await go_on()


async def test_a_closing_response_reaches_a_client_that_still_sends(listen):
    """An answer that ends the connection is not taken away from a client that listens only afterwards."""
    async with listen(body_timeout_s=0.05) as server, server.client() as client:
        client.send(HEAD + b"Content-Length: 10000000\r\n\r\n")
        await asyncio.sleep(0.2)
        client.send(b"x" * 10_000_000)
        await client.writer.drain()
        answer = await client.answer()
        assert (408, "slow_body", True) == (answer.status, answer.code, answer.closes)
        assert await client.ended()


# -- responses that the client does not read -----------------------------------------------------------------------

LARGE = b"x" * 50_000_000  # more than the system keeps for a connection


@pytest.fixture
def large() -> ASGIApp:
    """An application whose every answer is large."""
    return Response(LARGE)


async def test_a_broken_body_behind_an_answer(large):
    """A client that sends invalid data in the middle of a body, while it is answered, is disconnected."""
    async with listening(large, Settings()) as server, server.client() as client:
        client.send(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        await until(lambda: server.state.total_requests == 1)
        client.send(b"not a length\r\n")
        _, _, body = (await client.reader.read()).partition(b"\r\n\r\n")
        assert LARGE == body


@pytest.mark.parametrize("end", [False, True], ids=["open", "half-closed"])
@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"], ids=["kept", "closing"])
async def test_an_unread_response_is_dropped(large, monkeypatch, more, end):
    """A client that does not read a large response is disconnected, and the response is dropped."""
    monkeypatch.setattr(flow_control, "STALLED_S", 0.1)
    async with listening(large, Settings()) as server, server.client() as client:
        client.writer.transport.pause_reading()
        client.send(b"GET / HTTP/1.1\r\n%s\r\n" % more)
        await until(lambda: server.state.total_requests == 1)
        if end:
            client.writer.write_eof()
        await until(lambda: not server.state.connections)
        assert 1 == server.state.total_requests


async def test_a_short_unread_response_is_dropped(monkeypatch):
    """Nor is what is too short to make the server wait, when its connection has been idle for long."""
    monkeypatch.setattr(flow_control, "STALLED_S", 0.1)
    socket_full = Response(b"x" * 60_000)
    async with listening(socket_full, Settings(), 0.3) as server, server.client() as client:
        client.writer.transport.pause_reading()
        client.send(b"GET / HTTP/1.1\r\n\r\n" * 99)
        await until(lambda: server.state.total_requests > 10)
        await until(lambda: not server.state.connections)


async def test_a_slow_reader_is_served(large, monkeypatch):
    """A client that reads slowly, but steadily, gets all of it, though the server is to close."""
    monkeypatch.setattr(flow_control, "STALLED_S", 0.2)
    async with listening(large, Settings()) as server, server.client() as client:
        client.send(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        heard = 0
        while chunk := await client.reader.read(500_000):
            heard += len(chunk)
            await asyncio.sleep(0.01)
    assert heard > len(LARGE)


async def test_unread_answers_have_a_limit_together(large, monkeypatch, lines):
    """Clients that read nothing are cut off when there is too much for all, and one that reads is not."""
    limit = 2 * len(LARGE)
    monkeypatch.setattr(UnreadResponses.__init__, "__defaults__", (limit, time.monotonic))
    monkeypatch.setattr(unread_responses, "LOOK_S", 0.2)
    async with listening(large, Settings()) as server, AsyncExitStack() as stack:
        for _ in range(5):
            silent = await stack.enter_async_context(server.client())
            silent.writer.transport.pause_reading()
            silent.send(b"GET / HTTP/1.1\r\n\r\n")
        await until(lambda: server.state.total_requests == 5)
        async with server.client() as reading:
            reading.send(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
            heard = 0
            while chunk := await reading.reader.read(500_000):
                heard += len(chunk)
                await asyncio.sleep(0.005)
        assert heard > len(LARGE)
        await until(lambda: sum(one.unread for one in server.state.connections) <= limit)
        assert 1 <= len(server.state.connections) <= 2
    assert "clients do not read their responses" in [line["event"] for line in lines]


async def test_no_second_answer_is_made_for_a_client_that_reads_none():
    """A request begins when the previous response has been read."""
    begun = []

    async def app(scope, receive, send):
        begun.append(scope["path"])
        await Response(LARGE)(scope, receive, send)

    async with listening(app, Settings()) as server, server.client() as client:
        client.writer.transport.pause_reading()
        client.send(b"GET /first HTTP/1.1\r\n\r\nGET /second HTTP/1.1\r\nConnection: close\r\n\r\n")
        await until(lambda: server.state.total_requests == 1)
        await asyncio.sleep(0.1)
        assert ["/first"] == begun
        client.writer.transport.resume_reading()
        assert len(await client.reader.read()) > 2 * len(LARGE)
    assert ["/first", "/second"] == begun


# -- how many connections there may be ---------------------------------------------------------------


@asynccontextmanager
async def busy_client(server: Listening) -> AsyncIterator[Client]:
    """A client whose request is in progress, since its body is not complete."""

    def busy() -> int:
        return sum(connection.state is State.BODY for connection in server.state.connections)

    before = busy()
    async with server.client() as client:
        client.send(post()[:-1])
        await until(lambda: busy() > before)
        yield client


async def test_a_connection_too_many_is_refused(listen, lines):
    """It gets 503 with `Retry-After`, is logged and closed; other connections stay."""
    async with listen(max_connections=2) as server, busy_client(server) as first:
        async with busy_client(server) as second:
            async with server.client() as third:
                answer = await third.ask(post(b"x" * 5_000_000), GET)
                assert (503, True) == (answer.status, answer.closes)
                assert "too_many_connections" == answer.code == lines[-1]["code"]
                assert int(answer.headers["retry-after"]) >= 1
                assert await third.ended()
            for client in (first, second):
                assert 200 == (await client.ask(post()[-1:])).status
        await until(lambda: len(server.state.connections) == 1)
        async with server.client() as fourth:
            answer = await fourth.ask(post())
            assert (200, False) == (answer.status, answer.closes)


@pytest.mark.parametrize("said", [b"", b"\r\n", GET[:20]], ids=["nothing", "line", "slow-head"])
async def test_connections_without_a_request_make_room(listen, said):
    """A new connection takes the place of the oldest one without a request, and of no busy one."""
    async with listen(max_connections=3) as server, busy_client(server) as busy:
        async with server.client() as first, server.client() as second:
            for silent in (first, second):
                silent.send(said)
                await asyncio.sleep(0.02)
            async with server.client() as new:
                new.send(GET.replace(b"live", b"ready"), post())
                assert [200, 200] == [(await new.answer()).status for _ in range(2)]
                with suppress(ConnectionResetError):
                    assert await first.ended()
                assert not second.reader.at_eof()
        assert 200 == (await busy.ask(post()[-1:])).status


async def test_idle_connections_make_room(listen, monkeypatch):
    """After those without any request comes the one that has been idle for longest, unless all had one just now."""
    async with (
        listen(max_connections=2) as server,
        server.client() as first,
        server.client() as second,
    ):
        for client in (first, second, first):
            assert 200 == (await client.ask(post())).status
        async with server.client() as third:
            assert "too_many_connections" == (await third.ask(post())).code
        monkeypatch.setattr(connection_table_module, "IDLE_S", 0.0)
        async with server.client() as fourth:
            assert 200 == (await fourth.ask(post())).status
            assert await second.ended()
        assert 200 == (await first.ask(post())).status


async def test_a_request_that_has_just_come_is_not_closed_for_another(listen):
    """Although the event loop has not read it when the new connection comes."""
    async with listen(max_connections=1) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.setblocking(False)
            await until(lambda: bool(server.state.connections))
            client.send(GET)
            (connection,) = server.state.connections
            assert not connection.evict()
            assert b"HTTP/1.1 200 " == (await asyncio.get_running_loop().sock_recv(client, 13))


@pytest.mark.parametrize("path", [b"/health/live", b"/health/ready", b"/metrics"])
async def test_a_crowded_service_is_not_a_dead_one(listen, path):
    """Probes and scrapes are answered, however many connections there are.

    The service is not ready while it refuses new connections.
    """
    ready = GET.replace(b"/health/live", b"/health/ready")
    async with listen(max_connections=1) as server:
        async with busy_client(server), server.client() as prober:
            answer = await prober.ask(GET.replace(b"/health/live", path))
            assert (503 if path == b"/health/ready" else 200, True) == (
                answer.status,
                answer.closes,
            )
        await until(lambda: not server.state.connections)
        async with server.client() as prober:
            assert 200 == (await prober.ask(ready)).status


async def test_a_connection_too_many_is_not_waited_for(listen, monkeypatch):
    """It has little time to ask."""
    monkeypatch.setattr(connection_module, "EXCESS_S", 0.1)
    async with (
        listen(max_connections=1) as server,
        busy_client(server),
        server.client() as silent,
        server.client() as dripping,
    ):
        dripping.send(GET[:20])
        async with asyncio.timeout(10):
            assert await silent.ended()
            assert "slow_headers" == (await dripping.answer()).code


async def test_a_flood_leaves_room_for_a_health_check(listen):
    """Connections beyond the limit are few: the oldest of them ends for each that comes, and the newest is answered."""
    async with listen(max_connections=1) as server, busy_client(server), AsyncExitStack() as flood:
        for _ in range(FEW + 20):
            await flood.enter_async_context(server.client())
        await until(lambda: len(server.state.connections) == 1 + FEW)
        async with server.client() as prober:
            assert 200 == (await prober.ask(GET)).status


async def test_an_excess_connection_takes_no_other_place(listen):
    """When there is room again, the next is welcome, though one that was too many is still there."""
    async with listen(max_connections=1) as server:
        async with busy_client(server):
            crowded = await asyncio.open_connection("127.0.0.1", server.port)
            await until(lambda: len(server.state.connections) == 2)
        await until(lambda: len(server.state.connections) == 1)
        async with server.client() as client:
            assert 200 == (await client.ask(post())).status
        crowded[1].transport.abort()


# Refused at a bad time

BUSY = Load(
    rates={"tiny@1": 100.0}, waiting={Flow("tiny@1"): Backlog.of(*[RemainingWork(10, 1)] * 1000)}
)
EMBED = b'{"inputs": "a text"}'


def embed(length: int = len(EMBED), headers: str = "") -> bytes:
    head = f"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {length}\r\n\r\n".encode()


@pytest.fixture
def busy(engines: FakeEngines) -> None:
    """More waits than can be answered in time."""
    engines.told = BUSY


async def test_an_overloaded_service_answers_like_the_application(client, busy, lines):
    """The refusal that never reaches the application says what the application's would, and is recorded."""
    early = await client.ask(embed(headers="X-Request-Id: mine\r\n") + EMBED)
    full = await client.ask(embed(headers="X-Request-Id: mine\r\nOrigin: http://a\r\n") + EMBED)
    client.send(embed(headers="X-Request-Id: mine\r\nConnection: close\r\n") + EMBED)
    assert (await client.answer()).closes
    assert await client.ended()
    assert early.status == full.status == 429
    assert json.loads(early.body)["error"]["code"] == "overloaded"
    assert {*early.headers} == {*full.headers}
    for name in ("retry-after", "x-request-id", "x-content-type-options", "content-type"):
        assert early.headers[name] == full.headers[name]
    told = [line for line in lines if line.get("event") == "request"]
    assert [(line["status"], line["request_id"], line["code"]) for line in told] == [
        (429, "mine", "overloaded")
    ] * 3


async def test_a_refused_body_is_dropped_and_the_connection_stays(client, busy, engines):
    """The rest of a large body is discarded, and the next request on the connection is answered."""
    assert 429 == (await client.ask(embed(3_000_000) + b"a" * 1_000_000)).status
    client.send(b"a" * 2_000_000)
    engines.told = None
    assert 200 == (await client.ask(embed() + EMBED)).status


async def test_requests_sent_ahead_are_refused_in_their_order(client, busy, engines):
    """Ten at once, with a page between them that is never refused."""
    page = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    client.send((embed() + EMBED) * 5 + page + (embed() + EMBED) * 4)
    statuses = [(await client.answer()).status for _ in range(10)]
    assert statuses == [429] * 5 + [200] + [429] * 4


async def test_a_disconnect_during_a_delayed_refusal_leaves_nothing(listen, busy, monkeypatch):
    """Its refusal is not sent, and it is recorded as a disconnect."""
    monkeypatch.setattr("service.middleware.refusal_throttle.REFUSALS_PER_S", 1)
    async with listen() as server:
        for _ in range(3):
            async with server.client() as client:
                client.send(embed() + EMBED)
                await asyncio.sleep(0.05)
        await until(lambda: not server.state.connections)
        async with server.client() as client:
            assert 429 == (await client.ask(embed() + EMBED)).status


def broken(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    "place",
    [
        "middleware.early_rejection.EarlyRejection.__call__",
        "server.connection.Connection.on_message_complete",
        "server.connection.Connection.on_body",
        "middleware.request_lifecycle.new_context",
    ],
)
async def test_our_bug_is_never_a_bad_request(listen, monkeypatch, lines, place):
    """The client gets 500, and the log a traceback; the connection is not left without an answer."""
    monkeypatch.setattr(f"service.{place}", broken)
    async with listen() as server, server.client() as client:
        assert 500 == (await client.ask(embed() + EMBED)).status
    assert "unexpected error" in [line["event"] for line in lines]


@pytest.mark.parametrize(
    "place",
    ["observability.metrics.Metrics.observe_request", "middleware.request_lifecycle.log_request"],
)
@pytest.mark.parametrize("load", [BUSY, None], ids=["refused", "answered"])
async def test_a_request_has_one_answer_though_it_cannot_be_recorded(
    listen, engines, monkeypatch, place, load
):
    """A failure after the answer changes nothing: the connection stays open for the next request."""
    engines.told = load
    status = 200 if load is None else 429
    monkeypatch.setattr(f"service.{place}", broken)
    async with asyncio.timeout(10), listen() as server, server.client() as client:
        for _ in range(3):
            answer = await client.ask(embed() + EMBED)
            assert (status, False) == (answer.status, answer.closes)


async def test_a_flood_of_pipelined_refusals_is_answered(listen, busy, monkeypatch):
    """Every request gets 429, on more connections than there may be held refusals; so does a single request."""
    monkeypatch.setattr(
        "service.middleware.refusal_throttle.RefusalThrottle.__init__.__defaults__", (200, 1.0, 16)
    )
    async with asyncio.timeout(60), listen() as server, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(server.client()) for _ in range(64)]
        for client in clients:
            client.send((embed() + EMBED) * 50)
        async with server.client() as control:
            assert 429 == (await control.ask(embed() + EMBED)).status
        for client in clients:
            assert [429] * 50 == [(await client.answer()).status for _ in range(50)]


@pytest.mark.parametrize(
    ("target", "path"),
    [(b"", "/"), (b"?a=1", "/"), (b"/health/live?a", "/health/live"), (b"/nothing", "/nothing")],
)
async def test_a_url_in_the_request_line_is_answered(listen, lines, target, path):
    """A server must accept the form that clients send to a proxy: RFC 9112, 3.2.2. Its path may be missing."""
    async with listen(log_level="debug") as server, server.client() as client:
        for url in (b"http://quartet" + target, b"HTTPS://quartet:8000" + target):
            answer = await client.ask(b"GET %s HTTP/1.1\r\nHost: quartet\r\n\r\n" % url)
            assert (404 if path == "/nothing" else 200, False) == (answer.status, answer.closes)
    assert {path} == {line["path"] for line in lines if line["event"] == "request"}


@pytest.mark.parametrize(
    "target", [b"http://", b"http:///a", b"http://q:99999/", b"ftp://q", b"ftp://q/a", b"a"]
)
async def test_a_wrong_target_is_named(client, lines, target):
    """The client gets 400 with a message of ours, and the log no traceback."""
    client.send(b"GET %s HTTP/1.1\r\nHost: quartet\r\n\r\n" % target)
    assert (400, "bad_request") == ((answer := await client.answer()).status, answer.code)
    assert b"b'" not in answer.body
    assert "unexpected error" not in [line["event"] for line in lines]


# -- what is sent ahead of answers ---------------------------------------------------------------------

AHEAD = 3_000_000  # bytes, more than the system keeps for a connection that is not read


def unread(server: Listening) -> int:
    """Bytes that the server's connections keep and no application has read."""
    kept = 0
    for connection in server.state.connections:
        for request in connection.waiting:
            kept += len(request if isinstance(request, bytes) else request.body)
        if connection.running is not None:
            kept += len(connection.running.body)
    return kept


@pytest.mark.parametrize("before", [1, 99])
@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_a_body_behind_a_request_is_not_read_ahead(listen, engine, before, framing):
    """No more than a piece of it is kept until its turn, whatever is answered before; then it is read whole."""
    engine.hold = asyncio.Event()
    body = b'{"inputs": "a"}' + b" " * AHEAD
    last = post(body)
    if framing == "chunks":
        last = CHUNKED + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    async with asyncio.timeout(30), listen() as server, server.client() as client:
        client.send(GET * (before - 1) + post() + post() + last)
        await engine.reached.wait()
        await asyncio.sleep(0.2)
        assert unread(server) <= 2 * PIECE
        (connection,) = server.state.connections
        assert connection.read_paused
        engine.hold.set()
        answers = [await client.answer() for _ in range(before + 2)]
        assert [200] * (before + 2) == [answer.status for answer in answers]
        await until(lambda: not connection.read_paused)
        assert 0 == unread(server)


async def test_refused_requests_let_no_body_in(listen):
    """What follows them is read a piece at a time, however many clients send it and need no key."""
    refused = b"POST /nothing HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"
    attack = refused * 99 + HEAD + b"Content-Length: %d\r\n\r\n" % 10**12
    most = 0
    async with asyncio.timeout(60), listen() as server, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(server.client()) for _ in range(16)]
        for client in clients:
            client.send(attack, b"x" * AHEAD)
        while server.state.total_requests < 16 * 100:
            most = max(most, unread(server))
            await asyncio.sleep(0)
    assert 0 < most <= 16 * 3 * PIECE


async def test_requests_that_wait_take_little_memory(listen, engine):
    """A hundred of them with a hundred headers each take about what was sent, and are answered as if sent singly."""
    engine.hold = asyncio.Event()
    many = post(more=b"".join(b"a%d:\r\n" % n for n in range(90)))
    async with asyncio.timeout(30), listen() as server, server.client() as client:
        client.send(post() + many * 50)
        await engine.reached.wait()
        await asyncio.sleep(0.1)
        (connection,) = server.state.connections
        sizes = [len(request) for request in connection.waiting if isinstance(request, bytes)]
        assert len(sizes) >= len(connection.waiting) - 1 > 40
        assert max(sizes) < 4 * len(many)
        engine.hold.set()
        assert [200] * 51 == [(await client.answer()).status for _ in range(51)]


async def test_a_head_behind_requests_that_wait_may_come_later(listen, engine):
    """Its time begins when it is read; the connection goes on with it as with a first one."""
    engine.hold = asyncio.Event()
    async with (
        asyncio.timeout(30),
        listen(header_timeout_s=1.0) as server,
        server.client() as client,
    ):
        client.send(post() + post() + GET[:20])
        await engine.reached.wait()
        await asyncio.sleep(1.5)
        engine.hold.set()
        assert [200, 200] == [(await client.answer()).status for _ in range(2)]
        assert 200 == (await client.ask(GET[20:])).status
        assert "slow_headers" == (await client.ask(GET[:20])).code


@pytest.mark.parametrize("way", ["closes", "half-closes", "resets"])
@pytest.mark.parametrize(
    "behind",
    [b"", b" " * 200_000, post(b"x" * 100_000)],
    ids=["small-body", "large-body", "pipelined"],
)
async def test_a_client_that_leaves_is_noticed_while_reading_is_paused(listen, engine, way, behind):
    """Its work is cancelled at once. Of what it has sent, the system keeps what is not read."""
    engine.hold = asyncio.Event()
    pipelined = behind.startswith(b"POST")
    request = post() + behind if pipelined else post(BODY + behind)
    async with asyncio.timeout(30), listen() as server:
        loop = asyncio.get_running_loop()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.setblocking(False)
            sending = asyncio.create_task(loop.sock_sendall(client, request))
            await engine.reached.wait()
            await asyncio.sleep(0.1)
            assert not engine.cancelled.is_set()
            sending.cancel()
            await asyncio.wait([sending])
            if way == "resets":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if way == "half-closes":
                client.shutdown(socket.SHUT_WR)
            else:
                client.close()
            await asyncio.wait_for(engine.cancelled.wait(), 5)
            await until(lambda: not server.state.connections)
            await until(lambda: not server.state.tasks)


@pytest.mark.parametrize(
    ("memory", "connections", "size"),
    [(80 << 20, 1000, 65_536), (80 << 20, 4000, 20_971), (1, 1, 4096)],
)
def test_pieces_fit_the_memory_of_bodies(memory, connections, size):
    """One for each connection, within bounds."""
    assert size == piece_size(memory, connections)


def in_chunks(body: bytes, size: int = 1) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


async def test_small_chunks_share_a_rate(listen, monkeypatch):
    """Many small chunks of all connections wait for their rate; large chunks and other requests do not."""
    seen = 0
    parse = Connection.on_body

    def count(self, body):
        nonlocal seen
        seen += len(body) < 2
        parse(self, body)

    monkeypatch.setattr(Connection, "on_body", count)
    async with listen() as server, AsyncExitStack() as stack:
        began = time.monotonic()
        for _ in range(10):
            client = await stack.enter_async_context(server.client())
            client.send(CHUNKED + in_chunks(b" " * 100_000))
        for _ in range(20):
            other = await stack.enter_async_context(server.client())
            assert (
                200
                == (
                    await other.ask(CHUNKED + in_chunks(BODY + b" " * 300_000, 4096) + b"0\r\n\r\n")
                ).status
            )
        lasted = time.monotonic() - began
    slices = (
        10 * connection_module.SLICE / len(in_chunks(b" "))
    )  # of ten connections, each one more
    most = connection_module.CHUNKS_AT_ONCE + connection_module.CHUNKS_PER_S * lasted + slices
    assert 0 < seen <= most
    assert seen < 1_000_000


async def test_a_body_in_small_chunks_is_read(client):
    """It is slow, but complete, and the next request on the connection is answered, too."""
    chunks = in_chunks(b'{"inputs": "%s"}' % (b"a " * 10_000))
    assert 200 == (await client.ask(CHUNKED + chunks + b"0\r\n\r\n" + GET)).status
    assert 200 == (await client.answer()).status
