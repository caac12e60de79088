"""A server that refuses everything and does nothing: what asking alone costs the machine.

python -m benchmarks.lib.noop_server PORT
"""

import asyncio
import sys
from typing import cast

import uvloop

READY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
REFUSAL = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n"


class Refusing(asyncio.Protocol):
    """One request at a time, as `benchmarks.lib.load_generator` sends them."""

    def __init__(self) -> None:
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no such class

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        length = head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r")[0]
        if found and len(body) >= int(length or 0):
            self._transport.write(READY if head.startswith(b"GET") else REFUSAL)
            self._received.clear()


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Refusing, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
