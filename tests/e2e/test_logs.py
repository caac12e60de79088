"""A log that cannot be written: its lines are lost, and nothing else."""

import http.client
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from tests import samples
from tests.e2e.conftest import START_S, URL, Server, kill_inference, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LONG_ID = {"X-Request-Id": "x" * 128}  # makes a log line longer
LINES = 3000  # of more bytes than a pipe and the writer keep
FILE_BLOCKS = 48  # of 1,024 bytes, that a log file may have
WORK = {"inputs": [samples.text(100, seed=seed) for seed in range(100)]}


@contextmanager
def logging_to(end: int, command: str, seen: "Log") -> Iterator[Server]:
    """A server that logs to a descriptor, which is closed here; a shell command comes before."""
    process = subprocess.Popen(["bash", "-c", command], stderr=end, text=True)
    os.close(end)
    server = Server(process)
    try:
        until(lambda: URL.search(seen.text()) or process.poll() is not None, START_S)
        found = URL.search(seen.text())
        assert found, f"ended at start: {seen.text()}"
        server.url = found.group(1)
        yield server
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(40)
        process.kill()


class Log:
    """The end of a pipe that is read only when told to."""

    def __init__(self, reader: int) -> None:
        self.reader = reader
        self.data = b""
        os.set_blocking(reader, False)

    def text(self) -> str:
        with suppress(BlockingIOError):
            while more := os.read(self.reader, 65_536):
                self.data += more
        return self.data.decode()


class File(Log):
    """A file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def text(self) -> str:
        return self.path.read_text()


def log_lines(server: Server, count: int) -> None:
    """Make the server log lines, by requests of which each has one."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        for _ in range(count):
            connection.request("GET", "/models", headers=LONG_ID)
            connection.getresponse().read()


def service(bundle: Path, before: str = "") -> str:
    return f"{before} exec {sys.executable} -m service {bundle} --port 0 --log-format json"


@contextmanager
def full_file(bundle: Path, folder: Path) -> Iterator[tuple[Server, Log]]:
    """A server whose log is a file that cannot grow any more."""
    file = File(folder / "log")
    end = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with logging_to(end, service(bundle, f"ulimit -f {FILE_BLOCKS};"), file) as server:
        while file.path.stat().st_size < FILE_BLOCKS * 1024:
            log_lines(server, 20)
        yield server, file


@contextmanager
def no_reader(bundle: Path, folder: Path) -> Iterator[tuple[Server, Log]]:
    """A server whose log is a pipe that its reader has closed."""
    reader, end = os.pipe()
    log = Log(reader)
    with logging_to(end, service(bundle), log) as server:
        os.close(reader)
        yield server, log


@contextmanager
def idle_reader(bundle: Path, folder: Path) -> Iterator[tuple[Server, Log]]:
    """A server whose log is a pipe that is full and not read."""
    reader, end = os.pipe()
    log = Log(reader)
    with logging_to(end, service(bundle), log) as server:
        log_lines(server, LINES)
        yield server, log
    os.close(reader)


LOGS = {"full": full_file, "closed": no_reader, "idle": idle_reader}


@pytest.mark.promise("A log that cannot be written loses its lines, but no request.")
@pytest.mark.parametrize("log", LOGS)
def test_a_log_that_cannot_be_written_costs_no_request(tiny_bundle, tmp_path, log):
    """Requests are answered once, a dead process is replaced, and SIGTERM drains what was accepted."""
    with LOGS[log](tiny_bundle, tmp_path) as (server, _):
        assert [200] * 5 == [server.post("/classify", {"inputs": "a"}).status for _ in range(5)]
        kill_inference(server)
        until(lambda: server.get("/health/ready").status == 200, START_S)
        replies = []
        asking = [
            threading.Thread(target=lambda: replies.append(server.post("/embed", WORK).status))
            for _ in range(4)
        ]
        for thread in asking:
            thread.start()
        until(lambda: in_work(server) or len(replies) == len(asking))
        server.process.send_signal(signal.SIGTERM)
        for thread in asking:
            thread.join()
        assert {200} == set(replies)
        assert 0 == server.process.wait(40)


def in_work(server: Server) -> bool:
    """Whether requests have come to the queue."""
    text = server.get("/metrics").body.decode()
    found = re.search(r"^quartet_queue_tokens (\S+)$", text, re.M)
    return found is not None and float(found.group(1)) > 0
