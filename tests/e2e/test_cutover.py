"""Clients move from a server of TEI's API to Quartet and back, by the configuration that the project ships."""

import http.client
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.e2e.conftest import Server, serving, until
from tests.e2e.test_proxies import NGINX, certificate, free_port, program
from tests.http_thread import QuietHandler, serving_in_thread
from tests.quartet.test_watch import metrics, watching

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
__all__ = ["certificate"]

FILE = ROOT / "deploy" / "proxies" / "nginx-cutover.conf"
BODY = json.dumps({"inputs": "Ada drew a comet."})
SHARE = "    10%     quartet;\n"
REST = "    *       tei;\n"
# The stages of the guide: what replaces each line of the file.
STAGES = {
    "before": {SHARE: ""},
    "watch": {SHARE: "", "# mirror /watch;": "mirror /watch;"},
    "shadow": {SHARE: "", "# mirror /shadow;": "mirror /shadow;"},
    "some": {SHARE: "    50%     quartet;\n"},
    "all": {SHARE: "", REST: "    *       quartet;\n"},
}


class Tei(QuietHandler):
    """A server with TEI's path of vectors."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.read_body()
        self.reply(b"[[1.0, 0.0]]")


class Cutover:
    """nginx before both servers."""

    def __init__(self, folder: Path, crt: Path, tei: int, quartet: Server) -> None:
        self.folder, self.port, self.watch = folder, free_port(), free_port()
        self.servers = [f"http://127.0.0.1:{port}" for port in (tei, quartet.port)]
        self._trust = ssl.create_default_context(cafile=str(crt / "crt"))
        self._changes = {
            "127.0.0.1:8080": f"127.0.0.1:{tei}",
            "127.0.0.1:8000": f"127.0.0.1:{quartet.port}",
            "127.0.0.1:9300": f"127.0.0.1:{self.watch}",
            "listen 443 ssl": f"listen 127.0.0.1:{self.port} ssl",
            "/etc/nginx/quartet.crt": f"{crt}/crt",
            "/etc/nginx/quartet.key": f"{crt}/key",
        }
        user = "user root;" if Path("/proc/self").owner() == "root" else ""
        (folder / "main.conf").write_text(NGINX.format(folder=folder, user=user))
        self.command = [program("nginx"), "-c", str(folder / "main.conf")]
        self.command += ["-e", str(folder / "error.log")]

    def write(self, stage: str) -> None:
        text = FILE.read_text(encoding="utf-8")
        for old, new in {**self._changes, **STAGES[stage]}.items():
            assert 1 == text.count(old), old
            text = text.replace(old, new)
        (self.folder / "quartet.conf").write_text(text)

    def enter(self, stage: str) -> None:
        """Change the file and reload it, as the guide says, and wait until the new workers answer."""
        self.write(stage)
        subprocess.run([*self.command, "-t"], check=True, capture_output=True)
        subprocess.run([*self.command, "-s", "reload"], check=True, capture_output=True)

    def ask(self, client: int = 2) -> tuple[int, str]:
        """Status and server of an answer to the client with an address that ends with this number."""
        address = (f"127.0.0.{client}", 0)
        with closing(
            http.client.HTTPSConnection(
                "127.0.0.1", self.port, timeout=60, context=self._trust, source_address=address
            )
        ) as connection:
            connection.request("POST", "/embed", BODY, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            reply.read()
            return reply.status, reply.headers["X-Answered-By"]

    def answers_by(self, *servers: str) -> bool:
        return {*servers} == {self.ask(client)[1] for client in range(2, 32)}


@pytest.fixture
def cutover(tiny_bundle: Path, certificate: Path, tmp_path: Path) -> Iterator[Any]:
    with serving(tiny_bundle, "--root-dialect", "tei") as quartet, listening() as tei:
        made = Cutover(tmp_path, certificate, tei, quartet)
        made.write("before")
        process = subprocess.Popen(made.command)
        try:
            until(lambda: is_up(made) or process.poll() is not None)
            assert process.poll() is None, (tmp_path / "error.log").read_text()
            yield made, quartet
        finally:
            process.terminate()
            process.wait(30)


@contextmanager
def listening() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Tei)
    server.daemon_threads = True
    with serving_in_thread(server):
        yield server.server_port


def is_up(made: Cutover) -> bool:
    try:
        return made.ask()[0] == 200
    except OSError:
        return False


def requests_of(quartet: Server) -> int:
    return len(
        [
            line
            for line in quartet.log
            if '"event": "request"' in line or '"event":"request"' in line
        ]
    )


def test_clients_move_to_quartet_and_back(cutover):
    """In the stages of the guide; a client stays at one server, and no request fails while nginx reloads."""
    made, quartet = cutover
    assert made.answers_by("tei")
    assert 0 == requests_of(quartet)
    made.enter("watch")
    a, b = made.servers
    with watching(a, b, "--dialect-a", "tei", "--watch", str(made.watch)) as (watch, port):
        until(lambda: (made.ask(), metrics(port)["changed"] > 0)[1])
        assert 1 == metrics(port)["=beyond"], "the stub's vectors have two numbers"
        watch.terminate()
        assert "[1.0000, 0.0000, ...]" in watch.communicate(timeout=60)[0]
    made.enter("shadow")
    until(lambda: (made.ask(), requests_of(quartet) > 0)[1])
    assert made.answers_by("tei")
    statuses: list[int] = []
    over = threading.Event()

    def ask_on() -> None:
        while not over.is_set():
            statuses.append(made.ask(2 + len(statuses) % 30)[0])

    thread = threading.Thread(target=ask_on)
    thread.start()
    try:
        made.enter("some")
        until(lambda: made.answers_by("tei", "quartet"))
        first = [made.ask(client) for client in range(2, 32)]
        assert first == [made.ask(client) for client in range(2, 32)]
        made.enter("all")
        until(lambda: made.answers_by("quartet"))
        made.enter("before")
        until(lambda: made.answers_by("tei"))
    finally:
        over.set()
        thread.join(60)
    assert {200} == {*statuses}
