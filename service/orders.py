"""What the main process tells its children and what they tell it, on one socket for each child.

An order is a byte, which another socket may come along with. A child obeys these alone, and no signal: a terminal or an
init system may signal every process at once, and only the main process knows in which order to stop. When it is gone,
the orders end, and so do its children.

A report is a line: an object in JSON, or nothing, which says no more than that the child serves and lives. A child
begins to report when it serves, and then never falls silent.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress

LEAVE = b"L"  # say that others should be asked, and answer who asks all the same
DRAIN = b"D"  # answer what was accepted, then end
PEER = b"P"  # comes with one end of a channel to another process

BEAT_S = 0.25  # between signs of life

Report = Mapping[str, object]


class Link:
    """The main process's end: it gives orders, and calls `reported` with each report, `{}` for a bare one."""

    def __init__(self, end: socket.socket, reported: Callable[[Report], None]) -> None:
        end.setblocking(False)
        self._end = end
        self._reported = reported
        self._rest = b""
        asyncio.get_running_loop().add_reader(end, self._read)

    def give(self, order: bytes, end: socket.socket | None = None) -> None:
        """A child that has just gone, or has read nothing for so long that no more fits, is told nothing."""
        with suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):
            socket.send_fds(self._end, [order], [] if end is None else [end.fileno()])

    def close(self) -> None:
        if self._end.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._end)
            self._end.close()

    def _read(self) -> None:
        try:
            data = self._end.recv(65_536)
        except ConnectionResetError:  # gone, and had not heard all that we said
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._end)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._reported(json.loads(line) if line else {})


class Orders(AsyncIterator[tuple[bytes, socket.socket | None]]):
    """A child's end: iterate it for orders, each with the socket that came along, until the main process is gone."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._saying = asyncio.Lock()

    async def report(self, report: Report) -> None:
        """Tell the main process; when it is gone, nobody."""
        line = json.dumps(report).encode() if report else b""
        async with self._saying:
            if self._end.fileno() >= 0:
                with suppress(BrokenPipeError, ConnectionResetError):
                    await asyncio.get_running_loop().sock_sendall(self._end, line + b"\n")

    async def beat(self) -> None:
        """Tell it again and again that this process lives."""
        while True:
            await self.report({})
            await asyncio.sleep(BEAT_S)

    async def __anext__(self) -> tuple[bytes, socket.socket | None]:
        await self._readable()
        try:
            order, descriptors, _, _ = socket.recv_fds(self._end, 1, 1)
        except ConnectionResetError:  # gone, and had not heard all that we said
            order, descriptors = b"", []
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
