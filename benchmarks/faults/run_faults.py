"""Compare Quartet with a peer under overload and under faults.

    python -m benchmarks.faults.run_faults [--only overload faults] [--servers NAME ...] [--short]

Each server gets the same weights, the same requests from the same generator, and the same faults; environments of peers
are built first. A fault is a function of a running server, which may not survive, so each fault has its own server.
Prints a table for each part and one JSON line.
"""

import argparse
import asyncio
import json
import math
import os
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from benchmarks.faults import overload
from benchmarks.lib import (
    environments,
    machine,
    models,
    processes,
    rounds,
    run_record,
    servers,
    traffic,
)
from benchmarks.lib.environments import Unavailable
from benchmarks.lib.load_generator import REFUSED, connect, request_bytes
from benchmarks.lib.servers import Call, Running, Server, StartError

NAMES = ("quartet fp32", "infinity optimum", "infinity torch")
CLIENTS = 16
CALM_S = 2.0  # of load before something happens
WATCH_S = 10.0  # for a server to answer again
HANG_S = 20.0  # for a server to answer again, where a hanging process must be detected first
PROBE_S = 1.0  # the usual timeout of an orchestrator's health check
PATIENCE_S = 60.0  # for one answer
UNREACHABLE, LATE = -1, -2  # further "statuses", as `load_generator.REFUSED`: no listener, timeout
PAUSE_S = 0.02  # before a retry where there is no listener
LONG_CHARACTERS = 1_000_000
LARGE_BYTES = 100_000_000
SLOW = 100  # clients that do not finish their requests
SLOW_S = 40.0

Figures = dict[str, Any]


class Outcome(NamedTuple):
    """The outcome of one request on its own connection; times of `time.perf_counter`."""

    began: float
    ended: float
    status: int


class Site(NamedTuple):
    """A server that runs, the requests for it, and how long slow clients are watched."""

    server: Server
    running: Running
    requests: Sequence[bytes]
    slow_s: float = SLOW_S

    @property
    def port(self) -> int:
        return self.running.port

    @property
    def root(self) -> int:
        return self.running.process.pid

    @property
    def victim(self) -> int:
        """The process that computes, or the only one."""
        word = self.server.computes
        return processes.called(self.root, word) if word else self.root

    @property
    def call(self) -> Call:
        return self.server.calls["embed"]

    @property
    def probe(self) -> bytes:
        return f"GET {self.server.ready} HTTP/1.1\r\nHost: bench\r\n\r\n".encode()

    def request_with(self, value: object) -> bytes:
        """Return a request with another value in place of the text."""
        body = {
            name: value if default in ("x", ["x"]) else default
            for name, default in self.call.body("x").items()
        }
        return request_bytes(self.call.path, json.dumps(body).encode())


Fault = Callable[[Site], Awaitable[Figures]]


# -- clients ----------------------------------------------------------------------------------------------------------


async def send_request(port: int, request: bytes, timeout_s: float = PATIENCE_S) -> Outcome:
    """Send one request on its own connection."""
    reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def answered(_: object, status: int, __: bytes) -> None:
        if not reply.done():
            reply.set_result(status)

    began = time.perf_counter()
    try:
        connection = await connect(port, answered)
    except OSError:
        return Outcome(began, time.perf_counter(), UNREACHABLE)
    try:
        connection.send(request, began)
        status = await asyncio.wait_for(reply, timeout_s)
    except TimeoutError:
        status = LATE
    finally:
        connection.close()
    return Outcome(began, time.perf_counter(), status)


def push(port: int, request: bytes, timeout_s: float = PATIENCE_S) -> Outcome:
    """Send a request that is too large for an event loop, from a thread, on a plain socket."""
    began = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(timeout_s)
        try:
            with suppress(
                ConnectionError
            ):  # the reply before the server closed may still be readable
                connection.sendall(request)
            head = connection.recv(4096)
        except TimeoutError:
            return Outcome(began, time.perf_counter(), LATE)
        except ConnectionError:
            head = b""
    status = int(head[9:12]) if head else REFUSED
    return Outcome(began, time.perf_counter(), status)


