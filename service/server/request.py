"""One HTTP request and its response, as an ASGI application receives and sends them."""

import asyncio
import marshal
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum, auto
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Scope

from service.server.flow_control import FlowControl

Headers = Iterable[tuple[bytes, bytes]]

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STATUS_LINES: dict[int, bytes] = {
    status: f"HTTP/1.1 {status} {status.phrase}".encode() for status in HTTPStatus
}
BODILESS = frozenset({HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED})
CONTROL = bytes([*range(9), *range(10, 32), 127])  # characters that no header may contain
# What the scope of a request without a complete head has from its head, in addition to the headers.
NO_HEAD = {"http_version": "1.1", "method": "", "path": "", "raw_path": b"", "query_string": b""}


class Progress(IntEnum):
    """The progress of a response."""

    DUE = auto()
    STARTED = auto()
    COMPLETE = auto()
    UNWANTED = auto()  # the client has disconnected, or its request cannot be read to its end


# In Python 3.11, access to these through their class takes ten times as long.
DUE, STARTED, COMPLETE, UNWANTED = Progress


class Request:
    """A request, whose body may be incomplete, and the progress of its response.

    body: what the application has not received yet
    more_body: whether the rest of the body has yet to arrive
    expects_continue: whether the client waits for `100 Continue` before it sends the body
    keep_alive: whether the connection stays open after the response
    """

    def __init__(
        self,
        scope: Scope,
        flow: FlowControl,
        default_headers: Headers,
        on_complete: Callable[[], None],
        keep_alive: bool,
    ) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.expects_continue = False
        self.body = bytearray()
        self.more_body = True
        self.progress = DUE
        self._flow = flow
        self._default_headers = default_headers
        self._on_complete = on_complete
        self._news = asyncio.Event()  # more of the body, or the end of the response
        self._left: int | None = None  # bytes of the response's body, if it has a known length

    # -- from the client ---------------------------------------------------------------------------

    def add_body(self, body: bytes, more: bool = True) -> None:
        self.body += body
        self.more_body = more
        self._news.set()

    def abandon(self) -> bool:
        """Report to the application that the client has disconnected. Returns whether the whole response was due."""
        before = self.progress
        if before < COMPLETE:
            self.progress = UNWANTED
            self._news.set()
        return before is DUE

    def pack(self) -> bytes:
        """Return a complete request as one object.

        The unpacked objects of a short request take a hundred times the bytes that the client sent.
        """
        head = {key: self.scope[key] for key in (*NO_HEAD, "headers")}
        return marshal.dumps((head, bytes(self.body), self.keep_alive))

    # -- the application ---------------------------------------------------------------------------

    async def run(self, app: ASGIApp) -> None:
        """Let the application respond, after the client has read the previous response."""
        await self._flow.drain()
        await app(self.scope, self.receive, self.send)

    async def receive(self) -> Message:
        if self.progress < COMPLETE:
            if self.expects_continue:
                self.expects_continue = False
                self._flow.write(CONTINUE)
            self._flow.resume_reading()
            await self._news.wait()
            self._news.clear()
        if self.progress >= COMPLETE:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        await self._flow.drain()
        kind = message["type"]
        if self.progress is STARTED and kind == "http.response.body":
            self.send_body(message.get("body", b""), message.get("more_body", False))
        elif self.progress is DUE and kind == "http.response.start":
            self.start_response(message["status"], message.get("headers", ()))
        elif self.progress is not UNWANTED:
            raise RuntimeError(f"{kind} does not follow a response that is {self.progress.name}")

    # -- the response ------------------------------------------------------------------------------

    def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a whole response."""
        own = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        self.start_response(status, [*own, (b"content-length", b"%d" % len(body))])
        self.send_body(body)

    def start_response(self, status: int, headers: Headers) -> None:
        """Send the head of a response, together with the first part of its body."""
        self.progress = STARTED
        self.expects_continue = False
        lines = [*self._default_headers, *headers]
        by_name = dict(lines)
        if b"connection" not in by_name and not self.keep_alive:
            lines.append((b"connection", b"close"))
        elif by_name.get(b"connection", b"").lower() == b"close":
            self.keep_alive = False
        if self.scope["method"] == "HEAD" or status in BODILESS:
            self._left = 0
        elif b"content-length" in by_name:
            self._left = int(by_name[b"content-length"])
        elif self.scope["http_version"] != "1.0":
            lines.append((b"transfer-encoding", b"chunked"))
        self._flow.hold(head_of(status, lines))

    def send_body(self, body: bytes, more: bool = False) -> None:
        """Send a part of a response's body."""
        if self.scope["method"] == "HEAD":
            body = b""
        if self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("the response's body has another length than its Content-Length")
        elif self.scope["http_version"] != "1.0":  # which has no chunks
            chunk = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
            body = chunk if more else chunk + b"0\r\n\r\n"
        self._flow.write(body)
        if not more:
            self.progress = COMPLETE
            self._news.set()
            self._on_complete()


def head_of(status: int, headers: Headers) -> bytes:
    """Return the head of a response. Raises ValueError for a header that would be more than one line."""
    lines = [b"%s: %s" % pair for pair in headers]
    content = b"".join(lines)
    if content != content.translate(None, CONTROL):
        raise ValueError("a header contains control characters")
    return b"\r\n".join([STATUS_LINES[status], *lines, b"", b""])
