"""Reranking next to sentence-transformers' CrossEncoder, and several heads in one pass next to one head."""

import itertools
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.lib import models, rounds, servers, traffic
from benchmarks.lib.environments import PEERS
from benchmarks.lib.goal_checks import Check
from benchmarks.lib.load_generator import request_bytes
from benchmarks.lib.servers import Server
from benchmarks.tasks import ratios

DOCUMENTS = 100  # in one request
QUERIES = 8
LEAST = 3  # requests in a measurement
WAIT_S = 120.0  # for an answer
AT_FP32, AT_INT8 = 1.5, 2.5  # of the peer's requests per second
CONNECTIONS = 8
OF_ONE_HEAD = 1.15  # of the processor time


def measure_rerank(
    model: Path, texts: Sequence[str], scratch: Path, *, rounds_: int, seconds: float
) -> tuple[list[Check], dict[str, list[float]]]:
    """Measure requests of `DOCUMENTS` documents per second, one at a time.

    model: a bundle of a cross-encoder; texts: of mixed lengths
    """
    queries = [traffic.question(text) for text in texts[:QUERIES]]
    documents = [*texts[QUERIES : QUERIES + DOCUMENTS]]
    bodies = [{"query": query, "documents": documents, "truncate": True} for query in queries]
    contenders = {"peer": cross_encoder(models.checkpoint("rerank", scratch))} | {
        precision: servers.quartet(precision) for precision in ("fp32", "int8")
    }
    with ExitStack() as stack:
        running = {
            name: rounds.start(stack, server, model, scratch) for name, server in contenders.items()
        }

        def measured(name: str) -> float:
            return rate(running[name].port, bodies, seconds)

        turns = {name: (one, lambda name=name: measured(name)) for name, one in running.items()}
        rates = rounds.take_turns(turns, rounds_)
    checks = [
        Check(
            f"/rerank at {precision}: of CrossEncoder's",
            ratios(rates[precision], rates["peer"]),
            limit,
        )
        for precision, limit in (("fp32", AT_FP32), ("int8", AT_INT8))
    ]
    return checks, rates


def rate(port: int, bodies: Sequence[object], seconds: float) -> float:
    """Return the requests per second of one connection, after one request that does not count."""
    servers.post(port, "/rerank", bodies[-1], timeout_s=WAIT_S)
    began = time.perf_counter()
    for done, body in enumerate(itertools.cycle(bodies), 1):
        servers.post(port, "/rerank", body, timeout_s=WAIT_S)
        spent = time.perf_counter() - began
        if spent >= seconds and done >= LEAST:
            return done / spent
    raise AssertionError("there are no requests")


def cross_encoder(checkpoint: Path) -> Server:
    """Return the peer: it gets the checkpoint, and not the bundle."""

    def command(python: Path, _: Path, port: int) -> list[str]:
        app = PEERS / "sentence_transformers" / "rerank_app.py"
        return [str(python), str(app), str(checkpoint), "--port", str(port)]

    return Server(name="CrossEncoder", command=command, calls={})


def measure_analysis(
    model: Path, texts: Sequence[str], scratch: Path, *, rounds_: int, seconds: float
) -> tuple[list[Check], dict[str, list[float]]]:
    """Measure the processor time of a text by one head, and by six heads in one pass.

    model: a bundle of `models.analysis`
    """
    bodies = {
        "one": ("/classify", [{"inputs": text} for text in texts]),
        "six": ("/analyze", [{"inputs": text, "truncate": True} for text in texts]),
    }
    weights = np.ones(len(texts))
    with ExitStack() as stack:
        running = rounds.start(stack, servers.quartet("fp32"), model, scratch)
        requests = {
            name: [request_bytes(path, json.dumps(body).encode()) for body in own]
            for name, (path, own) in bodies.items()
        }

        def measured(name: str) -> float:
            found = rounds.measure_closed(running, requests[name], weights, CONNECTIONS, seconds)
            return found.cpu_ms

        turns = {name: (running, lambda name=name: measured(name)) for name in bodies}
        spent = rounds.take_turns(turns, rounds_)
    what = "/analyze with six heads: processor time of /classify"
    return [Check(what, ratios(spent["six"], spent["one"]), OF_ONE_HEAD, at_most=True)], spent
