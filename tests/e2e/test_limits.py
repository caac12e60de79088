"""A server whose batches wait for company: its queue stands still, so that its limits can be met one by one."""

import http.client
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import samples
from tests.e2e.conftest import Server, children, queued, serving, until

pytestmark = pytest.mark.e2e

LIMITS = ["--max-wait-ms", "60000", "--max-queue-tokens", "300", "--body-timeout-s", "2"]
BODY = json.dumps({"inputs": samples.text(60, seed=1)})


@pytest.fixture(scope="module")
def still(tiny_bundle: Path) -> Iterator[Server]:
    """A server that holds a batch for a minute, unless it is full or everybody has left."""
    with serving(tiny_bundle, *LIMITS, "--drain-s", "1") as server:
        yield server


@contextmanager
def waiting(server: Server, requests: int) -> Iterator[float]:
    """Keep this number of requests in the queue, from clients that disconnect at the end; yields their tokens."""
    clients = [http.client.HTTPConnection("127.0.0.1", server.port) for _ in range(requests)]
    for client in clients:
        client.request("POST", "/embed", BODY, {"Content-Type": "application/json"})
    until(lambda: queued(server) > 0 and queued(server) % requests == 0)
    try:
        yield queued(server)
    finally:
        for client in clients:
            client.close()
        until(lambda: queued(server) == 0)


def computed(server: Server) -> float:
    """Batches so far."""
    found = re.findall(
        r"^quartet_batch_size_count\S* (\S+)$", server.get("/metrics").body.decode(), re.M
    )
    return sum(map(float, found))


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """A service with a stopped inference process."""
    (inference,) = children(server)["inference"]
    os.kill(inference, signal.SIGSTOP)
    try:
        until(lambda: ") T" in Path(f"/proc/{inference}/stat").read_text())
        yield
    finally:
        os.kill(inference, signal.SIGCONT)


def assert_error(error: dict[str, Any], code: str, param: str | None = None) -> None:
    """The one shape of errors: a code for machines, a message for people, the field at fault."""
    assert [*error] == ["error"]
    assert [*error["error"]] == ["code", "message", "param"]
    assert (code, param) == (error["error"]["code"], error["error"]["param"])
    assert error["error"]["message"]


@pytest.mark.promise("The work of a client that leaves is dropped.")
def test_client_that_leaves_takes_its_work_along(still):
    """What a client has queued is dropped when it disconnects, long before its batch would have run."""
    with waiting(still, 1) as tokens:
        assert tokens > 60
    assert 0 == queued(still)


@pytest.mark.promise(
    "A deadline that passes in the queue is answered at once, and nothing is computed for it."
)
def test_deadline(still):
    """A request that its batch keeps waiting beyond its time is answered 504, and leaves the queue."""
    before = computed(still)
    with stopped(still):  # or it would compute what it held, just in time
        reply = still.post("/embed", json.loads(BODY), {"X-Request-Timeout-Ms": "100"})
    assert 504 == reply.status
    assert_error(reply.json(), "deadline_exceeded")
    until(lambda: queued(still) == 0)
    assert before == computed(still)


@pytest.mark.promise("A slow client cannot hold a worker.")
def test_slow_body(still):
    """A body that does not come is given up, and so is its connection."""
    with closing(socket.create_connection(("127.0.0.1", still.port), timeout=20)) as client:
        client.sendall(b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n")
        client.sendall(b'Content-Length: 100\r\n\r\n{"inputs": ')
        with client.makefile("rb") as wire:
            head, _, body = wire.read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"\r\nconnection: close" in head.lower()
    assert_error(json.loads(body), "slow_body")
