"""The latency of one connection: p50 of a request by the length of its text, compared with the bare session.

    python -m benchmarks.one_connection [--bundle DIR] [--rounds N] [--requests N] [--env NAME=VALUE ...]

One client sends one request after the other on one connection. The limit for its p50 is 1.05 times the bare session's
fastest p50, plus the p50 of `GET /health/live` by the same client, plus ALLOWED_MS. The bare session runs in a process
of its own (`--serve-bare`), with one thread and with one thread for each core, which spin, and IDLE_S between two runs.
All processes are measured in interleaved rounds. The one that is measured runs; the others are stopped (SIGSTOP).

A second table has the parts of a request by `Server-Timing`, and how much of the client's time they do not contain.
"""

import argparse
import itertools
import json
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from http.server import HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.bulk import stages
from benchmarks.lib import goal_checks, machine, models, rounds, run_record, servers, traffic
from benchmarks.lib.goal_checks import Check
from benchmarks.lib.load_generator import request_bytes
from benchmarks.lib.onnxruntime_baseline import make_handler, packed_graph
from benchmarks.lib.servers import WINDOW, Call, Running, Server
from service.core import bundle
from service.core.cpu import CPU
from service.core.encode import Encoder, Window
from service.core.packing import pack
from service.core.session import Session, SessionOptions, keep_freed_memory
from service.settings import usable_cores

LENGTHS = (5, 25, 50, 256)  # tokens
PRECISIONS = ("fp32", "int8")
REQUESTS = 60  # of each length in a round
WARM_UP = 10  # uncounted requests or runs before them
IDLE_S = 0.002  # between two runs of the bare session, as between two requests of a client
OF_BARE, ALLOWED_MS = 1.05, 0.4


