"""Vectors of Quartet and its peers with the same weights on the same cores, in interleaved rounds of equal requests.

    python -m benchmarks.compare [--mixes short news documents] [--servers NAME ...] [--rounds 5]

First their vectors are compared. Then they are measured at 1, 8, 32 and 128 connections, one text per request. Prints
a table for each mix and one JSON line. Peers' environments are built first (see benchmarks/peers/README.md); a server
whose environment cannot be built is left out by name.
"""

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib import environments, models, rounds, run_record, servers, traffic
from benchmarks.lib.environments import Unavailable
from benchmarks.lib.servers import Server


def main() -> None:
    parser = rounds.parser(__doc__, (1, 8, 32, 128))
    parser.add_argument("--mixes", nargs="+", choices=traffic.MIXES, default=[*traffic.MIXES])
    parser.add_argument("--servers", nargs="+", metavar="NAME", help="all by default")
    given = parser.parse_args()
    chosen = servers.chosen(given.servers)
    results = []
    peers = sorted({server.environment for server in chosen if server.environment})
    environments.build_all(map(environments.of_peer, peers))
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        cosines = compare_vectors(chosen, scratch)
        for mix in given.mixes:
            print(f"\n== {mix}")
            texts = traffic.texts(traffic.MIXES[mix])
            rows = rounds.table(chosen, "embed", models.minilm(), texts, scratch, given)
            results.append({"task": "embed", "mix": mix, "servers": rows, "cosines": cosines})
        run_record.write({"rounds": given.rounds, "results": results}, given.out, scratch)


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
