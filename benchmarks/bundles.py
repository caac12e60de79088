"""Several bundles in one server: the cost of bundles without requests, and load that is spread over all."""

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import uvloop

from benchmarks import bulk
from benchmarks.lib import onnxruntime_baseline, processes, rounds, servers
from benchmarks.lib.goal_checks import Check
from benchmarks.lib.load_generator import Measured, closed_loop, request_bytes
from service.core import bundle

CONNECTIONS = 32
KEPT = 0.9
CROWD = 256
ALONE = "one bundle alone"


def measure(
    model: Path,
    texts: Sequence[str],
    scratch: Path,
    *,
    rounds_: int,
    seconds: float,
    loaded: Sequence[int] = (1, 2, 8),
) -> tuple[list[Check], dict[str, object]]:
    """Serve the most of `loaded` bundles, load each number of them, and compare with a server of one bundle.

    Returns the checks, and texts per second and threads.
    """
    copies = [copy(model, scratch, f"copy{number + 1}") for number in range(max(loaded))]
    ids = [bundle.load(path).manifest.id for path in copies]
    sizes = [
        *map(
            onnxruntime_baseline.tokens,
            onnxruntime_baseline.encode(bundle.load(model), "embed", texts),
        )
    ]
    weights = np.asarray(sizes) / np.mean(sizes)
    with ExitStack() as stack:
        one = replace(servers.quartet("fp32"), name="one bundle")
        alone = rounds.start(stack, one, copies[0], scratch)
        many = replace(servers.quartet("fp32", copies[1:]), name="many bundles")
        running = rounds.start(stack, many, copies[0], scratch)

        def turn(
            served: servers.Running, count: int
        ) -> tuple[servers.Running, Callable[[], float]]:
            load = (served, encoded(texts, ids[:count]), weights, CONNECTIONS, seconds)
            return served, lambda: rounds.measure_closed(*load).rate

        turns = {ALONE: turn(alone, 1)}
        turns |= {f"{asked} of {len(copies)} asked": turn(running, asked) for asked in loaded}
        rates = rounds.take_turns(turns, rounds_)
        apart = rounds.take_turns(
            {"apart": (running, lambda: isolation(running.port, texts, ids, 4 * seconds))}, rounds_
        )["apart"]
        threads = {
            "one": processes.threads(alone.process.pid),
            "many": processes.threads(running.process.pid),
        }
    wanted = [
        Check(
            f"bundles, {name}: of one alone",
            [float(a / b) for a, b in zip(found, rates[ALONE], strict=True)],
            KEPT,
        )
        for name, found in rates.items()
        if name != ALONE
    ]
    what = f"threads of {len(copies)} bundles, beyond those of one"
    wanted.append(Check(what, [threads["many"] - threads["one"]], 0, at_most=True))
    wanted.append(
        Check(
            "a bundle while another has a crowd: p99 of the wait, by a batch",
            [one.wait / one.batch for one in apart],
            1.0,
            at_most=True,
        )
    )
    return wanted, {
        "texts_per_second": rates,
        "threads": threads,
        "apart": [one._asdict() for one in apart],
    }


class Isolation(NamedTuple):
    """One client of a bundle during a burst on another bundle, in milliseconds.

    wait: p99 of the time in the queue
    batch: the longest batch of the burst that a client of it recorded
    count: of answers
    """

    wait: float
    batch: float
    count: int


def isolation(port: int, texts: Sequence[str], ids: Sequence[str], seconds: float) -> Isolation:
    """Measure a client of the second bundle during a burst on the first, whose batches another client records."""
    crowd = closed_loop(port, encoded(texts, ids[:1]), CROWD, seconds, retry=True)
    with ThreadPoolExecutor(3) as threads:
        flooding = threads.submit(uvloop.run, crowd)
        clients = [threads.submit(send_until, flooding, port, texts, model) for model in ids[:2]]
        of_burst, of_other = (client.result() for client in clients)
    waits = [stages["queue"] for stages in of_other]
    batches = [stages["inference"] for stages in of_burst]
    return Isolation(float(np.percentile(waits, 99)), max(batches), len(waits))


def send_until(
    over: Future[Measured], port: int, texts: Sequence[str], model: str
) -> list[dict[str, float]]:
    """Send texts one after the other, and return the stages of each answer; refusals are left out."""
    timings: list[dict[str, float]] = []
    for text in itertools.cycle(texts):
        if over.done():
            return timings
        with suppress(RuntimeError):
            body = {"inputs": text, "truncate": True, "model": model}
            headers, _ = servers.post(port, "/embed", body)
            timings.append(bulk.stages(headers["Server-Timing"]))
    return timings


def copy(model: Path, scratch: Path, version: str) -> Path:
    """Copy a bundle under another version."""
    full = bundle.load(model)
    out = scratch / "copies" / version
    out.mkdir(parents=True)
    for name in full.manifest.files():
        shutil.copyfile(full.file(name), out / name)
    manifest = json.loads((model / bundle.MANIFEST).read_text())
    (out / bundle.MANIFEST).write_text(json.dumps({**manifest, "version": version}))
    return out


def encoded(texts: Sequence[str], ids: Sequence[str]) -> list[bytes]:
    """Return requests to the bundles in turn."""
    bodies = (
        {**servers.quartet_body(text), "model": ids[number % len(ids)]}
        for number, text in enumerate(texts)
    )
    return [request_bytes("/embed", json.dumps(body).encode()) for body in bodies]
