"""Load generators on plain sockets: closed loop (a fixed concurrency) and open loop (a fixed rate).

They share the machine's cores with the server under test, so they do little per request, and measure their CPU time.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

REFUSED = 0  # the "status" of a connection that the server closed without an answer
WARM_MOST_S = 30.0  # for every connection to be answered once


@dataclass(frozen=True)
class Measured:
    """The answers of a window with status 200.

    latencies: in seconds
    others: the number of answers with another status, by status
    cpu_s: CPU time of the generator itself, in a closed loop
    numbers: the index of each answer's request, in a closed loop
    lasted: seconds from the first request to the last, in a closed loop
    """

    seconds: float
    latencies: np.ndarray
    others: Counter[int] = field(default_factory=Counter)
    cpu_s: float = 0.0
    numbers: np.ndarray | None = None
    lasted: float = 0.0

    @property
    def requests(self) -> int:
        return len(self.latencies)

    @property
    def rate(self) -> float:
        """Answers per second."""
        return self.requests / self.seconds

    def percentile(self, share: float) -> float:
        """Return a percentile in milliseconds; NaN without answers."""
        return float(np.percentile(self.latencies, share)) * 1000 if self.requests else float("nan")


def request_bytes(path: str, body: bytes, **headers: str) -> bytes:
    """Return a request as bytes; underscores in a header's name become hyphens."""
    fields = {"Host": "bench", "Content_Type": "application/json", **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    head = "\r\n".join([f"POST {path} HTTP/1.1", *lines, f"Content-Length: {len(body)}"])
    return f"{head}\r\n\r\n".encode() + body


class Connection(asyncio.Protocol):
    """One request at a time; `answered(self, status, body)` is called for each."""

    def __init__(self, answered: "Answered") -> None:
        self.answered = answered
        self.sent_at = 0.0
        self.number = -1
        self.closed = False
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no such class

    def send(self, request: bytes, sent_at: float) -> None:
        """Send a request. sent_at: when it was due, by `time.perf_counter`"""
        assert self._transport is not None
        self.sent_at = sent_at
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        head, body = bytes(self._received[:end]).lower(), bytes(self._received[end + 4 :])
        if b"\r\ntransfer-encoding:" in head:  # in chunks: counted, not read
            complete = body.endswith(b"0\r\n\r\n")
        else:
            length = head.partition(b"\r\ncontent-length:")[2].partition(b"\r")[0]
            complete = len(body) >= int(length or 0)
        if complete:
            self._received = bytearray()
            self.answered(self, int(head[9:12]), body)

    def connection_lost(self, _: Exception | None) -> None:
        self.closed = True
        if self.sent_at:
            self.answered(self, REFUSED, b"")

    def close(self) -> None:
        self.sent_at = 0.0
        if self._transport is not None:
            self._transport.abort()


Answered = Callable[[Connection, int, bytes], None]
OnAnswer = Callable[[int, bytes], None]  # the index of a request, and the body of its answer


async def connect(port: int, answered: Answered) -> Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(answered), "127.0.0.1", port)
    return connection


