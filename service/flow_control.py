"""How connections are read: in small pieces, with pauses, during which a client that leaves is noticed."""

import asyncio
import select
from collections.abc import Callable
from contextlib import suppress

from uvicorn.protocols.http.flow_control import FlowControl

PIECE = 65_536  # bytes that are read at once, at most
LEAST_PIECE = 4096


def piece_size(memory: int, connections: int) -> int:
    """Bytes to read at once, so that this number of connections with one piece each stays within `memory` bytes."""
    return max(LEAST_PIECE, min(PIECE, memory // connections))


class Reader(asyncio.BufferedProtocol):
    """Passes the data of one connection to a protocol, in pieces no larger than a buffer that connections share."""

    def __init__(self, protocol: asyncio.Protocol, buffer: memoryview) -> None:
        self._buffer = buffer
        self._protocol = protocol
        self._received = protocol.data_received

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._received(bytes(self._buffer[:nbytes]))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()


class Hangups:
    """Sockets that are not read, and what to call when their client closes its direction or the connection.

    The event loop notices that only of a socket that is read to its end. Without epoll, it is not noticed.
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


class Flow(FlowControl):
    """Pauses and resumes one connection, uvicorn's way: it resumes only where `may_read` allows.

    left: called when the client leaves during a pause
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        hangups: Hangups,
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

    def forget(self) -> None:
        """Watch no longer: the connection is lost, or is read."""
        self._hangups.forget(self._descriptor)
