"""The load generator counts what a server answered, and the padded server is fed the same weights."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import pytest

from benchmarks.bench import mixed_texts, only_portable, serving
from benchmarks.load import closed_loop, request_bytes
from service import bundle

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
REQUESTS = [request_bytes("/embed", body) for body in (b"1", b"22", b"333")]


@asynccontextmanager
async def listening(answer: bytes) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server that gives one answer to everything: its port, and the bodies that it saw."""
    seen: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                seen.append(await reader.readexactly(int(head.split(b"Content-Length: ")[1])))
                writer.write(answer)

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], seen


async def test_closed_loop() -> None:
    """Every connection keeps asking, in turn; what is answered within the window is counted and timed."""
    async with listening(ANSWER) as (port, seen):
        found = await closed_loop(port, REQUESTS, connections=3, seconds=0.2, warm_s=0.05)

    assert seen[:3] == [b"1", b"22", b"333"]
    assert 3 < found.requests == len(found.latencies) <= len(seen)
    assert found.rate == found.requests / 0.2
    assert 0 < found.percentile(50) <= found.percentile(99) < 250


async def test_closed_loop_stops_at_an_error() -> None:
    """An answer that is no success is no throughput."""
    async with listening(b"HTTP/1.1 429 Too Many Requests\r\n\r\n") as (port, _):
        with pytest.raises(RuntimeError, match="429 Too Many Requests"):
            await closed_loop(port, REQUESTS, connections=1, seconds=0.2)


@pytest.mark.e2e
async def test_serving_takes_many_requests(tiny_bundle: Path) -> None:
    """A server goes on answering when it has logged more than a pipe holds."""
    body = json.dumps({"inputs": "Ada drew a comet."}).encode()
    with serving(tiny_bundle, "int8") as port:
        found = await closed_loop(port, [request_bytes("/embed", body)], 8, seconds=4, warm_s=0)
    assert found.requests > 600


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    """Its log is in the error."""
    with (
        pytest.raises(RuntimeError, match=r"did not start: .*manifest\.json"),
        serving(tmp_path, "fp32"),
    ):
        pytest.fail("it started")


def test_only_portable(tiny_bundle: Path, tmp_path: Path) -> None:
    """The padded server's bundle has the portable graph and no other, with the same weights."""
    full = bundle.load(tiny_bundle)
    padded = bundle.load(only_portable(full, tmp_path / "padded"))

    (graph,) = padded.manifest.graphs
    assert (graph.layout, graph.precision) == ("portable", "fp32")
    assert graph in full.manifest.graphs


def test_mixed_texts() -> None:
    """The same texts every time, short and long."""
    texts = mixed_texts()

    lengths = sorted(len(text.split()) for text in texts)
    assert texts == mixed_texts()
    assert lengths[0] < 10
    assert lengths[-1] > 150
