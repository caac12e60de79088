"""Flow control of reads: small pieces with pauses, during which the server detects that a client disconnects."""

import asyncio
import select
from collections.abc import Callable
from contextlib import suppress

from uvicorn.protocols.http.flow_control import FlowControl

PIECE = 65_536  # largest number of bytes in one read
BODY_PIECE = 2  # pieces in one read, for the body of the current request
LEAST_PIECE = 4096


def piece_size(memory: int, connections: int) -> int:
    """Return the bytes per read, so that this number of connections with one piece each stays within `memory` bytes."""
    return max(LEAST_PIECE, min(PIECE, memory // connections))


class Connection(asyncio.Protocol):
    """A protocol that a `Reader` passes data to.

    in_body: whether the next data is the rest of the current request's body
    """

    in_body = False

    def rest(self) -> None:
        """Pause reading until the next turn of the event loop."""


class Reader(asyncio.BufferedProtocol):
    """Passes the data of one connection on, in pieces no larger than a buffer that all connections share.

    After a full piece, the connection pauses until the next turn of the event loop. Otherwise the event loop would read
    many more pieces before it serves other connections.
    """

    def __init__(self, connection: Connection, buffer: memoryview) -> None:
        self._connection = connection
        self._received = connection.data_received
        self._large, self._small = buffer, buffer[: len(buffer) // BODY_PIECE]
        self._piece = self._small

    def get_buffer(self, sizehint: int) -> memoryview:
        self._piece = self._large if self._connection.in_body else self._small
        return self._piece

    def buffer_updated(self, nbytes: int) -> None:
        piece = self._piece
        self._received(bytes(piece[:nbytes]))
        if nbytes == len(piece):
            self._connection.rest()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


class HangupWatcher:
    """Watches sockets that are not read. It calls a function when the client closes its direction or the connection.

    The event loop detects this only on a socket that it reads to its end. Without epoll, it is not detected.
    """

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._calls: dict[int, Callable[[], object]] = {}

    def watch(self, descriptor: int, call: Callable[[], object]) -> None:
        if self._epoll is None:
            if not hasattr(select, "epoll"):
                return
            self._epoll = select.epoll()
            asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._notice)
        self._epoll.register(descriptor, select.EPOLLRDHUP)
        self._calls[descriptor] = call

    def forget(self, descriptor: int) -> None:
        if self._calls.pop(descriptor, None) is not None and self._epoll is not None:
            with suppress(OSError):
                self._epoll.unregister(descriptor)

    def _notice(self) -> None:
        assert self._epoll is not None
        for descriptor, _ in self._epoll.poll(0):
            call = self._calls.get(descriptor)
            self.forget(descriptor)
            if call is not None:
                call()


class ReadFlow(FlowControl):
    """Pauses and resumes one connection through uvicorn's interface. It resumes only if `may_read` allows it.

    left: called when the client disconnects during a pause
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        hangups: HangupWatcher,
        may_read: Callable[[], bool],
        left: Callable[[], object],
    ) -> None:
        super().__init__(transport)
        self._hangups = hangups
        self._descriptor: int = transport.get_extra_info("socket").fileno()
        self._may_read = may_read
        self._left = left

    def pause_reading(self) -> None:
        if not self.read_paused and not self._transport.is_closing():
            super().pause_reading()
            self._hangups.watch(self._descriptor, self._left)

    def resume_reading(self) -> None:
        if self.read_paused and self._may_read():
            self.forget()
            super().resume_reading()

    def has_data(self) -> bool:
        """Return whether the socket has unread data, or an unread end of data."""
        socket = select.poll()
        socket.register(self._descriptor, select.POLLIN)
        return bool(socket.poll(0))

    def rest(self) -> None:
        """Pause reading until the next turn of the event loop."""
        if not self.read_paused and not self._transport.is_closing():
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if not self.read_paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def forget(self) -> None:
        """Stop watching for a disconnect of the client."""
        self._hangups.forget(self._descriptor)
