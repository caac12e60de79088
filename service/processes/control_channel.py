"""The control channel between the main process and a child: commands to the child and reports from it, on one socket.

A command is one byte. Some commands come with a descriptor of a socket or of a file in memory. A child without a free
descriptor reports that it is missing (`MISSING`), and the main process sends the command again. A child follows only
these commands and ignores signals: a terminal or an init system may signal all processes at once, but only the main
process knows the order in which they must stop. When the main process is gone, the channel closes and its children end.

A report is a line that contains a JSON object or is empty. An empty report is a heartbeat: the child serves. A child
starts to report when it serves, and then reports regularly.
"""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from service import liveness
from service.processes.process_signals import die_with_parent, end_within
from service.shutdown import Stage

LEAVE, DRAIN, HURRY = b"L", b"D", b"H"
STAGES = {LEAVE: Stage.LEAVING, DRAIN: Stage.DRAINING, HURRY: Stage.HURRYING}  # to enter
KEYS = b"K"  # comes with a file in memory that contains all API keys
# Comes with one end of a channel to the process of a device; the byte is this and the device's number. From the process
# of a device, a channel to an HTTP process has the number 0.
PEER = 0x80
MISSING = "missing"  # in a report: the command whose descriptor did not arrive

Report = Mapping[str, object]


class ChildControl:
    """The main process's end. It sends commands, and calls `reported` with each report, `{}` for a heartbeat."""

    def __init__(self, end: socket.socket, reported: Callable[[Report], None]) -> None:
        end.setblocking(False)
        self._end = end
        self._reported = reported
        self._rest = b""
        asyncio.get_running_loop().add_reader(end, self._read)

    def send(self, command: bytes, end: socket.socket | None = None) -> bool:
        """Return whether a command was sent: the child may have ended, or its full buffer be unread."""
        return self._send(command, [] if end is None else [end.fileno()])

    def send_keys(self, keys: bytes) -> bool:
        """Return whether API keys, as JSON in a file in memory because of their size, were sent."""
        try:
            with open(os.memfd_create("keys"), "wb") as file:
                file.write(keys)
                file.flush()
                file.seek(0)
                return self._send(KEYS, [file.fileno()])
        except OSError:
            return False

    def _send(self, command: bytes, descriptors: list[int]) -> bool:
        try:
            socket.send_fds(self._end, [command], descriptors)
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
        except ConnectionResetError:  # the child has ended without reading all commands
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._end)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._reported(json.loads(line) if line else {})


class ControlCommand(NamedTuple):
    """A command as a child receives it. end: the socket of a channel; text: the JSON of KEYS"""

    kind: bytes
    end: socket.socket | None = None
    text: bytes = b""

    @property
    def device(self) -> int:
        """The number of the device at the other end of a channel."""
        return self.kind[0] - PEER


def channel_to(device: int) -> bytes:
    """Return the command that comes with one end of a channel to the process of a device."""
    return bytes([PEER + device])


def has_descriptor(kind: bytes) -> bool:
    return kind == KEYS or kind[0] >= PEER


class ControlChannel(AsyncIterator[ControlCommand]):
    """The child's end. Iterate over it for commands; the iteration ends when the main process is gone.

    The channel keeps one descriptor in reserve for a descriptor that comes with a command, because client connections
    may use all other descriptors of the process.

    end_within_s: seconds within which this process ends after the main process is gone
    """

    def __init__(self, end: socket.socket, end_within_s: float | None = None) -> None:
        end.setblocking(False)
        self._end = end
        self._end_within_s = end_within_s
        self._reporting = asyncio.Lock()
        self._reserve: int | None = None
        self._keep_reserve()

    async def report(self, report: Report) -> None:
        """Send a report to the main process, unless it is gone."""
        line = json.dumps(report).encode() if report else b""
        async with self._reporting:
            if self._end.fileno() >= 0:
                with suppress(BrokenPipeError, ConnectionResetError):
                    await asyncio.get_running_loop().sock_sendall(self._end, line + b"\n")

    async def report_missing(self, kind: bytes) -> None:
        """Report that the descriptor of a command is missing."""
        await self.report({MISSING: kind[0]})

    async def beat(self) -> None:
        """Send a heartbeat to the main process at regular intervals, forever."""
        die_with_parent(False)
        while True:
            await self.report({})
            await asyncio.sleep(liveness.HEARTBEAT_S)

    async def __anext__(self) -> ControlCommand:
        while True:
            await self._readable()
            kind, descriptors = self._receive()
            if not kind:
                self._free_reserve()
                self._end.close()
                if self._end_within_s is not None:
                    end_within(self._end_within_s)
                raise StopAsyncIteration
            if not has_descriptor(kind):
                return ControlCommand(kind)
            if descriptors:
                return command_with_descriptor(kind, descriptors[0])
            await asyncio.sleep(liveness.DESCRIPTOR_MISSING_S)
            await self.report_missing(kind)

    def _receive(self) -> tuple[bytes, list[int]]:
        """Receive the next command's byte, and its descriptors unless the process has no free one."""
        self._free_reserve()
        try:
            kind, descriptors, _, _ = socket.recv_fds(self._end, 1, 1)
        except ConnectionResetError:  # the main process has ended without reading all reports
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


def command_with_descriptor(kind: bytes, descriptor: int) -> ControlCommand:
    """Return the command of this kind with its descriptor."""
    if kind == KEYS:
        with open(descriptor, "rb") as file:
            return ControlCommand(kind, text=file.read())
    return ControlCommand(kind, end=socket.socket(fileno=descriptor))
