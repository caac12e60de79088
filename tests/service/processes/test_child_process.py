"""Children get their start-up config and no secrets, and one of them may start before there are settings."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from service.processes import child_process
from service.processes.child_process import ChildProcess

# Stands in for child_main: sends its role, its variables and the length of its config to the control channel, and ends.
SCRIPT = """
import json, os, socket, sys, time
role, parent, control, *listeners = sys.argv[-ARGUMENTS:]
time.sleep(PAUSE)
config = sys.stdin.buffer.read()
names = sorted(name for name in os.environ if name.startswith("QUARTET_"))
open_to = [socket.socket(fileno=int(number)).getsockname()[1] for number in listeners]
found = {"role": role, "parent": int(parent), "names": names, "config": len(config), "ports": open_to}
socket.socket(fileno=int(control)).sendall(json.dumps(found).encode())
sys.exit(7)
"""


@pytest.fixture(autouse=True)
def _none_early() -> Iterator[None]:
    child_process.drop_early()
    yield
    child_process.drop_early()


def stand_in(monkeypatch: pytest.MonkeyPatch, arguments: int = 3, pause: float = 0.0) -> None:
    script = SCRIPT.replace("ARGUMENTS", str(arguments)).replace("PAUSE", str(pause))
    command = [sys.executable, "-c", script]
    monkeypatch.setattr(child_process, "child_python", lambda: command)


async def finish(process: ChildProcess, config: bytes) -> tuple[int, dict[str, object]]:
    await process.send_config(config)
    status = await asyncio.wait_for(process.wait(), 20)
    with process.control as control:
        return status, json.loads(control.recv(1 << 16))


async def test_a_child_has_its_config_and_listeners_and_no_secrets(monkeypatch):
    """A config longer than a pipe holds is sent while the child does not read yet."""
    monkeypatch.setenv("QUARTET_API_KEY", "secret")
    monkeypatch.setenv("quartet_keys", "secret")
    monkeypatch.setenv("QUARTET_LOG_LEVEL", "info")
    stand_in(monkeypatch, arguments=4, pause=0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = ChildProcess("http", [listener])
        status, found = await finish(process, b"x" * 1_000_000)
        port = listener.getsockname()[1]
    assert status == 7
    assert found == {
        "role": "http",
        "parent": os.getpid(),
        "names": ["QUARTET_LOG_LEVEL"],
        "config": 1_000_000,
        "ports": [port],
    }


async def test_the_end_of_a_child_is_known(monkeypatch):
    """A signal is a negative status. A child that has ended takes a config and a further signal without an error."""
    stand_in(monkeypatch, pause=30)
    process = ChildProcess("inference")
    waiting = asyncio.create_task(process.wait())
    await asyncio.sleep(0)
    process.kill()
    assert await asyncio.wait_for(waiting, 20) == -signal.SIGKILL
    process.kill()
    await process.send_config(b"too late")
    assert await process.wait() == -signal.SIGKILL
    process.control.close()


async def test_the_inference_process_starts_early_once(monkeypatch):
    """An HTTP process needs listeners, so it does not; the next inference process is a new one."""
    stand_in(monkeypatch)
    child_process.start_early(["bundles/mine", "--port", "8000"])
    frontend = child_process.start("http", [])
    early = child_process.start("inference", [])
    again = child_process.start("inference", [])
    assert early.pid not in (frontend.pid, again.pid)
    for process, role in ((early, "inference"), (frontend, "http"), (again, "inference")):
        status, found = await finish(process, b"config")
        assert (status, found["role"], found["config"]) == (7, role, 6)


def no_process(arguments: Sequence[str]) -> bool:
    child_process.start_early(arguments)
    return not child_process._early


def test_no_process_starts_early_where_the_command_ends_at_once(monkeypatch):
    stand_in(monkeypatch)
    assert no_process(["--help"])
    assert no_process(["bundles/mine", "--check-config"])
    monkeypatch.setattr(child_process, "child_python", lambda: ["/nothing"])
    assert no_process(["bundles/mine"])


async def test_an_unused_early_process_is_ended(monkeypatch):
    stand_in(monkeypatch, pause=30)
    child_process.start_early([])
    [early] = child_process._early
    child_process.drop_early()
    assert await asyncio.wait_for(early.wait(), 20) == -signal.SIGKILL
    assert not child_process._early


def test_a_child_without_a_config_ends_in_silence():
    """The main process ended before it had read its settings, and has said why itself."""
    ours, control = socket.socketpair()
    with ours, control:
        command = [*child_process.child_python(), "-m", "service.processes.child_main"]
        done = subprocess.run(
            [*command, "inference", str(os.getpid()), str(control.fileno())],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            pass_fds=[control.fileno()],
            check=False,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_refused_setting_leaves_no_process(tmp_path):
    """The main process prints one line, and ends the process that it had started early."""
    command = [sys.executable, "-m", "service", str(tmp_path), "--port", "none"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as main:
        _, problem = main.communicate(timeout=20)
    assert main.returncode == 2
    assert len(problem.splitlines()) == 1
    end = time.monotonic() + 10
    while children_of(main.pid):
        assert time.monotonic() < end
        time.sleep(0.05)


def children_of(parent: int) -> list[str]:
    """List the child processes that were started by a main process with this id, also if that has ended."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            arguments = (entry / "cmdline").read_text().split("\0")
            if "service.processes.child_main" in arguments and str(parent) in arguments:
                found.append(entry.name)
    return found
