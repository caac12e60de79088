"""Refusals of large bodies reach every kind of client as a status, not as a connection reset."""

import asyncio
import gc
import http.client
import io
import json
import os
import shutil
import socket
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp
import httpx
import pytest
import requests

from benchmarks.lib.servers import free_port
from service.keys import make_key
from tests import samples
from tests.e2e.conftest import Server, queued, serving, until
from tests.e2e.test_drain import half_sent
from tests.e2e.test_keys import metrics

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KEY = make_key()
LIMITS = ["--max-body-bytes", "6000000", "--max-queue-tokens", "300", "--metrics-port", "0"]
STILL = ["--max-wait-ms", "600000", "--deadline-ms", "600000", "--drain-s", "1"]
JSON = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
LARGE = json.dumps({"inputs": ["a" * 250_000] * 20}).encode()  # each of three tokens
TOO_LARGE = b" " * 7_000_000


@dataclass(frozen=True)
class Refused:
    """A request that has to be sent to its end to be told no."""

    status: int
    path: str = "/embed"
    body: bytes = LARGE
    headers: dict[str, str] = field(default_factory=lambda: JSON)
    chunked: bool = False

    def parts(self) -> Iterator[bytes]:
        for start in range(0, len(self.body), 65_536):
            yield self.body[start : start + 65_536]


REFUSED = {
    "too large": Refused(413, body=TOO_LARGE),
    "too large, of unknown length": Refused(413, body=TOO_LARGE, chunked=True),
    "no JSON": Refused(415, headers={**JSON, "Content-Type": "text/plain"}),
    "strangely compressed": Refused(415, headers={**JSON, "Content-Encoding": "br"}),
    "a wrong key": Refused(401, headers={**JSON, "Authorization": "Bearer x"}),
    "nothing there": Refused(404, path="/nothing"),
    "another method": Refused(405, path="/models"),
    "overloaded": Refused(429),
    "overloaded, in chunks": Refused(429, chunked=True),
    "broken": Refused(400, body=b"x" * 5_000_000),
}

Ask = Callable[[str, Refused], int]


def ask_http_client(url: str, refused: Refused) -> int:
    with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)) as client:
        body = refused.parts() if refused.chunked else refused.body
        client.request("POST", refused.path, body, refused.headers, encode_chunked=refused.chunked)
        return client.getresponse().status


def ask_requests(url: str, refused: Refused) -> int:
    with requests.Session() as session:
        body = refused.parts() if refused.chunked else refused.body
        return session.post(
            url + refused.path, data=body, headers=refused.headers, timeout=60
        ).status_code


def ask_httpx(url: str, refused: Refused) -> int:
    body = refused.parts() if refused.chunked else refused.body
    return httpx.post(
        url + refused.path, content=body, headers=refused.headers, timeout=60
    ).status_code


def ask_aiohttp(url: str, refused: Refused) -> int:
    async def parts():
        for part in refused.parts():
            yield part

    async def ask() -> int:
        async with aiohttp.ClientSession() as session:
            body = parts() if refused.chunked else io.BytesIO(refused.body)
            async with session.post(url + refused.path, data=body, headers=refused.headers) as told:
                return told.status

    status = asyncio.run(ask())
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()  # aiohttp does not wait for a connection to be closed whose request it has not sent whole
    return status


def ask_socket(url: str, refused: Refused) -> int:
    """Sends everything, and listens only then."""
    host, port = url.removeprefix("http://").split(":")
    head = "".join(f"{name}: {value}\r\n" for name, value in refused.headers.items())
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(f"POST {refused.path} HTTP/1.1\r\nHost: {host}\r\n{head}".encode())
        if refused.chunked:
            client.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
            for part in refused.parts():
                client.sendall(b"%x\r\n%s\r\n" % (len(part), part))
            client.sendall(b"0\r\n\r\n")
        else:
            client.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(refused.body), refused.body))
        with client.makefile("rb") as wire:
            return int(wire.readline().split()[1])


