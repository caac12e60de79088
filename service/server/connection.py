"""One connection: uvicorn's, with bounds on what a client may send, hold back and leave unread.

Uvicorn leaves these to a proxy: a head may be endless and take for ever, thousands of requests may be sent ahead, and
an answer that nobody reads is kept. What is refused here becomes a request that carries its error (`REFUSAL`), so that
it is named, logged and counted like any other, and answered in its turn.
"""

import asyncio
import marshal
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from typing import Any, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, parse_url
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
from service.middleware.refusals import Refusal, log_internal_error, refuse
from service.middleware.request_context import CONTEXT, RequestContext
from service.middleware.request_lifecycle import REFUSAL, RequestLifecycle
from service.observability.logs import QUIET_ROUTES
from service.server.excess_connections import ExcessConnections
from service.server.flow_control import Connection, HangupWatcher, ReadFlow

HEAD_BYTES = 65_536  # of a request's line and headers, and of what its body may have behind it
ADDRESS_BYTES = 8192  # of what a request asks for, which the log and some answers repeat
HEADERS = 100
PIPELINED = 100  # requests that may be sent ahead of their answers
HEARING_S = 10.0  # for a client that was refused to hear so and stop sending
CROWDED_S = 5.0  # for a connection too many to say what it wants
LOOK_S = 1.0  # for a request to begin that came when its connection was about to be closed
STALLED_S = 30.0  # in which a client has to read so much of a long answer
STALLED_BYTES = 65_536
FRAMING = (b"content-length", b"transfer-encoding")


class StopParsing(Exception):
    """The rest of what came is not to be parsed."""


