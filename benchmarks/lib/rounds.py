"""Interleaved rounds: servers are measured in turn, so that changes of the machine's speed affect all of them.

All servers are started once. In each round, for each load, each is continued (SIGCONT), measured, and stopped again
(SIGSTOP), so that it takes nothing from the others; every other round has the reverse order. A figure is the median
over the rounds. A ratio to the first server is computed within each round before its median. The ONNX Runtime baseline
(`benchmarks/lib/onnxruntime_baseline.py`) takes part like a server but measures itself, optionally while a no-op server
answers the number of requests that a service answered.
"""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import uvloop

from benchmarks.lib import processes, servers
from benchmarks.lib.environments import Unavailable
from benchmarks.lib.load_generator import Measured, closed_loop, open_loop, request_bytes, streaming
from benchmarks.lib.servers import WINDOW, Running, Server, StartError

T = TypeVar("T")

WARM_S = 0.7  # before each window
SETTLE_S = 20.0  # after one, at most
IDLE, IDLE_S = 0.3, 0.2  # share of a core, and seconds, below which a server is idle
CAPACITY_AT = 32  # connections
KEPT_UP = (
    0.95  # share of the offered requests; a server that answers less in an open loop is overloaded
)


@dataclass(frozen=True)
class Window:
    """The figures of one server in one window.

    rate: answers per second, of mean size
    cpu_ms: of its processes, per answer
    generator: cores that the load generator took
    each: milliseconds of the last answer to each text, by its index, in a closed loop and in the baseline at one
        connection
    """

    load: float  # connections, or requests offered per second
    rate: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float
    generator: float
    each: Mapping[int, float] = field(default_factory=dict)


@dataclass
class Tested:
    """One server's start, its memory at the end, and its windows by load, one for each round."""

    name: str
    note: str = ""
    skipped: str = ""
    start_s: float = 0.0
    peak_mb: float = 0.0
    closed: dict[int, list[Window]] = field(default_factory=dict)
    open: dict[int | str, list[Window]] = field(
        default_factory=dict
    )  # a rate, or a share of capacity


@dataclass
class Contender:
    """A running server, its requests and its results.

    overloaded: whether it fell behind in an open loop of this round
    noop_load: requests to a no-op server while it measures itself
    """

    server: Server
    running: Running
    requests: Sequence[bytes]
    weights: np.ndarray
    result: Tested
    overloaded: bool = False
    noop_load: "NoopLoad | None" = None


class NoopLoad(NamedTuple):
    """Load on a no-op server while a contender measures itself: the number of requests that another one answers."""

    noop: Running
    other: Contender


def measure(
    chosen: Sequence[Server],
    task: str,
    model: Path,
    texts: Sequence[str],
    scratch: Path,
    *,
    connections: Sequence[int],
    rates: Sequence[int] = (),
    shares: Sequence[float] = (),
    weights: Sequence[float] | None = None,
    rounds: int = 5,
    seconds: float = 3.0,
    open_seconds: float | None = None,
    noop_load: Mapping[str, str] | None = None,
    say: Callable[[str], None] = print,
) -> list[Tested]:
    """Measure every server that offers the task, under every load, in every round.

    rates: of the open loop, requests per second
    shares: rates of the open loop relative to the server's rate at CAPACITY_AT connections in the same round
    weights: the size of each text, for example in tokens; an answer counts by its size
    open_seconds: of a window of the open loop
    noop_load: by the name of a server that measures itself, the server whose rate a no-op server answers meanwhile

    A server that fails is left out with its reason. A server that falls behind a rate of the open loop gets no higher
    one in the same round.
    """
    tested = [Tested(server.name, server.note) for server in chosen]
    open_s = open_seconds or seconds
    blocks: list[tuple[str, Callable[[Contender], None]]] = []
    for count in connections:
        blocks.append((f"{count} connections", partial(run_closed, count=count, seconds=seconds)))
        if count == CAPACITY_AT:
            blocks += [
                (f"{share:.0%} of that", partial(run_share, share=share, seconds=open_s))
                for share in shares
            ]
    blocks += [(f"{rate}/s", partial(run_open, rate=rate, seconds=open_s)) for rate in rates]
    with ExitStack() as stack:
        contenders: list[Contender] = []
        for server, result in zip(chosen, tested, strict=True):
            if task not in server.calls:
                result.skipped = "does not offer it"
                continue
            say(f"starting {server.name}")
            try:
                running = start(stack, server, model, scratch)
            except (Unavailable, StartError) as error:
                result.skipped = str(error)
                continue
            result.start_s = running.start_s
            requests = encode_requests(server, task, texts)
            sizes = np.ones(len(texts)) if weights is None else np.asarray(weights)
            contenders.append(Contender(server, running, requests, sizes / sizes.mean(), result))
        start_noop_loads(stack, contenders, noop_load or {}, model, scratch)
        for number in range(rounds):
            for one in contenders:
                one.overloaded = False
            for what, ask in blocks:
                say(f"round {number + 1} of {rounds}: {what}")
                for one in alternating_order(contenders, number):
                    if not one.result.skipped:
                        with suppress_failure(one.result), working(one.running):
                            ask(one)
        for one in contenders:
            one.result.peak_mb = processes.peak_mb(one.running.process.pid)
    return tested


