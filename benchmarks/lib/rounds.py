"""Interleaved rounds: servers are measured in turn, so that changes of the machine's speed affect all of them.

All servers are started once. In each round, for each load, each is continued (SIGCONT), measured, and stopped again
(SIGSTOP), so that it takes nothing from the others; every other round has the reverse order. A figure is the median
over the rounds. A ratio to the first server is computed within each round before its median. The ONNX Runtime baseline
(`benchmarks/lib/onnxruntime_baseline.py`) takes part like a server but measures itself.
"""

import argparse
import json
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.lib import processes, servers
from benchmarks.lib.environments import Unavailable
from benchmarks.lib.load_generator import Measured, closed_loop, request_bytes
from benchmarks.lib.servers import WINDOW, Running, Server, StartError

WARM_S = 0.7  # before each window


@dataclass(frozen=True)
class Window:
    """The figures of one server in one window.

    rate: answers per second, of mean size
    cpu_ms: of its processes, per answer
    generator: cores that the load generator took
    """

    load: int  # connections
    rate: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float
    generator: float


@dataclass
class Tested:
    """One server's start, its memory at the end, and its windows by connections, one for each round."""

    name: str
    note: str = ""
    skipped: str = ""
    start_s: float = 0.0
    peak_mb: float = 0.0
    closed: dict[int, list[Window]] = field(default_factory=dict)


@dataclass
class Contender:
    """A running server, its requests and its results."""

    server: Server
    running: Running
    requests: Sequence[bytes]
    weights: np.ndarray
    result: Tested


