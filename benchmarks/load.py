"""A closed-loop load generator on plain sockets: so little work per request that two cores can share it."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Measured:
    """requests: answered in the window; latencies in seconds."""

    connections: int
    requests: int
    seconds: float
    latencies: np.ndarray

    @property
    def rate(self) -> float:
        return self.requests / self.seconds

    def percentile(self, share: float) -> float:
        """Milliseconds."""
        return float(np.percentile(self.latencies, share)) * 1000


def request_bytes(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def closed_loop(
    port: int, requests: Sequence[bytes], connections: int, seconds: float, warm_s: float = 1.0
) -> Measured:
    """Keep `connections` requests in flight, each connection its next as soon as it is answered.

    Requests are taken in turn, from the first. What ends within the window after `warm_s` counts.
    """
    turn = iter(range(2**62))
    begin = time.perf_counter() + warm_s
    end = begin + seconds
    latencies: list[float] = []

    async def connection() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with closing(writer):
            while (sent := time.perf_counter()) < end:
                writer.write(requests[next(turn) % len(requests)])
                await _read_answer(reader)
                done = time.perf_counter()
                if begin <= done <= end:
                    latencies.append(done - sent)

    await asyncio.gather(*(connection() for _ in range(connections)))
    return Measured(connections, len(latencies), seconds, np.asarray(latencies))


async def _read_answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"unexpected answer: {head.decode()}")
    length = next(
        int(line.split(b":")[1])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length:")
    )
    return await reader.readexactly(length)