def alternating_order(items: Sequence[T], number: int) -> Sequence[T]:
    """Return the order of a round's turns, reversed in every other round."""
    return items[:: 1 if number % 2 else -1]


def encode_requests(server: Server, task: str, texts: Sequence[str]) -> list[bytes]:
    """Return the requests for texts as bytes."""
    call = server.calls[task]
    return [request_bytes(call.path, json.dumps(call.body(text)).encode()) for text in texts]


def take_turns(
    turns: Mapping[str, tuple[Running, Callable[[], T]]],
    rounds: int,
    say: Callable[[str], None] = print,
) -> dict[str, list[T]]:
    """Run each measurement in each round, and return the results by name.

    turns: a server, which runs during the measurement and is idle after it, and the measurement
    """
    results: dict[str, list[T]] = {name: [] for name in turns}
    for number in range(rounds):
        for name, (running, ask) in alternating_order([*turns.items()], number):
            say(f"round {number + 1} of {rounds}: {name}")
            with working(running):
                results[name].append(ask())
                wait_until_idle(running)
    return results


# -- loads ------------------------------------------------------------------------------------------------------------


def run_closed(one: Contender, count: int, seconds: float) -> None:
    if one.noop_load:
        noop, other = one.noop_load
        rate = rate_of(other, count, seconds)
        found = uvloop.run(
            self_measured_with_noop(noop, other.requests, rate, one.running, count, seconds)
        )
    elif one.server.measures_itself:
        found = self_measured(one.running, count, seconds)
    else:
        found = measure_closed(one.running, one.requests, one.weights, count, seconds)
    one.result.closed.setdefault(count, []).append(found)


def run_share(one: Contender, share: float, seconds: float) -> None:
    if not one.server.measures_itself:
        rate = share * one.result.closed[CAPACITY_AT][-1].rate
        found, _ = measure_open(one.running, one.requests, rate, seconds)
        one.result.open.setdefault(f"{share:.0%}", []).append(found)


def run_open(one: Contender, rate: int, seconds: float) -> None:
    if not one.server.measures_itself and not one.overloaded:
        found, offered = measure_open(one.running, one.requests, rate, seconds)
        one.result.open.setdefault(rate, []).append(found)
        one.overloaded = found.rate < KEPT_UP * offered or found.p99_ms > 1000 * seconds


def rate_of(one: Contender, count: int, seconds: float) -> float:
    """Return a server's median rate under a load so far; measures it before its first turn."""
    if windows := one.result.closed.get(count):
        return float(np.median([found.rate for found in windows]))
    with working(one.running):
        return measure_closed(one.running, one.requests, one.weights, count, seconds).rate


def measure_closed(
    running: Running, requests: Sequence[bytes], weights: np.ndarray, count: int, seconds: float
) -> Window:
    """Measure a closed loop of `count` connections; an answer counts by the weight of its request."""
    found, spent = run_load(
        running, closed_loop(running.port, requests, count, seconds, warm_s=WARM_S)
    )
    assert found.numbers is not None
    each = zip(found.numbers.tolist(), (1000 * found.latencies).tolist(), strict=True)
    return window(count, found, weights[found.numbers].sum() / seconds, spent, dict(each))


def measure_open(
    running: Running, requests: Sequence[bytes], rate: float, seconds: float
) -> tuple[Window, float]:
    """Measure an open loop at a rate. Returns the window, and the requests that were offered per second."""
    found, spent = run_load(
        running, open_loop(running.port, requests, rate, seconds, warm_s=WARM_S)
    )
    assert found.offered is not None
    return window(rate, found, found.rate, spent), found.offered


def self_measured(running: Running, count: int, seconds: float) -> Window:
    """Let the baseline measure itself under a load."""
    load = {"connections": count, "seconds": seconds, "warm_s": WARM_S}
    before = processes.cpu_s(running.process.pid)
    _, body = servers.post(running.port, WINDOW, load, timeout_s=60 + 10 * seconds)
    spent = processes.cpu_s(running.process.pid) - before
    found = json.loads(body)
    cpu_ms = 1000 * spent / found["ran"]
    each = dict(found.get("each", ()))
    return Window(count, found["rate"], found["p50_ms"], found["p99_ms"], cpu_ms, 0.0, each)