def parser(description: str | None, connections: Sequence[int]) -> argparse.ArgumentParser:
    """Return a parser of the options that `table` takes, and of the result file."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--connections", nargs="+", type=int, default=connections)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--out", type=Path, help="write the JSON line to this file, too")
    return parser


def table(
    chosen: Sequence[Server],
    task: str,
    model: Path,
    texts: Sequence[str],
    scratch: Path,
    options: argparse.Namespace,
    **weights: Sequence[float],
) -> list[dict[str, Any]]:
    """Measure servers as `measure` does, print the table of results, and return them as JSON."""
    loads = {name: getattr(options, name) for name in ("connections", "rounds", "seconds")}
    rows = summaries(measure(chosen, task, model, texts, scratch, **loads, **weights))
    show(rows)
    return rows


def measure(
    chosen: Sequence[Server],
    task: str,
    model: Path,
    texts: Sequence[str],
    scratch: Path,
    *,
    connections: Sequence[int],
    weights: Sequence[float] | None = None,
    rounds: int = 5,
    seconds: float = 3.0,
) -> list[Tested]:
    """Measure every server that offers the task, under every load, in every round.

    weights: the size of each text, for example in tokens; an answer counts by its size

    A server that fails is left out with its reason.
    """
    tested = [Tested(server.name, server.note) for server in chosen]
    with ExitStack() as stack:
        contenders: list[Contender] = []
        for server, result in zip(chosen, tested, strict=True):
            if task not in server.calls:
                result.skipped = "does not offer it"
                continue
            print(f"starting {server.name}")
            try:
                running = start(stack, server, model, scratch)
            except (Unavailable, StartError) as error:
                result.skipped = str(error)
                continue
            result.start_s = running.start_s
            call = server.calls[task]
            bodies = [json.dumps(call.body(text)).encode() for text in texts]
            requests = [request_bytes(call.path, body) for body in bodies]
            sizes = np.ones(len(texts)) if weights is None else np.asarray(weights)
            contenders.append(Contender(server, running, requests, sizes / sizes.mean(), result))
        for number in range(rounds):
            for count in connections:
                print(f"round {number + 1} of {rounds}: {count} connections")
                for one in contenders[:: 1 if number % 2 else -1]:
                    if one.result.skipped:
                        continue
                    try:
                        with working(one.running):
                            run_closed(one, count, seconds)
                    except (RuntimeError, OSError) as error:
                        one.result.skipped = f"failed under load: {error}"
        for one in contenders:
            one.result.peak_mb = processes.peak_mb(one.running.process.pid)
    return tested


# -- loads ------------------------------------------------------------------------------------------------------------


def run_closed(one: Contender, count: int, seconds: float) -> None:
    if one.server.measures_itself:
        found = self_measured(one.running, count, seconds)
    else:
        found = measure_closed(one.running, one.requests, one.weights, count, seconds)
    one.result.closed.setdefault(count, []).append(found)


def measure_closed(
    running: Running, requests: Sequence[bytes], weights: np.ndarray, count: int, seconds: float
) -> Window:
    """Measure a closed loop of `count` connections; an answer counts by the weight of its request."""
    found, spent = run_load(
        running, closed_loop(running.port, requests, count, seconds, warm_s=WARM_S)
    )
    assert found.numbers is not None
    return Window(
        load=count,
        rate=weights[found.numbers].sum() / seconds,
        p50_ms=found.percentile(50),
        p99_ms=found.percentile(99),
        cpu_ms=1000 * spent / max(found.requests, 1),
        generator=found.cpu_s / found.seconds,
    )


def self_measured(running: Running, count: int, seconds: float) -> Window:
    """Let the baseline measure itself under a load."""
    load = {"connections": count, "seconds": seconds, "warm_s": WARM_S}
    before = processes.cpu_s(running.process.pid)
    _, body = servers.post(running.port, WINDOW, load, timeout_s=60 + 10 * seconds)
    spent = processes.cpu_s(running.process.pid) - before
    found = json.loads(body)
    cpu_ms = 1000 * spent / found["ran"]
    return Window(count, found["rate"], found["p50_ms"], found["p99_ms"], cpu_ms, 0.0)


def run_load(running: Running, load: Coroutine[Any, Any, Measured]) -> tuple[Measured, float]:
    """Run a load on a server, and wait until it is idle. Returns the result, and CPU seconds of the window."""
    before = processes.cpu_s(running.process.pid)
    found = uvloop.run(load)
    spent = processes.cpu_s(running.process.pid) - before
    processes.wait_until_idle(running.process.pid)
    return found, spent * found.seconds / found.lasted


# -- processes --------------------------------------------------------------------------------------------------------


def start(stack: ExitStack, server: Server, model: Path, scratch: Path) -> Running:
    """Start a server and stop it (SIGSTOP) until its turn. Raises Unavailable and StartError."""
    running = stack.enter_context(servers.serving(server, model, scratch))
    stack.callback(processes.wake, running.process.pid)  # before it is ended
    processes.wait_until_idle(running.process.pid)
    processes.rest(running.process.pid)
    return running


@contextmanager
def working(running: Running) -> Iterator[None]:
    processes.wake(running.process.pid)
    try:
        yield
    finally:
        processes.rest(running.process.pid)


# -- figures ----------------------------------------------------------------------------------------------------------


def summary(windows: Sequence[Window], base: Sequence[Window]) -> dict[str, Any]:
    """Return medians over the rounds, and the ratios of throughput, p50 and processor time to the first server's."""
    figures = {
        name: float(np.median([getattr(one, name) for one in windows]))
        for name in ("rate", "p50_ms", "p99_ms", "cpu_ms", "generator")
    }
    ratios = [one.rate / other.rate for one, other in zip(windows, base, strict=False)]
    slower = [one.p50_ms / other.p50_ms for one, other in zip(windows, base, strict=False)]
    dearer = [one.cpu_ms / other.cpu_ms for one, other in zip(windows, base, strict=False)]
    spread = [min(ratios, default=np.nan), max(ratios, default=np.nan)]
    medians = {"ratio": ratios, "p50_ratio": slower, "cpu_ratio": dearer}
    return {
        **figures,
        **{name: float(np.median(each or [np.nan])) for name, each in medians.items()},
        "spread": spread,
        "p50_spread": [min(slower, default=np.nan), max(slower, default=np.nan)],
    }


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
        }
        for one in tested
    ]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table of throughput, latency and CPU time."""
    columns = (
        f"{'':<24}{'load':>7}{'texts/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'CPU ms':>8}{'ratio':>7}"
    )
    print(f"\n{columns}  (range)      p50  (range)      CPU")
    for row in rows:
        if row.get("skipped"):
            print(f"{row['server']:<24}{row['skipped'].splitlines()[0]}")
        for load, found in row["closed"].items():
            (low, high), (fast, slow) = found["spread"], found["p50_spread"]
            print(
                f"{row['server']:<24}{load:>7}{found['rate']:>9.0f}{found['p50_ms']:>9.1f}"
                f"{found['p99_ms']:>9.1f}{found['cpu_ms']:>8.1f}{found['ratio']:>7.2f}  ({low:.2f}-{high:.2f})"
                f"{found['p50_ratio']:>7.2f}  ({fast:.2f}-{slow:.2f}){found['cpu_ratio']:>7.2f}"
            )
    print("\nload: connections; ratios are to the first server")
    for row in rows:
        if row["start_s"]:
            print(
                f"{row['server']:<24}ready in {row['start_s']:.1f} s, {row['peak_mb']:.0f} MB at most"
            )
    generator = [window["generator"] for row in rows for window in row["closed"].values()]
    if generator:
        print(f"the load generator took at most {max(generator):.2f} of a core")
