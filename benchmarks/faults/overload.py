"""What a server still does when it is asked for much more than it can do.

Capacity is what it answers at 32 connections while the stream that is to come goes to a server that does nothing, so
that the generator costs the same both times. Then the stream comes to it, open loop, and after that connections that
ask again at once when they are refused.
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
RECOVERED = 2.0  # times the latency of a lone text before
PATIENCE_S = 30.0  # for it to recover


@dataclass(frozen=True)
class Flooded:
    """What one server did, and how it was asked; rates in answers per second.

    late_s: from the end of the stream until its last answer, or until patience with it ended
    recovery_s: from then until a lone text takes at most twice what it took before
    crowds: by the number of connections that insist; of one that the server ended, a lost connection and no answer
    """

    capacity: float
    stream: Measured
    memory_mb: tuple[float, float]
    late_s: float
    recovery_s: float
    crowds: dict[int, Measured]

    @property
    def useful(self) -> float:
        """Answers per second that came within the deadline, which not every server knows."""
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
    """Goodput, latency, errors, memory and recovery at ten times the capacity, and goodput with clients that insist."""
    found = flood(pressed(servers.quartet("fp32")), model, texts, scratch, seconds=seconds)
    fives = sum(count for status, count in found.stream.others.items() if status >= 500)
    lost = found.stream.others[0]
    before, after = found.memory_mb
    wanted = [
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
    return wanted, found.figures()


def pressed(server: Server) -> Server:
    """Quartet with the deadline; others have none, and find no meaning in it."""
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
    requests = rounds.encoded(server, "embed", texts)
    with (
        servers.serving(server, model, scratch) as running,
        servers.serving(NOOP, model, scratch) as noop,
    ):
        port = running.port
        alone_s = lone(port, requests)
        guess = uvloop.run(closed_loop(port, requests, CONNECTIONS, seconds, insist=True)).rate
        rate = TIMES * guess
        capacity = uvloop.run(beside(port, noop.port, requests, rate, 3 * seconds)).rate
        uvloop.run(
            open_loop(port, requests, rate, seconds, patience_s=PATIENCE_S)
        )  # memory that any flood takes
        rounds.settle(running)
        before = processes.resident_mb(running.process.pid)
        began = time.perf_counter()
        stream = uvloop.run(open_loop(port, requests, rate, stream_s, patience_s=PATIENCE_S))
        late_s = max(time.perf_counter() - began - stream.lasted, 0.0)
        recovery_s = recovery(port, requests, alone_s)
        rounds.settle(running)
        memory_mb = before, processes.resident_mb(running.process.pid)
        crowds = {count: insisting(port, requests, count, 3 * seconds) for count in CROWDS}
        return Flooded(capacity, stream, memory_mb, late_s, recovery_s, crowds)


async def beside(
    port: int, noop: int, requests: Sequence[bytes], rate: float, seconds: float
) -> Measured:
    """What a server answers while the stream goes elsewhere; what it refuses on a busy machine is asked again."""
    async with streaming(noop, requests, rate, seconds + 2.0):
        return await closed_loop(port, requests, CONNECTIONS, seconds, insist=True)


def insisting(port: int, requests: Sequence[bytes], count: int, seconds: float) -> Measured:
    """Connections that ask again at once, whatever they are told; none is opened again."""
    try:
        return uvloop.run(closed_loop(port, requests, count, seconds, insist=True))
    except (RuntimeError, OSError):
        return Measured(count, seconds, np.array([]), others=Counter({REFUSED: 1}))


def lone(port: int, requests: Sequence[bytes], seconds: float = 2.0) -> float:
    """The median latency of a lone text, in seconds."""
    found = uvloop.run(closed_loop(port, requests, 1, seconds))
    return float(np.median(found.latencies))


def recovery(port: int, requests: Sequence[bytes], alone_s: float) -> float:
    """Seconds until a lone text is answered about as soon as before."""
    began = time.perf_counter()
    while (waited := time.perf_counter() - began) < PATIENCE_S:
        with suppress(RuntimeError):  # refused
            found = uvloop.run(closed_loop(port, requests, 1, 0.2, warm_s=0.0))
            if found.requests and np.median(found.latencies) <= RECOVERED * alone_s:
                return waited
    return float("inf")
