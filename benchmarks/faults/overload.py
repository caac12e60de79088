"""Goodput, latency, memory and recovery of a server under overload.

The capacity of a server is its throughput at 32 connections while the overload goes to a no-op server, so that the
generator costs the same both times. Then the server gets the overload as an open loop, and after that bursts of
connections that retry at once when they are refused.
"""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.lib import processes, rounds, servers
from benchmarks.lib.goal_checks import Check
from benchmarks.lib.load_generator import REFUSED, Measured, closed_loop, open_loop, streaming
from benchmarks.lib.servers import NOOP, Server

CONNECTIONS = 32
TIMES = 10  # its capacity
STREAM_S = 60.0
DEADLINE_MS = 2000
CROWDS = (256, 600)  # connections
RECOVERED = 2.0  # times the latency of a single text before
PATIENCE_S = 30.0  # for it to recover


@dataclass(frozen=True)
class Flooded:
    """The result of one server; rates in answers per second.

    late_s: from the end of the stream until its last answer, at most PATIENCE_S
    recovery_s: from then until the latency of a single text is at most RECOVERED times the one before
    crowds: by the number of retrying connections; where the server closed one, a lost connection and no answer
    """

    capacity: float
    stream: Measured
    memory_mb: tuple[float, float]
    late_s: float
    recovery_s: float
    crowds: dict[int, Measured]

    @property
    def useful(self) -> float:
        """Answers per second within the deadline, which not every server enforces."""
        return float((self.stream.latencies <= DEADLINE_MS / 1000).sum()) / self.stream.seconds

    def figures(self) -> dict[str, object]:
        return {
            "capacity": self.capacity,
            "offered": self.stream.offered,
            "goodput": self.stream.rate,
            "goodput_in_time": self.useful,
            "p50_ms": self.stream.percentile(50),
            "p99_ms": self.stream.percentile(99),
            "others": dict(self.stream.others),
            "memory_mb": self.memory_mb,
            "late_s": self.late_s,
            "recovery_s": self.recovery_s,
            "crowds": {
                count: {
                    "goodput": found.rate,
                    "p99_ms": found.percentile(99),
                    "others": dict(found.others),
                }
                for count, found in self.crowds.items()
            },
        }


def measure(
    model: Path, texts: Sequence[str], scratch: Path, *, rounds_: int, seconds: float
) -> tuple[list[Check], dict[str, object]]:
    """Measure goodput, latency, errors, memory and recovery at ten times the capacity, and with retrying clients."""
    found = flood(with_deadline(servers.quartet("fp32")), model, texts, scratch, seconds=seconds)
    fives = sum(count for status, count in found.stream.others.items() if status >= 500)
    lost = found.stream.others[0]
    before, after = found.memory_mb
    checks = [
        Check(
            f"goodput at {TIMES} times capacity, of capacity",
            [found.stream.rate / found.capacity],
            0.9,
        ),
        Check(
            "p99 of what was accepted",
            [found.stream.percentile(99)],
            DEADLINE_MS,
            at_most=True,
            unit="ms",
        ),
        Check("answers of 500 and above", [fives], 0, at_most=True),
        Check("requests without an answer", [lost], 0, at_most=True),
        Check("memory after it, by memory before", [after / before], 1.05, at_most=True),
        Check("recovered after", [found.recovery_s], 2.0, at_most=True, unit="s"),
        *(
            Check(
                f"goodput with {count} that insist, of capacity", [crowd.rate / found.capacity], 0.8
            )
            for count, crowd in found.crowds.items()
        ),
    ]
    return checks, found.figures()


def with_deadline(server: Server) -> Server:
    """Return the server with Quartet's deadline set, which other servers ignore."""
    return replace(server, env={**server.env, "QUARTET_DEADLINE_MS": str(DEADLINE_MS)})


def flood(
    server: Server,
    model: Path,
    texts: Sequence[str],
    scratch: Path,
    *,
    seconds: float,
    stream_s: float = STREAM_S,
) -> Flooded:
    requests = rounds.encode_requests(server, "embed", texts)
    with (
        servers.serving(server, model, scratch) as running,
        servers.serving(NOOP, model, scratch) as noop,
    ):
        port = running.port
        alone_s = single_latency(port, requests)
        estimate = uvloop.run(closed_loop(port, requests, CONNECTIONS, seconds, retry=True)).rate
        rate = TIMES * estimate
        capacity = uvloop.run(measure_capacity(port, noop.port, requests, rate, 3 * seconds)).rate
        uvloop.run(
            open_loop(port, requests, rate, seconds, patience_s=PATIENCE_S)
        )  # takes the memory of a first overload
        rounds.wait_until_idle(running)
        before = processes.resident_mb(running.process.pid)
        began = time.perf_counter()
        stream = uvloop.run(open_loop(port, requests, rate, stream_s, patience_s=PATIENCE_S))
        late_s = max(time.perf_counter() - began - stream.lasted, 0.0)
        recovery_s = recovery(port, requests, alone_s)
        rounds.wait_until_idle(running)
        memory_mb = before, processes.resident_mb(running.process.pid)
        crowds = {count: retry_at_once(port, requests, count, 3 * seconds) for count in CROWDS}
        return Flooded(capacity, stream, memory_mb, late_s, recovery_s, crowds)


async def measure_capacity(
    port: int, noop: int, requests: Sequence[bytes], rate: float, seconds: float
) -> Measured:
    """Measure a server's throughput while the overload goes to the no-op server; refused requests are retried."""
    async with streaming(noop, requests, rate, seconds + 2.0):
        return await closed_loop(port, requests, CONNECTIONS, seconds, retry=True)


def retry_at_once(port: int, requests: Sequence[bytes], count: int, seconds: float) -> Measured:
    """Measure connections that retry at once on any status; a closed one is not opened again."""
    try:
        return uvloop.run(closed_loop(port, requests, count, seconds, retry=True))
    except (RuntimeError, OSError):
        return Measured(count, seconds, np.array([]), others=Counter({REFUSED: 1}))


def single_latency(port: int, requests: Sequence[bytes], seconds: float = 2.0) -> float:
    """The median latency of a single text, in seconds."""
    found = uvloop.run(closed_loop(port, requests, 1, seconds))
    return float(np.median(found.latencies))


def recovery(port: int, requests: Sequence[bytes], alone_s: float) -> float:
    """Seconds until the latency of a single text is about the same as before."""
    began = time.perf_counter()
    while (waited := time.perf_counter() - began) < PATIENCE_S:
        with suppress(RuntimeError):  # refused
            found = uvloop.run(closed_loop(port, requests, 1, 0.2, warm_s=0.0))
            if found.requests and np.median(found.latencies) <= RECOVERED * alone_s:
                return waited
    return float("inf")
