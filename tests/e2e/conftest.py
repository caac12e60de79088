"""Real processes: `python -m service` on a free port, and a client that returns status, headers and body."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

START_S = 60  # a loaded machine may take its time
LIVENESS_S = 60.0  # for what has to happen, however busy the machine is
# Options of a server that is so slow that a test sees its queue before it is empty.
SLOWLY = ("--max-batch-size", 1, "--threads", 1)
URL = re.compile(r'"url": ?"(http://[^"]+)"')
GRPC_ADDRESS = re.compile(r'"grpc": ?"([^"]+)"')
METRICS_URL = re.compile(r'"metrics": ?"(http://[^"]+)"')


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Server:
    """A service process, where it listens and what it has logged."""

    process: subprocess.Popen[str]
    url: str = ""
    log: list[str] = field(default_factory=list)

    def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send(
            "POST", path, data, {"Content-Type": "application/json", **(headers or {})}
        )

    def get(self, path: str) -> Reply:
        return self.send("GET", path, None, {})

    def send(self, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> Reply:
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return Reply(answer.status, dict(answer.headers), answer.read())
        except urllib.error.HTTPError as answer:
            with answer:
                return Reply(answer.code, dict(answer.headers), answer.read())

    def answer(self, path: str, body: object) -> Any:
        """The body of an answer that must be 200."""
        reply = self.post(path, body)
        assert 200 == reply.status, reply.body.decode()
        return reply.json()

    @property
    def grpc_address(self) -> str:
        """Host and port of gRPC, for a server with a `grpc_port`."""
        found = GRPC_ADDRESS.search("".join(self.log))
        assert found, "the server has no grpc_port"
        return found.group(1)

    @property
    def metrics_port(self) -> int:
        """The port of the metrics, for a server with a `metrics_port`."""
        found = METRICS_URL.search("".join(self.log))
        assert found, "the server has no metrics_port"
        return int(found.group(1).rpartition(":")[2])

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


def start(
    *arguments: str | Path,
    under: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = (sys.executable, "-m", "service"),
    folder: Path | None = None,
) -> subprocess.Popen[str]:
    command = [*under, *program, *map(str, arguments), "--log-format", "json"]
    return subprocess.Popen(command, env=env, cwd=folder, stderr=subprocess.PIPE, text=True)


@contextmanager
def serving(
    *arguments: str | Path,
    under: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    url: re.Pattern[str] = URL,
    program: Sequence[str] = (sys.executable, "-m", "service"),
    folder: Path | None = None,
) -> Iterator[Server]:
    """A server for `python -m service` with these arguments, ready; ended when the block ends.

    under: a command that runs the service in its own process, such as `nice`; env: in place of our environment
    program: the command that starts the service; folder: its working directory, ours by default
    url: the server's URL in the log; `METRICS_URL` for a service on a Unix socket with a `metrics_port`
    """
    started = start(*arguments, "--port", "0", under=under, env=env, program=program, folder=folder)
    server = Server(started)
    ready = threading.Event()
    reader = threading.Thread(target=read_log, args=(server, ready, url), daemon=True)
    reader.start()
    try:
        assert ready.wait(START_S), f"not ready: {server.log}"
        assert server.url, f"ended at start: {server.log}"
        yield server
    finally:
        server.process.terminate()
        server.process.wait(60)
        reader.join(10)
        if server.process.stderr is not None:
            server.process.stderr.close()


def read_log(server: Server, ready: threading.Event, url: re.Pattern[str] = URL) -> None:
    """Collect a server's log until it ends; `ready` is set when the log has the URL, or ends."""
    assert server.process.stderr is not None
    for line in server.process.stderr:
        server.log.append(line)
        if found := url.search(line):
            server.url = found.group(1)
            ready.set()
    ready.set()


def children(server: Server) -> dict[str, list[int]]:
    """The process ids of a server's children, by role."""
    found: dict[str, list[int]] = {"inference": [], "http": []}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == server.process.pid and b"service.processes.child_main" in arguments:
                role = arguments[arguments.index(b"service.processes.child_main") + 1].decode()
                found[role].append(int(entry.name))
    return found


def readiness(server: Server) -> int | None:
    """The status of /health/ready; None when no process listens."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)) as client:
        try:
            client.request("GET", "/health/ready")
            return client.getresponse().status
        except (ConnectionError, http.client.BadStatusLine):
            return None


def processor_s(pid: int) -> float:
    """Seconds of processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def until(condition: Any, timeout_s: float = LIVENESS_S) -> None:
    """Wait for what another process will do."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def kill_inference(server: Server) -> None:
    """Kill the process that computes, and wait until that is noticed."""
    (inference,) = children(server)["inference"]
    os.kill(inference, signal.SIGKILL)

    def noticed() -> bool:
        unready = server.get("/health/ready").status == 503
        return unready or children(server)["inference"] not in ([], [inference])

    until(noticed)


def queued(server: Server) -> float:
    """Tokens that wait in the server's queue."""
    found = re.search(r"^quartet_queue_tokens (\S+)$", server.get("/metrics").body.decode(), re.M)
    assert found
    return float(found.group(1))


@pytest.fixture(scope="session")
def tiny(tiny_bundle: Path) -> Iterator[Server]:
    """A server of the tiny bundle, at fp32."""
    with serving(tiny_bundle) as server:
        yield server


@pytest.fixture(scope="session")
def mini(mini_bundle: Path) -> Iterator[Server]:
    """A server of the repository's default bundle."""
    with serving(mini_bundle) as server:
        yield server


@pytest.fixture(scope="session")
def mini_url(mini: Server) -> str:
    return mini.url


@pytest.fixture(scope="session")
def server_url(mini_url: str) -> str:
    """Where the page and all four tasks are served."""
    return mini_url


@pytest.fixture(scope="session")
def limit_s(pytestconfig: pytest.Config) -> Callable[[float], float]:
    """A function of the seconds that a promise allows: returns these under --chaos, otherwise LIVENESS_S.

    So an ordinary run requires what has to happen, and `make chaos` on an idle machine requires when.
    """
    return lambda promised_s: promised_s if pytestconfig.getoption("--chaos") else LIVENESS_S


@pytest.fixture(scope="session")
def seconds(request: pytest.FixtureRequest) -> float:
    """How long a promise is put to the test."""
    given: float | None = request.config.getoption("--seconds")
    return given or (60.0 if request.config.getoption("--chaos") else 3.0)
