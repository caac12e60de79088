"""Attacks on a server, all at once, from one process that takes a stated share of one core.

`python -m tests.e2e.attackers PORT GRPC_PORT SECONDS SHARE [KEY]` prints a line of JSON: what was sent, and the share
of a core. With a key, some attacks come from a tenant; the others come from strangers. No attack waits for an answer,
so a server that only reads gets the same kinds of bytes.
"""

import asyncio
import gzip
import json
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from itertools import cycle
from typing import cast

import uvloop

from tests import hostile

HEAD = "POST /{path} HTTP/1.1\r\nHost: quartet\r\nContent-Type: application/json\r\n{more}"
ENDLESS = "Content-Length: 1000000000000\r\n\r\n"
CONNECTIONS = 1200  # silent ones, more than a service keeps by default
SLOW_HEADS = 50
SLOW_BODIES = 50
GZIP = {"Content-Encoding": "gzip"}
# HTTP/2: the beginning of a connection, frame types, flags, and headers of HPACK's static table (RFC 7541, appendix A).
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)
DATA, HEADERS, END_STREAM, END_HEADERS = 0, 1, 1, 4
POST_HTTP, PATH = b"\x83\x86", 4
STREAMS = 100  # of a connection
CALLS = ["ModelInfer", "ModelReady", "RepositoryModelLoad", "Unknown"]
SEVERAL = ["Ada drew a comet."] * 40
LONG = "the ferry to the harbour was late " * 300
# Requests of the tasks that multiply their fields: most are refused by their product, the others are small.
PRODUCTS: list[tuple[str, dict[str, object]]] = [
    ("/zero-shot", {"inputs": "a", "labels": ["b" * 9999], "hypothesis_template": "{}" * 9999}),
    ("/zero-shot", {"inputs": SEVERAL, "labels": [str(number) for number in range(99)]}),
    ("/zero-shot", {"inputs": SEVERAL[0], "labels": ["sea", "sky"]}),
    ("/hf/pipeline/zero-shot-classification", {"inputs": "a", "candidate_labels": "," * 9999}),
    ("/rerank", {"query": LONG * 9, "documents": SEVERAL}),
    ("/vllm/score", {"text_1": LONG * 9, "text_2": SEVERAL}),
    ("/fill-mask", {"inputs": "[MASK] " * 16 + LONG * 9, "top_k": 100}),
    ("/fill-mask", {"inputs": "Ada [MASK] a comet.", "targets": ["drew", " " * 9999]}),
    ("/embed-sparse", {"inputs": SEVERAL, "return_tokens": True}),
    ("/embed-tokens", {"inputs": SEVERAL, "truncate": "window"}),
    ("/tokenize", {"inputs": [LONG * 9]}),
    ("/detokenize", {"ids": [[7] * 9999] * 9}),
]


