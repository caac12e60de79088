"""What the main process tells its children: a byte at a time on a socket, which another socket may come along with.

A child obeys these alone, and no signal: a terminal or an init system may signal every process at once, and only the
main process knows in which order to stop. When it is gone, the orders end, and so do its children.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress

DRAIN = b"D"  # answer what was accepted, then end
PEER = b"P"  # comes with one end of a channel to another process


def give(orders: socket.socket, order: bytes, end: socket.socket | None = None) -> None:
    """Tell a child; one that has just gone is told nothing."""
    with suppress(BrokenPipeError, ConnectionResetError):
        socket.send_fds(orders, [order], [] if end is None else [end.fileno()])


class Orders(AsyncIterator[tuple[bytes, socket.socket | None]]):
    """A child's end: iterate it for orders, each with the socket that came along, until the main process is gone."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end

    async def __anext__(self) -> tuple[bytes, socket.socket | None]:
        await self._readable()
        order, descriptors, _, _ = socket.recv_fds(self._end, 1, 1)
        if not order:
            self._end.close()
            raise StopAsyncIteration
        return order, socket.socket(fileno=descriptors[0]) if descriptors else None

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._end, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._end)
