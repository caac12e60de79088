"""The speed of this checkout relative to another one, such as a worktree of an earlier commit.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.revisions /tmp/before [--bundle DIR] [--mix news] [--rounds 5] [--seconds 3]

Both serve the same bundle with this environment's packages, in interleaved rounds, at fp32 and at int8. A difference
beyond the range of the rounds is a difference of the code.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.lib import machine, models, rounds, run_record, servers, traffic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--bundle", type=Path, help="a full bundle; MiniLM is exported by default")
    parser.add_argument("--mix", choices=traffic.MIXES, default="news", help="lengths of texts")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "int8"])
    parser.add_argument("--connections", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--out", type=Path, help="write the JSON line to this file, too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    options = parser.parse_args()
    texts = traffic.texts(traffic.MIXES[options.mix])
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = servers.to_bundle(Path(sys.executable), options.bundle or models.minilm(), scratch)
        run = run_record.describe_run(model)
        for precision in options.precisions:
            here = replace(servers.quartet(precision), name=f"{precision} here")
            there = replace(here, name=f"{precision} before", folder=options.before.resolve())
            tested = rounds.measure(
                [there, here],
                "embed",
                model.resolve(),
                texts,
                scratch,
                connections=options.connections,
                rounds=options.rounds,
                seconds=options.seconds,
            )
            results[precision] = rounds.summaries(tested)
    for precision, (_, row) in results.items():
        if "skipped" in row:
            raise SystemExit(f"{row['server']}: {row['skipped']}")
        for load, found in row["closed"].items():
            rate, p50 = found["ratio"], found["p50_ratio"]
            low, high = found["spread"]
            fast, slow = found["p50_spread"]
            print(
                f"{precision} {load:>3} connections: throughput {rate:.3f} ({low:.2f}-{high:.2f}),"
                f" p50 {p50:.3f} ({fast:.2f}-{slow:.2f}), processor time {found['cpu_ratio']:.3f}"
            )
    line = json.dumps({"run": run, "machine": machine.describe(), "results": results})
    print(line)
    if options.out:
        options.out.write_text(line + "\n")


if __name__ == "__main__":
    main()
