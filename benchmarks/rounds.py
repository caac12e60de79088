"""Servers measured in turn, in rounds, so that what the machine does meanwhile happens to all of them.

All servers are started once. In each round each is woken, asked, and stopped again (SIGSTOP), so that it takes nothing
from the others; every other round goes backwards. A figure is the median over the rounds, and a ratio is taken within
each round, against the first server, before its median: a machine that is slow for a minute is slow for both.
"""

import json
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks import processes, servers
from benchmarks.environments import Unavailable
from benchmarks.load import Measured, closed_loop, open_loop, request_bytes
from benchmarks.servers import Running, Server, StartError

WARM_S = 0.7  # before each window
SETTLE_S = 20.0  # after one, at most
IDLE, IDLE_S = 0.3, 0.2  # a server that takes less of a core for so long is idle
KEPT_UP = 0.95  # an open loop's server that answers less of what was offered is overloaded


@dataclass(frozen=True)
class Window:
    """What one server did in one window; cpu_ms: of its processes, per answer; generator: cores that asking took."""

    load: float  # connections, or requests offered per second
    rate: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float
    generator: float


@dataclass
class Tested:
    """One server's start, its memory at the end, and its windows by load, one for each round."""

    name: str
    note: str = ""
    skipped: str = ""
    start_s: float = 0.0
    peak_mb: float = 0.0
    closed: dict[int, list[Window]] = field(default_factory=dict)
    open: dict[int, list[Window]] = field(default_factory=dict)


def measure(
    chosen: Sequence[Server],
    task: str,
    model: Path,
    texts: Sequence[str],
    scratch: Path,
    *,
    connections: Sequence[int],
    rates: Sequence[int] = (),
    rounds: int = 5,
    seconds: float = 3.0,
    say: Callable[[str], None] = print,
) -> list[Tested]:
    """Every server that offers the task, under every load, in every round.

    A server that fails is left out with its reason. In the open loop a server that cannot keep up with a rate is not
    asked for a higher one.
    """
    tested = [Tested(server.name, server.note) for server in chosen]
    with ExitStack() as stack:
        awake: list[tuple[Tested, Running, list[bytes]]] = []
        for server, result in zip(chosen, tested, strict=True):
            if task not in server.calls:
                result.skipped = "does not offer it"
                continue
            say(f"starting {server.name}")
            try:
                running = stack.enter_context(servers.serving(server, model, scratch))
            except (Unavailable, StartError) as error:
                result.skipped = str(error)
                continue
            stack.callback(processes.wake, running.process.pid)  # before it is ended
            result.start_s = running.start_s
            call = server.calls[task]
            asked = [request_bytes(call.path, json.dumps(call.body(t)).encode()) for t in texts]
            awake.append((result, running, asked))
            processes.rest(running.process.pid)
        for number in range(rounds):
            for result, running, asked in awake[:: 1 if number % 2 else -1]:
                say(f"round {number + 1} of {rounds}: {result.name}")
                with suppress_failure(result), working(running):
                    ask(result, running, asked, connections, rates, seconds)
        for result, running, _ in awake:
            result.peak_mb = processes.peak_mb(running.process.pid)
    return tested


def ask(
    result: Tested,
    running: Running,
    requests: Sequence[bytes],
    connections: Sequence[int],
    rates: Sequence[int],
    seconds: float,
) -> None:
    """One server's turn in one round."""
    if result.skipped:
        return
    for count in connections:
        found, spent = under(
            running, closed_loop(running.port, requests, count, seconds, warm_s=WARM_S)
        )
        result.closed.setdefault(count, []).append(window(count, found, spent))
    for rate in rates:
        found, spent = under(
            running, open_loop(running.port, requests, rate, seconds, warm_s=WARM_S)
        )
        result.open.setdefault(rate, []).append(window(rate, found, spent))
        assert found.offered is not None
        if found.rate < KEPT_UP * found.offered or found.percentile(99) > 1000 * seconds:
            break


