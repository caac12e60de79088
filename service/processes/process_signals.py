"""Signals, parents and orphans of the service's processes, by direct system calls.

| signal | before the service can drain | then |
|---|---|---|
| SIGTERM, SIGQUIT, SIGINT | the process ends, since no request was accepted | see `service.shutdown` |
| SIGHUP | ignored | API keys are read again, if there are any |
| SIGUSR1, SIGUSR2 | ignored | ignored |
"""

import ctypes
import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
IGNORED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
REAP_S = 1.0
PR_SET_PDEATHSIG, PR_GET_CHILD_SUBREAPER = 1, 37  # linux/prctl.h


def ignore(numbers: Collection[signal.Signals]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


class StopSignals:
    """A thread that receives the stop signals of a main process, so that no work of another thread delays them.

    They are blocked in all other threads and in children. Without a receiver, a signal ends the process.
    """

    def __init__(self) -> None:
        self._receiver: Callable[[int], None] | None = None

    def start(self) -> None:
        """Start the thread; call this before all other threads start, because they inherit the blocked signals."""
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
        threading.Thread(target=self._receive, name="signals", daemon=True).start()

    def deliver(self, receiver: Callable[[int], None]) -> None:
        """Call the receiver with the number of each signal, in the thread."""
        self._receiver = receiver

    def _receive(self) -> None:
        while True:
            number = signal.sigwait(STOP)
            if self._receiver is None:
                os._exit(0)
            self._receiver(number)


stop_signals = StopSignals()  # of this process; `python -m service` starts it


def at_start() -> None:
    """Make a stop signal end the process until it can drain, and ignore other signals until they have a handler."""
    ignore(IGNORED)
    stop_signals.start()


def die_with_parent(enabled: bool, parent: int | None = None) -> None:
    """Turn on or off that the kernel kills this process with its parent; end now if `parent` has ended."""
    prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL if enabled else 0))
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def end_within(seconds: float) -> None:
    """End this process after some seconds from a thread of the C runtime, even if no Python code can run."""
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(seconds, exit=True, file=os.dup(nowhere.fileno()))


def prctl(option: int, argument: Any) -> int:
    """Call prctl(2); return -1 where the system does not have it."""
    with suppress(AttributeError, OSError):
        return int(ctypes.CDLL(None).prctl(option, argument, 0, 0, 0))
    return -1


def adopts_orphans() -> bool:
    """Return whether the kernel makes this process the parent of orphans, as it does for process 1."""
    subreaper = ctypes.c_int(0)
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(subreaper))
    return os.getpid() == 1 or bool(subreaper.value)


async def reap_orphans(own: Callable[[], Collection[int]] = tuple) -> None:
    """Collect the exit status of orphans without end, if they come here. own: children that other code waits for

    Only processes that are dead in two checks in a row count as orphans, because asyncio collects its own earlier.
    """
    import asyncio  # here, because `at_start` is called before anything slow is imported

    seen: set[int] = set()
    while adopts_orphans():
        await asyncio.sleep(REAP_S)
        dead = dead_children() - {*own()}
        for pid in dead & seen:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        seen = dead


def dead_children() -> set[int]:
    """Return the process ids of the children that have ended and whose exit status is not collected yet."""
    found, parent = set(), str(os.getpid())
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state, its_parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                if (state, its_parent) == ("Z", parent):
                    found.add(int(entry.name))
    return found