class Measured(NamedTuple):
    """The medians of one length in one round, in milliseconds.

    live: of `GET /health/live`
    parts: by the names in `Server-Timing`
    """

    p50: float
    live: float
    parts: Mapping[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, help="a full bundle; MiniLM is exported by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each length in a round")
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=LENGTHS, help="of texts, in tokens"
    )
    parser.add_argument("--env", nargs="*", default=[], help="settings of the service: NAME=VALUE")
    parser.add_argument("--out", type=Path, help="write the JSON line to this file, too")
    parser.add_argument("--serve-bare", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_bare:
        keep_freed_memory()
        session = BareSession(bundle.load(options.bundle))
        HTTPServer(("127.0.0.1", options.serve_bare), make_handler(session)).serve_forever()
    described = machine.describe()
    print(described)
    env = dict(setting.split("=", 1) for setting in options.env)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = servers.to_bundle(Path(sys.executable), options.bundle or models.minilm(), scratch)
        run = run_record.describe_run(model)
        found = measure(model, scratch, options.lengths, options.rounds, options.requests, env)
    show(found)
    checks = [*goals(found)]
    goal_checks.show(checks)
    results = {
        "run": run,
        "machine": described,
        "env": env,
        "one_connection": found,
        "checks": [check.as_json() for check in checks],
    }
    print(json.dumps(results))
    if options.out:
        options.out.write_text(json.dumps(results) + "\n")


# By contender: what each round measured, by length. Of "bare": p50 by precision, threads and length.
Rounds = dict[str, list[dict[str, Any]]]


def measure(
    model: Path,
    scratch: Path,
    lengths: Sequence[int] = LENGTHS,
    number: int = 5,
    requests: int = REQUESTS,
    env: Mapping[str, str] | None = None,
) -> Rounds:
    """Measure both precisions and the bare sessions in rounds."""
    with ExitStack() as stack:
        bare = rounds.start(stack, bare_server(), model, scratch)
        turns: dict[str, tuple[Running, Any]] = {
            "bare": (bare, partial(ask_bare, bare.port, lengths, requests))
        }
        for precision in PRECISIONS:
            server = replace(servers.quartet(precision), env=env or {})
            running = rounds.start(stack, server, model, scratch)
            turns[precision] = (running, partial(ask_service, running.port, lengths, requests))
        return rounds.take_turns(turns, number)


# -- the service ------------------------------------------------------------------------------------------------------


def text_of(tokens: int) -> str:
    """Return a text with this many tokens, including the two special ones."""
    return " ".join(itertools.islice(itertools.cycle(traffic.WORDS), tokens - 2))


def ask_service(port: int, lengths: Sequence[int], requests: int) -> dict[str, Measured]:
    """Send requests of each length on one connection."""
    found = {}
    live = b"GET /health/live HTTP/1.1\r\nHost: bench\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for length in lengths:
            body = json.dumps({"inputs": text_of(length), "truncate": True}).encode()
            request = request_bytes("/embed", body)
            answers = [exchange(connection, request) for _ in range(WARM_UP + requests)][WARM_UP:]
            probes = [exchange(connection, live) for _ in range(WARM_UP + requests)][WARM_UP:]
            parts = [stages(header) for _, header in answers]
            found[str(length)] = Measured(
                1000 * float(np.median([spent for spent, _ in answers])),
                1000 * float(np.median([spent for spent, _ in probes])),
                {name: float(np.median([one[name] for one in parts])) for name in parts[0]},
            )
    return found


def exchange(connection: socket.socket, request: bytes) -> tuple[float, str]:
    """Send a request, and read its response. Returns the seconds that this took, and `Server-Timing`.

    Raises RuntimeError for a response that is not 200.
    """
    began = time.perf_counter()
    connection.sendall(request)
    received = connection.recv(1 << 20)
    while (end := received.find(b"\r\n\r\n")) < 0:
        received += connection.recv(1 << 20)
    lines = received[:end].decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    missing = int(headers["content-length"]) - (len(received) - end - 4)
    while missing > 0:
        missing -= len(connection.recv(1 << 20))
    spent = time.perf_counter() - began
    if " 200 " not in lines[0]:
        raise RuntimeError(f"the service answered {lines[0]}: {received[end:][:500]!r}")
    return spent, headers.get("server-timing", "")


# -- the bare session -------------------------------------------------------------------------------------------------


def bare_server() -> Server:
    """Return the bare sessions as a server that measures itself."""

    def command(python: Path, model: Path, port: int) -> list[str]:
        arguments = ["--bundle", str(model), "--serve-bare", str(port)]
        return [str(python), "-m", "benchmarks.one_connection", *arguments]

    return Server(
        name="bare sessions",
        command=command,
        ready=WINDOW,
        prepare=servers.to_bundle,
        calls={"embed": Call(WINDOW, lambda _: {}, lambda document: document)},
        measures_itself=True,
    )


def ask_bare(port: int, lengths: Sequence[int], requests: int) -> dict[str, Any]:
    """Return the p50 of each precision, number of threads and length, in milliseconds."""
    load = {"lengths": [*lengths], "requests": requests}
    _, body = servers.post(port, WINDOW, load, timeout_s=600)
    found: dict[str, Any] = json.loads(body)
    return found


class BareSession:
    """The packed graphs of a bundle, without batching, decoding and HTTP. Its sessions exist during a window only."""

    layout = "one text, one thread or all"
    trials: Mapping[str, float] = {}

    def __init__(self, full: bundle.Bundle) -> None:
        self._bundle = full
        self._encoder = Encoder.from_file(full.file("tokenizer.json"), full.manifest.max_length)

    def window(self, lengths: Sequence[int], requests: int) -> dict[str, Any]:
        """Return the p50 of each precision, number of threads and length, in milliseconds."""
        windows = {length: self._encoder.texts([text_of(length)])[0].windows for length in lengths}
        found: dict[str, Any] = {}
        for precision in PRECISIONS:
            graph = packed_graph(self._bundle, precision)
            for threads in dict.fromkeys((1, usable_cores())):
                session = Session(self._bundle, graph, CPU, SessionOptions(threads, spin=True))
                spent = {
                    str(length): time_runs(session, window, requests)
                    for length, window in windows.items()
                }
                found.setdefault(precision, {})[str(threads)] = spent
        return found


def time_runs(session: Session, window: Sequence[Window], requests: int) -> float:
    """Return the p50 of runs with a pause between them, in milliseconds."""
    spent = []
    for _ in range(WARM_UP + requests):
        time.sleep(IDLE_S)
        began = time.perf_counter()
        session.run(pack(window))
        spent.append(time.perf_counter() - began)
    return 1000 * float(np.median(spent[WARM_UP:]))


# -- figures ----------------------------------------------------------------------------------------------------------


def best_of(bare: Mapping[str, Mapping[str, float]], length: str) -> float:
    """Return the fastest p50 of a bare session for a length, in milliseconds."""
    return min(by_length[length] for by_length in bare.values())


def limits(found: Rounds, precision: str, length: str) -> list[tuple[Measured, float, float]]:
    """Return, for each round, what was measured, the bare session's best p50, and the limit."""
    pairs = zip(found["bare"], found[precision], strict=True)
    rows = [(Measured(*own[length]), best_of(bare[precision], length)) for bare, own in pairs]
    return [(one, best, OF_BARE * best + one.live + ALLOWED_MS) for one, best in rows]


def goals(found: Rounds) -> Iterator[Check]:
    """Yield the check of each precision and length."""
    for precision in PRECISIONS:
        for length in found[precision][0]:
            rows = limits(found, precision, length)
            what = f"{precision}, {length} tokens: p50 by its limit"
            yield Check(what, [one.p50 / limit for one, _, limit in rows], 1.0, at_most=True)


def show(found: Rounds) -> None:
    """Print p50 by length next to the bare sessions, and the parts of a request."""
    cases = [(precision, length) for precision in PRECISIONS for length in found[precision][0]]
    print(
        f"\n{'ms':<14}{'client':>8}{'bare':>8}{'live':>8}{'limit':>8}{'over':>8}   bare by threads"
    )
    for precision, length in cases:
        rows = limits(found, precision, length)
        figures = [
            median(one.p50 for one, _, _ in rows),
            median(best for _, best, _ in rows),
            median(one.live for one, _, _ in rows),
            median(limit for _, _, limit in rows),
            median(one.p50 - limit for one, _, limit in rows),
        ]
        cells = "".join(f"{figure:>8.2f}" for figure in figures)
        by_threads = ", ".join(
            f"{threads}: {median(each[precision][threads][length] for each in found['bare']):.2f}"
            for threads in found["bare"][0][precision]
        )
        print(f"{precision:<5}{length:>5}    {cells}   {by_threads}")
    names = [*Measured(*found[PRECISIONS[0]][0][cases[0][1]]).parts]
    print(f"\n{'ms':<14}" + "".join(f"{name:>11}" for name in (*names, "unnamed", "outside")))
    for precision, length in cases:
        each = [Measured(*own[length]) for own in found[precision]]
        parts = {name: median(one.parts[name] for one in each) for name in names}
        unnamed = 2 * parts["total"] - sum(parts.values())
        outside = median(one.p50 for one in each) - parts["total"]
        cells = "".join(f"{value:>11.2f}" for value in (*parts.values(), unnamed, outside))
        print(f"{precision:<5}{length:>5}    {cells}")


def median(values: Iterable[float]) -> float:
    return float(np.median([*values]))


if __name__ == "__main__":
    main()
