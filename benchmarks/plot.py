"""Throughput and p99 against connections, for every server of a comparison: a picture from its JSON line.

python -m benchmarks.plot RESULTS.json PICTURE.png [--task embed] [--mix news]
"""

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

PANELS = (("rate", "texts per second"), ("p99_ms", "p99, ms"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--task", default="embed")
    parser.add_argument("--mix", default="news")
    given = parser.parse_args()
    results = json.loads(given.results.read_text())
    wanted = (given.task, given.mix)
    (found,) = (one for one in results["results"] if (one["task"], one["mix"]) == wanted)
    draw(found["servers"], given.picture, f"{given.task}, {given.mix} mix")


def draw(
    rows: Iterable[dict[str, Any]],
    picture: Path,
    title: str,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Draw a line per server that answered, on two panels; Quartet's lines are thick."""
    matplotlib.use("agg")
    figure, panels = pyplot.subplots(1, len(PANELS), figsize=(11, 4.2), layout="constrained")
    for row in rows:
        loads = sorted(row["closed"], key=int)
        ours = row["server"].startswith("quartet")
        for panel, (name, label) in zip(panels, PANELS, strict=True):
            if loads:
                values = [row["closed"][load][name] for load in loads]
                panel.plot(loads, values, "o-", linewidth=3 if ours else 1.2, label=row["server"])
            panel.set(xlabel="connections", ylabel=label)
            panel.grid(alpha=0.3)
    panels[0].set_ylim(bottom=0)
    panels[1].set_yscale("log")
    panels[0].legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(picture, dpi=110, metadata=dict(metadata or {}))
    pyplot.close(figure)


if __name__ == "__main__":
    main()
