"""Servers measured in turn, in rounds, so that what the machine does meanwhile happens to all of them.

All servers are started once. In each round, for each load, each is woken, asked, and stopped again (SIGSTOP), so that
it takes nothing from the others; every other round goes backwards. A figure is the median over the rounds, and a ratio
is taken within each round, against the first server, before its median: a machine that is slow for a minute is slow for
all. One of the servers may be no server but the bare session (`benchmarks/lib/onnxruntime_baseline.py`), which measures
itself, if asked for that beside a no-op server that answers as many requests as a service did.
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
IDLE, IDLE_S = 0.3, 0.2  # a server that takes less of a core for so long is idle
CAPACITY_AT = 32  # connections
KEPT_UP = 0.95  # an open loop's server that answers less of what was offered is overloaded


@dataclass(frozen=True)
class Window:
    """What one server did in one window.

    rate: answers per second, of mean size; cpu_ms: of its processes, per answer; generator: cores that asking took
    each: milliseconds of the last answer to each text, by its number, in a closed loop; of the bare session's, alone
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
    """A server that runs, what it is asked, and what it did.

    overloaded: it could not keep up in this round; company: what else is asked while it measures itself
    """

    server: Server
    running: Running
    requests: Sequence[bytes]
    weights: np.ndarray
    result: Tested
    overloaded: bool = False
    company: "Company | None" = None


class Company(NamedTuple):
    """What is asked of a no-op server while a contender measures itself: as many requests as another one answers."""

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
    company: Mapping[str, str] | None = None,
    say: Callable[[str], None] = print,
) -> list[Tested]:
    """Every server that offers the task, under every load, in every round.

    rates: of the open loop, per second; shares: its rates as parts of what the same server answered at `CAPACITY_AT`
    connections in the same round; weights: the size of each text, say in tokens, by which an answer counts, so that
    it does not matter which of them a window happened to hold; open_seconds: of a window of the open loop; company: by
    the name of a server that measures itself, the one as many of whose requests a no-op server answers meanwhile.

    A server that fails is left out with its reason. In the open loop a server that cannot keep up with a rate is not
    asked for a higher one.
    """
    tested = [Tested(server.name, server.note) for server in chosen]
    open_s = open_seconds or seconds
    blocks: list[tuple[str, Callable[[Contender], None]]] = []
    for count in connections:
        blocks.append((f"{count} connections", partial(ask_closed, count=count, seconds=seconds)))
        if count == CAPACITY_AT:
            blocks += [
                (f"{share:.0%} of that", partial(ask_share, share=share, seconds=open_s))
                for share in shares
            ]
    blocks += [(f"{rate}/s", partial(ask_open, rate=rate, seconds=open_s)) for rate in rates]
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
            asked = encoded(server, task, texts)
            sizes = np.ones(len(texts)) if weights is None else np.asarray(weights)
            contenders.append(Contender(server, running, asked, sizes / sizes.mean(), result))
        keep_company(stack, contenders, company or {}, model, scratch)
        for number in range(rounds):
            for one in contenders:
                one.overloaded = False
            for what, ask in blocks:
                say(f"round {number + 1} of {rounds}: {what}")
                for one in there_and_back(contenders, number):
                    if not one.result.skipped:
                        with suppress_failure(one.result), working(one.running):
                            ask(one)
        for one in contenders:
            one.result.peak_mb = processes.peak_mb(one.running.process.pid)
    return tested


def there_and_back(items: Sequence[T], number: int) -> Sequence[T]:
    """The order of a round's turns."""
    return items[:: 1 if number % 2 else -1]


def encoded(server: Server, task: str, texts: Sequence[str]) -> list[bytes]:
    """The requests for texts, ready to be sent."""
    call = server.calls[task]
    return [request_bytes(call.path, json.dumps(call.body(text)).encode()) for text in texts]


def take_turns(
    turns: Mapping[str, tuple[Running, Callable[[], T]]],
    rounds: int,
    say: Callable[[str], None] = print,
) -> dict[str, list[T]]:
    """What each of some askings found in each round; whoever is asked is awake for it, and idle again after it."""
    found: dict[str, list[T]] = {name: [] for name in turns}
    for number in range(rounds):
        for name, (running, ask) in there_and_back([*turns.items()], number):
            say(f"round {number + 1} of {rounds}: {name}")
            with working(running):
                found[name].append(ask())
                settle(running)
    return found


# -- loads ------------------------------------------------------------------------------------------------------------


def ask_closed(one: Contender, count: int, seconds: float) -> None:
    if one.company:
        noop, other = one.company
        rate = rate_of(other, count, seconds)
        found = uvloop.run(told_beside(noop, other.requests, rate, one.running, count, seconds))
    elif one.server.measures_itself:
        found = told(one.running, count, seconds)
    else:
        found = closed(one.running, one.requests, one.weights, count, seconds)
    one.result.closed.setdefault(count, []).append(found)


