"""Compare the default settings of threads and memory with alternatives for a bundle, and recommend settings.

    python -m benchmarks.tune BUNDLE [--precision auto] [--rounds N] [--seconds N]

Each layout is a server of its own; they are measured in interleaved rounds at one connection (latency) and at 32
(throughput). A setting is recommended only if it is better than the default in every round.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib import rounds, run_record, servers, traffic
from benchmarks.lib.servers import Server
from service.core import bundle
from service.settings import usable_cores
from service.variables import PREFIX

TASKS = {"embedding": "embed", "classification": "classify", "ner": "ner"}


def main() -> None:
    parser = rounds.parser(__doc__, (1, 32))
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--mix", choices=traffic.MIXES, default="news", help="lengths of texts")
    options = parser.parse_args()
    heads = bundle.load(options.bundle).manifest.heads.values()
    task = next((TASKS[head.task] for head in heads if head.task in TASKS), None)
    if task is None:
        raise SystemExit(f"{options.bundle} has no head of {', '.join(TASKS)}")
    chosen = layouts(options.precision, usable_cores())
    texts = traffic.texts(traffic.MIXES[options.mix])
    with tempfile.TemporaryDirectory() as scratch:
        rows = rounds.table(chosen, task, options.bundle, texts, Path(scratch), options)
    for load in options.connections:
        print(f"for {load} connections: {advice(chosen, rows, load)}")
    run_record.write({"layouts": rows}, options.out, options.bundle)


def layouts(precision: str, cores: int) -> list[Server]:
    """Return the default first, then the alternatives, without duplicates."""
    settings: list[dict[str, str]] = [{}, {"SPIN": "true"}, {"ARENA": "true"}]
    settings += [{"REPLICAS": str(n)} for n in sorted({1, cores // 2, cores} - {0})]
    settings += [{"REPLICAS": "1", "SPIN": "true"}]
    base = servers.quartet(precision)
    return [
        replace(
            base,
            name=" ".join(f"{name}={value}" for name, value in variables.items()) or "default",
            env={f"{PREFIX}{name}": value for name, value in variables.items()},
        )
        for variables in settings
    ]


def advice(chosen: Sequence[Server], rows: Sequence[dict[str, Any]], load: int) -> str:
    """Return the fastest settings for a load among those that were faster than the default in every round."""
    better = [
        (row["closed"][load]["ratio"], server.env)
        for server, row in zip(chosen, rows, strict=True)
        if load in row["closed"] and row["closed"][load]["spread"][0] > 1
    ]
    if not better:
        return "leave the default"
    ratio, env = max(better, key=lambda found: found[0])
    return f"{' '.join(f'{name}={value}' for name, value in env.items())} ({ratio:.2f} times the default)"


if __name__ == "__main__":
    main()
