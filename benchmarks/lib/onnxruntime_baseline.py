"""The ONNX Runtime baseline (bare session): a packed graph on encoded inputs, without HTTP, batching or decoding.

The cost of the service is the difference to it. It runs in its own process, which is measured in turn with the servers
and stopped otherwise. At start it tries layouts (one session on all cores or one on each, batches of 1, 8 or 32 inputs
of similar lengths) and keeps the fastest. Then it gets a load over HTTP, measures itself, and returns the figures: for
one connection, inputs one after the other on one session of all cores; for more, its best layout.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lib import servers
from benchmarks.lib.servers import WINDOW, Call, Server
from export.verify import RunGraph, graph_runner
from service.core import bundle
from service.core.encode import Encoder, Encoding
from service.core.manifest import Graph
from service.core.session import keep_freed_memory
from service.settings import usable_cores

BATCHES = (1, 8, 32)
TRIAL_S = 1.5
Batch = Sequence[Encoding]


class SessionLayout(NamedTuple):
    """The number of parallel sessions, their threads, and the inputs of their batches."""

    sessions: int
    threads: int
    size: int

    def __str__(self) -> str:
        return f"{self.sessions} x {self.threads} threads, batches of {self.size}"


def server(precision: str, texts: Sequence[str], scratch: Path) -> Server:
    """Return the baseline as one of the servers in the rounds, for the same texts."""
    file = scratch / "bare.json"
    file.write_text(json.dumps(list(texts)))

    def command(python: Path, model: Path, port: int) -> list[str]:
        arguments = [str(model), str(file), "--precision", precision]
        arguments += ["--trial-seconds", str(TRIAL_S), "--port", str(port)]
        return [str(python), "-m", "benchmarks.lib.onnxruntime_baseline", *arguments]

    return Server(
        name=f"bare {precision}",
        command=command,
        ready=WINDOW,
        prepare=servers.to_bundle,
        calls={"embed": Call(WINDOW, lambda _: {}, lambda document: document)},
        note="p50 and p99 are of a text at one connection, of a batch at more",
        measures_itself=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("texts", type=Path, help="a JSON list")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument(
        "--trial-seconds", type=float, default=TRIAL_S, help="of each layout, twice"
    )
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    full = bundle.load(options.bundle)
    keep_freed_memory()
    items = [(encoding,) for encoding in encode(full, json.loads(options.texts.read_text()))]
    session = Bare(full, options.precision, items, options.trial_seconds)
    print(session.layout, session.trials, flush=True)
    HTTPServer(("127.0.0.1", options.port), make_handler(session)).serve_forever()


def encode(full: bundle.Bundle, texts: Sequence[str]) -> list[Encoding]:
    encoder = Encoder.from_file(full.file("tokenizer.json"), full.manifest.max_length)
    return [item.windows[0] for item in encoder.texts(texts)]


class Bare:
    """Sessions of one graph, and their inputs. layout: the fastest one at start"""

    def __init__(
        self, full: bundle.Bundle, precision: str, items: Sequence[Batch], trial_s: float = TRIAL_S
    ) -> None:
        self.items = items
        self.mean = float(np.mean([tokens(item) for item in items]))
        graph = packed_graph(full, precision)
        cores = usable_cores()
        self.runs = {
            sessions: [graph_runner(full, graph, cores // sessions) for _ in range(sessions)]
            for sessions in dict.fromkeys((1, cores))
        }
        layouts = [
            SessionLayout(sessions, cores // sessions, size)
            for size, sessions in itertools.product(BATCHES, self.runs)
        ]
        self.batches = {size: shuffled_batches(items, size) for size in BATCHES}
        self.trials: dict[str, float] = {}
        for layout in layouts * 2:  # the machine may be slow for a moment
            rate = self.run_batches(layout, trial_s, warm_s=0.1)["rate"]
            self.trials[str(layout)] = max(rate, self.trials.get(str(layout), 0.0))
        self.layout = max(layouts, key=lambda layout: self.trials[str(layout)])

    def window(self, connections: int, seconds: float, warm_s: float) -> dict[str, float]:
        """Measure a window: inputs of mean length per second, and milliseconds of a batch, or of an input."""
        if connections == 1:
            return self.run_single(seconds, warm_s)
        return self.run_batches(self.layout, seconds, warm_s)

    def run_single(self, seconds: float, warm_s: float) -> dict[str, float]:
        """Run inputs one after the other from the first, like the requests of one connection."""
        (run,) = self.runs[1]
        return self.figures([run_window(run, itertools.cycle(self.items), seconds, warm_s, [])])

    def run_batches(self, layout: SessionLayout, seconds: float, warm_s: float) -> dict[str, float]:
        """Run batches in all sessions of a layout."""
        runs = self.runs[layout.sessions]
        batches = self.batches[layout.size]
        ended: list[RunGraph] = []
        with ThreadPoolExecutor(len(runs)) as threads:
            parts = [
                threads.submit(run_window, run, batches, seconds, warm_s, ended, len(runs))
                for run in runs
            ]
            return self.figures([part.result() for part in parts])

    def figures(self, parts: Sequence["SessionWindow"]) -> dict[str, float]:
        spent_ms = 1000 * np.concatenate([part.spent for part in parts])
        p50, p99 = np.percentile(spent_ms, (50, 99))
        return {
            "rate": sum(part.tokens / part.spent.sum() for part in parts) / self.mean,
            "ran": sum(part.ran for part in parts) / self.mean,
            "p50_ms": float(p50),
            "p99_ms": float(p99),
        }


class SessionWindow(NamedTuple):
    """The window of one session.

    tokens: within the window
    spent: seconds of each of its batches
    ran: tokens including those before and after the window
    """

    tokens: int
    spent: np.ndarray
    ran: int


def run_window(
    run: RunGraph,
    batches: Iterator[Batch],
    seconds: float,
    warm_s: float,
    ended: list[RunGraph],
    sessions: int = 1,
) -> SessionWindow:
    """Run batches for a window after `warm_s`, and uncounted ones until the other sessions' windows have ended."""
    counted, spent, elapsed, ran = 0, [], 0.0, 0
    began = time.perf_counter()
    while len(ended) < sessions:
        batch = next(batches)
        before = time.perf_counter()
        run(batch)
        now = time.perf_counter()
        ran += tokens(batch)
        if before - began >= warm_s and elapsed < seconds:
            counted += tokens(batch)
            spent.append(now - before)
            elapsed += now - before
            if elapsed >= seconds:
                ended.append(run)
    return SessionWindow(counted, np.asarray(spent), ran)


def tokens(batch: Batch) -> int:
    return sum(map(len, batch))


def shuffled_batches(items: Sequence[Batch], size: int) -> Iterator[Batch]:
    """Return endless batches of inputs of similar lengths, in random order, so that any window is representative."""
    ordered = sorted(itertools.chain.from_iterable(items), key=len)
    batches = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    np.random.default_rng(0).shuffle(batches)
    return itertools.cycle(batches)


def packed_graph(full: bundle.Bundle, precision: str) -> Graph:
    return next(g for g in full.manifest.graphs if (g.precision, g.layout) == (precision, "packed"))


def make_handler(session: Bare) -> type[BaseHTTPRequestHandler]:
    """Return a request handler: GET returns the trials, POST measures the load in its body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({"layout": str(session.layout), "rates": session.trials})

        def do_POST(self) -> None:
            load = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(session.window(**load))

        def answer(self, document: dict[str, Any]) -> None:
            body = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


if __name__ == "__main__":
    main()
