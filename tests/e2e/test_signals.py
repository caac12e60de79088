"""What each signal does to the service at its start, while it serves and while it drains, and which process ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from service.processes import process_signals
from tests.e2e.conftest import Server, children, read_log, readiness, serving, start, until
from tests.e2e.test_drain import CALLS, HALF, body_of, half_sent
from tests.e2e.test_processes import alive

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WORKERS = pytest.mark.parametrize("workers", ["0", "2"])

# Each Python process of a service with this in its path does this in place of opening a session.
HOOK = """
import builtins, ctypes, os, sys

def open_session(*_, **__):
    os.write(2, b"opening\\n")
    {action}

def import_and_replace(*arguments, **named):
    imported = load(*arguments, **named)
    device = sys.modules.get("service.engines.local_device")
    if hasattr(device, "open_device"):  # it was imported to its end
        device.open_session = open_session
    return imported

load, builtins.__import__ = builtins.__import__, import_and_replace
"""
IN_C = "while True: ctypes.CDLL(None).sleep(60)"  # as a runtime that reads a large graph
CRASH = "os.abort()"


@contextmanager
def starting(folder: Path, action: str, *arguments: str | Path) -> Iterator[Server]:
    """A service whose first attempt to open a bundle has begun, and does this instead."""
    (folder / "sitecustomize.py").write_text(HOOK.format(action=action))
    paths = [str(folder), str(Path.cwd())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    server = Server(start(*arguments, "--port", "0", env=environment))
    try:
        with reading(server):
            until(lambda: "opening\n" in server.log)
            yield server
    finally:
        server.process.kill()
        server.process.wait()


@contextmanager
def reading(server: Server) -> Iterator[None]:
    """Collect the log of a process in a thread."""
    reader = threading.Thread(target=read_log, args=(server, threading.Event()), daemon=True)
    reader.start()
    try:
        yield
    finally:
        server.process.kill()
        reader.join(30)
        assert server.process.stderr is not None
        server.process.stderr.close()


def pids(server: Server) -> list[int]:
    return [pid for found in children(server).values() for pid in found]


@pytest.mark.parametrize(
    ("workers", "action", "number"),
    [
        ("0", IN_C, signal.SIGTERM),
        ("0", IN_C, signal.SIGINT),
        ("2", IN_C, signal.SIGINT),
        ("2", IN_C, signal.SIGQUIT),
        ("2", CRASH, signal.SIGTERM),
    ],
)
def test_a_stop_during_the_start_ends_at_once(
    tiny_bundle, tmp_path, workers, action, number, limit_s
):
    """While bundles load, or starts fail and are repeated, nothing was accepted: the status is 0 within a second."""
    with starting(tmp_path, action, tiny_bundle, "--http-workers", workers) as server:
        if action == CRASH:  # the pauses between starts are longer by now
            until(lambda: sum("process ended" in line for line in server.log) >= 4)
        left = pids(server)
        began = time.monotonic()
        server.process.send_signal(number)
        assert 0 == server.process.wait(30)
        assert time.monotonic() - began < limit_s(1.0)
        until(lambda: not any(alive(pid) for pid in left))
    assert not any("Traceback" in line for line in server.log)


@WORKERS
def test_user_signals_are_ignored_and_sigquit_drains(tiny_bundle, workers):
    """SIGUSR1, SIGUSR2 and, without keys, SIGHUP change nothing in any process; SIGQUIT is what SIGTERM is.

    After the delay, what was accepted is answered, and the status is 0. The log names the process that takes signals.
    """
    options = ["--http-workers", workers, "--drain-delay-s", "0.5"]
    with serving(tiny_bundle, *options) as server, half_sent(server) as client:
        line = next(json.loads(line) for line in server.log if '"event":"serving"' in line)
        assert server.process.pid == line["pid"]
        before = pids(server)
        for pid in [server.process.pid, *before]:
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
                os.kill(pid, number)
        time.sleep(0.5)
        assert server.process.poll() is None
        assert before == pids(server)
        assert 200 == readiness(server)
        server.process.send_signal(signal.SIGQUIT)
        until(lambda: readiness(server) == 503)
        until(lambda: any('"draining"' in line for line in server.log))
        client.sendall(body_of(CALLS[0])[HALF:])
        with client.makefile("rb") as wire:
            assert wire.readline().startswith(b"HTTP/1.1 200 ")
        assert 0 == server.process.wait(30)
        until(lambda: not any(alive(pid) for pid in before))


@WORKERS
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(tiny_bundle, workers, number, limit_s):
    """A request that never ends does not hold it up. The log has no traceback, and "stopped" at the end."""
    with serving(tiny_bundle, "--http-workers", workers) as server, half_sent(server):
        left = pids(server)
        server.process.send_signal(number)
        until(lambda: any('"draining"' in line for line in server.log))
        began = time.monotonic()
        for _ in range(3):
            server.process.send_signal(number)
            time.sleep(0.01)
        assert 0 == server.process.wait(30)
        assert time.monotonic() - began < min(limit_s(1.0), 15)  # and `drain_s` is 30
        until(lambda: not any(alive(pid) for pid in left))
    assert not any("Traceback" in line or "KeyboardInterrupt" in line for line in server.log)
    assert "stopped" == json.loads(server.log[-1])["event"]


@pytest.mark.parametrize("role", ["inference", "http"])
def test_children_do_not_outlive_a_main_process_killed_at_the_start(tiny_bundle, tmp_path, role):
    """They end at once: none has accepted a request."""
    with starting(tmp_path, IN_C, tiny_bundle, "--http-workers", "2") as server:
        until(lambda: len(pids(server)) == 3)
        left = children(server)[role]
        server.process.kill()
        server.process.wait()
        until(lambda: not any(alive(pid) for pid in left), 10)


def test_children_outlive_a_killed_main_process_by_a_drain_at_most(tiny_bundle):
    """A request that never ends holds them up until `drain_s` is over, and no longer; the port is free at once."""
    options = ["--http-workers", "2", "--drain-s", "3"]
    with serving(tiny_bundle, *options) as server, half_sent(server):
        left = pids(server)
        began = time.monotonic()
        server.process.kill()
        server.process.wait()
        until(lambda: readiness(server) is None, 10)
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", server.port))
        until(lambda: not any(alive(pid) for pid in left))
        assert time.monotonic() - began < 30


def test_a_child_that_stands_still_ends_with_the_main_process(tiny_bundle):
    """A process that was stopped when the main process ended notices it when it goes on."""
    with serving(tiny_bundle, "--http-workers", "1", "--drain-s", "1") as server:
        left = pids(server)
        for pid in left:
            os.kill(pid, signal.SIGSTOP)
        server.process.kill()
        server.process.wait()
        for pid in left:
            os.kill(pid, signal.SIGCONT)
        until(lambda: not any(alive(pid) for pid in left))


ADOPT = (  # PR_SET_CHILD_SUBREAPER
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)
ORPHAN = '(sleep 0.2 & echo "orphan $!" >&2) ; exec "$@"'  # its parent ends before it does


@WORKERS
def test_orphans_are_reaped(tiny_bundle, workers):
    """A process that adopts orphans, as process 1 does, collects those that end, and none of its own is lost."""

    command = [sys.executable, "-c", ADOPT, "sh", "-c", ORPHAN, "sh"]
    with serving(tiny_bundle, "--http-workers", workers, under=command) as server:
        (orphan,) = [int(line.split()[1]) for line in server.log if line.startswith("orphan")]
        until(lambda: not Path(f"/proc/{orphan}").exists(), 30)
        if workers != "0":
            (before,) = children(server)["inference"]
            os.kill(before, signal.SIGKILL)
            until(lambda: children(server)["inference"] not in ([], [before]))
            until(lambda: any("inference process ended" in line for line in server.log))
            status = next(line for line in server.log if "inference process ended" in line)
            assert '"status": -9' in status or '"status":-9' in status


def ps_of_children(pid: int, column: str) -> list[str]:
    command = ["ps", "-o", f"{column}=", "--ppid", str(pid)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()


@WORKERS
def test_as_process_1_it_stops_and_reaps(tiny_bundle, workers):
    """In a PID namespace of its own, SIGTERM drains, and an orphan leaves no zombie."""
    apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespace can be made here")
    command = [*apart, "sh", "-c", ORPHAN, "sh"]
    with serving(tiny_bundle, "--http-workers", workers, under=command) as server:
        first = int(ps_of_children(server.process.pid, "pid")[0])  # process 1 of the namespace
        time.sleep(0.5)
        until(lambda: not any(stat.startswith("Z") for stat in ps_of_children(first, "stat")), 30)
        os.kill(first, signal.SIGTERM)
        assert 0 == server.process.wait(30)


def test_dead_children_are_found():
    """A child that has ended and was not waited for is dead, and a living one is not."""
    ended, living = (subprocess.Popen(["sleep", seconds]) for seconds in ("0", "60"))
    try:
        until(lambda: ended.pid in process_signals.dead_children())
        assert living.pid not in process_signals.dead_children()
    finally:
        living.kill()
        for process in (ended, living):
            process.wait()
    assert ended.pid not in process_signals.dead_children()
