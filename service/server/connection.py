"""One connection: uvicorn's protocol with limits on what a client may send, delay and leave unread.

Uvicorn leaves these limits to a proxy. Without them, request headers may be endless and take forever, a client may send
thousands of requests ahead, and responses to a client that does not read stay in memory. A request that this module
refuses becomes a request with its error in the scope (`REFUSAL`). The application therefore logs and counts it like any
other request, and its response keeps its place in the order.
"""

import asyncio
import marshal
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from typing import Any, cast

from httptools import (
    HttpParserError,
    HttpParserInvalidURLError,
    HttpParserUpgrade,
    HttpRequestParser,
    parse_url,
)
from starlette.types import Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn._types import HTTPScope
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from service.errors import (
    BadRequest,
    HeadersTooLarge,
    Overloaded,
    QuartetError,
    SlowHeaders,
    TooManyConnections,
)
from service.middleware.rate_limit import Bucket
from service.middleware.refusals import Refusal, log_internal_error, refuse
from service.middleware.request_context import CONTEXT, RequestContext
from service.middleware.request_lifecycle import REFUSAL, RequestLifecycle
from service.observability.logs import QUIET_ROUTES
from service.server.connection_table import ConnectionTable
from service.server.flow_control import Connection, HangupWatcher, ReadFlow
from service.server.unread_responses import UnreadResponses

HEAD_BYTES = 65_536  # limit for a request's line and headers, and for trailers after its body
ADDRESS_BYTES = 8192  # limit for a request's URL
PATH_BYTES = 2048  # limit for its path, whose escapes take 80 ns per byte to decode, and which the log repeats
HEADERS = 100
PIPELINED = 100  # requests that a client may send ahead of their responses
HEARING_S = 10.0  # time for a refused client to read the refusal and stop sending
CROWDED_S = 5.0  # time for an excess connection to send its request
LOOK_S = 1.0  # time for a request to begin that arrived just before its idle connection was closed
STALLED_S = 30.0  # time in which a client must read STALLED_BYTES of a long response
STALLED_BYTES = 65_536
PROBES = (b"/health/", b"/v2/health/", b"/metrics")  # beginnings of paths
FRAMING = (b"content-length", b"transfer-encoding")
# Data is parsed in slices. A slice with many chunks of a body takes far more time than its bytes, so the chunks of all
# connections in such slices share a rate: about 5 % of the event loop's time.
SLICE = 4096  # bytes
SMALL_CHUNK = 64  # average bytes per chunk, below which a slice counts
CHUNKS_PER_S = 25_000
CHUNKS_AT_ONCE = 2_500  # that may exceed the rate


class StopParsing(Exception):
    """Stops the parser: the remaining data must not be parsed."""


