"""Vectors of Quartet and its peers with the same weights on the same cores, in interleaved rounds of equal requests.

    python -m benchmarks.compare [--mixes short news documents] [--servers NAME ...] [--rounds 5]

First their vectors are compared. Then they are measured at 1, 8, 32 and 128 connections, one text per request. Prints
a table for each mix and one JSON line. Peers' environments are built first (see benchmarks/peers/README.md); a server
whose environment cannot be built is left out by name.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib import environments, machine, models, rounds, run_record, servers, traffic
from benchmarks.lib.environments import Unavailable
from benchmarks.lib.servers import Server

CONNECTIONS = (1, 8, 32, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixes", nargs="+", choices=traffic.MIXES, default=[*traffic.MIXES])
    parser.add_argument("--servers", nargs="+", metavar="NAME", help="all by default")
    parser.add_argument("--connections", nargs="*", type=int, default=CONNECTIONS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--out", type=Path, help="write the JSON line to this file, too")
    given = parser.parse_args()
    chosen = servers.chosen(given.servers)
    results = []
    for peer in sorted({server.environment for server in chosen if server.environment}):
        try:
            environments.build(peer)
        except Unavailable as error:
            print(f"{peer}: {error}")
    with tempfile.TemporaryDirectory() as scratch:
        cosines = compare_vectors(chosen, Path(scratch))
        for mix in given.mixes:
            print(f"\n== {mix}: {machine.describe()}")
            tested = rounds.measure(
                chosen,
                "embed",
                models.minilm(),
                traffic.texts(traffic.MIXES[mix]),
                Path(scratch),
                connections=given.connections,
                rounds=given.rounds,
                seconds=given.seconds,
            )
            rows = rounds.summaries(tested)
            rounds.show(rows)
            results.append({"task": "embed", "mix": mix, "servers": rows, "cosines": cosines})
        run = run_record.describe_run(Path(scratch))
    described = {"run": run, "machine": machine.describe()}
    line = json.dumps({**described, "rounds": given.rounds, "results": results})
    print(line)
    if given.out:
        given.out.write_text(line + "\n")


def compare_vectors(chosen: Sequence[Server], scratch: Path) -> dict[str, float]:
    """Return each server's smallest cosine to the vectors of Quartet at fp32, for long and short texts in batches."""
    texts = [text for mix in traffic.MIXES.values() for text in traffic.texts(mix, 10)]
    expected = vectors(servers.named("quartet fp32"), texts, scratch)
    cosines = {}
    for server in chosen:
        try:
            found = vectors(server, texts, scratch)
        except Unavailable:
            continue
        cosines[server.name] = float((expected * found).sum(axis=1).min())
        print(f"{server.name:<28}smallest cosine {cosines[server.name]:.7f}", flush=True)
    return cosines


def vectors(server: Server, texts: Sequence[str], scratch: Path) -> NDArray[np.float64]:
    """Return a server's vectors of texts, several at once, scaled to length 1, `[n, D]`. Raises Unavailable."""
    with (
        servers.serving(server, models.minilm(), scratch) as running,
        ThreadPoolExecutor(8) as clients,
    ):
        ask = partial(servers.ask, running.port, server.calls["embed"])
        rows = np.array([*clients.map(ask, texts)])
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


if __name__ == "__main__":
    main()
