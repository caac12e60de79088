"""The service on a Unix socket, with one and with several processes, from start to drain."""

import http.client
import json
import signal
import socket
import stat
from pathlib import Path

import pytest

from tests.e2e.conftest import METRICS_URL, serving, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BODY = json.dumps({"inputs": "Ada drew a comet."}).encode()


class UnixConnection(http.client.HTTPConnection):
    """A client's connection to a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("quartet", timeout=30)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(str(self.path))


def embed(path: Path) -> int:
    client = UnixConnection(path)
    try:
        client.request("POST", "/embed", BODY, {"Content-Type": "application/json"})
        return client.getresponse().status
    finally:
        client.close()


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_unix_socket_is_served_and_drained(tiny_bundle, tmp_path, workers):
    """Requests are answered, what was accepted is answered after SIGTERM, and no file is left."""
    path = tmp_path / "quartet.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))  # and its file stays
    options = ["--uds", path, "--uds-mode", "600", "--metrics-port", "0", "--http-workers", workers]
    with serving(tiny_bundle, *options, url=METRICS_URL) as server:
        assert f"unix:{path}" in "".join(server.log)
        assert 0o600 == stat.S_IMODE(path.stat().st_mode)
        assert [200] * 8 == [embed(path) for _ in range(8)]
        client = UnixConnection(path)
        client.putrequest("POST", "/embed")
        client.putheader("Content-Type", "application/json")
        client.putheader("Content-Length", str(len(BODY)))
        client.putheader("Expect", "100-continue")
        client.endheaders()
        assert client.sock.recv(100).startswith(b"HTTP/1.1 100 ")
        server.process.send_signal(signal.SIGTERM)
        until(lambda: not path.exists())
        with pytest.raises(FileNotFoundError):
            embed(path)
        client.send(BODY)
        with client.sock.makefile("rb") as wire:
            assert wire.readline().startswith(b"HTTP/1.1 200 ")
        client.close()
        assert 0 == server.process.wait(30)
    assert [] == [*tmp_path.iterdir()]
