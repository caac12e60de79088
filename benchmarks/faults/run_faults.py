"""What Quartet and a peer still do when they are asked too much, and when something goes wrong.

    python -m benchmarks.faults.run_faults [--only overload faults] [--servers NAME ...] [--short]

Each server gets the same weights, the same requests from the same generator, and the same faults; environments of peers
are built first. A fault is a function of a running server, which it may leave dead: each has one of its own. Prints
a table for each part and one JSON line.
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
from benchmarks.lib import environments, machine, models, processes, rounds, servers, traffic
from benchmarks.lib.environments import Unavailable
from benchmarks.lib.load_generator import REFUSED, connect, request_bytes
from benchmarks.lib.servers import Call, Running, Server, StartError

NAMES = ("quartet fp32", "infinity optimum", "infinity torch")
CLIENTS = 16
CALM_S = 2.0  # of load before something happens
WATCH_S = 10.0  # for a server to answer again
HANG_S = 20.0  # likewise, where a process has to be found hanging first
PROBE_S = 1.0  # what an orchestrator gives a health check by default
PATIENCE_S = 60.0  # for one answer
UNREACHABLE, LATE = -1, -2  # "statuses" beside `load.REFUSED`: nobody listens, nothing came in time
PAUSE_S = 0.02  # before asking again where nobody listens
LONG_CHARACTERS = 1_000_000
LARGE_BYTES = 100_000_000
SLOW = 100  # clients that do not finish what they say
SLOW_S = 40.0

Figures = dict[str, Any]


class Asked(NamedTuple):
    """One request on a connection of its own; by `time.perf_counter`."""

    began: float
    ended: float
    status: int


class Site(NamedTuple):
    """A server that runs, what to ask of it, and for how long slow clients are watched."""

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
        """The process that computes: the only one, where there is no other."""
        word = self.server.computes
        return processes.called(self.root, word) if word else self.root

    @property
    def call(self) -> Call:
        return self.server.calls["embed"]

    @property
    def probe(self) -> bytes:
        return f"GET {self.server.ready} HTTP/1.1\r\nHost: bench\r\n\r\n".encode()

    def asking(self, given: object) -> bytes:
        """A request with something else where the text would be."""
        body = {
            name: given if value in ("x", ["x"]) else value
            for name, value in self.call.body("x").items()
        }
        return request_bytes(self.call.path, json.dumps(body).encode())


Fault = Callable[[Site], Awaitable[Figures]]


# -- clients ----------------------------------------------------------------------------------------------------------


async def ask(port: int, request: bytes, timeout_s: float = PATIENCE_S) -> Asked:
    """One request on a connection of its own."""
    told: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def answered(_: object, status: int, __: bytes) -> None:
        if not told.done():
            told.set_result(status)

    began = time.perf_counter()
    try:
        connection = await connect(port, answered)
    except OSError:
        return Asked(began, time.perf_counter(), UNREACHABLE)
    try:
        connection.send(request, began)
        status = await asyncio.wait_for(told, timeout_s)
    except TimeoutError:
        status = LATE
    finally:
        connection.close()
    return Asked(began, time.perf_counter(), status)


def push(port: int, request: bytes, timeout_s: float = PATIENCE_S) -> Asked:
    """A request that is larger than an event loop should hold, from a thread, on a plain socket."""
    began = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(timeout_s)
        try:
            with suppress(ConnectionError):  # what was said before it hung up may still be heard
                connection.sendall(request)
            head = connection.recv(4096)
        except TimeoutError:
            return Asked(began, time.perf_counter(), LATE)
        except ConnectionError:
            head = b""
    status = int(head[9:12]) if head else REFUSED
    return Asked(began, time.perf_counter(), status)


@asynccontextmanager
async def crowd(site: Site, count: int = CLIENTS) -> AsyncIterator[list[Asked]]:
    """So many clients that ask again as soon as they are answered; what they asked, as it ends."""
    asked: list[Asked] = []
    leaving = asyncio.Event()

    async def client(number: int) -> None:
        while not leaving.is_set():
            request = site.requests[(number + len(asked)) % len(site.requests)]
            found = await ask(site.port, request)
            asked.append(found)
            if found.status == UNREACHABLE:
                await asyncio.sleep(PAUSE_S)

    clients = [asyncio.create_task(client(number)) for number in range(count)]
    try:
        yield asked
        leaving.set()
        await asyncio.wait(clients, timeout=WATCH_S)
    finally:
        for task in clients:
            task.cancel()


async def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it came true in time."""
    end = time.perf_counter() + timeout_s
    while not condition():
        if time.perf_counter() > end:
            return False
        await asyncio.sleep(PAUSE_S)
    return True


