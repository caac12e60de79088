"""The service behind proxies with the configurations that the project ships: the same files, with ports put in."""

import gzip
import http.client
import json
import random
import re
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.servers import free_port
from service.settings import Settings
from tests import samples
from tests.conftest import ROOT
from tests.e2e.conftest import METRICS_URL, Reply, Server, queued, serving, until
from tests.e2e.test_abandoned import DROPPED_S, HEADERS, WORK, Watch, body_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FILES = {"nginx": "nginx.conf", "haproxy": "haproxy.cfg"}
CLIENT = "127.0.0.2"  # an address of the loopback network that is not trusted
FORGED = "203.0.113.66"
BODY = json.dumps({"inputs": "Ada drew a comet.", "dimensions": 2}).encode()
# nginx reads only what stands in its http block from the file.
NGINX = """\
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
worker_processes 1;
{user}
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/quartet.conf;
}}
"""


@dataclass(frozen=True)
class Proxy:
    """A proxy in front of a service; trust: what its certificate is checked against."""

    kind: str
    port: int
    trust: ssl.SSLContext
    server: Server
    upstream: str

    def connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=60, context=self.trust, source_address=(CLIENT, 0)
        )

    def post(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> Reply:
        with closing(self.connect()) as client:
            return ask(client, path, body, headers)

    def lines(self) -> list[dict[str, Any]]:
        """What the service has logged of its requests."""
        found = [json.loads(line) for line in self.server.log if line.startswith("{")]
        return [line for line in found if line["event"] == "request"]


def ask(
    client: http.client.HTTPConnection,
    path: str,
    body: bytes,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    client.request("POST", path, body, {**HEADERS, **(headers or {})})
    answer = client.getresponse()
    return Reply(answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read())


def program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def configuration(kind: str, changes: Mapping[str, str]) -> str:
    """A file as it is shipped, with each of these texts, which stand in it once, replaced."""
    text = (ROOT / "deploy" / "proxies" / FILES[kind]).read_text(encoding="utf-8")
    for old, new in changes.items():
        assert 1 == text.count(old), old
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate that signs itself, its key, and both in one file."""
    folder = tmp_path_factory.mktemp("certificate")
    names = "subjectAltName=IP:127.0.0.1,DNS:localhost"
    made = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    files = ["-addext", names, "-keyout", str(folder / "key"), "-out", str(folder / "crt")]
    subprocess.run([program("openssl"), "req", *made, *files], check=True, capture_output=True)
    (folder / "pem").write_bytes((folder / "crt").read_bytes() + (folder / "key").read_bytes())
    return folder


@contextmanager
def proxied(
    kind: str,
    server: Server,
    certificate: Path,
    folder: Path,
    path: Path | None = None,
    changes: Mapping[str, str] | None = None,
) -> Iterator[Proxy]:
    """A proxy before a server, on its port or on the Unix socket at `path`; changes: more of the file to replace."""
    executable, port = program(kind), free_port()
    common = {"127.0.0.1:8000": f"127.0.0.1:{server.port}"}
    if kind == "nginx":
        if path is not None:
            lines = {"    server 127.0.0.1:8000;\n": "", "    # server unix:": "    server unix:"}
            common = {**lines, "unix:/run/quartet/quartet.sock": f"unix:{path}"}
        own = {
            "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
            "/etc/nginx/quartet.crt": f"{certificate}/crt",
            "/etc/nginx/quartet.key": f"{certificate}/key",
        }
        (folder / "quartet.conf").write_text(
            configuration(kind, {**common, **own, **(changes or {})})
        )
        user = "user root;" if Path("/proc/self").owner() == "root" else ""
        (folder / "main.conf").write_text(NGINX.format(folder=folder, user=user))
        command = [executable, "-c", str(folder / "main.conf"), "-e", str(folder / "error.log")]
    else:
        if path is not None:
            lines = {
                "    server quartet 127.0.0.1:8000": "    # 127.0.0.1",
                "    # server": "    server",
            }
            common = {**lines, "unix@/run/quartet/quartet.sock": f"unix@{path}"}
        own = {
            "bind :443": f"bind 127.0.0.1:{port}",
            "/etc/haproxy/quartet.pem": f"{certificate}/pem",
        }
        (folder / "haproxy.cfg").write_text(
            configuration(kind, {**common, **own, **(changes or {})})
        )
        command = [executable, "-f", str(folder / "haproxy.cfg")]
    log = (folder / "log").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        trust = ssl.create_default_context(cafile=str(certificate / "crt"))
        proxy = Proxy(kind, port, trust, server, "port" if path is None else "unix")
        until(lambda: answers(proxy) or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        yield proxy
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def answers(proxy: Proxy) -> bool:
    try:
        with closing(proxy.connect()) as client:
            client.request("GET", "/health/ready")
            return client.getresponse().status == 200
    except OSError:
        return False


@pytest.fixture(
    scope="module", params=[(k, u) for k in FILES for u in ("port", "unix")], ids="-".join
)
def proxy(
    request: pytest.FixtureRequest,
    mini_bundle: Path,
    certificate: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Proxy]:
    kind, upstream = request.param
    program(kind)
    folder = tmp_path_factory.mktemp("p")
    if upstream == "port":
        with serving(mini_bundle) as server, proxied(kind, server, certificate, folder) as proxy:
            yield proxy
        return
    path = folder / "s"
    options = ["--uds", path, "--metrics-port", "0", "--forwarded-allow-ips", "unix:"]
    with (
        serving(mini_bundle, *options, url=METRICS_URL) as server,
        proxied(kind, server, certificate, folder, path) as proxy,
    ):
        yield proxy


def test_answers_come_over_tls(proxy):
    """A client that checks the proxy's certificate gets the service's answer, compressed if it accepts that."""
    reply = proxy.post("/embed", BODY)
    assert (200, 2) == (reply.status, len(reply.json()["embeddings"][0]))
    many = json.dumps({"inputs": ["Ada drew a comet."] * 64}).encode()
    packed = proxy.post("/embed", many, {"Accept-Encoding": "gzip"})
    assert "gzip" == packed.headers["content-encoding"]
    assert 64 == len(json.loads(gzip.decompress(packed.body))["embeddings"])


def test_request_ids_are_passed_on(proxy):
    """The client's own id reaches the log and the answer; where there is none, the proxy makes one."""
    own = "0A000001:C5B2_0A000002:1F40_67891233_01AF:7D1B"
    replies = [proxy.post("/embed", BODY, {"X-Request-Id": own}), proxy.post("/embed", BODY)]
    given = [reply.headers["x-request-id"] for reply in replies]
    assert own == given[0]
    assert re.fullmatch("[0-9a-f]{32}" if proxy.kind == "nginx" else "[0-9a-f-]{36}", given[1])
    until(lambda: {*given} <= {line["request_id"] for line in proxy.lines()})


def test_the_log_has_the_clients_own_address(proxy):
    """It is the address that connects to the proxy, independent of the client's headers."""
    spoofed = {"X-Forwarded-For": FORGED, "Forwarded": f"for={FORGED}"}
    for number, headers in enumerate(({}, spoofed)):
        name = f"address-{number}"
        proxy.post("/embed", BODY, {"X-Request-Id": name, **headers})
        until(lambda name=name: any(line["request_id"] == name for line in proxy.lines()))
    found = {line["client"] for line in proxy.lines() if line["request_id"].startswith("address-")}
    assert {CLIENT} == found


def established(port: int) -> set[int]:
    """The local ports of connections to a port."""
    pattern = rf"^ *\d+: \S+:(\w{{4}}) \S+:{port:04X} 01 "
    return {
        int(found, 16) for found in re.findall(pattern, Path("/proc/net/tcp").read_text(), re.M)
    }


def test_connections_to_the_service_are_kept(proxy):
    """Requests of several clients share a connection to the service, one after the other."""
    if proxy.upstream == "unix":
        pytest.skip("the connections of a Unix socket have no ports to tell them apart")
    proxy.post("/embed", BODY)
    before = established(proxy.server.port)
    for _ in range(5):
        assert 200 == proxy.post("/embed", BODY).status
    assert before & established(proxy.server.port)


def test_lines_come_as_they_are_computed(proxy):
    """The first line of a stream reaches the client while other texts are queued, though it is short."""
    texts = [samples.text(4000, seed=n) for n in range(8)]
    body = json.dumps({"inputs": texts, "dimensions": 2, "truncate": "window"})
    with closing(proxy.connect()) as client:
        client.request("POST", "/embed", body, {**HEADERS, "Accept": "application/x-ndjson"})
        answer = client.getresponse()
        first = answer.readline()
        assert queued(proxy.server) > 0
        rest = answer.read()
    assert "embedding" in json.loads(first)
    assert 8 == len(rest.splitlines())
    assert len(first + rest) < 1400  # bytes, which nginx would collect and send at once


@pytest.fixture(scope="module")
def whole_s(proxy: Proxy) -> float:
    """Processor time of the work when its client waits for the answer."""
    watch = Watch(proxy.server)
    before = watch.settle()
    assert 200 == proxy.post("/embed", WORK.encode()).status
    return watch.settle() - before


@pytest.mark.parametrize("kib", [0, 240, 5000])
@pytest.mark.exclusive
def test_a_client_that_leaves_ends_its_request(proxy, whole_s, kib, limit_s):
    """The proxy passes on that its client has left, and the texts are not computed."""
    watch = Watch(proxy.server)
    before, seen = watch.settle(), watch.abandoned()
    with closing(proxy.connect()) as client:
        client.request("POST", "/embed", body_of(kib), HEADERS)
        until(lambda: queued(proxy.server) > 0)
    until(lambda: watch.abandoned() == seen + 1, limit_s(DROPPED_S))
    until(lambda: queued(proxy.server) == 0)
    assert watch.settle() - before < whole_s / 2


def test_large_bodies_pass(proxy):
    """A body of nearly the service's limit is answered, and the service itself refuses a larger one."""
    largest = Settings().max_body_bytes
    assert 200 == proxy.post("/embed", BODY.ljust(largest)).status
    reply = proxy.post("/embed", BODY.ljust(largest + 1))
    assert (413, "too_large") == (reply.status, reply.json()["error"]["code"])


def test_a_refusal_says_when_to_come_back(tiny_bundle, certificate, tmp_path, kind):
    """429 and its `Retry-After` reach the client."""
    limits = ["--max-wait-ms", "60000", "--max-queue-tokens", "300", "--drain-s", "1"]
    waiting = json.dumps({"inputs": samples.text(150, seed=1)}).encode()
    with (
        serving(tiny_bundle, *limits) as server,
        proxied(kind, server, certificate, tmp_path) as proxy,
        closing(proxy.connect()) as client,
    ):
        client.request("POST", "/embed", waiting, HEADERS)
        until(lambda: queued(server) > 0)
        reply = proxy.post("/embed", json.dumps({"inputs": samples.text(150, seed=2)}).encode())
    assert (429, "overloaded") == (reply.status, reply.json()["error"]["code"])
    assert int(reply.headers["retry-after"]) >= 1


@pytest.mark.parametrize("kind", FILES)
def test_idle_connections_end_at_the_proxy_first(kind):
    """The proxy lets an idle connection go before the service does by default."""
    name = {"nginx": r"keepalive_timeout (\d+)s", "haproxy": r"pool-purge-delay (\d+)s"}[kind]
    (seconds,) = re.findall(name, configuration(kind, {}))
    assert int(seconds) < Settings().keep_alive_s


def test_no_request_is_lost_to_an_idle_connection(tiny_bundle, certificate, tmp_path, kind):
    """With times in the shipped order, shorter by 40, requests after pauses around them are all answered."""
    shorter = {
        "nginx": {"keepalive_timeout 60s": "keepalive_timeout 1s"},
        "haproxy": {"pool-purge-delay 30s": "pool-purge-delay 1s"},
    }
    statuses = []
    with (
        serving(tiny_bundle, "--keep-alive-s", "2") as server,
        proxied(kind, server, certificate, tmp_path, changes=shorter[kind]) as proxy,
    ):

        def ask_after_pauses(seed):
            chance = random.Random(seed)
            for _ in range(8):
                time.sleep(chance.uniform(0.8, 2.2))
                statuses.append(proxy.post("/embed", BODY).status)

        threads = [threading.Thread(target=ask_after_pauses, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [200] * 32 == statuses


@pytest.fixture(params=FILES)
def kind(request: pytest.FixtureRequest) -> str:
    program(request.param)
    return str(request.param)