async def self_measured_with_noop(
    noop: Running,
    requests: Sequence[bytes],
    rate: float,
    running: Running,
    count: int,
    seconds: float,
) -> Window:
    """Let the baseline measure itself while a no-op server answers `rate` requests per second (Poisson)."""
    async with streaming(noop.port, requests, rate, 60 + 10 * seconds):
        return await asyncio.to_thread(self_measured, running, count, seconds)


def run_load(running: Running, load: Coroutine[Any, Any, Measured]) -> tuple[Measured, float]:
    """Run a load on a server, and wait until it is idle. Returns the result, and CPU seconds of the window."""
    before = processes.cpu_s(running.process.pid)
    found = uvloop.run(load)
    spent = processes.cpu_s(running.process.pid) - before
    wait_until_idle(running)
    return found, spent * found.seconds / found.lasted


def window(
    load: float, found: Measured, rate: float, spent: float, each: Mapping[int, float] | None = None
) -> Window:
    return Window(
        load=load,
        rate=rate,
        p50_ms=found.percentile(50),
        p99_ms=found.percentile(99),
        cpu_ms=1000 * spent / max(found.requests, 1),
        generator=found.cpu_s / found.seconds,
        each=each or {},
    )


@contextmanager
def suppress_failure(result: Tested) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        result.skipped = f"failed under load: {error}"


# -- processes --------------------------------------------------------------------------------------------------------


def start(stack: ExitStack, server: Server, model: Path, scratch: Path) -> Running:
    """Start a server and stop it (SIGSTOP) until its turn. Raises Unavailable and StartError."""
    running = stack.enter_context(servers.serving(server, model, scratch))
    stack.callback(processes.wake, running.process.pid)  # before it is ended
    wait_until_idle(running)
    processes.rest(running.process.pid)
    return running


def start_noop_loads(
    stack: ExitStack,
    contenders: Sequence[Contender],
    noop_load: Mapping[str, str],
    model: Path,
    scratch: Path,
) -> None:
    """Start the no-op server of the contenders that measure themselves; it is idle without requests."""
    named = {one.server.name: one for one in contenders}
    pairs = [
        (named[name], named[other])
        for name, other in noop_load.items()
        if {name, other} <= {*named}
    ]
    if pairs:
        noop = stack.enter_context(servers.serving(servers.NOOP, model, scratch))
        for one, other in pairs:
            one.noop_load = NoopLoad(noop, other)


@contextmanager
def working(running: Running) -> Iterator[None]:
    processes.wake(running.process.pid)
    try:
        yield
    finally:
        processes.rest(running.process.pid)


def wait_until_idle(running: Running) -> None:
    """Wait until a server has finished abandoned requests, so that they do not take time in the next window."""
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end:
        before = processes.cpu_s(running.process.pid)
        time.sleep(IDLE_S)
        if processes.cpu_s(running.process.pid) - before < IDLE * IDLE_S:
            return


# -- figures ----------------------------------------------------------------------------------------------------------


def summary(windows: Sequence[Window], base: Sequence[Window]) -> dict[str, Any]:
    """Return medians over the rounds, and the ratio of throughput to the first server's in the same round."""
    figures = {
        name: float(np.median([getattr(one, name) for one in windows]))
        for name in ("rate", "p50_ms", "p99_ms", "cpu_ms", "generator")
    }
    ratios = [one.rate / other.rate for one, other in zip(windows, base, strict=False)]
    spread = [min(ratios, default=np.nan), max(ratios, default=np.nan)]
    return {**figures, "ratio": float(np.median(ratios or [np.nan])), "spread": spread}


def summaries(tested: Sequence[Tested]) -> list[dict[str, Any]]:
    """Return the results of the rounds as JSON."""
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


def loaded(load: int | str, kind: str) -> str:
    """Format a load for the table: `32`, `80/s`, `80%`."""
    return f"{load}/s" if kind == "open" and isinstance(load, int) else str(load)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table of throughput, latency and CPU time."""
    head = f"{'':<24}{'load':>7}{'texts/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'CPU ms':>8}{'ratio':>7}"
    print(f"\n{head}  (range)")
    for row in rows:
        if row.get("skipped"):
            print(f"{row['server']:<24}{row['skipped'].splitlines()[0]}")
        for kind in ("closed", "open"):
            for load, found in row[kind].items():
                low, high = found["spread"]
                print(
                    f"{row['server']:<24}{loaded(load, kind):>7}{found['rate']:>9.0f}{found['p50_ms']:>9.1f}"
                    f"{found['p99_ms']:>9.1f}{found['cpu_ms']:>8.1f}{found['ratio']:>7.2f}  ({low:.2f}-{high:.2f})"
                )
    print(
        "\nload: connections of a closed loop, requests offered per second,"
        f" or a part of the rate at {CAPACITY_AT} connections"
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
        print(f"the load generator took at most {max(generator):.2f} of a core")