class Protocol(HttpToolsProtocol, Connection):
    """One connection. `tables`, by the local port, decide whether it is served or an excess connection."""

    flow: ReadFlow

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        tables: Mapping[int, ConnectionTable],
        header_timeout_s: float,
        lifecycle: RequestLifecycle,
        hangups: HangupWatcher,
        chunk_rate: Bucket,
        unread_responses: UnreadResponses,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.unread_responses = unread_responses
        self.hangups = hangups
        self.chunk_rate = chunk_rate
        self.tables = tables
        self.header_timeout_s = header_timeout_s
        self.lifecycle = lifecycle
        # The current request; `cycle` is the last one received.
        self.running: RequestResponseCycle | None = None
        self.crowded = False
        self.in_head = False
        self.in_body = False
        self.deaf = False  # received data is dropped
        self.closing = False
        self.in_chunks = False  # whether the current request's body is chunked
        self.pieces = 0  # of bodies, in the current slice
        self.slowed = False  # by `chunk_rate`
        self.unparsed = b""  # received data that waits for `chunk_rate`
        self.head_bytes = 0  # bytes of the current request's headers so far
        self.heard = False  # whether the last data contained a header or a piece of a body
        self.unheard = 0  # bytes received since the last header or piece of a body
        # Limits the time of a head, and after `close` the time to read on.
        self.late = Timer(self.loop)
        self.stalled = Timer(self.loop)

    # -- callbacks of the event loop ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.wire = transport
        self.own = Transport(self)
        self.transport = cast(asyncio.Transport, self.own)
        self.flow = ReadFlow(transport, self.hangups, self.may_read, self.leave)
        self.leaving: asyncio.Future[None] = self.loop.create_future()
        self.table = self.tables[port_of(transport)]
        self.crowded = not self.table.admit(self)
        if self.crowded:
            self.table.add_excess(transport)
            self.header_timeout_s = min(CROWDED_S, self.header_timeout_s)
            self.expect_request(CROWDED_S)
        else:
            self.expect_request(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        self.table.discard(self, self.wire)
        self.closing = True
        self.stop_timers()
        if self.running is not None and not self.running.response_complete:
            self.running.disconnected = True
            self.running.message_event.set()
        self.leaving.set_result(None)
        self.unread_responses.discard(self)
        self.flow.forget()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.deaf:
            return
        if self.unparsed:  # read before the pause took effect
            self.unparsed += data
            return
        self.heard = False
        self.parse(data)
        if (self.in_head or self.in_body) and not self.deaf:
            self.watch_sender(0 if self.heard else len(data))

    def parse(self, data: bytes) -> None:
        """Parse data slice by slice, and leave the rest for later when there are too many small chunks."""
        for start in range(0, len(data), SLICE):
            if self.deaf:
                return
            part, self.pieces = data[start : start + SLICE], 0
            self.feed(part)
            if self.pieces * SMALL_CHUNK > len(part):
                self.chunk_rate.take(self.pieces)
                if wait_s := self.chunk_rate.wait_s():
                    self.unparsed = data[start + SLICE :]
                    self.slow_down(wait_s)
                    return

    def slow_down(self, seconds: float) -> None:
        """Read and parse nothing more of this connection for a while."""
        self.slowed = True
        self.flow.pause_reading()
        self.loop.call_later(seconds, self.go_on)

    def go_on(self) -> None:
        self.slowed = False
        rest, self.unparsed = self.unparsed, b""
        if self.wire.is_closing():
            return
        self.data_received(rest)
        if not self.slowed:
            self.flow.resume_reading()

    def eof_received(self) -> None:
        self.closing = True  # the event loop closes the connection once all data is sent
        if self.wire.get_write_buffer_size():
            self.watch_reader()

    def rest(self) -> None:
        self.flow.rest()

    def leave(self) -> None:
        """Close the connection as the event loop does at the end of the client's data, although some data is unread."""
        self.eof_received()
        self.wire.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread_responses.add(self)
        self.watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unread_responses.discard(self)
        if not self.closing:
            self.stalled.stop()

    # -- callbacks of the parser -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= PIPELINED:
            self.cycle.keep_alive = False  # the last request that gets a response
            self.deaf = True
            raise StopParsing
        if self.pipeline:
            last, app = self.pipeline[0]
            self.pipeline[0] = cast(RequestResponseCycle, PackedRequest(last)), app
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self.in_head = self.heard = True
        self.head_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self.heard = True
        self.head_bytes += len(name) + len(value) + 4
        if self.head_bytes > HEAD_BYTES:
            raise too_large()
        if self.in_head:  # not in trailers after the body
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.url) > ADDRESS_BYTES:
            raise HeadersTooLarge(f"the request target is longer than {ADDRESS_BYTES} bytes")
        if len(self.url.partition(b"?")[0]) > PATH_BYTES:
            raise HeadersTooLarge(f"the path is longer than {PATH_BYTES} bytes")
        if len(self.headers) > HEADERS:
            raise HeadersTooLarge(f"the request has more than {HEADERS} headers")
        if not self.url.startswith(b"/"):
            self.url = with_path(self.url)
        self.in_chunks = any(name == b"transfer-encoding" for name, _ in self.headers)
        self.table.begin_request(self, is_probe=self.url.startswith(PROBES))
        super().on_headers_complete()
        self.in_head, self.in_body = False, True
        self.late.stop()

    def on_body(self, body: bytes) -> None:
        self.heard = True
        self.pieces += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the body, if the request has one, follows
        self.in_body = False
        super().on_message_complete()
        self.flow.resume_reading()  # detects that a client disconnects
        if self.cycle.response_complete:  # the response was complete before the request
            self.expect_request(self.timeout_keep_alive)

    # -- callbacks of the response -----------------------------------------------------------------

    def on_response_complete(self) -> None:
        self.own.flush()
        if self.running is not None:
            # Otherwise the body would stay in memory until the next request.
            self.running.body.clear()
        super().on_response_complete()
        if self.closing:
            return
        if self.cycle.response_complete:
            self.table.end_request(self)
        self.flow.resume_reading()  # the last waiting request may have started
        if self.in_head:  # the head of the next request, which has its own timer
            self._unset_keepalive_if_required()
            self.watch_head()

    def timeout_keep_alive_handler(self) -> None:
        self.close_idle()

    def shutdown(self) -> None:
        last = cast(RequestResponseCycle | None, self.cycle)
        if last is None or last.response_complete:
            self.close_idle()
        else:
            super().shutdown()

    def close_idle(self) -> None:
        """Close a connection without a request, unless it has data that the event loop has not read yet.

        Without this last check, the system would reset a request that arrived since the event loop last read.
        """
        if not self.in_head and self.flow.has_data():
            self.expect_request(LOOK_S)  # in case the data begins no request
        elif not self.transport.is_closing():
            self.transport.close()

    def evict(self) -> bool:
        """Close a connection without a complete head, in favor of a new connection.

        Returns False if data has just arrived on an idle connection.
        """
        if self.in_head or self.in_body:  # slow headers, or the body of a refused request
            self.wire.abort()
            return True
        if self.flow.has_data():
            return False
        self.close()
        return True

    def is_closing(self) -> bool:
        return self.closing or self.wire.is_closing()

    def close(self) -> None:
        """Close after all written data is sent. If the client still sends, read and drop its data for a while first.

        Otherwise the system would reset the connection and discard a response that the client has not read yet.
        """
        if self.closing:
            return
        self.own.flush()
        self.closing = True
        self.stop_timers()
        if self.in_head or self.in_body or self.pipeline or self.deaf:
            self.deaf = True
            self.flow.resume_reading()
            self.wire.write_eof()
            self.late.set(HEARING_S, self.wire.abort)
        else:
            self.wire.close()
        if self.wire.get_write_buffer_size():
            self.watch_reader()

    # -- limits ------------------------------------------------------------------------------------

    def may_read(self) -> bool:
        """Return whether to read more: not while a request waits behind another, unless all data is dropped.

        A connection that sends many small chunks waits for `chunk_rate`, too.
        """
        return self.closing or not (self.pipeline or self.slowed)

    def expect_request(self, seconds: float) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            seconds, self.timeout_keep_alive_handler
        )

    def watch_sender(self, unheard: int) -> None:
        """Limit the size of a header that does not end, and the time of a head.

        The parser keeps an unfinished header in memory.

        unheard: bytes received without a complete header or body piece; 0 if there was one
        """
        self.unheard = self.unheard + unheard if unheard else 0
        if self.unheard > HEAD_BYTES:
            self.refuse(too_large())
        elif self.in_head:
            self.watch_head()

    def watch_head(self) -> None:
        """Limit the time until a head is complete, excluding the time in which reading is paused."""
        if not self.late.is_set and not self.flow.read_paused and not self.deaf:
            error = SlowHeaders(f"the headers did not arrive within {self.header_timeout_s:g} s")
            self.late.set(self.header_timeout_s, self.refuse, error)

    def watch_reader(self, unread: float = inf) -> None:
        """Abort the connection of a client that does not read, and so free the data that waits for it."""
        left = self.wire.get_write_buffer_size()
        if left > unread - STALLED_BYTES:
            self.wire.abort()
        else:
            self.stalled.set(STALLED_S, self.watch_reader, left)

    @property
    def unread(self) -> int:
        return self.wire.get_write_buffer_size()

    @property
    def sent(self) -> int:
        return self.own.written - self.unread

    def drop(self) -> None:
        self.wire.abort()

    def stop_timers(self) -> None:
        self._unset_keepalive_if_required()
        self.late.stop()
        self.stalled.stop()

    # -- refusals ----------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except HttpParserUpgrade as offer:
                data = self.stay(data[offer.args[0] :])
                continue
            except HttpParserError as error:
                self.stop_parsing(error)
            return

    def stop_parsing(self, error: HttpParserError) -> None:
        """Refuse a request that the parser rejects, or that one of the methods called by the parser rejects."""
        cause = error.__context__ or error  # the exception of such a method
        if isinstance(cause, QuartetError):
            self.refuse(cause)
        elif isinstance(cause, HttpParserInvalidURLError):
            self.refuse(BadRequest("the request target is neither a path nor a URL"))
        elif isinstance(cause, HttpParserError):
            self.refuse(BadRequest(f"this is not HTTP/1.1: {cause}"))
        elif not isinstance(cause, StopParsing):
            self.refuse(log_internal_error())

    def stay(self, rest: bytes) -> bytes:
        """Ignore a request's offer of another protocol, and read the request as HTTP. Returns the data to parse next.

        The parser assumes that such a request has no body, whatever its headers declare, and stops behind its head.
        """
        framing = [b"%s: %s\r\n" % pair for pair in self.headers if pair[0] in FRAMING]
        self.parser = HttpRequestParser(BodyParser(self))
        # As in uvicorn's own parser.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"POST / HTTP/1.1\r\n%s\r\n%s" % (b"".join(framing), rest)

    def refuse(self, error: QuartetError) -> None:
        """Respond to a faulty request with an error, after the earlier responses, and close the connection."""
        self.deaf = True
        self.late.stop()
        self._unset_keepalive_if_required()
        if self.in_body and self.cycle.response_started:
            self.cycle.disconnected = True
            self.close()
            return
        last = cast(RequestResponseCycle | None, self.cycle)
        busy = last is not None and not last.response_complete
        if self.in_body:
            busy = self.abandon(self.cycle)
        self.cycle = self.refusal(error)
        if busy:
            self.pipeline.appendleft((self.cycle, self.app))
        else:
            self._start_asgi_task(self.cycle, self.app)

    def abandon(self, half: RequestResponseCycle) -> bool:
        """Discard a request whose body is incomplete.

        Returns whether earlier requests still wait for their responses.
        """
        if self.pipeline:
            self.pipeline.popleft()
            return True
        half.disconnected = True
        half.message_event.set()
        return False

    def refusal(self, error: QuartetError) -> RequestResponseCycle:
        """Return a request with an error in its scope, made from what was received of it."""
        nothing: dict[str, Any] = {"method": "", "path": "", "raw_path": b"", "query_string": b""}
        scope = {**nothing, **self.scope, "state": {**self.app_state, REFUSAL: error}}
        return self.new_cycle(scope, keep_alive=False, expect_100_continue=False)

    def new_cycle(
        self, scope: Mapping[str, Any], *, keep_alive: bool, expect_100_continue: bool
    ) -> RequestResponseCycle:
        return RequestResponseCycle(
            scope=cast(HTTPScope, scope),
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=expect_100_continue,
            keep_alive=keep_alive,
            on_response=self.on_response_complete,
        )

    def unpack(self, waiting: "PackedRequest") -> RequestResponseCycle:
        """Return the request as it was before it was packed."""
        own, body, keep_alive, expect_100_continue = marshal.loads(waiting.packed)
        scope = {**self.scope, **own, "state": self.app_state.copy()}
        cycle = self.new_cycle(
            scope, keep_alive=keep_alive, expect_100_continue=expect_100_continue
        )
        cycle.body += body
        cycle.more_body = False
        cycle.message_event.set()
        return cycle

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start a request. An overloaded server refuses it here, because a task would cost too much time."""
        if isinstance(cycle, PackedRequest):
            cycle = self.unpack(cycle)
            if not self.pipeline:
                self.cycle = cycle  # the last request received
        self.running = cycle
        if self.flow.write_paused:
            app = partial(when_read, app, self.flow)
        if cycle.scope["http_version"] == "1.0":
            cycle.waiting_for_100_continue = (
                False  # an HTTP/1.0 client gets no 100 Continue: RFC 9110, 10.1.1
            )
            app = partial(send_unchunked, app, cycle)
        try:
            if self.turn_away_early(cycle):
                return
        except Exception:
            cast(Scope, cycle.scope)["state"].setdefault(REFUSAL, log_internal_error())
        super()._start_asgi_task(cycle, app)

    def turn_away_early(self, cycle: RequestResponseCycle) -> bool:
        """Check a request. Returns whether it is overloaded and its refusal, written here, is scheduled."""
        if self.crowded:
            self.send_away(cycle)
        scope = cast(Scope, cycle.scope)
        context = scope["state"][CONTEXT] = self.lifecycle.receive(scope)
        context.leaving, context.closes = self.leaving, not cycle.keep_alive
        if self.in_chunks and cycle is self.cycle:
            # The rest of a body without a known length is not parsed.
            context.drops_body = lambda: self.in_body and cycle is self.cycle
        of_a_page = "origin" in context.headers  # a web page, whose response needs more headers
        if not isinstance(context.refusal, Overloaded) or of_a_page:
            return False
        self.lifecycle.throttle.hold(partial(self.turn_away, cycle, context, context.refusal))
        return True

    def turn_away(
        self, cycle: RequestResponseCycle, context: RequestContext, error: Overloaded
    ) -> None:
        try:
            self.write_refusal(cycle, context, error)
        except Exception:
            log_internal_error()
            self.wire.abort()

    def write_refusal(
        self, cycle: RequestResponseCycle, context: RequestContext, error: Overloaded
    ) -> None:
        if not cycle.disconnected:
            answer = refuse(context, error)
            context.status = answer.status
            common = self.lifecycle.headers(context)
            cycle.keep_alive = not context.closes
            self.transport.write(to_bytes(answer, common, self.server_state.default_headers))
        cycle.response_started = cycle.response_complete = True
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()
        scope = cast(Scope, cycle.scope)
        self.lifecycle.record(scope["method"], scope, context)

    def send_away(self, cycle: RequestResponseCycle) -> None:
        """Send one response on an excess connection: a refusal, except for health checks and the metrics."""
        cycle.keep_alive = False
        if cycle.scope["path"] not in QUIET_ROUTES:
            error = TooManyConnections("the service has as many connections as it can keep")
            cycle.scope["state"].setdefault(REFUSAL, error)


async def when_read(app: Any, flow: ReadFlow, scope: Scope, receive: Receive, send: Send) -> None:
    """Begin a request after the client has read the previous response, so that no second one waits for it."""
    await flow.drain()
    await app(scope, receive, send)


async def send_unchunked(
    app: Any, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """Respond to an HTTP/1.0 request.

    HTTP/1.0 has no chunks: the end of the connection ends a response of unknown length.
    """
    bare = False

    async def send_bare(message: Message) -> None:
        nonlocal bare
        if message["type"] == "http.response.start":
            bare = not any(
                name.lower() == b"content-length" for name, _ in message.get("headers", ())
            )
            if bare:
                cycle.chunked_encoding = False
        elif bare:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_bare)


class PackedRequest:
    """A complete request that waits behind another, packed into one object.

    The unpacked objects of a short request take a hundred times the bytes that the client sent.
    """

    OWN = ("http_version", "method", "path", "raw_path", "query_string", "headers")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        scope = cast(Scope, cycle.scope)
        own = {key: scope[key] for key in self.OWN}
        expects = cycle.waiting_for_100_continue
        self.packed = marshal.dumps((own, bytes(cycle.body), cycle.keep_alive, expects))


class Timer:
    """A timer that can be set and stopped repeatedly."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.timer: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self.timer is not None

    def set(self, seconds: float, ring: Callable[..., None], *arguments: object) -> None:
        self.stop()
        self.timer = self.loop.call_later(seconds, ring, *arguments)

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Transport:
    """The part of a transport that uvicorn uses. It closes through `Protocol`, and sends a head with its body.

    Two separate writes would take two system calls and wake the client twice.
    """

    def __init__(self, connection: Protocol) -> None:
        self.connection = connection
        self.close = connection.close
        self.is_closing = connection.is_closing
        self.written = 0  # bytes
        self.begun: RequestResponseCycle | None = None  # the last response that has begun
        self.head = b""

    def write(self, data: bytes) -> None:
        cycle = self.connection.running
        if cycle is not None and cycle.response_started and cycle is not self.begun:
            self.begun, self.head = cycle, data
        else:
            data = self.head + data
            self.written += len(data)
            self.connection.wire.write(data)
            self.head = b""

    def flush(self) -> None:
        """Send a head that no body follows."""
        if self.head:
            self.write(b"")