@asynccontextmanager
async def client_load(site: Site, count: int = CLIENTS) -> AsyncIterator[list[Outcome]]:
    """Run `count` clients in a closed loop during the block. Yields the outcomes, which grow as requests end."""
    outcomes: list[Outcome] = []
    leaving = asyncio.Event()

    async def client(number: int) -> None:
        while not leaving.is_set():
            request = site.requests[(number + len(outcomes)) % len(site.requests)]
            outcome = await send_request(site.port, request)
            outcomes.append(outcome)
            if outcome.status == UNREACHABLE:
                await asyncio.sleep(PAUSE_S)

    clients = [asyncio.create_task(client(number)) for number in range(count)]
    try:
        yield outcomes
        leaving.set()
        await asyncio.wait(clients, timeout=WATCH_S)
    finally:
        for task in clients:
            task.cancel()


async def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for a condition, and return whether it came true in time."""
    end = time.perf_counter() + timeout_s
    while not condition():
        if time.perf_counter() > end:
            return False
        await asyncio.sleep(PAUSE_S)
    return True


def recovery_time(outcomes: Sequence[Outcome], since: float) -> float:
    """Return the seconds from a moment to the first good answer of a later request; infinite if there is none."""
    good = [one.ended for one in outcomes if one.began > since and one.status == 200]
    return min(good, default=math.inf) - since


def status_name(status: int) -> str:
    return {REFUSED: "cut off", LATE: "no answer", UNREACHABLE: "nobody"}.get(status, str(status))


def count_statuses(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Count outcomes by status, without requests that found no listener, whose number is arbitrary."""
    count = Counter(status_name(one.status) for one in outcomes if one.status != UNREACHABLE)
    return dict(sorted(count.items()))


def slowest(outcomes: Iterable[Outcome]) -> float | None:
    """Return the milliseconds of the slowest good answer; None if there is none."""
    return max(
        (1000 * (one.ended - one.began) for one in outcomes if one.status == 200), default=None
    )


# -- faults -----------------------------------------------------------------------------------------------------------


async def killed(site: Site) -> Figures:
    """Send SIGKILL to the process that computes, under load."""
    async with client_load(site) as outcomes:
        await asyncio.sleep(CALM_S)
        victim = site.victim
        moment = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        await until(lambda: recovery_time(outcomes, moment) < math.inf, WATCH_S)
        back_s = recovery_time(outcomes, moment)
    return {
        "answers again after, s": back_s if back_s < math.inf else "not restarted",
        "asked before, and told": count_statuses(
            one for one in outcomes if one.began <= moment < one.ended
        ),
        "asked later, and told": count_statuses(one for one in outcomes if one.began > moment),
    }


async def terminated(site: Site) -> Figures:
    """Send SIGTERM to the server under load, with a connection for each request."""
    async with client_load(site) as outcomes:
        await asyncio.sleep(CALM_S)
        moment = time.perf_counter()
        site.running.process.send_signal(signal.SIGTERM)
        gone = await until(lambda: site.running.process.poll() is not None, WATCH_S + HANG_S)
        end_s = time.perf_counter() - moment
    late = [one for one in outcomes if one.ended > moment and one.status != UNREACHABLE]
    return {
        "ended after, s": end_s if gone else "not ended",
        "answered": sum(one.status == 200 for one in late),
        "lost": sum(one.status != 200 for one in late),
        "how": count_statuses(one for one in late if one.status != 200),
    }


async def stopped(site: Site) -> Figures:
    """Send SIGSTOP to the process that computes: the time until readiness fails, and until texts are answered again."""
    async with client_load(site):
        await asyncio.sleep(CALM_S)
    victim = site.victim
    moment = time.perf_counter()
    os.kill(victim, signal.SIGSTOP)
    noticed, how, back_s = math.inf, "", math.inf
    try:
        while time.perf_counter() < moment + HANG_S and back_s == math.inf:
            found = await send_request(site.port, site.probe, PROBE_S)
            if found.status != 200 and noticed == math.inf:
                noticed, how = found.ended - moment, status_name(found.status)
            if noticed < math.inf and found.status == 200:
                one = await send_request(site.port, site.requests[0], PROBE_S)
                back_s = one.ended - moment if one.status == 200 else math.inf
            await asyncio.sleep(PAUSE_S)
    finally:
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)
    return {
        "readiness says no after, s": noticed if noticed < math.inf else "never",
        "as": how,
        "answers again after, s": back_s if back_s < math.inf else "not restarted",
    }


