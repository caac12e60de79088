"""Flow control of one connection: reads in small pieces with pauses, and writes that the client must read in time."""

import asyncio
import select
from collections.abc import Callable
from contextlib import suppress
from math import inf

PIECE = 65_536  # largest number of bytes in one read
BODY_PIECE = 2  # pieces in one read, for the body of the current request
LEAST_PIECE = 4096
STALLED_S = 30.0  # time in which a client must read STALLED_BYTES of a long response
STALLED_BYTES = 65_536


def piece_size(memory: int, connections: int) -> int:
    """Return the bytes per read, so that this number of connections with one piece each stays within `memory` bytes."""
    return max(LEAST_PIECE, min(PIECE, memory // connections))


class HangupWatcher:
    """Watches sockets that are not read. It calls a function when the client closes its direction or the connection.

    The event loop detects this only on a socket that it reads to its end.
    """

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._calls: dict[int, Callable[[], object]] = {}

    def watch(self, descriptor: int, call: Callable[[], object]) -> None:
        if self._epoll is None:
            self._epoll = select.epoll()
            asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._report)
        self._epoll.register(descriptor, select.EPOLLRDHUP)
        self._calls[descriptor] = call

    def forget(self, descriptor: int) -> None:
        if self._calls.pop(descriptor, None) is not None and self._epoll is not None:
            with suppress(OSError):
                self._epoll.unregister(descriptor)

    def _report(self) -> None:
        assert self._epoll is not None
        for descriptor, _ in self._epoll.poll(0):
            call = self._calls.get(descriptor)
            self.forget(descriptor)
            if call is not None:
                call()


class Timer:
    """A timer that can be set and stopped repeatedly."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.handle: asyncio.TimerHandle | None = None

    def set(self, seconds: float, ring: Callable[..., None], *arguments: object) -> None:
        self.stop()
        self.handle = self._loop.call_later(seconds, ring, *arguments)

    def stop(self) -> None:
        if self.handle is not None:
            self.handle.cancel()
            self.handle = None


class FlowControl(asyncio.BufferedProtocol):
    """A protocol whose reads can pause, and whose client must read in time what is written."""

    def __init__(self, hangups: HangupWatcher) -> None:
        self.loop = asyncio.get_running_loop()
        self.read_paused = False
        self._hangups = hangups
        self._writable = asyncio.Event()
        self._writable.set()
        self._stalled = Timer(self.loop)
        self._held = b""
        self._written = 0  # bytes

    def may_read(self) -> bool:
        """Return whether reading may resume."""
        return True

    def end(self) -> None:
        """Close the connection, because the client has disconnected while reading is paused."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._descriptor: int = transport.get_extra_info("socket").fileno()

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        self._stalled.stop()
        self._hangups.forget(self._descriptor)

    # -- reads -------------------------------------------------------------------------------------

    def pause_reading(self) -> None:
        if not self.read_paused and not self.transport.is_closing():
            self.read_paused = True
            self.transport.pause_reading()
            self._hangups.watch(self._descriptor, self.end)

    def resume_reading(self) -> None:
        if self.read_paused and self.may_read():
            self.read_paused = False
            self._hangups.forget(self._descriptor)
            self.transport.resume_reading()

    def rest(self) -> None:
        """Pause reading until the next turn of the event loop."""
        if not self.read_paused and not self.transport.is_closing():
            self.transport.pause_reading()
            self.loop.call_soon(self._end_rest)

    def _end_rest(self) -> None:
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def has_data(self) -> bool:
        """Return whether the socket has unread data, or an unread end of data."""
        socket = select.poll()
        socket.register(self._descriptor, select.POLLIN)
        return bool(socket.poll(0))

    # -- writes ------------------------------------------------------------------------------------

    def hold(self, head: bytes) -> None:
        """Keep a head for the next write: two writes would take two system calls and wake the client twice."""
        self._held = head

    def flush(self) -> None:
        """Send a head that no body follows."""
        if self._held:
            self.write(b"")

    def write(self, data: bytes) -> None:
        if self._held:
            data, self._held = self._held + data, b""
        self._written += len(data)
        self.transport.write(data)

    def pause_writing(self) -> None:
        self._writable.clear()
        self.watch_reader()

    def resume_writing(self) -> None:
        self._writable.set()
        if not self.transport.is_closing():
            self._stalled.stop()

    async def drain(self) -> None:
        """Wait until the client has read enough for more to be written."""
        await self._writable.wait()

    def watch_reader(self, before: float = inf) -> None:
        """Drop the connection of a client that does not read, and so free the data that waits for it."""
        if not self.unread:
            return
        if self.unread > before - STALLED_BYTES:
            self.abort()
        else:
            self._stalled.set(STALLED_S, self.watch_reader, self.unread)

    @property
    def unread(self) -> int:
        """Bytes that wait for the client."""
        return self.transport.get_write_buffer_size()

    @property
    def sent(self) -> int:
        """Bytes that the system has taken."""
        return self._written - self.unread

    def abort(self) -> None:
        self.transport.abort()