def again(asked: Sequence[Asked], since: float) -> float:
    """Seconds from a moment to the first good answer to what was asked after it; endless where there is none."""
    good = [one.ended for one in asked if one.began > since and one.status == 200]
    return min(good, default=math.inf) - since


def named(status: int) -> str:
    return {REFUSED: "cut off", LATE: "no answer", UNREACHABLE: "nobody"}.get(status, str(status))


def ended(asked: Iterable[Asked]) -> dict[str, int]:
    """How many ended how, but for those who found nobody: they ask as often as they like."""
    count = Counter(named(one.status) for one in asked if one.status != UNREACHABLE)
    return dict(sorted(count.items()))


def slowest(asked: Iterable[Asked]) -> float | None:
    """Milliseconds of the slowest good answer."""
    return max((1000 * (one.ended - one.began) for one in asked if one.status == 200), default=None)


# -- faults -----------------------------------------------------------------------------------------------------------


async def killed(site: Site) -> Figures:
    """`kill -9` of the process that computes, under load."""
    async with crowd(site) as asked:
        await asyncio.sleep(CALM_S)
        victim = site.victim
        moment = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        await until(lambda: again(asked, moment) < math.inf, WATCH_S)
        back_s = again(asked, moment)
    return {
        "answers again after, s": back_s if back_s < math.inf else "not restarted",
        "asked before, and told": ended(one for one in asked if one.began <= moment < one.ended),
        "asked later, and told": ended(one for one in asked if one.began > moment),
    }


async def terminated(site: Site) -> Figures:
    """SIGTERM to the server under load, with a connection for each request."""
    async with crowd(site) as asked:
        await asyncio.sleep(CALM_S)
        moment = time.perf_counter()
        site.running.process.send_signal(signal.SIGTERM)
        gone = await until(lambda: site.running.process.poll() is not None, WATCH_S + HANG_S)
        end_s = time.perf_counter() - moment
    late = [one for one in asked if one.ended > moment and one.status != UNREACHABLE]
    return {
        "ended after, s": end_s if gone else "not ended",
        "answered": sum(one.status == 200 for one in late),
        "lost": sum(one.status != 200 for one in late),
        "how": ended(one for one in late if one.status != 200),
    }


