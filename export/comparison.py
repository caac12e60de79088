"""A table of a bundle's graphs that a CPU runs: the agreement that export measured, speed and size."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from export import goldens, verify
from service.core import bundle
from service.core.cpu import CPU
from service.core.encode import Encoder

LONGEST = 128  # tokens of the texts that are timed
RUNS = 3  # of which the fastest counts


def compare_graphs(out: Path, agreement: Mapping[str, str]) -> str:
    """Return the table, and the option that selects a precision. Speeds are relative to the first graph of the table.

    agreement: what export measured, by precision and layout
    """
    opened = bundle.load(out)
    manifest = opened.manifest
    encoder = Encoder.from_file(
        opened.file(manifest.vocabulary.file), min(manifest.max_length, LONGEST)
    )
    encodings = goldens.golden_encodings(encoder, manifest.heads)
    lines, first_s = [f"{'precision':10} {'speed':>6} {'size':>9}  agreement"], 0.0
    for precision in sorted(manifest.precisions, reverse=True, key=lambda p: p == "fp32"):
        for graph in manifest.graphs_for(CPU, precision)[:1]:
            run = verify.graph_runner(opened, graph, threads=os.cpu_count() or 1)
            times = []
            for _ in range(1 + RUNS):  # the first run allocates memory
                began = time.perf_counter()
                run(encodings)
                times.append(time.perf_counter() - began)
            seconds = min(times[1:])
            first_s = first_s or seconds
            names = [graph.file, *([graph.weights.file] if graph.weights else [])]
            size = sum(opened.file(name).stat().st_size for name in names) / 1e6
            measured = agreement.get(f"{graph.precision} {graph.layout}", "")
            lines.append(f"{precision:10} {first_s / seconds:6.1f} {size:6.1f} MB  {measured}")
    default = manifest.default_precision
    choices = " or ".join(f"--precision {precision}" for precision in manifest.precisions)
    lines.append(f"a service on a CPU computes {default} by default; {choices} selects a graph")
    return "\n".join(lines)