class Governor:
    """Holds this process to a share of one core: it sleeps when its processor time is ahead of the clock."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._began = (
            time.monotonic() - time.process_time() / share
        )  # as if all had been at that share

    async def pause(self) -> None:
        """Wait until this process may go on. The event loop runs at least once."""
        await asyncio.sleep(0)
        while (ahead_s := time.process_time() / self._share + self._began - time.monotonic()) > 0:
            await asyncio.sleep(min(ahead_s, 1.0))


class Connection(asyncio.Protocol):
    """A connection that drops what it reads, or reads nothing."""

    def __init__(self, reads: bool = True) -> None:
        self.reads = reads
        self.open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.open = cast(asyncio.Transport, transport), True
        if not self.reads:
            self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False


class Attackers:
    """All attacks on one port. `sent` counts bytes and connections by attack."""

    def __init__(self, port: int, grpc_port: int, share: float, key: str) -> None:
        self.port, self.grpc_port, self.key = port, grpc_port, key
        self.authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        self.sent: Counter[str] = Counter()
        self.chance = random.Random(38)
        self.cases = [
            *(*hostile.torn(), *hostile.flipped(self.chance), *hostile.mistyped()),
            *(*hostile.numbers(), *hostile.strings(), *hostile.noise(self.chance)),
            hostile.Case("bomb", "/embed", hostile.bomb(11), {**hostile.JSON, **GZIP}),
            *(
                hostile.Case("product", path, packed(body), {**hostile.JSON, **GZIP})
                for path, body in PRODUCTS
            ),
        ]
        self.chance.shuffle(self.cases)
        self.governor = Governor(share)  # made last: what comes before takes no time of the attacks

    async def connect(self, name: str, reads: bool = True, port: int = 0) -> Connection:
        self.sent[f"{name} connections"] += 1
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(
            lambda: Connection(reads), "127.0.0.1", port or self.port
        )
        return made

    def send(self, name: str, connection: Connection, data: bytes) -> None:
        if connection.open and connection.transport.get_write_buffer_size() < 1 << 20:
            connection.transport.write(data)
            self.sent[f"{name} bytes"] += len(data)

    def head(self, path: str, tenant: bool = False, more: str = "") -> bytes:
        own = self.authorization if tenant else ""
        return HEAD.format(path=path, more=own + more).encode()

    async def silent(self) -> AsyncIterator[None]:
        """Connect and send nothing, again and again."""
        held: list[Connection] = []
        while True:
            held.append(await self.connect("silent"))
            if len(held) > CONNECTIONS:
                held.pop(0).transport.abort()
            yield

    async def slow_heads(self) -> AsyncIterator[None]:
        """Send headers byte by byte."""
        held: list[Connection] = []
        for place in cycle(range(SLOW_HEADS)):
            if place >= len(held) or not held[place].open:
                held[place : place + 1] = [await self.connect("slow heads")]
                self.send("slow heads", held[place], b"GET / HTTP/1.1\r\nX: ")
            self.send("slow heads", held[place], b"x")
            yield

    async def slow_bodies(self) -> AsyncIterator[None]:
        """Send bodies byte by byte, as a tenant."""
        begin = self.head("classify", True, "Content-Length: 1000000\r\n\r\n")
        held: list[Connection] = []
        for place in cycle(range(SLOW_BODIES)):
            if place >= len(held) or not held[place].open:
                held[place : place + 1] = [await self.connect("slow bodies")]
                self.send("slow bodies", held[place], begin)
            self.send("slow bodies", held[place], b" ")
            yield

    def chunks(self) -> AsyncIterator[None]:
        """Send an endless body in chunks of one byte, as a tenant."""
        return self.stream(
            "chunks",
            self.head("classify", True, "Transfer-Encoding: chunked\r\n\r\n"),
            b"1\r\n \r\n" * 5000,
        )

    def bodies_ahead(self) -> AsyncIterator[None]:
        """Send requests that are refused, and an endless body behind them."""
        ahead = self.head("classify", False, "Content-Length: 0\r\n\r\n") * 99
        return self.stream(
            "bodies ahead", ahead + self.head("classify", False, ENDLESS), b"x" * 65_536
        )

    def refused_bodies(self) -> AsyncIterator[None]:
        """Send an endless body without a key."""
        return self.stream("refused bodies", self.head("embed", False, ENDLESS), b"x" * 65_536)

    async def stream(self, name: str, begin: bytes, data: bytes) -> AsyncIterator[None]:
        """Send a beginning and then data without end, on one connection after the other."""
        while True:
            connection = await self.connect(name)
            self.send(name, connection, begin)
            for _ in range(2000):
                if not connection.open:
                    break
                self.send(name, connection, data)
                yield
            connection.transport.abort()

    async def unread(self) -> AsyncIterator[None]:
        """Request the largest page that needs no key, and read none of it."""
        page = b"GET /openapi.json HTTP/1.1\r\nHost: quartet\r\n\r\n" * 20
        held: list[Connection] = []
        while True:
            held.append(await self.connect("unread", reads=False))
            self.send("unread", held[-1], page)
            if len(held) > 200:
                held.pop(0).transport.abort()
            yield

    def refusals(self) -> AsyncIterator[None]:
        """Send requests with long paths and wrong keys."""
        path = "%ff" * 680
        wrong = f"GET /{path} HTTP/1.1\r\nHost: quartet\r\nAuthorization: Bearer x\r\n\r\n".encode()
        return self.stream("refusals", wrong, wrong)

    async def not_http(self) -> AsyncIterator[None]:
        """Send what is not HTTP."""
        while True:
            connection = await self.connect("not http")
            self.send("not http", connection, self.chance.randbytes(2000))
            yield
            connection.transport.close()

    async def hostile_bodies(self) -> AsyncIterator[None]:
        """Send wrong bodies as a tenant: torn, nested, mistyped, compressed."""
        for case in cycle(self.cases):
            connection = await self.connect("hostile bodies")
            lines = {**case.headers, "Content-Length": str(len(case.body))}
            more = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
            head = f"POST {case.path} HTTP/1.1\r\nHost: q\r\n{self.authorization}{more}\r\n"
            self.send("hostile bodies", connection, head.encode("latin-1") + case.body)
            yield
            connection.transport.close()

    async def calls(self, name: str, key: str, *messages: bytes) -> AsyncIterator[None]:
        """Begin calls over gRPC, each with the bytes of a message, which may lack its end; none ends its stream."""
        for number in cycle(range(STREAMS)):
            if not number:
                connection = await self.connect(name, port=self.grpc_port)
                self.send(name, connection, PREFACE)
            stream = 2 * number + 1
            call = CALLS[number % len(CALLS)]
            head = POST_HTTP + indexed(PATH, f"/inference.GRPCInferenceService/{call}")
            head += named("content-type", "application/grpc") + named("te", "trailers")
            head += named("authorization", f"Bearer {key}") if key else b""
            frames = frame(HEADERS, END_HEADERS, stream, head)
            if messages:
                frames += frame(DATA, 0, stream, messages[number % len(messages)])
            self.send(name, connection, frames)
            yield
            if number == STREAMS - 1:
                connection.transport.abort()

    def calls_of_strangers(self) -> AsyncIterator[None]:
        """Begin calls without a key, with no message, a part of one, or four million fields in 4 KiB."""
        return self.calls("calls of strangers", "", b"", *messages())

    def calls_of_a_tenant(self) -> AsyncIterator[None]:
        return self.calls("calls of a tenant", self.key, *messages())

    def attacks(self) -> list[Callable[[], AsyncIterator[None]]]:
        return [
            *(self.silent, self.slow_heads, self.slow_bodies, self.chunks, self.bodies_ahead),
            *(self.refused_bodies, self.unread, self.refusals, self.not_http, self.hostile_bodies),
            *(self.calls_of_strangers, self.calls_of_a_tenant),
        ]


def packed(body: object) -> bytes:
    return gzip.compress(json.dumps(body).encode())


def messages() -> list[bytes]:
    """Return messages of gRPC with their prefix: half of one, one of many fields, and one that is compressed."""
    many = gzip.compress(b"\x2a\0" * 4_000_000)
    return [
        struct.pack(">BI", 0, 1000) + b"\x0a\4tiny",
        struct.pack(">BI", 0, 10_000) + b"\x2a\0" * 5000,
        struct.pack(">BI", 1, len(many)) + many,
    ]


def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    """Return a frame of HTTP/2 (RFC 9113, 4.1)."""
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def text(value: str) -> bytes:
    """Return a string of HPACK, of fewer than 127 bytes."""
    return bytes([len(value)]) + value.encode()


def indexed(name: int, value: str) -> bytes:
    return bytes([name]) + text(value)


def named(name: str, value: str) -> bytes:
    return b"\0" + text(name) + text(value)


async def repeat(attack: Callable[[], AsyncIterator[None]]) -> AsyncIterator[None]:
    """Yield the steps of an attack, which begins again when the server closes its connections."""
    while True:
        with suppress(OSError):
            async for _ in attack():
                yield
        yield


async def attack_all(
    port: int, grpc_port: int, seconds: float, share: float, key: str
) -> dict[str, object]:
    """Run all attacks in turns for some seconds. Returns what was sent and this process's share of a core."""
    attackers = Attackers(port, grpc_port, share, key)
    began, used = time.monotonic(), time.process_time()
    turns = [repeat(attack) for attack in attackers.attacks()]
    while time.monotonic() - began < seconds:
        for turn in turns:
            await anext(turn)
        await attackers.governor.pause()
    taken = (time.process_time() - used) / (time.monotonic() - began)
    return {"core": round(taken, 4), **attackers.sent}


def main() -> None:
    port, grpc_port, seconds, share, *key = sys.argv[1:]
    ports = int(port), int(grpc_port)
    told = uvloop.run(attack_all(*ports, float(seconds), float(share), "".join(key)))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
