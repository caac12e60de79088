"""One connection: HTTP/1.1 with limits on what a client may send, delay and leave unread.

Without these limits, request headers may be endless and take forever, a client may send thousands of requests ahead,
and responses to a client that does not read stay in memory. A request that this module refuses becomes a request with
its error in the scope (`REFUSAL`). The application therefore logs and counts it like any other request, and its
response keeps its place in the order.
"""

import asyncio
import marshal
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, auto
from functools import partial
from math import inf
from typing import Any
from urllib.parse import unquote

import structlog
from httptools import (
    HttpParserError,
    HttpParserInvalidURLError,
    HttpParserUpgrade,
    HttpRequestParser,
    parse_url,
)
from uvicorn import Config
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
from service.middleware.refusals import log_internal_error, refuse
from service.middleware.request_context import CONTEXT, RequestContext
from service.middleware.request_lifecycle import REFUSAL, RequestLifecycle
from service.observability.logs import QUIET_ROUTES
from service.server.connection_table import ConnectionTable
from service.server.flow_control import FlowControl, HangupWatcher, Timer
from service.server.request import COMPLETE, DUE, NO_HEAD, STARTED, Request
from service.server.unread_responses import UnreadResponses

log = structlog.get_logger()

HEAD_BYTES = 65_536  # limit for a request's line and headers, and for trailers after its body
ADDRESS_BYTES = 8192  # limit for a request's URL
PATH_BYTES = 2048  # limit for its path, whose escapes take 80 ns per byte to decode, and which the log repeats
HEADERS = 100
BODY_BYTES = 65_536  # of a body that the application has not received, above which reading pauses
PIPELINED = 100  # requests that a client may send ahead of their responses
LINGER_S = 10.0  # time for a refused client to read the refusal and stop sending
EXCESS_S = 5.0  # time for an excess connection to send its request
ARRIVAL_S = 1.0  # time for a request to begin that arrived just before its idle connection closed
PROBES = (b"/health/", b"/v2/health/", b"/metrics")  # beginnings of paths
FRAMING = (b"content-length", b"transfer-encoding")
# Data is parsed in slices. A slice with many chunks of a body takes far more time than its bytes, so the chunks of all
# connections in such slices share a rate: about 5 % of the event loop's time.
SLICE = 4096  # bytes
SMALL_CHUNK = 64  # average bytes per chunk, below which a slice counts
CHUNKS_PER_S = 25_000
CHUNKS_AT_ONCE = 2_500  # that may exceed the rate


class State(IntEnum):
    """What a connection receives. It may respond to earlier requests at the same time, before it lingers."""

    IDLE = auto()  # the next request
    HEAD = auto()  # the rest of a head
    UPGRADE = auto()  # the body of a request that offers another protocol
    BODY = auto()  # the rest of a body
    DROPPING = auto()  # nothing: data is dropped, but responses are still due
    LINGERING = auto()  # nothing: the last response is sent, but the client may still send
    CLOSING = auto()


# In Python 3.11, access to these through their class takes ten times as long.
IDLE, HEAD, UPGRADE, BODY, DROPPING, LINGERING, CLOSING = State


class StopParsing(Exception):
    """Stops the parser: the remaining data must not be parsed."""


@dataclass(frozen=True)
class Shared:
    """What all connections of a process share.

    tables: decide, by the local port, whether a connection is served or an excess connection
    buffers: for the data of one read; the larger one is for the body of the current request
    """

    lifecycle: RequestLifecycle
    header_timeout_s: float
    tables: Mapping[int | None, ConnectionTable]
    buffers: tuple[memoryview, memoryview]
    hangups: HangupWatcher = field(default_factory=HangupWatcher)
    unread_responses: UnreadResponses = field(default_factory=UnreadResponses)
    chunk_rate: Bucket = field(
        default_factory=lambda: Bucket(60 * CHUNKS_PER_S, size=CHUNKS_AT_ONCE)
    )


