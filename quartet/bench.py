"""`quartet bench [NAME]`: measure a model on this machine: texts per second, latency and memory by precision."""

import argparse
import http.client
import itertools
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.cache import SourceError, resolve
from service.bulk.rows import ROUTES
from service.core.bundle import BundleError
from service.core.bundle import load as load_bundle
from service.core.cpu import CPU
from service.core.device_table import KINDS
from service.core.manifest import Head, Manifest
from service.processes.child_process import child_python
from service.settings_sources import ConfigError, find_bundles

READY_S = 120.0
MASK = "[MASK]"  # of BERT's vocabulary
BAR = 30  # characters of the longest bar
# About 45 tokens, as in a news item.
TEXT = "The council of the town will decide on Monday whether the old bridge north of the station is repaired. "
WORDS = (TEXT * 2).split()


@dataclass(frozen=True)
class Load:
    """The result of one load. per_s: requests a second; p50, p99: milliseconds"""

    connections: int
    per_s: float
    p50: float
    p99: float


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        "quartet bench",
        description="Measure a model on this machine through HTTP, one text a request. The client shares the machine.",
    )
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="a model as quartet serve takes it; default: the model that it serves without a name",
    )
    parser.add_argument(
        "--precision",
        nargs="+",
        help="precisions to measure; default: all that a CPU runs, with bf16 where OpenVINO and the processor have it",
    )
    parser.add_argument(
        "--connections",
        nargs="+",
        type=int,
        default=[1, 8, 32],
        metavar="N",
        help="clients that send requests at the same time; default: 1 8 32",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=3.0,
        metavar="S",
        help="duration of each measurement; default: 3",
    )
    parser.add_argument(
        "--texts",
        type=Path,
        metavar="FILE",
        help="a file with one text a line; default: texts of 3 to 38 words",
    )
    return parser


def main() -> int:
    """Measure, and print a table. Returns the exit status."""
    arguments = parser().parse_args()
    try:
        folder = resolve(arguments.name) if arguments.name else find_bundles()[0]
        manifest = load_bundle(folder).manifest
        texts = read_texts(arguments.texts)
    except (SourceError, ConfigError, BundleError, OSError) as error:
        print(f"quartet: {error}", file=sys.stderr)
        return 3
    served = runnable(manifest)
    if unknown := {*(arguments.precision or [])} - {*served}:
        parser().error(f"--precision: {', '.join(unknown)}: {manifest.id} has {', '.join(served)}")
    name, head = next(iter(manifest.heads.items()))
    print(f"{manifest.id}, head {name} ({head.task}), {len(texts)} texts")
    best: dict[str, float] = {}
    for precision in arguments.precision or served:
        with serving(folder, *served[precision]) as (port, process):
            send(port, head, texts, 1, 0.5)  # the first requests are slower
            loads = [
                send(port, head, texts, count, arguments.seconds) for count in arguments.connections
            ]
            memory = resident_bytes(process) / 1e6
        best[precision] = max(load.per_s for load in loads)
        print(f"\n{precision}: {memory:,.0f} MB of memory")
        print("  connections   texts/s   p50 ms   p99 ms")
        for load in loads:
            bar = "▇" * round(BAR * load.per_s / max(best.values()))
            print(
                f"  {load.connections:>11} {load.per_s:>9,.0f} {load.p50:>8.1f} {load.p99:>8.1f}  {bar}"
            )
    default = manifest.precisions[0]
    print()
    for precision in sorted(best, key=lambda precision: -best[precision]):
        gain = best[precision] / best.get(default, math.inf)
        if gain > 1:
            command = ["quartet serve", *filter(None, [arguments.name]), *served[precision]]
            print(f"{precision} is {gain:.2f} times as fast as {default}: {' '.join(command)}")
    return 0


def runnable(manifest: Manifest) -> dict[str, list[str]]:
    """Return the options of the service for each precision of the model that this machine's CPU computes."""
    # Here, because `--help` does not need the runtime.
    from service.core.session import device_problem

    found: dict[str, list[str]] = {
        p: ["--precision", p] for p in manifest.precisions if manifest.graphs_for(CPU, p)
    }
    for kind in KINDS:
        for precision, reduced in kind.reduced.items():
            fits = manifest.graphs_for(kind, precision) and not reduced.problem()
            if fits and device_problem(kind) is None:
                found[precision] = ["--provider", kind.name, "--precision", precision]
    return found


def read_texts(file: Path | None) -> Sequence[str]:
    if file is not None:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [" ".join(WORDS[: 3 + 5 * count % len(WORDS)]) for count in range(64)]


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[tuple[int, int]]:
    """Serve a bundle; yields its port and the main process's id. Raises SourceError with the log's last line."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    options = ["--port", str(port), *arguments, "--log-level", "error"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*child_python(), "-m", "service", str(folder), *options], stdout=log, stderr=log
        )
        try:
            wait_until_ready(port, process, log)
            yield port, process.pid
        finally:
            process.terminate()
            process.wait()


def wait_until_ready(port: int, process: subprocess.Popen[bytes], log: Any) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.1)
    log.seek(0)
    lines = log.read().strip().splitlines()
    raise SystemExit(f"quartet: the service did not start: {lines[-1] if lines else 'no output'}")


def send(port: int, head: Head, texts: Sequence[str], connections: int, seconds: float) -> Load:
    """Send requests of one text on each connection, one after the other, for this many seconds."""
    end = time.perf_counter() + seconds

    def call(first: int) -> list[float]:
        own = (texts[number % len(texts)] for number in itertools.count(first, connections))
        return [took for took, _ in timed(port, head, own, end)]

    began = time.perf_counter()
    with ThreadPoolExecutor(connections) as threads:
        times = [each for part in threads.map(call, range(connections)) for each in part]
    took = time.perf_counter() - began
    return Load(connections, len(times) / took, *(1000 * quantile(times, q) for q in (0.5, 0.99)))


def timed(
    port: int, head: Head, texts: Iterable[str], end: float
) -> Iterator[tuple[float, http.client.HTTPMessage]]:
    """Send a request for each text, one after the other, until `end`; yield the seconds and the headers of each.

    The time ends when the response arrives, because http.client takes 0.3 ms to send a request and to read headers.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for text in texts:
            path, body = request(head, text)
            content = json.dumps(body).encode()
            fields = (
                f"Host: bench\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
            )
            message = f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + content
            if (began := time.perf_counter()) >= end:
                break
            connection.sendall(message)
            connection.recv(1, socket.MSG_PEEK)
            took = time.perf_counter() - began
            with http.client.HTTPResponse(connection) as response:
                response.begin()
                answer = response.read()
            if response.status != 200:
                raise SystemExit(f"quartet: {path} returned {response.status}: {answer[:200]!r}")
            yield took, response.headers


def quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]


def request(head: Head, text: str) -> tuple[str, dict[str, Any]]:
    """Return the path of a head's task, and a body with one text."""
    path, fields = ROUTES[head.task]
    values = {"question": "What will be decided?", "context": text, "text": text}
    if head.per_mask:
        values["text"] += f" {MASK}"
    return path, {field: values[column] for column, field in fields.items() if column in values}


def resident_bytes(process: int) -> int:
    """Return the memory of a process and its children; pages that they share count once."""
    total, left = 0, [process]
    while left:
        folder = Path(f"/proc/{left.pop()}")
        try:
            rollup = (folder / "smaps_rollup").read_text()
            total += int(rollup.partition("\nPss:")[2].split()[0]) * 1024
            for thread in os.listdir(folder / "task"):
                left += map(int, (folder / "task" / thread / "children").read_text().split())
        except OSError:
            continue
    return total
