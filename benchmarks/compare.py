"""Quartet and its peers with the same weights on the same cores, asked the same, in interleaved rounds.

    python -m benchmarks.compare [--tasks embed] [--mixes short news documents] [--servers NAME ...] [--rounds 5]

First their answers are compared. Then a closed loop of 1, 8, 32 and 128 connections, one text per request, and an open
loop at rising rates. Prints a table for each task and mix and one JSON line. Peers' environments are built first (see
benchmarks/peers/README.md); what cannot be built or is not on the PATH is left out by name.
"""

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks import agreement
from benchmarks.lib import environments, machine, models, rounds, run_record, servers, traffic
from benchmarks.lib.environments import Unavailable

CONNECTIONS = (1, 8, 32, 128)
RATES = (20, 40, 80, 120, 160, 240, 320)  # requests per second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=agreement.TASKS, default=["embed"])
    parser.add_argument("--mixes", nargs="+", choices=traffic.MIXES, default=[*traffic.MIXES])
    parser.add_argument("--servers", nargs="+", metavar="NAME", help="all by default")
    parser.add_argument("--connections", nargs="*", type=int, default=CONNECTIONS)
    parser.add_argument("--rates", nargs="*", type=int, default=RATES, help="of the open loop")
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
        for task in given.tasks:
            model = models.checkpoint(task, Path(scratch))
            agreed = agreement.measure(task, chosen, agreement.texts(20), Path(scratch))
            for mix in given.mixes:
                print(f"\n== {task}, {mix}: {machine.describe()}")
                texts = traffic.texts(traffic.MIXES[mix])
                tested = rounds.measure(
                    chosen,
                    task,
                    model,
                    texts,
                    Path(scratch),
                    connections=given.connections,
                    rates=given.rates,
                    rounds=given.rounds,
                    seconds=given.seconds,
                )
                rows = rounds.summaries(tested)
                rounds.show(rows)
                results.append({"task": task, "mix": mix, "servers": rows, "agreement": agreed})
        run = run_record.describe_run(Path(scratch))
    described = {"run": run, "machine": machine.describe()}
    line = json.dumps({**described, "rounds": given.rounds, "results": results})
    print(line)
    if given.out:
        given.out.write_text(line + "\n")


if __name__ == "__main__":
    main()
