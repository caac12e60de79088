"""Performance goals beyond `benchmarks.bench`: large requests, all tasks, many bundles, start, memory and dialects.

    python -m benchmarks.goals [--only bulk tasks rerank analyze bundles life dialects] [--mix news] [--rounds N]

Each part starts its servers once and measures them in interleaved rounds, with the bare session as the baseline where
a goal is relative to it. Weights are MiniLM's at fp32; for the tasks, its encoder with a random head for each.
"""

import argparse
import json
import re
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks import bulk, bundles, dialects, life, ranking, tasks
from benchmarks.faults import overload
from benchmarks.lib import goal_checks, machine, models, run_record, servers, traffic
from benchmarks.lib.goal_checks import Check

PARTS = {
    "bulk": bulk.measure,
    "tasks": tasks.measure,
    "rerank": ranking.measure_rerank,
    "analyze": ranking.measure_analysis,
    "bundles": bundles.measure,
    "life": life.measure,
    "dialects": dialects.measure,
    "overload": overload.measure,
}
BULK = 1000  # texts in one request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--mix", choices=traffic.MIXES, default="news", help="lengths of texts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--out", type=Path, help="write the JSON line to this file, too")
    given = parser.parse_args()
    described = machine.describe()
    print(described)
    parts: dict[str, dict] = {}
    wanted = []
    with tempfile.TemporaryDirectory() as folder:
        for part in given.only:
            print(f"\n== {part}")
            try:
                found, figures = measure(part, given, Path(folder))
            except (RuntimeError, OSError) as error:  # the other parts can still be measured
                parts[part] = {"failed": str(error)}
                continue
            wanted += found
            parts[part] = {"checks": [check.as_json() for check in found], "figures": figures}
        run = run_record.describe_run(Path(folder))
    for part, told in parts.items():
        print(f"\n{part}: {told.get('failed', '')}")
        for name, figure in told.get("figures", {}).items():
            print(f"    {name}: {shown(figure)}")
    goal_checks.show(wanted)
    line = json.dumps({"run": run, "machine": described, "mix": given.mix, "parts": parts})
    print(line)
    if given.out:
        given.out.write_text(line + "\n")


def measure(part: str, given: argparse.Namespace, scratch: Path) -> tuple[list[Check], dict]:
    """What is wanted in one part, with what was found, and the figures behind it."""
    checkpoints = {
        "tasks": models.joint,
        "analyze": models.analysis,
        "rerank": partial(models.checkpoint, "rerank"),
    }
    checkpoint = checkpoints.get(part, lambda _: models.minilm())(scratch)
    model = servers.to_bundle(Path(sys.executable), checkpoint, scratch)
    mix = "short" if part == "life" else given.mix  # many requests, and no need of their length
    texts = traffic.texts(traffic.MIXES[mix], BULK if part == "bulk" else 600)
    return PARTS[part](model, texts, scratch, rounds_=given.rounds, seconds=given.seconds)


def shown(figure: object) -> str:
    """Numbers of any figure to four digits."""
    return re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.4g}", json.dumps(figure))


if __name__ == "__main__":
    main()
