"""A child process of the service, and the early start of the inference process.

The inference process takes longest until it serves. `start_early` starts it before the main process imports the modules
that read its settings, so that both import at the same time: the service is ready 0.16 s sooner, of 2.1 s, if two cores
are idle. Therefore this module imports nothing slow.
"""

import atexit
import os
import site
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import service
from service.variables import without_secrets

EARLY_ROLE = "inference"
ENDS_AT_ONCE = frozenset({"-h", "--help", "--version", "--check-config"})


class ChildProcess:
    """A process of `service.processes.child_main`. control: the main process's end of its control channel"""

    def __init__(self, role: str, listeners: Sequence[socket.socket] = ()) -> None:
        """Start the process, which waits for its start-up config, with inherited `listeners`. Raises OSError."""
        self.control, theirs = socket.socketpair()
        inherited = [end.fileno() for end in (theirs, *listeners)]
        command = [*child_python(), "-m", "service.processes.child_main", role]
        try:
            self._process = subprocess.Popen(
                [*command, *map(str, (os.getpid(), *inherited))],
                stdin=subprocess.PIPE,
                env=without_secrets(os.environ),
                pass_fds=inherited,
                process_group=0,  # a signal from a terminal reaches only the main process
            )
        except OSError:
            self.control.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def send_config(self, config: bytes) -> None:
        """Write the start-up config to the process's standard input, and close it."""
        import asyncio  # here, because `start_early` is called before anything slow is imported

        await asyncio.to_thread(self._write, config)  # a pipe holds only part of a long one

    def _write(self, config: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ConnectionResetError), self._process.stdin as pipe:
            pipe.write(config)

    async def wait(self) -> int:
        """Return the exit status once the process has ended; a signal is a negative number."""
        import asyncio

        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()

        def report(status: int) -> None:
            if not ended.done():
                ended.set_result(status)

        def collect() -> None:
            status = self._process.wait()
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(report, status)

        threading.Thread(target=collect, name=f"wait for {self.pid}", daemon=True).start()
        return await ended

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        with suppress(ProcessLookupError):
            self._process.kill()

    def discard(self) -> None:
        """End a process that has no start-up config, and close everything of it."""
        self.kill()
        self.control.close()
        self._process.communicate()


_early: list[ChildProcess] = []  # at most one


def start_early(arguments: Sequence[str]) -> None:
    """Start the inference process, unless these arguments of the command line end the service at once."""
    if ENDS_AT_ONCE & {*arguments}:
        return
    with suppress(OSError):  # the service starts one later, and logs the problem
        _early.append(ChildProcess(EARLY_ROLE))
    atexit.register(drop_early)


def start(role: str, listeners: Sequence[socket.socket]) -> ChildProcess:
    """Start a process, or return the one that was started early. Raises OSError."""
    return _early.pop() if role == EARLY_ROLE and _early else ChildProcess(role, listeners)


def drop_early() -> None:
    """End the process that was started early, if no role needs it."""
    while _early:
        _early.pop().discard()


def child_python() -> Sequence[str]:
    """Return the command of a child's interpreter; an installed service ignores the working directory's modules."""
    folders = {*site.getsitepackages(), site.getusersitepackages()}
    is_installed = str(Path(service.__file__).parent.parent) in folders
    return [sys.executable, "-P"] if is_installed else [sys.executable]
