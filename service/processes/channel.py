"""The message channel between two processes over a stream socket: a JSON header, and arrays in their memory layout.

    frame = length of header, length of arrays (u32 each, little-endian), header, the arrays' bytes
    header = [role, number, kind, fields]

Both ends run the same version on the same machine. The frames therefore need no version number and no byte swapping.
`service.processes.peer` defines the roles and numbers.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Literal, cast

import orjson
from numpy.typing import NDArray

from service.processes.messages import KINDS, Message

LENGTHS = struct.Struct("<II")

Role = Literal["request", "part", "reply", "notice"]


def frame(role: Role, number: int, message: Message, *arrays: NDArray[Any] | bytes) -> bytes:
    header = orjson.dumps([role, number, type(message).__name__, message])
    body = b"".join(part if isinstance(part, bytes) else part.tobytes() for part in arrays)
    return LENGTHS.pack(len(header), len(body)) + header + body


class Channel(asyncio.Protocol):
    """One end of a channel.

    received: called with the role, the number, the message and the arrays of each frame
    lost: called once, when the other end has closed
    broken: whether received data could not be processed, because of a bug in the service; the socket is then closed
    """

    def __init__(
        self, received: Callable[[Role, int, Message, bytes], None], lost: Callable[[], None]
    ) -> None:
        self._received = received
        self._lost = lost
        self.broken = False
        self._buffer = bytearray()
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports are not subclasses of asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(
        self, role: Role, number: int, message: Message, *arrays: NDArray[Any] | bytes
    ) -> None:
        """Send a message, or drop it if the other end has closed, which `lost` reports.

        All messages of one turn of the event loop are written together, because waking the other end costs more.
        """
        if not self.open:
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frame(role, number, message, *arrays))

    def _flush(self) -> None:
        if self._unsent and self._transport is not None and self.open:
            self._transport.writelines(self._unsent)
        self._unsent = []

    def close(self) -> None:
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        # The event loop logs an exception and closes the connection.
        self.broken = True
        self._receive(data)
        self.broken = False

    def _receive(self, data: bytes) -> None:
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= LENGTHS.size:
            header, body = LENGTHS.unpack_from(self._buffer, start)
            middle = start + LENGTHS.size + header
            if len(self._buffer) < middle + body:
                break
            role, number, kind, fields = orjson.loads(self._buffer[start + LENGTHS.size : middle])
            start = middle + body
            message = KINDS[kind](**fields)
            with memoryview(self._buffer) as buffer:
                arrays = bytes(buffer[middle:start])
            self._received(role, number, message, arrays)
        del self._buffer[:start]

    def connection_lost(self, _: Exception | None) -> None:
        self._lost()
