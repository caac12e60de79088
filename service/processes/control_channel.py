"""What the main process tells its children and what they tell it, on one socket for each child.

An order is a byte, which a descriptor may come along with: another socket, or a file in memory. A child that finds no
room for the descriptor reports that it is missing (`MISSING`), and the main process sends it again. A child obeys these
alone, and no signal: a terminal or an init system may signal every process at once, and only the main process knows in
which order to stop. When it is gone, the orders end, and so do its children.

A report is a line: an object in JSON, or nothing, which says no more than that the child serves and lives. A child
begins to report when it serves, and then never falls silent.
"""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from service import health
from service.process_signals import die_with_parent, end_within

LEAVE = b"L"  # report not ready, and still answer requests
DRAIN = b"D"  # answer what was accepted, then end
PEER = b"P"  # comes with one end of a channel to another process
KEYS = b"K"  # comes with a file in memory that holds all API keys

WITH_DESCRIPTOR = {PEER, KEYS}
MISSING = "missing"  # in a report: the order whose descriptor did not arrive

Report = Mapping[str, object]


class ChildControl:
    """The main process's end: it gives orders, and calls `reported` with each report, `{}` for a bare one."""

    def __init__(self, end: socket.socket, reported: Callable[[Report], None]) -> None:
        end.setblocking(False)
        self._end = end
        self._reported = reported
        self._rest = b""
        asyncio.get_running_loop().add_reader(end, self._read)

    def give(self, order: bytes, end: socket.socket | None = None) -> bool:
        """Send an order; returns whether it was sent.

        It is not to a child that has just gone, or that has read nothing for so long that no more fits.
        """
        return self._send(order, [] if end is None else [end.fileno()])

    def give_keys(self, keys: bytes) -> bool:
        """Send API keys, as JSON, which are no part of the stream because they may be larger than its buffer."""
        try:
            with open(os.memfd_create("keys"), "wb") as file:
                file.write(keys)
                file.flush()
                file.seek(0)
                return self._send(KEYS, [file.fileno()])
        except OSError:
            return False

    def _send(self, order: bytes, descriptors: list[int]) -> bool:
        try:
            socket.send_fds(self._end, [order], descriptors)
        except OSError:
            return False
        return True

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


class Order(NamedTuple):
    """An order as a child gets it.

    end: the socket of PEER; text: the JSON of KEYS
    """

    kind: bytes
    end: socket.socket | None = None
    text: bytes = b""


class ControlChannel(AsyncIterator[Order]):
    """A child's end: iterate it for orders, until the main process is gone.

    One descriptor is held in reserve for what comes along with an order, because clients' connections may take all
    others that the process is allowed.

    end_within_s: when the main process is gone, this process ends within so many seconds
    """

    def __init__(self, end: socket.socket, end_within_s: float | None = None) -> None:
        end.setblocking(False)
        self._end = end
        self._end_within_s = end_within_s
        self._saying = asyncio.Lock()
        self._reserve: int | None = None
        self._keep_reserve()

    async def report(self, report: Report) -> None:
        """Send a report to the main process, unless it is gone."""
        line = json.dumps(report).encode() if report else b""
        async with self._saying:
            if self._end.fileno() >= 0:
                with suppress(BrokenPipeError, ConnectionResetError):
                    await asyncio.get_running_loop().sock_sendall(self._end, line + b"\n")

    async def beat(self) -> None:
        """Tell it again and again that this process lives and serves."""
        die_with_parent(False)
        while True:
            await self.report({})
            await asyncio.sleep(health.HEARTBEAT_S)

    async def __anext__(self) -> Order:
        while True:
            await self._readable()
            kind, descriptors = self._receive()
            if not kind:
                self._free_reserve()
                self._end.close()
                if self._end_within_s is not None:
                    end_within(self._end_within_s)
                raise StopAsyncIteration
            if kind not in WITH_DESCRIPTOR:
                return Order(kind)
            if descriptors:
                return order_with(kind, descriptors[0])
            await asyncio.sleep(health.DESCRIPTOR_MISSING_S)
            await self.report({MISSING: kind.decode()})

    def _receive(self) -> tuple[bytes, list[int]]:
        """The next order's byte and descriptors; the system drops a descriptor for which there is no room."""
        self._free_reserve()
        try:
            kind, descriptors, _, _ = socket.recv_fds(self._end, 1, 1)
        except ConnectionResetError:  # gone, and had not heard all that we said
            return b"", []
        finally:
            self._keep_reserve()
        return kind, descriptors

    def _keep_reserve(self) -> None:
        with suppress(OSError):
            self._reserve = os.open(os.devnull, os.O_RDONLY)

    def _free_reserve(self) -> None:
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._end, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._end)


def order_with(kind: bytes, descriptor: int) -> Order:
    """The order of this kind that a descriptor came along with."""
    if kind == PEER:
        return Order(kind, end=socket.socket(fileno=descriptor))
    with open(descriptor, "rb") as file:
        return Order(kind, text=file.read())