def ask_share(one: Contender, share: float, seconds: float) -> None:
    if not one.server.measures_itself:
        rate = share * one.result.closed[CAPACITY_AT][-1].rate
        found, _ = opened(one.running, one.requests, rate, seconds)
        one.result.open.setdefault(f"{share:.0%}", []).append(found)


def ask_open(one: Contender, rate: int, seconds: float) -> None:
    if not one.server.measures_itself and not one.overloaded:
        found, offered = opened(one.running, one.requests, rate, seconds)
        one.result.open.setdefault(rate, []).append(found)
        one.overloaded = found.rate < KEPT_UP * offered or found.p99_ms > 1000 * seconds


def rate_of(one: Contender, count: int, seconds: float) -> float:
    """What a server answered per second so far under a load; before its first turn, it is asked for as long."""
    if windows := one.result.closed.get(count):
        return float(np.median([found.rate for found in windows]))
    with working(one.running):
        return closed(one.running, one.requests, one.weights, count, seconds).rate


def closed(
    running: Running, requests: Sequence[bytes], weights: np.ndarray, count: int, seconds: float
) -> Window:
    """So many connections at once; an answer counts by the weight of its request."""
    found, spent = under(
        running, closed_loop(running.port, requests, count, seconds, warm_s=WARM_S)
    )
    assert found.numbers is not None
    each = zip(found.numbers.tolist(), (1000 * found.latencies).tolist(), strict=True)
    return window(count, found, weights[found.numbers].sum() / seconds, spent, dict(each))


def opened(
    running: Running, requests: Sequence[bytes], rate: float, seconds: float
) -> tuple[Window, float]:
    """Requests at random moments, at a rate; and how many were in fact offered per second."""
    found, spent = under(running, open_loop(running.port, requests, rate, seconds, warm_s=WARM_S))
    assert found.offered is not None
    return window(rate, found, found.rate, spent), found.offered


def told(running: Running, count: int, seconds: float) -> Window:
    """What the bare session says of itself."""
    load = {"connections": count, "seconds": seconds, "warm_s": WARM_S}
    before = processes.cpu_s(running.process.pid)
    _, said = servers.post(running.port, WINDOW, load, timeout_s=60 + 10 * seconds)
    spent = processes.cpu_s(running.process.pid) - before
    found = json.loads(said)
    cpu_ms = 1000 * spent / found["ran"]
    each = dict(found.get("each", ()))
    return Window(count, found["rate"], found["p50_ms"], found["p99_ms"], cpu_ms, 0.0, each)


async def told_beside(
    noop: Running,
    requests: Sequence[bytes],
    rate: float,
    running: Running,
    count: int,
    seconds: float,
) -> Window:
    """The same while a no-op server answers so many requests per second, which come at random moments."""
    async with streaming(noop.port, requests, rate, 60 + 10 * seconds):
        return await asyncio.to_thread(told, running, count, seconds)


def under(running: Running, load: Coroutine[Any, Any, Measured]) -> tuple[Measured, float]:
    """Put a server under a load, and see it idle again: what it did, and the processor seconds of the window."""
    before = processes.cpu_s(running.process.pid)
    found = uvloop.run(load)
    spent = processes.cpu_s(running.process.pid) - before
    settle(running)
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
    """A server that runs and rests, and is ended with the stack. Raises Unavailable and StartError."""
    running = stack.enter_context(servers.serving(server, model, scratch))
    stack.callback(processes.wake, running.process.pid)  # before it is ended
    settle(running)
    processes.rest(running.process.pid)
    return running


def keep_company(
    stack: ExitStack,
    contenders: Sequence[Contender],
    company: Mapping[str, str],
    model: Path,
    scratch: Path,
) -> None:
    """Give contenders a no-op server to measure themselves beside; it takes nothing when it is not asked."""
    named = {one.server.name: one for one in contenders}
    pairs = [
        (named[name], named[other]) for name, other in company.items() if {name, other} <= {*named}
    ]
    if pairs:
        noop = stack.enter_context(servers.serving(servers.NOOP, model, scratch))
        for one, other in pairs:
            one.company = Company(noop, other)


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


def loaded(load: int | str, kind: str) -> str:
    """A load as the table names it: `32`, `80/s`, `80%`."""
    return f"{load}/s" if kind == "open" and isinstance(load, int) else str(load)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A table of throughput and latency, and what each server cost."""
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
        "\nload: connections that ask as soon as they are answered, requests offered per second,"
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
        print(f"asking took at most {max(generator):.2f} of a core")