async def stopped(site: Site) -> Figures:
    """SIGSTOP to the process that computes: when readiness says no, and when texts are answered again."""
    async with crowd(site):
        await asyncio.sleep(CALM_S)
    victim = site.victim
    moment = time.perf_counter()
    os.kill(victim, signal.SIGSTOP)
    noticed, how, back_s = math.inf, "", math.inf
    try:
        while time.perf_counter() < moment + HANG_S and back_s == math.inf:
            found = await ask(site.port, site.probe, PROBE_S)
            if found.status != 200 and noticed == math.inf:
                noticed, how = found.ended - moment, named(found.status)
            if noticed < math.inf and found.status == 200:
                one = await ask(site.port, site.requests[0], PROBE_S)
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
    """A text of a million characters among short ones, and a list with a text that is none."""
    async with crowd(site, 4) as asked:
        await asyncio.sleep(CALM_S)
        before = [*asked]
        long = await ask(site.port, site.asking("word " * (LONG_CHARACTERS // 5)))
        meanwhile = [one for one in asked[len(before) :] if one.began < long.ended]
    listed = await ask(site.port, site.asking(["good", 5, "good"]))
    after = await ask(site.port, site.requests[0])
    return {
        "a long text is told": named(long.status),
        "after, s": long.ended - long.began,
        "others before it, slowest ms": slowest(before),
        "others meanwhile, slowest ms": slowest(meanwhile),
        "a list with a number is told": named(listed.status),
        "then a good one": named(after.status),
    }


async def malformed(site: Site) -> Figures:
    """Bodies that are none: what each is told, and whether the next good one is answered."""
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
    told = {
        name: (await ask(site.port, request_bytes(path, body))) for name, body in bodies.items()
    }
    told["an empty list"] = await ask(site.port, site.asking([]))
    told["an object for a text"] = await ask(site.port, site.asking({"a": 1}))
    told["no length"] = await ask(site.port, f"POST {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    told["no HTTP"] = await ask(site.port, b"HELLO\r\n\r\n", PROBE_S)
    told["then a good one"] = await ask(site.port, site.requests[0])
    return {name: named(one.status) for name, one in told.items()}


async def large(site: Site) -> Figures:
    """A body of 100 MB: what it is told, what it takes, and what others wait for it."""
    request = site.asking("word " * (LARGE_BYTES // 5))
    before = most = processes.resident_mb(site.root)
    async with crowd(site, 4) as asked:
        await asyncio.sleep(CALM_S)
        calm = [*asked]
        asking = asyncio.create_task(asyncio.to_thread(push, site.port, request))
        while not asking.done():
            most = max(most, processes.resident_mb(site.root))
            await asyncio.sleep(5 * PAUSE_S)
        found = asking.result()
        meanwhile = [one for one in asked[len(calm) :] if one.began < found.ended]
    return {
        "told": named(found.status),
        "after, s": found.ended - found.began,
        "memory before, MB": before,
        "more at most, MB": most - before,
        "others before it, slowest ms": slowest(calm),
        "others meanwhile, slowest ms": slowest(meanwhile),
    }


async def slow(site: Site) -> Figures:
    """Clients that never finish their headers, and as many that never finish their body, for a while."""
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
                if not one.heard.done():
                    one.writer.write(b"x")  # what is not silent is not idle
            await asyncio.sleep(1.0)
        held = {
            f"held of {SLOW} that send {what}": sum(not one.heard.done() for one in kind)
            for what, kind in opened.items()
        }
        async with crowd(site, 4) as asked:
            await asyncio.sleep(CALM_S)
        return {
            "watched for, s": site.slow_s,
            **held,
            "others meanwhile": ended(asked),
            "slowest of them, ms": slowest(asked),
            "memory, MB more": processes.resident_mb(site.root) - before,
        }
    finally:
        for one in (*opened["headers"], *opened["a body"]):
            one.heard.cancel()
            one.writer.transport.abort()


class Slow(NamedTuple):
    """heard: done when the server has said something, or hung up."""

    writer: asyncio.StreamWriter
    heard: asyncio.Task[bytes]


async def open_slowly(port: int, said: bytes) -> list[Slow]:
    """So many connections that have begun to say something."""
    opened = []
    for _ in range(SLOW):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
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
    """What `benchmarks.faults.overload` finds, as figures of one server."""
    seconds, stream_s = (1.0, 10.0) if short else (4.0, overload.STREAM_S)
    pressed = overload.pressed(server)
    found = overload.flood(pressed, model, texts, scratch, seconds=seconds, stream_s=stream_s)
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
            f"{count} that insist, of capacity": crowd.rate / found.capacity
            for count, crowd in found.crowds.items()
        },
    }


def faulted(
    server: Server, model: Path, texts: Sequence[str], scratch: Path, short: bool
) -> Figures:
    """Each fault on a server of its own, which it may leave dead."""
    requests = rounds.encoded(server, "embed", texts)
    found: Figures = {}
    for name, fault in FAULTS.items():
        print(f"{server.name}: {name}", flush=True)
        with servers.serving(server, model, scratch) as running:
            rounds.settle(running)
            site = Site(server, running, requests, 5.0 if short else SLOW_S)
            figures = uvloop.run(fault(site))
        found |= {f"{name}: {what}": figure for what, figure in figures.items()}
    return found


PARTS = {"overload": flooded, "faults": faulted}


def shown(figure: object) -> str:
    """A figure for people."""
    match figure:
        case float():
            return f"{figure:.3g}" if figure < 100 else f"{figure:,.0f}"
        case dict():
            return ", ".join(f"{count} {how}" for how, count in figure.items()) or "none"
        case None:
            return "-"
    return str(figure)


def show(found: Mapping[str, Figures]) -> None:
    """A row for each figure, a column for each server."""
    rows = dict.fromkeys(what for figures in found.values() for what in figures)
    width = max(map(len, rows), default=0)
    print(f"\n{'':<{width}}" + "".join(f"  {name:<22}" for name in found))
    for what in rows:
        cells = (shown(figures.get(what)) for figures in found.values())
        print(f"{what:<{width}}" + "".join(f"  {cell:<22}" for cell in cells))


def measure(server: Server, part: str, scratch: Path, short: bool) -> Figures:
    """One part of one server; why, where it cannot be had."""
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
    given = parser.parse_args()
    described = machine.describe()
    print(described)
    chosen = servers.chosen(given.servers)
    results: dict[str, dict[str, Figures]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for part in given.only:
            results[part] = {
                server.name: measure(server, part, Path(scratch), given.short) for server in chosen
            }
            show(results[part])
    line = json.dumps({"machine": described, "short": given.short, "results": results})
    print(line)
    if given.out:
        given.out.write_text(line + "\n")


if __name__ == "__main__":
    main()