class Protocol(HttpToolsProtocol, Connection):
    """One connection among those in `admitted`, of which there are to be `max_connections` at most."""

    flow: ReadFlow

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        admitted: set["Protocol"],
        excess: ExcessConnections,
        max_connections: int,
        header_timeout_s: float,
        lifecycle: RequestLifecycle,
        hangups: HangupWatcher,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.hangups = hangups
        self.admitted = admitted
        self.excess = excess
        self.max_connections = max_connections
        self.header_timeout_s = header_timeout_s
        self.lifecycle = lifecycle
        self.running: RequestResponseCycle | None = None  # `cycle` is the last that came
        self.crowded = False
        self.in_head = False
        self.in_body = False
        self.deaf = False  # what comes is dropped
        self.closing = False
        self.head_bytes = 0  # of the headers that are there
        self.heard = False  # of a header or a piece of a body in what came last
        self.unheard = 0  # bytes that came since, in which there was none
        self.late = Timer(self.loop)  # for a head to be whole, and in the end for silence
        self.stalled = Timer(self.loop)

    # -- what the event loop tells -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.wire = transport
        self.own = Transport(self)
        self.transport = cast(asyncio.Transport, self.own)
        self.flow = ReadFlow(transport, self.hangups, self.may_read, self.leave)
        self.leaving: asyncio.Future[None] = self.loop.create_future()
        self.crowded = len(self.admitted) >= self.max_connections
        if self.crowded:
            self.excess.add(transport)
            self.header_timeout_s = min(CROWDED_S, self.header_timeout_s)
            self.expect_request(CROWDED_S)
        else:
            self.admitted.add(self)
            self.expect_request(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        self.admitted.discard(self)
        self.excess.discard(self.wire)
        self.closing = True
        self.stop_timers()
        if self.running is not None and not self.running.response_complete:
            self.running.disconnected = True
            self.running.message_event.set()
        self.leaving.set_result(None)
        self.flow.forget()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.deaf:
            return
        self.heard = False
        self.feed(data)
        if (self.in_head or self.in_body) and not self.deaf:
            self.watch_sender(0 if self.heard else len(data))

    def eof_received(self) -> None:
        self.closing = True  # which the event loop does, when what was written is sent
        if self.wire.get_write_buffer_size():
            self.watch_reader()

    def rest(self) -> None:
        self.flow.rest()

    def leave(self) -> None:
        """Close as the event loop does at the end of the client's data, of which some is not read."""
        self.eof_received()
        self.wire.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.closing:
            self.stalled.stop()

    # -- what the parser tells ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= PIPELINED:
            self.cycle.keep_alive = False  # the last one to be answered
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
        if self.in_head:  # and not behind the body
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.url) > ADDRESS_BYTES:
            raise HeadersTooLarge(f"the address is longer than {ADDRESS_BYTES} bytes")
        if len(self.headers) > HEADERS:
            raise HeadersTooLarge(f"the request has more than {HEADERS} headers")
        if not self.url.startswith(b"/") and parse_url(self.url).path is None:
            raise BadRequest("the address in the request line has no path")
        super().on_headers_complete()
        self.in_head, self.in_body = False, True
        self.late.stop()

    def on_body(self, body: bytes) -> None:
        self.heard = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # its body, if it has one, is still to come
        self.in_body = False
        super().on_message_complete()
        self.flow.resume_reading()  # so that a client that leaves is noticed
        if self.cycle.response_complete:  # long before
            self.expect_request(self.timeout_keep_alive)

    # -- what the application's answer tells -------------------------------------------------------

    def on_response_complete(self) -> None:
        self.own.flush()
        if self.running is not None:
            self.running.body.clear()  # else it would be kept until the next request
        super().on_response_complete()
        if self.closing:
            return
        self.flow.resume_reading()  # the last request that waited may have begun
        if self.in_head:  # the next one's, which has its own timer
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
        """Close a connection without a request, unless data has come that the event loop has not read yet.

        Without this last look, a request that came since the event loop last read would be reset.
        """
        if not self.in_head and self.flow.has_data():
            self.expect_request(LOOK_S)  # for data that begins no request
        elif not self.transport.is_closing():
            self.transport.close()

    def is_closing(self) -> bool:
        return self.closing or self.wire.is_closing()

    def close(self) -> None:
        """Close when what was written is sent. A client that still sends is heard out for a while first.

        Else the system would reset the connection, and with it take away an answer that is not read yet.
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

    # -- bounds ------------------------------------------------------------------------------------

    def may_read(self) -> bool:
        """Whether to read more: not while a request waits behind another, unless all data is dropped."""
        return not self.pipeline or self.closing

    def expect_request(self, seconds: float) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            seconds, self.timeout_keep_alive_handler
        )

    def watch_sender(self, unheard: int) -> None:
        """Bound a header that does not end, which is kept until it does, and the time that a head takes."""
        self.unheard = self.unheard + unheard if unheard else 0
        if self.unheard > HEAD_BYTES:
            self.refuse(too_large())
        elif self.in_head:
            self.watch_head()

    def watch_head(self) -> None:
        """Bound the time that a head takes, without the time in which it is not read."""
        if not self.late.is_set and not self.flow.read_paused and not self.deaf:
            error = SlowHeaders(f"the headers did not arrive within {self.header_timeout_s:g} s")
            self.late.set(self.header_timeout_s, self.refuse, error)

    def watch_reader(self, unread: float = inf) -> None:
        """Cut off a client that does not read, and let go of what is kept for it."""
        left = self.wire.get_write_buffer_size()
        if left > unread - STALLED_BYTES:
            self.wire.abort()
        else:
            self.stalled.set(STALLED_S, self.watch_reader, left)

    def stop_timers(self) -> None:
        self._unset_keepalive_if_required()
        self.late.stop()
        self.stalled.stop()

    # -- refusing ----------------------------------------------------------------------------------

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
        elif isinstance(cause, HttpParserError):
            self.refuse(BadRequest(f"this is not HTTP/1.1: {cause}"))
        elif not isinstance(cause, StopParsing):
            self.refuse(log_internal_error())

    def stay(self, rest: bytes) -> bytes:
        """Read a request that offers another protocol as if it did not; gives what is to be parsed for that.

        The parser takes it to have no body, whatever its headers say, and goes on behind it.
        """
        framing = [b"%s: %s\r\n" % pair for pair in self.headers if pair[0] in FRAMING]
        self.parser = HttpRequestParser(BodyParser(self))
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        return b"POST / HTTP/1.1\r\n%s\r\n%s" % (b"".join(framing), rest)

    def refuse(self, error: QuartetError) -> None:
        """Answer what cannot be read on, after what came before it, and close."""
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
        """Forget a request whose body was coming; tells whether others are still to be answered."""
        if self.pipeline:
            self.pipeline.popleft()
            return True
        half.disconnected = True
        half.message_event.set()
        return False

    def refusal(self, error: QuartetError) -> RequestResponseCycle:
        """A request of which only so much came that it has to be refused."""
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
        """The request as it was before it was packed."""
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
        """Answer a request that comes at a bad time right here: who is overloaded has no time for more."""
        if isinstance(cycle, PackedRequest):
            cycle = self.unpack(cycle)
            if not self.pipeline:
                self.cycle = cycle  # no request came after it
        self.running = cycle
        if cycle.scope["http_version"] == "1.0":
            cycle.waiting_for_100_continue = (
                False  # which is not for such clients: RFC 9110, 10.1.1
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
        of_a_page = "origin" in context.headers  # which needs more headers
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
        """Give a connection too many one answer, which is a refusal unless it looks after the service."""
        cycle.keep_alive = False
        if cycle.scope["path"] not in QUIET_ROUTES:
            error = TooManyConnections("the service has as many connections as it can keep")
            cycle.scope["state"].setdefault(REFUSAL, error)


async def send_unchunked(
    app: Any, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer a request of HTTP/1.0, which has no chunks: an answer of unknown length ends with its connection."""
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
    """A whole request that waits behind another, packed into one object.

    The objects of a short request take a hundred times the bytes that were sent.
    """

    OWN = ("http_version", "method", "path", "raw_path", "query_string", "headers")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        scope = cast(Scope, cycle.scope)
        own = {key: scope[key] for key in self.OWN}
        expects = cycle.waiting_for_100_continue
        self.packed = marshal.dumps((own, bytes(cycle.body), cycle.keep_alive, expects))


