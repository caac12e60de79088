"""What one tenant sends costs others no more than their share: its long texts, and its slow bodies."""

import asyncio
import gzip
import json
import socket
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import uvloop

from benchmarks.lib.load_generator import Measured, closed_loop, request_bytes
from service.keys import make_key, record
from tests import samples
from tests.e2e.conftest import Server, serving

pytestmark = [pytest.mark.e2e, pytest.mark.exclusive, pytest.mark.nightly]

APP, CRAWLER = make_key(), make_key()
DOTS = json.dumps({"inputs": "." * 250_000}).encode()  # a token each: the most expensive text
DOCUMENT = json.dumps({"inputs": samples.text(1500, seed=7)[:6000]}).encode()
FLOOD = 32  # connections
MAX_BODY = 262_144  # bytes; all bodies may have eight times as many
LARGE = {"inputs": "the film was fine. " * 5000}  # 95 KB


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the keys of two tenants."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(record("app", APP) + record("crawler", CRAWLER))
    return path


@pytest.fixture(scope="module")
def tenants(tiny_bundle: Path, keys: Path) -> Iterator[Server]:
    """A server for two tenants, whose requests have two minutes."""
    with serving(tiny_bundle, "--api-keys", keys, "--deadline-ms", "120000") as server:
        yield server


def next_to_flood(server: Server, flood: bytes, seconds: float) -> tuple[Measured, Measured]:
    """Measure many connections that send a request, and one of another tenant that sends documents."""
    document = request_bytes("/embed", DOCUMENT, Authorization=f"Bearer {APP}")

    async def both() -> tuple[Measured, Measured]:
        many = closed_loop(server.port, [flood], FLOOD, 2 * seconds, retry=True)
        one = closed_loop(server.port, [document], 1, seconds, 2.0)
        found = await asyncio.gather(many, one)
        return found[0], found[1]

    return uvloop.run(both())


@pytest.mark.promise("A tenant's long text waits for at most one long text of another tenant.")
@pytest.mark.parametrize("priority", ["bulk", "interactive"])
def test_long_texts_of_others_are_not_waited_for(tenants, priority, seconds):
    """A document waits for a small part of the time that each text of a flood waits; it had been all of it."""
    compressed = gzip.compress(DOTS)
    assert len(compressed) < 1000
    flood = request_bytes(
        "/embed",
        compressed,
        Authorization=f"Bearer {CRAWLER}",
        Content_Encoding="gzip",
        X_Priority=priority,
    )
    many, one = next_to_flood(tenants, flood, min(seconds, 15))
    assert not one.others
    assert one.requests
    assert many.requests
    assert one.percentile(50) < many.percentile(50) / 4


def slow_body(stack: ExitStack, server: Server, headers: bytes, source: str) -> socket.socket:
    """Send a body of a few hundred bytes that inflates to the largest size and never ends."""
    stream = zlib.compressobj(9, zlib.DEFLATED, 31)
    part = stream.compress(b" " * (MAX_BODY - 10)) + stream.flush(zlib.Z_SYNC_FLUSH)
    client = stack.enter_context(
        socket.create_connection(("127.0.0.1", server.port), source_address=(source, 0))
    )
    client.sendall(
        b"POST /embed HTTP/1.1\r\nHost: q\r\nContent-Type: application/json\r\n"
        b"Content-Encoding: gzip\r\n%sContent-Length: %d\r\n\r\n%s" % (headers, len(part) + 9, part)
    )
    return client


def refusal(clients: list[socket.socket]) -> bytes:
    """Return the first answer to a body that has not ended."""
    for client in clients:
        client.settimeout(0.5)
        try:
            return client.recv(65_536)
        except TimeoutError:
            continue
    raise AssertionError("no body was refused")


@pytest.mark.promise("Slow bodies of one tenant leave memory for the bodies of others.")
@pytest.mark.parametrize("by", ["key", "address"])
def test_slow_bodies_leave_memory_to_others(tiny_bundle, keys, by):
    """Nine bodies that never end held the memory of all; now some of them are refused, and others' are answered."""
    options = ["--max-body-bytes", str(MAX_BODY), *(["--api-keys", keys] if by == "key" else [])]
    bearer = {"Authorization": f"Bearer {APP}"} if by == "key" else {}
    own = b"Authorization: Bearer %s\r\n" % CRAWLER.encode() if by == "key" else b""
    source = "127.0.0.1" if by == "key" else "127.0.0.2"
    with serving(tiny_bundle, *map(str, options)) as server, ExitStack() as stack:
        assert 200 == server.post("/embed", LARGE, bearer).status
        clients = [slow_body(stack, server, own, source) for _ in range(9)]
        answer = refusal(clients)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert [200] * 5 == [server.post("/embed", LARGE, bearer).status for _ in range(5)]
        assert b"of this client" in answer