async def closed_loop(
    port: int,
    requests: Sequence[bytes],
    connections: int,
    seconds: float,
    warm_s: float = 1.0,
    *,
    retry: bool = False,
    on_answer: OnAnswer | None = None,
) -> Measured:
    """Keep `connections` requests in flight: each connection sends its next one as soon as it is answered.

    Requests are sent in order, from the first. Answers within the window count; it begins after `warm_s`, and when
    every connection was answered once, because until then they all send at the same moment.
    retry: count an answer that is not 200, and send the next request at once
    on_answer: called for each answer with status 200, also before the window
    Raises RuntimeError for an answer that is not 200, unless `retry` is set.
    """
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[None] = loop.create_future()
    warm: asyncio.Future[None] = loop.create_future()
    latencies: list[float] = []
    numbers: list[int] = []
    others: Counter[int] = Counter()
    began = time.perf_counter()
    begin = end = math.inf
    sent = 0

    def send(connection: Connection, now: float) -> None:
        nonlocal sent
        connection.number = sent % len(requests)
        connection.send(requests[connection.number], now)
        sent += 1

    def answered(connection: Connection, status: int, body: bytes) -> None:
        now = time.perf_counter()
        if status != 200 and not (retry and status):
            if not failed.done():
                failed.set_exception(RuntimeError(f"answered {status}: {body.decode()}"))
            return
        if status == 200 and on_answer:
            on_answer(connection.number, body)
        if status != 200 and begin <= now < end:
            others[status] += 1
        elif begin <= now < end:
            latencies.append(now - connection.sent_at)
            numbers.append(connection.number)
        if connection in unanswered:
            unanswered.discard(connection)
            if not unanswered:
                warm.set_result(None)
        if now < end:
            send(connection, now)

    opened = [await connect(port, answered) for _ in range(connections)]
    unanswered = {*opened}
    try:
        for connection in opened:
            send(connection, time.perf_counter())
        await asyncio.wait([failed], timeout=warm_s)
        first = asyncio.FIRST_COMPLETED
        await asyncio.wait([failed, warm], timeout=WARM_MOST_S, return_when=first)
        begin = time.perf_counter()
        end = begin + seconds
        before = time.process_time()
        await asyncio.wait([failed], timeout=seconds)
        cpu_s = time.process_time() - before
        if failed.done():
            failed.result()
    finally:
        for connection in opened:
            connection.close()
    return Measured(
        seconds,
        np.asarray(latencies),
        others=others,
        cpu_s=cpu_s,
        numbers=np.asarray(numbers, dtype=int),
        lasted=end - began,
    )


async def open_loop(
    port: int,
    requests: Sequence[bytes],
    rate: float,
    seconds: float,
    *,
    warm_s: float = 1.0,
    patience_s: float = 10.0,
    most: int = 900,
    seed: int = 0,
    on_answer: OnAnswer | None = None,
) -> Measured:
    """Send `rate` requests per second at random moments (Poisson), independently of the answers.

    A latency begins when its request is due, so that it includes the stalls of a server (no coordinated omission).
    Requests that are due in the window count if they are answered within `patience_s` after it. At most `most`
    connections are open; a request without a free connection waits for one, and its latency includes the wait.
    on_answer: called for each answer with status 200, also before the window
    """
    loop = asyncio.get_running_loop()
    rng = np.random.default_rng(seed)
    count = rng.poisson(rate * (warm_s + seconds))
    moments = np.sort(rng.uniform(0.0, warm_s + seconds, count))
    begin = time.perf_counter() + warm_s
    idle: deque[Connection] = deque()
    waiting: deque[tuple[int, float]] = deque()
    latencies: list[float] = []
    others: Counter[int] = Counter()
    everything: list[Connection] = []
    left = int(count)
    done: asyncio.Future[None] = loop.create_future()

    def send_next(connection: Connection) -> None:
        connection.number, due = waiting.popleft()
        connection.send(requests[connection.number], due)

    def answered(connection: Connection, status: int, body: bytes) -> None:
        nonlocal left
        sent_at, connection.sent_at = connection.sent_at, 0.0
        if status == 200 and on_answer:
            on_answer(connection.number, body)
        if sent_at >= begin:
            if status == 200:
                latencies.append(time.perf_counter() - sent_at)
            else:
                others[status] += 1
        left -= 1
        if not left and not done.done():
            done.set_result(None)
        if connection.closed:
            everything.remove(connection)
        elif waiting:
            send_next(connection)
        else:
            idle.append(connection)

    async def grow() -> None:
        connection = await connect(port, answered)
        everything.append(connection)
        if waiting:
            send_next(connection)
        else:
            idle.append(connection)

    growing: set[asyncio.Task[None]] = set()
    try:
        for number, moment in enumerate(moments):
            due = begin - warm_s + moment
            if (pause := due - time.perf_counter()) > 0:
                await asyncio.sleep(pause)
            waiting.append((number % len(requests), due))
            while idle and idle[0].closed:
                idle.popleft()
            if idle:
                send_next(idle.popleft())
            elif len(everything) + len(growing) < most:
                task = loop.create_task(grow())
                growing.add(task)
                task.add_done_callback(growing.discard)
        if left:
            await asyncio.wait([done], timeout=patience_s)
    finally:
        for connection in everything:
            connection.close()
    if unanswered := int((moments >= warm_s).sum()) - len(latencies) - sum(others.values()):
        others[REFUSED] += unanswered
    return Measured(seconds, np.asarray(latencies), others)