NODE = """
const {url, headers, file, chunked, fetching} = JSON.parse(process.argv[1]);
const body = require('fs').readFileSync(file);
const parts = function* () {
  for (let at = 0; at < body.length; at += 65536) yield body.subarray(at, at + 65536);
};
if (fetching) {
  const sent = chunked ? {body: ReadableStream.from(parts()), duplex: 'half'} : {body};
  fetch(url, {method: 'POST', headers, ...sent}).then((told) => console.log(told.status));
} else {
  const length = chunked ? {} : {'Content-Length': body.length};
  const options = {method: 'POST', headers: {...headers, ...length}};
  const request = require('http').request(url, options, (told) => {
    console.log(told.statusCode);
    told.resume();
  });
  for (const part of chunked ? parts() : [body]) request.write(part);
  request.end();
}
"""


def ask_node(url: str, refused: Refused, *, fetching: bool = False) -> int:
    if not shutil.which("node"):
        pytest.skip("node is not on the PATH")
    with tempfile.NamedTemporaryFile() as file:
        file.write(refused.body)
        file.flush()
        asked = {
            "url": url + refused.path,
            "headers": refused.headers,
            "file": file.name,
            "chunked": refused.chunked,
            "fetching": fetching,
        }
        command = ["node", "-e", NODE, json.dumps(asked)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout, run.stderr
    return int(run.stdout)


CLIENTS: dict[str, Ask] = {
    "http.client": ask_http_client,
    "requests": ask_requests,
    "httpx": ask_httpx,
    "aiohttp": ask_aiohttp,
    "socket": ask_socket,
    "node": ask_node,
    "fetch": partial(ask_node, fetching=True),
}
each_client = pytest.mark.parametrize("client", CLIENTS)
each_refusal = pytest.mark.parametrize("refusal", REFUSED)


@pytest.fixture(scope="module")
def full(tiny_bundle: Path) -> Iterator[Server]:
    """A server with a key and a queue that stands still, nearly full."""
    env = {**os.environ, "QUARTET_API_KEY": KEY}
    with serving(tiny_bundle, *LIMITS, *STILL, env=env) as server, waiting(server):
        yield server


@contextmanager
def waiting(server: Server) -> Iterator[None]:
    """Requests of a patient client in the queue."""
    body = json.dumps({"inputs": samples.text(110, seed=1)})
    with ExitStack() as clients:
        for _ in range(2):
            connection = http.client.HTTPConnection("127.0.0.1", server.port)
            clients.enter_context(closing(connection)).request("POST", "/embed", body, JSON)
        until(lambda: queued(metrics(server)) > 200)
        yield


@pytest.mark.promise("A refusal reaches its client as a status, even while the client still sends.")
@each_client
@each_refusal
def test_every_client_hears_the_status(full, client, refusal):
    """A client that sends 5 MB of a refused body reads the status once it reads."""
    refused = REFUSED[refusal]
    assert refused.status == CLIENTS[client](full.url, refused)


@pytest.fixture(scope="module")
def crowded(tiny_bundle: Path) -> Iterator[Server]:
    """A server whose only connection has a request in progress: its body is not complete."""
    options = ["--max-connections", "1", *STILL, "--body-timeout-s", "600"]
    with serving(tiny_bundle, *options) as server, half_sent(server):
        yield server


@each_client
def test_every_excess_client_gets_503(crowded, client):
    """A connection too many is closed with a status, though its client is still sending."""
    assert 503 == CLIENTS[client](crowded.url, Refused(503))


PROXY = """
daemon off;
master_process off;
pid {folder}/pid;
error_log stderr;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/client;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    client_max_body_size 100m;
    upstream quartet {{ server 127.0.0.1:{behind}; keepalive 8; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://quartet;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_request_buffering {buffering};
        }}
    }}
}}
"""


@pytest.fixture(scope="module", params=["on", "off"], ids=["buffering", "passing on"])
def proxy(
    full: Server, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of an nginx in front of the server."""
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if not nginx:
        pytest.skip("nginx is not on the PATH")
    folder = tmp_path_factory.mktemp("nginx")
    port = free_port()
    settings = {"folder": folder, "behind": full.port, "port": port, "buffering": request.param}
    (folder / "nginx.conf").write_text(PROXY.format(**settings))
    process = subprocess.Popen([nginx, "-p", folder, "-c", folder / "nginx.conf"])
    try:
        until(lambda: answers(port) or process.poll() is not None)
        assert process.poll() is None
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@each_refusal
def test_a_proxy_gets_the_status(proxy, refusal):
    """Nginx forwards the status of the service and does not replace it by 502."""
    refused = REFUSED[refusal]
    assert refused.status == ask_http_client(proxy, refused)
