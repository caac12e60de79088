"""The processes of a server: a tree, since a server may start others, also in process groups of their own."""

import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PARENT, CPU, STARTED = 1, slice(11, 15), 19  # fields of `stat`, counted from the third on
SETTLE_S = 20.0  # after a load, at most
IDLE, IDLE_S = 0.3, 0.2  # cores and seconds: a server that takes less is idle


def members(root: int) -> Iterator[tuple[int, list[str]]]:
    """The ids of a process and of all below it, parents first, each with the fields of its `stat` from the third on."""
    stats: dict[int, list[str]] = {}
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                stats[int(entry.name)] = stat
                children[int(stat[PARENT])].append(int(entry.name))
    waiting = [root]
    for pid in waiting:
        if pid in stats:
            yield pid, stats[pid]
        waiting += children[pid]


def cpu_s(root: int) -> float:
    """Processor seconds of a tree's processes and of those that they have waited for."""
    return sum(sum(map(int, stat[CPU])) for _, stat in members(root)) / TICKS


def cores(root: int, seconds: float) -> float:
    """Return how many cores a tree takes in the next `seconds`."""
    before = cpu_s(root)
    time.sleep(seconds)
    return (cpu_s(root) - before) / seconds


def wait_until_idle(root: int) -> None:
    """Wait until a server has finished abandoned requests, so that they take no time in the next window.

    A batch that runs while the server is stopped would also be a slow one for its estimates.
    """
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end and cores(root, IDLE_S) >= IDLE:
        pass


def peak_mb(root: int) -> float:
    """The largest resident memory of each process of a tree, summed: shared pages count for each."""
    return _status(root, "VmHWM") / 1024


def resident_mb(root: int) -> float:
    """The resident memory of each process of a tree now, summed: shared pages count for each."""
    return _status(root, "VmRSS") / 1024


def _status(root: int, name: str) -> int:
    total = 0
    for pid, _ in members(root):
        with suppress(OSError):
            told = Path(f"/proc/{pid}/status").read_text().partition(f"\n{name}:")[2].split()
            total += int(told[0]) if told else 0  # a process that has ended has no memory
    return total


def rest(root: int) -> None:
    """Stop a tree, so that it takes nothing from others."""
    _send(root, signal.SIGSTOP)


def wake(root: int) -> None:
    _send(root, signal.SIGCONT)


def _send(root: int, number: signal.Signals) -> None:
    """Parents first, and again for those that were started meanwhile."""
    sent: set[int] = set()
    while fresh := [pid for pid, _ in members(root) if pid not in sent]:
        for pid in fresh:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        sent.update(fresh)


def started(root: int) -> set[tuple[int, str]]:
    """Every process of a tree, with when it was started: what tells it from a later one of the same id."""
    return {(pid, stat[STARTED]) for pid, stat in members(root)}


def kill(known: set[tuple[int, str]]) -> None:
    """Kill those that still run of what `started` found, wherever in the tree of processes they are now."""
    for pid, when in known:
        if (pid, when) in started(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