def under(running: Running, load: Coroutine[Any, Any, Measured]) -> tuple[Measured, float]:
    """Put a server under a load, and see it idle again: what it did, and the processor seconds of the window."""
    before = processes.cpu_s(running.process.pid)
    found = uvloop.run(load)
    spent = processes.cpu_s(running.process.pid) - before
    settle(running)
    return found, spent * found.seconds / (found.seconds + WARM_S)


def window(load: float, found: Measured, spent: float) -> Window:
    return Window(
        load=load,
        rate=found.rate,
        p50_ms=found.percentile(50),
        p99_ms=found.percentile(99),
        cpu_ms=1000 * spent / max(found.requests, 1),
        generator=found.cpu_s / found.seconds,
    )


@contextmanager
def suppress_failure(result: Tested) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        result.skipped = f"failed under load: {error}"


# -- processes --------------------------------------------------------------------------------------------------------


@contextmanager
def working(running: Running) -> Iterator[None]:
    processes.wake(running.process.pid)
    try:
        yield
    finally:
        processes.rest(running.process.pid)


def settle(running: Running) -> None:
    """Wait until a server has done what nobody waits for any more, so that it does not do it in the next window."""
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end:
        before = processes.cpu_s(running.process.pid)
        time.sleep(IDLE_S)
        if processes.cpu_s(running.process.pid) - before < IDLE * IDLE_S:
            return


# -- figures ----------------------------------------------------------------------------------------------------------


def summary(windows: Sequence[Window], base: Sequence[Window]) -> dict[str, Any]:
    """Medians over the rounds, and the ratio of throughput to the first server's in the same round."""
    figures = {
        name: float(np.median([getattr(one, name) for one in windows]))
        for name in ("rate", "p50_ms", "p99_ms", "cpu_ms", "generator")
    }
    ratios = [one.rate / other.rate for one, other in zip(windows, base, strict=False)]
    spread = [min(ratios, default=np.nan), max(ratios, default=np.nan)]
    return {**figures, "ratio": float(np.median(ratios or [np.nan])), "spread": spread}


def summaries(tested: Sequence[Tested]) -> list[dict[str, Any]]:
    """What the rounds came to, as JSON."""
    first = tested[0]
    return [
        {
            "server": one.name,
            **({"note": one.note} if one.note else {}),
            **({"skipped": one.skipped} if one.skipped else {}),
            "start_s": one.start_s,
            "peak_mb": one.peak_mb,
            "closed": {
                load: summary(found, first.closed.get(load, ()))
                for load, found in one.closed.items()
            },
            "open": {
                load: summary(found, first.open.get(load, ())) for load, found in one.open.items()
            },
        }
        for one in tested
    ]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A table of throughput and latency, and what each server cost."""
    head = f"{'':<24}{'load':>7}{'texts/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'CPU ms':>8}{'ratio':>7}"
    print(f"\n{head}  (range)")
    for row in rows:
        if row.get("skipped"):
            print(f"{row['server']:<24}{row['skipped'].splitlines()[0]}")
        for kind, unit in (("closed", ""), ("open", "/s")):
            for load, found in row[kind].items():
                low, high = found["spread"]
                print(
                    f"{row['server']:<24}{f'{load}{unit}':>7}{found['rate']:>9.0f}{found['p50_ms']:>9.1f}"
                    f"{found['p99_ms']:>9.1f}{found['cpu_ms']:>8.1f}{found['ratio']:>7.2f}  ({low:.2f}-{high:.2f})"
                )
    print(
        "\nload: connections that ask as soon as they are answered, or requests offered per second"
    )
    for row in rows:
        if row["start_s"]:
            print(
                f"{row['server']:<24}ready in {row['start_s']:.1f} s, {row['peak_mb']:.0f} MB at most"
            )
    generator = [
        w["generator"] for row in rows for kind in ("closed", "open") for w in row[kind].values()
    ]
    if generator:
        print(f"asking took at most {max(generator):.2f} of a core")