class Connection(FlowControl):
    """One connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        shared: Shared,
    ) -> None:
        super().__init__(shared.hangups)
        self.config = config
        self.server_state = server_state
        self.app_state = app_state
        self.shared = shared
        self.buffer = shared.buffers[0]
        self.state = IDLE
        self.timer = Timer(self.loop)  # of the state
        self.leaving: asyncio.Future[None] = self.loop.create_future()
        self.parser = self.new_parser()
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.head_bytes = 0  # of the current request so far
        self.pending_bytes = 0  # bytes received since the last header or piece of a body
        self.pieces = 0  # of bodies, in the current slice
        self.unparsed: bytes | None = None  # received data that waits for `chunk_rate`
        self.incoming: Request  # the last request whose head is complete
        self.running: Request | None = None  # the last request that has begun
        # Requests that wait for the responses before theirs; all but the last are packed.
        self.waiting: deque[Request | bytes] = deque()

    @property
    def is_busy(self) -> bool:
        """Return whether a response is due."""
        return self.running is not None and self.running.progress < COMPLETE

    # -- callbacks of the event loop ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.server_state.connections.add(self)  # type: ignore[arg-type]
        super().connection_made(transport)
        server, client = map(address, map(transport.get_extra_info, ("sockname", "peername")))
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "server": server,
            "client": None if client[1] is None else client,
            "scheme": "http",
            "root_path": "",
        }
        self.table = self.shared.tables[server[1]]
        self.is_excess = not self.table.admit(self)
        self.expect_request(EXCESS_S if self.is_excess else self.config.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.server_state.connections.discard(self)
        self.table.discard(self)
        self.state = CLOSING
        self.timer.stop()
        if self.running is not None:
            self.running.abandon()
        self.leaving.set_result(None)
        self.shared.unread_responses.discard(self)
        self.waiting.clear()
        del self.parser  # which refers to the connection

    def get_buffer(self, sizehint: int) -> memoryview:
        self.buffer = self.shared.buffers[self.state is BODY]
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Receive data. After a full piece, the connection pauses until the next turn of the event loop.

        Otherwise the event loop would read many more pieces before it serves other connections.
        """
        self.receive(bytes(self.buffer[:nbytes]))
        if nbytes == len(self.buffer):
            self.rest()

    def eof_received(self) -> None:
        self.state = CLOSING  # the event loop closes the connection once all data is sent
        self.timer.stop()
        self.watch_reader()

    def end(self) -> None:
        """Close the connection as the event loop does at the end of the client's data, although some data is unread."""
        self.eof_received()
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.shared.unread_responses.add(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.shared.unread_responses.discard(self)

    def receive(self, data: bytes) -> None:
        if self.unparsed is not None:  # read before the pause took effect
            self.unparsed += data
            return
        self.pending_bytes += len(data)
        self.parse(data)
        if self.state in (HEAD, BODY) and self.pending_bytes > HEAD_BYTES:
            self.refuse(too_large())  # the parser keeps an unfinished header in memory
        self.watch_head()

    def parse(self, data: bytes) -> None:
        """Parse data slice by slice, and leave the rest for later when there are too many small chunks."""
        for start in range(0, len(data), SLICE):
            if self.state >= DROPPING:
                return
            part, self.pieces = data[start : start + SLICE], 0
            self.feed(part)
            if self.pieces * SMALL_CHUNK > len(part):
                self.shared.chunk_rate.take(self.pieces)
                if wait_s := self.shared.chunk_rate.wait_s():
                    self.unparsed = data[start + SLICE :]
                    self.pause_reading()
                    self.loop.call_later(wait_s, self.continue_parsing)
                    return

    def continue_parsing(self) -> None:
        """Continue to parse and to read after a pause for `chunk_rate`."""
        rest, self.unparsed = self.unparsed or b"", None
        if self.transport.is_closing():
            return
        self.receive(rest)
        self.resume_reading()

    def feed(self, data: bytes) -> None:
        while data:
            part, data = data, b""
            try:
                self.parser.feed_data(part)
            except HttpParserUpgrade as offer:
                data = self.decline_upgrade(part[offer.args[0] :])
            except HttpParserError as error:
                self.stop_parsing(error)

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

    def decline_upgrade(self, rest: bytes) -> bytes:
        """Ignore a request's offer of another protocol, and read the request as HTTP. Returns the data to parse next.

        The parser assumes that such a request has no body, whatever its headers declare, and stops behind its head.
        """
        if self.state is not UPGRADE:
            return b""
        framing = [b"%s: %s\r\n" % pair for pair in self.headers if pair[0] in FRAMING]
        self.parser = self.new_parser()
        return b"POST / HTTP/1.1\r\n%s\r\n%s" % (b"".join(framing), rest)

    def new_parser(self) -> HttpRequestParser:
        parser = HttpRequestParser(self)
        # Requests behind one with `Connection: close` are ignored: they do not make that one invalid.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    # -- callbacks of the parser -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.state is UPGRADE:
            return
        if self.state >= DROPPING:
            raise StopParsing
        if self.waiting:
            if len(self.waiting) >= PIPELINED:
                self.incoming.keep_alive = False  # the last request that gets a response
                self.state = DROPPING
                raise StopParsing
            self.waiting[-1] = self.incoming.pack()
        self.timer.stop()
        self.state = HEAD
        self.url, self.headers = b"", []
        self.head_bytes = self.pending_bytes = 0

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.pending_bytes = 0
        self.head_bytes += len(name) + len(value) + 4
        if self.head_bytes > HEAD_BYTES:
            raise too_large()
        if self.state is HEAD:  # not in trailers after the body
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.state is UPGRADE:
            self.state = BODY
            return
        head = self.read_head()
        keep_alive = head["http_version"] != "1.0" and self.parser.should_keep_alive()
        self.table.begin_request(self, is_probe=head["raw_path"].startswith(PROBES))
        self.timer.stop()
        self.state = BODY
        self.incoming = self.new_request(head, keep_alive)
        self.start_in_order(self.incoming)

    def on_body(self, body: bytes) -> None:
        self.pending_bytes = 0
        self.pieces += 1
        if self.state is BODY and self.incoming.progress < COMPLETE:
            self.incoming.add_body(body)
            if len(self.incoming.body) > BODY_BYTES:
                self.pause_reading()

    def on_message_complete(self) -> None:
        if self.state is not BODY:
            return
        if self.parser.should_upgrade():
            self.state = UPGRADE
            return
        self.state = IDLE
        self.incoming.add_body(b"", more=False)
        self.resume_reading()  # detects that a client disconnects
        if not self.is_busy:  # the response was complete before the request
            self.expect_request(self.config.timeout_keep_alive)

    # -- requests ----------------------------------------------------------------------------------

    def read_head(self) -> dict[str, Any]:
        """Return what a head adds to the scope. Raises HeadersTooLarge and the errors of `parse_target`."""
        if len(self.url) > ADDRESS_BYTES:
            raise HeadersTooLarge(f"the request target is longer than {ADDRESS_BYTES} bytes")
        if len(self.url.partition(b"?")[0]) > PATH_BYTES:
            raise HeadersTooLarge(f"the path is longer than {PATH_BYTES} bytes")
        if len(self.headers) > HEADERS:
            raise HeadersTooLarge(f"the request has more than {HEADERS} headers")
        raw_path, query = parse_target(self.url)
        path = raw_path.decode("ascii")
        return {
            "http_version": self.parser.get_http_version(),
            "method": self.parser.get_method().decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": self.headers,
        }

    def new_request(self, head: Mapping[str, Any], keep_alive: bool = False) -> Request:
        scope = {**self.scope, **head, "state": self.app_state.copy()}
        default_headers = self.server_state.default_headers
        return Request(scope, self, default_headers, self.end_response, keep_alive)

    def unpack(self, packed: bytes) -> Request:
        """Return a request as it was before it was packed."""
        head, body, keep_alive = marshal.loads(packed)
        request = self.new_request(head, keep_alive)
        request.add_body(body, more=False)
        return request

    def start_in_order(self, request: Request) -> None:
        """Start a request after the responses to the earlier ones."""
        if self.is_busy:
            self.waiting.append(request)
            self.pause_reading()
        else:
            self.start(request)

    def start(self, request: Request) -> None:
        """Start a request. An overloaded server refuses it here, because a task would cost too much time."""
        self.running = request
        try:
            if self.refuse_early(request):
                return
        except Exception:  # a bug in a check must not leave the client without a response
            request.scope["state"].setdefault(REFUSAL, log_internal_error())
        task = self.loop.create_task(request.run(self.config.loaded_app))
        self.server_state.tasks.add(task)
        task.add_done_callback(partial(self.end_task, request))

    def end_task(self, request: Request, task: asyncio.Task[None]) -> None:
        """Log the exception of a request's task, and close the connection if the response is not complete."""
        self.server_state.tasks.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            log.error("Exception in ASGI application", exc_info=error)
        if request.progress is DUE:
            request.keep_alive = False
            request.respond(500, {"content-type": "text/plain"}, b"Internal Server Error")
        elif request.progress is STARTED:
            request.abandon()
            self.close()

    def end_response(self) -> None:
        """Start the next request, or wait for it, after a response is complete."""
        assert self.running is not None
        self.server_state.total_requests += 1
        self.running.body.clear()  # it would stay in memory until the next request
        if not self.running.keep_alive:
            self.close()
        if self.is_closing:
            return
        if self.waiting:
            request = self.waiting.popleft()
            self.start(request if isinstance(request, Request) else self.unpack(request))
        else:
            self.table.end_request(self)
            if self.state is not HEAD:  # which has its own timer
                self.expect_request(self.config.timeout_keep_alive)
        self.resume_reading()  # the last waiting request may have started
        self.watch_head()

    def may_read(self) -> bool:
        """Return whether to read more: not while a request waits behind another, unless all data is dropped.

        A connection that sends many small chunks waits for `chunk_rate`, too.
        """
        return self.state >= LINGERING or not (self.waiting or self.unparsed is not None)

    def expect_request(self, seconds: float) -> None:
        self.timer.set(seconds, self.close_idle)

    def watch_head(self) -> None:
        """Limit the time until a head is complete, excluding the time in which reading is paused."""
        if self.state is HEAD and not self.timer.handle and not self.read_paused:
            limit_s = min(EXCESS_S if self.is_excess else inf, self.shared.header_timeout_s)
            error = SlowHeaders(f"the headers did not arrive within {limit_s:g} s")
            self.timer.set(limit_s, self.refuse, error)

    # -- refusals ----------------------------------------------------------------------------------

    def refuse(self, error: QuartetError) -> None:
        """Respond to a faulty request with an error, after the earlier responses, and close the connection."""
        head: Mapping[str, Any] = {**NO_HEAD, "headers": self.headers}
        if self.state is BODY:
            head = self.incoming.scope
            if self.waiting:
                self.waiting.pop()
            elif not self.incoming.abandon():
                self.close()
                return
        self.state = DROPPING
        self.timer.stop()
        request = self.new_request(head)
        request.scope["state"][REFUSAL] = error
        self.start_in_order(request)

    def refuse_early(self, request: Request) -> bool:
        """Check a request. Returns whether it is overloaded and its refusal, written here, is scheduled."""
        scope, lifecycle = request.scope, self.shared.lifecycle
        if self.is_excess:
            # It gets one response: a refusal, except for health checks and the metrics.
            request.keep_alive = False
            if scope["path"] not in QUIET_ROUTES:
                error = TooManyConnections("the service has as many connections as it can keep")
                scope["state"].setdefault(REFUSAL, error)
        context = scope["state"][CONTEXT] = lifecycle.receive(scope)
        context.leaving, context.closes = self.leaving, not request.keep_alive
        # An HTTP/1.0 client gets no `100 Continue`: RFC 9110, 10.1.1.
        expects = context.headers.get("expect", "").lower() == "100-continue"
        request.expects_continue = expects and scope["http_version"] != "1.0"
        if "transfer-encoding" in context.headers:
            # The rest of a body without a known length is not parsed.
            context.drops_body = lambda: self.state is BODY and request is self.incoming
        # The response to a web page needs more headers.
        if not isinstance(context.refusal, Overloaded) or "origin" in context.headers:
            return False
        lifecycle.throttle.hold(partial(self.write_refusal, request, context, context.refusal))
        return True

    def write_refusal(self, request: Request, context: RequestContext, error: Overloaded) -> None:
        try:
            if request.progress is DUE:
                answer = refuse(context, error)
                context.status = answer.status
                headers = {**answer.headers, **self.shared.lifecycle.headers(context)}
                request.keep_alive = not context.closes
                request.respond(answer.status, headers, answer.body)
            self.shared.lifecycle.record(request.scope["method"], request.scope, context)
        finally:
            if request.progress < COMPLETE:
                self.abort()

    # -- the end -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Close the connection as soon as no response is due. The server calls this method when it drains."""
        if not self.is_busy:
            self.close_idle()
        elif self.running is not None and not self.waiting:
            self.running.keep_alive = False

    def close_idle(self) -> None:
        """Close a connection without a request, unless it has data that the event loop has not read yet.

        Without this last check, the system would reset a request that arrived since the event loop last read.
        """
        if self.state in (IDLE, BODY) and self.has_data():
            self.expect_request(ARRIVAL_S)  # in case the data begins no request
        else:
            self.close()

    def evict(self) -> bool:
        """Close a connection without a complete head, in favor of a new connection.

        Returns False if data has just arrived on an idle connection.
        """
        if self.state is IDLE:
            if self.has_data():
                return False
            self.close()
        elif self.state is not CLOSING:  # slow headers, or the body of a refused request
            self.abort()
        return True

    @property
    def is_closing(self) -> bool:
        return self.state >= LINGERING or self.transport.is_closing()

    def close(self) -> None:
        """Close after all written data is sent. If the client still sends, read and drop its data for a while first.

        Otherwise the system would reset the connection and discard a response that the client has not read yet.
        """
        if self.is_closing:
            return
        self.flush()
        if self.state is IDLE and not self.waiting:
            self.state = CLOSING
            self.timer.stop()
            self.transport.close()
        else:
            self.state = LINGERING
            self.resume_reading()
            self.transport.write_eof()
            self.timer.set(LINGER_S, self.abort)
        self.watch_reader()

    def abort(self) -> None:
        self.state = CLOSING
        super().abort()


def address(found: object) -> tuple[str, int | None]:
    """Return the host and the port of a socket, or the path of a Unix socket and None."""
    return (found[0], found[1]) if isinstance(found, tuple) else (str(found or ""), None)


def parse_target(target: bytes) -> tuple[bytes, bytes]:
    """Return the path and the query of a request target. A URL may have no path (RFC 9112, 3.2.2).

    Raises BadRequest for a URL of another scheme, and HttpParserInvalidURLError.
    """
    url = parse_url(target)
    if (url.schema or b"http").lower() not in (b"http", b"https"):
        raise BadRequest("the URL in the request line is not one of http or https")
    return url.path or b"/", url.query or b""


def too_large() -> HeadersTooLarge:
    return HeadersTooLarge(f"the headers are larger than {HEAD_BYTES} bytes")