class Timer:
    """A timer that is set and stopped again and again."""

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
    """What uvicorn uses of a transport, with our way to close; an answer's head is sent with what follows it.

    In two pieces, it would take two calls of the system, and wake the client twice.
    """

    def __init__(self, connection: Protocol) -> None:
        self.connection = connection
        self.close = connection.close
        self.is_closing = connection.is_closing
        self.begun: RequestResponseCycle | None = None  # the last one to be answered
        self.head = b""

    def write(self, data: bytes) -> None:
        cycle = self.connection.running
        if cycle is not None and cycle.response_started and cycle is not self.begun:
            self.begun, self.head = cycle, data
        else:
            self.connection.wire.write(self.head + data)
            self.head = b""

    def flush(self) -> None:
        """Send a head that nothing follows."""
        if self.head:
            self.write(b"")


class BodyParser:
    """Hears of one body from a parser whose head the connection has seen before, and passes on what comes behind it."""

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
    """An answer with the headers of every answer and of the server, as HTTP/1.1."""
    headers = {**answer.headers, **common, "Content-Length": str(len(answer.body))}
    lines = [
        STATUS_LINE[answer.status].rstrip(),
        *(b"%s: %s" % pair for pair in default),
        *(f"{name.lower()}: {value}".encode() for name, value in headers.items()),
    ]
    return b"\r\n".join([*lines, b"", answer.body])


def too_large() -> HeadersTooLarge:
    return HeadersTooLarge(f"the headers are larger than {HEAD_BYTES} bytes")
