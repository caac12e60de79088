"""From SIGTERM to the end: nobody new, nobody lost."""

import http.client
import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import Server, serving, until

pytestmark = pytest.mark.e2e

BODY = json.dumps({"inputs": "Ada drew a comet."}).encode()


@contextmanager
def half_sent(server: Server) -> Iterator[socket.socket]:
    """A request of which the service has the head and half the body."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(
            b"POST /embed HTTP/1.1\r\nHost: quartet\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n%s" % (len(BODY), BODY[:9])
        )
        assert client.recv(100).startswith(b"HTTP/1.1 100 ")  # it is being answered
        yield client


def readiness(server: Server) -> int | None:
    """The status of /health/ready; None when nobody listens."""
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        client.request("GET", "/health/ready")
        return client.getresponse().status
    except (ConnectionError, http.client.BadStatusLine):
        return None
    finally:
        client.close()


def begin_drain(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)
    until(lambda: any('"draining"' in line for line in server.log))


@pytest.mark.promise("From SIGTERM on nobody new is wanted, and who was accepted is answered.")
def test_request_under_way_is_answered(tiny_bundle: Path) -> None:
    """A request whose body was still coming is answered; meanwhile nobody new is wanted; then it ends."""
    with serving(tiny_bundle) as server:
        with half_sent(server) as client:
            begin_drain(server)
            assert readiness(server) in (503, None)
            until(lambda: readiness(server) is None)
            assert server.process.poll() is None
            client.sendall(BODY[9:])
            with client.makefile("rb") as wire:
                head, _, body = wire.read().partition(b"\r\n\r\n")
        assert 0 == server.process.wait(30)

    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nconnection: close" in head.lower()
    assert "tiny@1" == json.loads(body)["model"]


def test_drain_ends_in_time(tiny_bundle: Path) -> None:
    """A client that never finishes its request is told so at the end, and does not put it off."""
    with serving(tiny_bundle, "--drain-s", "1") as server, half_sent(server) as client:
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        with client.makefile("rb") as wire:
            head, _, body = wire.read().partition(b"\r\n\r\n")
        server.process.wait(30)

    assert time.monotonic() - began < 15
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: " in head.lower()
    assert "draining" == json.loads(body)["error"]["code"]
