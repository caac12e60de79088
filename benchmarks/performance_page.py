"""Renew the figures of docs/reference/performance.md and its chart from files of benchmarks/results.

python -m benchmarks.performance_page
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from model.checkpoints.tables import insert

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "performance.md"
CHART = ROOT / "docs" / "images" / "performance.png"
FAMILIES = ROOT / "docs" / "reference" / "families.md"
RESULTS = ROOT / "benchmarks" / "results"
SERVERS = "2026-11-25-peers-news-third-epyc-avx512-2-cores.json"
NEWS = "2026-11-25-bench-news-third-epyc-avx512-2-cores.json"
DOCUMENTS = "2026-11-25-bench-documents-third-epyc-avx512-2-cores.json"
OTHER_MIXES = "2026-11-21-peers-short-documents-epyc-avx512-2-cores.json"
LOADS = ("1", "32", "128")
BUSY = "32"  # connections
PANELS = (("rate", "texts per second"), ("p99_ms", "p99, ms"))
NAMES = {
    "quartet fp32": "**Quartet fp32**",
    "quartet int8": "**Quartet int8**",
    "infinity optimum": "infinity, ONNX",
    "infinity torch": "infinity, PyTorch",
    "sentence-transformers": "FastAPI + sentence-transformers",
    "litserve": "LitServe",
}

Rows = Mapping[str, Mapping[str, Any]]


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def rows_of(rows: Iterable[Mapping[str, Any]]) -> Rows:
    """Return the measured servers of a result file by name."""
    return {row["server"]: row for row in rows}


def server_table() -> str:
    """Return the table of all servers: throughput by connections, latency, start and memory."""
    measured = rows_of(read(SERVERS)["results"][0]["servers"])
    head = [f"texts/s, {load} connection{'s' if load != '1' else ''}" for load in LOADS]
    relative = f"relative to Quartet fp32, {BUSY} connections"
    columns = ["server", *head, relative, f"p99, {BUSY} connections", "start", "peak memory"]
    lines = [line(columns), line(["---"] * len(columns))]
    for name, label in NAMES.items():
        row = measured[name]
        busy = row["closed"][BUSY]
        ratio = "" if name == "quartet fp32" else figure(busy)
        rates = [f"{row['closed'][load]['rate']:.0f}" for load in LOADS]
        times = [f"{busy['p99_ms']:.0f} ms", f"{row['start_s']:.1f} s"]
        lines.append(line([label, *rates, ratio, *times, f"{row['peak_mb']:.0f} MB"]))
    return "\n".join(lines)


def packing_list() -> str:
    """Return what packing brings, as a list: figures of result files and of the table of families."""
    news = rows_of(read(NEWS)["contenders"])
    documents = rows_of(read(DOCUMENTS)["contenders"])
    others = {result["mix"]: rows_of(result["servers"]) for result in read(OTHER_MIXES)["results"]}
    speeds = packed_speeds(FAMILIES.read_text(encoding="utf-8"))
    padded = ", ".join(
        f"{figure(news['padded fp32']['closed'][load])} at {load}" for load in ("8", "32", "128")
    )
    infinity = others["documents"]["infinity optimum"]["closed"][BUSY]
    int8 = documents["packed int8"]["closed"][BUSY]
    return f"""- **Mixed lengths in one batch**: a packed graph is {min(speeds)} to {max(speeds)} times as fast as the
  padded graph of the same weights on sixteen news texts ([by family](families.md)).
- **Training**: 1.5 to 3.1 times the tokens per second of transformers, mostly because padding and unmasked
  positions are not computed ([research](../../research/2026-11-22-faster-pretraining-steps.md)).
- **On a GPU** a batch has no padding, whatever its lengths. Packed and padded graphs have not been compared there.
- **Over HTTP on a CPU, packing brings no speed**, because the planner already groups texts of similar lengths. The
  throughput of the padded graph, relative to the packed one, is {padded} connections (news).
- **On long texts of one length, all fp32 servers are similar**, because matrix products take the time. infinity
  reaches {figure(infinity)} of Quartet fp32 at {BUSY} connections (documents). Quartet int8 reaches
  {figure(int8)} times Quartet fp32."""


def packed_speeds(page: str) -> list[float]:
    """Return the last column of the table of families: packed speed relative to padded."""
    return [float(speed) for speed in re.findall(r"^\| `.*\| ([\d.]+) \|$", page, re.MULTILINE)]


def figure(load: Mapping[str, Any]) -> str:
    """Return a median of ratios with the range of the rounds."""
    low, high = load["spread"]
    return f"{load['ratio']:.2f} ({low:.2f}–{high:.2f})"


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


BLOCKS = {"servers": server_table, "packing": packing_list}


def render(page: str) -> str:
    """Return the page with current figures."""
    for name, content in BLOCKS.items():
        page = insert(page, name, content())
    return page


def source_hash() -> str:
    """Return the SHA-256 of the file that the chart shows; the chart's metadata contains it."""
    return hashlib.sha256((RESULTS / SERVERS).read_bytes()).hexdigest()


def draw(rows: Iterable[Mapping[str, Any]], picture: Path, metadata: Mapping[str, str]) -> None:
    """Draw throughput and p99 by connections, a line per measured server; Quartet's lines are thick."""
    # It takes a second to import.
    import matplotlib
    from matplotlib import pyplot

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
    figure.suptitle("Embeddings, news mix")
    figure.savefig(picture, dpi=110, metadata=dict(metadata))
    pyplot.close(figure)


def main() -> None:
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    rows = read(SERVERS)["results"][0]["servers"]
    draw(rows, CHART, {"Source": source_hash()})


if __name__ == "__main__":
    main()