async def one_bad(site: Site) -> Figures:
    """Send a text of a million characters among short ones, and a list with a number for a text."""
    async with client_load(site, 4) as outcomes:
        await asyncio.sleep(CALM_S)
        before = [*outcomes]
        long = await send_request(site.port, site.request_with("word " * (LONG_CHARACTERS // 5)))
        meanwhile = [one for one in outcomes[len(before) :] if one.began < long.ended]
    listed = await send_request(site.port, site.request_with(["good", 5, "good"]))
    after = await send_request(site.port, site.requests[0])
    return {
        "a long text is told": status_name(long.status),
        "after, s": long.ended - long.began,
        "others before it, slowest ms": slowest(before),
        "others meanwhile, slowest ms": slowest(meanwhile),
        "a list with a number is told": status_name(listed.status),
        "then a good one": status_name(after.status),
    }


async def malformed(site: Site) -> Figures:
    """Send malformed bodies: the status of each, and whether the next good one is answered."""
    path = site.call.path
    bodies: Mapping[str, bytes] = {
        "nothing": b"",
        "half of it": b'{"input": "a',
        "null": b"null",
        "a list": b"[]",
        "no UTF-8": b'{"input": "\xff\xfe"}',
        "NaN": b'{"input": NaN}',
        "a lone surrogate": b'{"input": "\\ud800", "inputs": "\\ud800", "model": "minilm"}',
        "100,000 brackets": b"[" * 100_000,
    }
    statuses = {
        name: (await send_request(site.port, request_bytes(path, body)))
        for name, body in bodies.items()
    }
    statuses["an empty list"] = await send_request(site.port, site.request_with([]))
    statuses["an object for a text"] = await send_request(site.port, site.request_with({"a": 1}))
    statuses["no length"] = await send_request(
        site.port, f"POST {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    )
    statuses["no HTTP"] = await send_request(site.port, b"HELLO\r\n\r\n", PROBE_S)
    statuses["then a good one"] = await send_request(site.port, site.requests[0])
    return {name: status_name(one.status) for name, one in statuses.items()}


async def large(site: Site) -> Figures:
    """Send a body of 100 MB: its status, its memory, and the delay of other requests."""
    request = site.request_with("word " * (LARGE_BYTES // 5))
    before = most = processes.resident_mb(site.root)
    async with client_load(site, 4) as outcomes:
        await asyncio.sleep(CALM_S)
        calm = [*outcomes]
        sending = asyncio.create_task(asyncio.to_thread(push, site.port, request))
        while not sending.done():
            most = max(most, processes.resident_mb(site.root))
            await asyncio.sleep(5 * PAUSE_S)
        found = sending.result()
        meanwhile = [one for one in outcomes[len(calm) :] if one.began < found.ended]
    return {
        "told": status_name(found.status),
        "after, s": found.ended - found.began,
        "memory before, MB": before,
        "more at most, MB": most - before,
        "others before it, slowest ms": slowest(calm),
        "others meanwhile, slowest ms": slowest(meanwhile),
    }


async def slow(site: Site) -> Figures:
    """Open clients that never finish their headers, and the same number that never finish their body."""
    head = f"POST {site.call.path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    before = processes.resident_mb(site.root)
    opened = {
        "headers": await open_slowly(site.port, head.encode()),
        "a body": await open_slowly(site.port, f'{head}Content-Length: 1000\r\n\r\n{{"'.encode()),
    }
    try:
        end = time.perf_counter() + site.slow_s
        while time.perf_counter() < end:
            for one in (*opened["headers"], *opened["a body"]):
                if not one.reply.done():
                    one.writer.write(b"x")  # so that the connection is not idle
            await asyncio.sleep(1.0)
        held = {
            f"held of {SLOW} that send {what}": sum(not one.reply.done() for one in kind)
            for what, kind in opened.items()
        }
        async with client_load(site, 4) as outcomes:
            await asyncio.sleep(CALM_S)
        return {
            "watched for, s": site.slow_s,
            **held,
            "others meanwhile": count_statuses(outcomes),
            "slowest of them, ms": slowest(outcomes),
            "memory, MB more": processes.resident_mb(site.root) - before,
        }
    finally:
        for one in (*opened["headers"], *opened["a body"]):
            one.reply.cancel()
            one.writer.transport.abort()


class Slow(NamedTuple):
    """A slow client. reply: done when the server has sent something, or closed"""

    writer: asyncio.StreamWriter
    reply: asyncio.Task[bytes]


async def open_slowly(port: int, beginning: bytes) -> list[Slow]:
    """Open SLOW connections that have sent the beginning of a request."""
    opened = []
    for _ in range(SLOW):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(beginning)
        opened.append(Slow(writer, asyncio.create_task(reader.read(1))))
    return opened


FAULTS: Mapping[str, Fault] = {
    "kill -9": killed,
    "SIGTERM": terminated,
    "SIGSTOP": stopped,
    "one bad text": one_bad,
    "malformed bodies": malformed,
    "a body of 100 MB": large,
    "slow clients": slow,
}


# -- figures ----------------------------------------------------------------------------------------------------------


def flooded(
    server: Server, model: Path, texts: Sequence[str], scratch: Path, short: bool
) -> Figures:
    """Return the results of `benchmarks.faults.overload` as figures of one server."""
    seconds, stream_s = (1.0, 10.0) if short else (4.0, overload.STREAM_S)
    found = overload.flood(
        overload.with_deadline(server),
        model,
        texts,
        scratch,
        seconds=seconds,
        stream_s=stream_s,
    )
    others = found.stream.others
    before, after = found.memory_mb
    return {
        "capacity, per s": found.capacity,
        "offered, of capacity": (found.stream.offered or 0) / found.capacity,
        f"answered within {overload.DEADLINE_MS / 1000:g} s, of capacity": found.useful
        / found.capacity,
        "answered ever, of offered": found.stream.rate / (found.stream.offered or math.nan),
        "p99 of answers, ms": found.stream.percentile(99),
        "refused (429)": others[429],
        "5xx": sum(count for status, count in others.items() if status >= 500),
        "cut off or not answered": others[REFUSED],
        "memory before, MB": before,
        "memory after, MB": after,
        "last answer after its end, s": found.late_s,
        "then recovered after, s": found.recovery_s
        if found.recovery_s < math.inf
        else "not recovered",
        **{
            f"{count} that insist, of capacity": client_load.rate / found.capacity
            for count, client_load in found.crowds.items()
        },
    }


def faulted(
    server: Server, model: Path, texts: Sequence[str], scratch: Path, short: bool
) -> Figures:
    """Return the figures of each fault, on its own server."""
    requests = rounds.encode_requests(server, "embed", texts)
    found: Figures = {}
    for name, fault in FAULTS.items():
        print(f"{server.name}: {name}", flush=True)
        with servers.serving(server, model, scratch) as running:
            rounds.wait_until_idle(running)
            site = Site(server, running, requests, 5.0 if short else SLOW_S)
            figures = uvloop.run(fault(site))
        found |= {f"{name}: {what}": figure for what, figure in figures.items()}
    return found


PARTS = {"overload": flooded, "faults": faulted}


def shown(figure: object) -> str:
    """Format a figure."""
    match figure:
        case float():
            return f"{figure:.3g}" if figure < 100 else f"{figure:,.0f}"
        case dict():
            return ", ".join(f"{count} {how}" for how, count in figure.items()) or "none"
        case None:
            return "-"
    return str(figure)


def show(found: Mapping[str, Figures]) -> None:
    """Print a table with a row for each figure and a column for each server."""
    rows = dict.fromkeys(what for figures in found.values() for what in figures)
    width = max(map(len, rows), default=0)
    print(f"\n{'':<{width}}" + "".join(f"  {name:<22}" for name in found))
    for what in rows:
        cells = (shown(figures.get(what)) for figures in found.values())
        print(f"{what:<{width}}" + "".join(f"  {cell:<22}" for cell in cells))


def measure(server: Server, part: str, scratch: Path, short: bool) -> Figures:
    """Measure one part of one server; the reason where it is unavailable."""
    model = models.minilm()
    texts = traffic.texts(traffic.MIXES["news"], 600)
    try:
        if server.environment:
            environments.build(server.environment)
        return PARTS[part](server, model, texts, scratch, short)
    except (Unavailable, StartError, RuntimeError, OSError) as error:
        return {"not measured": str(error)[:200]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--servers", nargs="+", metavar="NAME", default=NAMES)
    parser.add_argument("--short", action="store_true", help="a look: 10 s of overload")
    parser.add_argument("--out", type=Path, help="write the JSON line to this file, too")
    options = parser.parse_args()
    described = machine.describe()
    print(described)
    chosen = servers.chosen(options.servers)
    results: dict[str, dict[str, Figures]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for part in options.only:
            results[part] = {
                server.name: measure(server, part, Path(scratch), options.short)
                for server in chosen
            }
            show(results[part])
        run = run_record.describe_run(Path(scratch))
    found = {"run": run, "machine": described, "short": options.short, "results": results}
    line = json.dumps(found)
    print(line)
    if options.out:
        options.out.write_text(line + "\n")


if __name__ == "__main__":
    main()