class BodyParser:
    """Parser callbacks for one body, for a request whose head the connection has already parsed.

    After the end of that body, they forward the next requests to the connection.
    """

    def __init__(self, connection: Protocol) -> None:
        self.connection = connection
        self.on_header = connection.on_header
        self.on_body = connection.on_body
        self.whole = False

    def on_message_begin(self) -> None:
        if self.whole:
            self.connection.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self.whole:
            self.connection.on_url(url)

    def on_headers_complete(self) -> None:
        if self.whole:
            self.connection.on_headers_complete()

    def on_message_complete(self) -> None:
        self.whole = True
        self.connection.on_message_complete()


def to_bytes(
    answer: Refusal, common: Mapping[str, str], default: Iterable[tuple[bytes, bytes]]
) -> bytes:
    """Return a response as HTTP/1.1, with the headers of every response and of the server."""
    headers = {**answer.headers, **common, "Content-Length": str(len(answer.body))}
    lines = [
        STATUS_LINE[answer.status].rstrip(),
        *(b"%s: %s" % pair for pair in default),
        *(f"{name.lower()}: {value}".encode() for name, value in headers.items()),
    ]
    return b"\r\n".join([*lines, b"", answer.body])


def port_of(transport: asyncio.Transport) -> int:
    """Return the local port of a connection, 0 for a Unix socket."""
    address = transport.get_extra_info("sockname")
    return address[1] if isinstance(address, tuple) else 0


def with_path(target: bytes) -> bytes:
    """Return the target of a request line, with the path `/` if it is a URL without a path (RFC 9112, 3.2.2).

    Raises BadRequest for a URL of another scheme, and HttpParserInvalidURLError.
    """
    url = parse_url(target)
    if (url.schema or b"http").lower() not in (b"http", b"https"):
        raise BadRequest("the URL in the request line is not one of http or https")
    if url.path is not None:
        return target
    return b"/" if url.query is None else b"/?" + url.query


def too_large() -> HeadersTooLarge:
    return HeadersTooLarge(f"the headers are larger than {HEAD_BYTES} bytes")
