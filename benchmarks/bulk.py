"""One request of many texts: its throughput, and the queueing time of single texts during it."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.lib import onnxruntime_baseline, rounds, servers
from benchmarks.lib.goal_checks import Check

OF_BARE = 0.95
WAIT_S = 600.0  # for an answer
PATIENT = {"QUARTET_DEADLINE_MS": str(int(1000 * WAIT_S))}


class SingleTexts(NamedTuple):
    """Single texts during a bulk request, in milliseconds.

    wait: p99 of the time in the queue
    batch: the longest batch of the bulk request
    latency: p99 of the total
    count: of single texts
    """

    wait: float
    batch: float
    latency: float
    count: int


def measure(
    model: Path,
    texts: Sequence[str],
    scratch: Path,
    *,
    rounds_: int,
    seconds: float,
    precision: str = "fp32",
) -> tuple[list[Check], dict[str, object]]:
    """Measure all texts in one request relative to the bare session, and single texts' wait relative to a batch."""
    with ExitStack() as stack:
        server = onnxruntime_baseline.server("embed", precision, texts, scratch)
        baseline = rounds.start(stack, server, model, scratch)
        server = replace(servers.quartet(precision), env=PATIENT)
        running = rounds.start(stack, server, model, scratch)
        rates = rounds.take_turns(
            {
                "bare": (baseline, lambda: rounds.self_measured(baseline, 32, seconds).rate),
                "bulk": (running, lambda: len(texts) / whole(running.port, texts)[0]),
            },
            rounds_,
        )
        singles = rounds.take_turns(
            {"singles": (running, lambda: with_singles(running.port, texts))}, rounds_
        )["singles"]
    wanted = [
        Check(
            f"one request of {len(texts):,} texts: of the bare session",
            [found / best for found, best in zip(rates["bulk"], rates["bare"], strict=True)],
            OF_BARE,
        ),
        Check(
            "single texts meanwhile: p99 of the wait, by a batch",
            [one.wait / one.batch for one in singles],
            1.0,
            at_most=True,
        ),
    ]
    return wanted, {"texts_per_second": rates, "singles": [one._asdict() for one in singles]}


def whole(port: int, texts: Sequence[str]) -> tuple[float, dict[str, float]]:
    """Return the seconds of a request with all texts, and the stages in its Server-Timing header."""
    body = {"inputs": list(texts), "truncate": True}
    began = time.perf_counter()
    headers, _ = servers.post(port, "/embed", body, timeout_s=WAIT_S)
    return time.perf_counter() - began, stages(headers["Server-Timing"])


def with_singles(port: int, texts: Sequence[str]) -> SingleTexts:
    """Send single texts one after the other during a request of all of them."""
    waits, latencies = [], []
    with ThreadPoolExecutor(1) as thread:
        bulk = thread.submit(whole, port, texts)
        number = 0
        while not bulk.done():
            spent, timing = whole(port, [texts[number % len(texts)]])
            waits.append(timing["queue"])
            latencies.append(1000 * spent)
            number += 1
    _, timing = bulk.result()
    wait, latency = np.percentile(waits, 99), np.percentile(latencies, 99)
    return SingleTexts(float(wait), timing["inference"], float(latency), number)


def stages(header: str) -> dict[str, float]:
    """Parse `queue;dur=1.5, inference;dur=7` to milliseconds by name."""
    parts = (part.strip().partition(";dur=") for part in header.split(","))
    return {name: float(duration) for name, _, duration in parts}
