"""Throughput and latency of `/embed` through HTTP: packed against padded, batched against not, and the bare session.

    python -m benchmarks.bench [--bundle DIR] [--mix news] [--cores N] [--rounds N] [--seconds N]

Six servers of the same weights (MiniLM, by default) are measured in interleaved rounds: the packed fp32 graph, the same
without batching, the portable padded fp32 graph, the packed int8 graph; and both packed graphs with HTTP and inference
in one process. The bare packed sessions of both precisions are measured in the same rounds: no HTTP, the same texts in
sorted batches (`benchmarks/lib/onnxruntime_baseline.py`). With `--beside-noop` a no-op server answers the same number
of requests during their windows, so that both pay for the load generator and for sockets. After 32 connections each
server gets an open loop of 80 % of its throughput. At the end, the latency of one connection is measured by the length
of the text (`benchmarks/one_connection.py`), without `--texts` and `--cores`.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import limit, one_connection
from benchmarks.lib import (
    goal_checks,
    machine,
    models,
    onnxruntime_baseline,
    rounds,
    run_record,
    servers,
    traffic,
)
from benchmarks.lib.goal_checks import Check
from benchmarks.lib.servers import Server
from service.core import bundle

CONNECTIONS = (1, 8, 32, 128, 256)
CALM = 0.8  # of its capacity, the rate of a server's open loop
OF_BARE = {"fp32": 0.90, "int8": 0.85}  # of the bare session's throughput
ADDED_MS = 1.5  # to the bare session's p50, for one client
INT8 = {
    "avx512_vnni": 1.6,
    "avx_vnni": 1.6,
    "avx2": 1.4,
}  # times fp32, by the processor's extensions
KEPT = 0.95  # of the best throughput, with more connections
NOOP_LOADS = {f"bare {precision}": f"packed {precision}" for precision in OF_BARE}
TAIL = 4  # p99 by p50 at most, in the open loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, help="a full bundle; MiniLM is exported by default")
    parser.add_argument("--texts", type=Path, help="one text per line, instead of a mix")
    parser.add_argument("--mix", choices=traffic.MIXES, default="news", help="lengths of texts")
    parser.add_argument(
        "--beside-noop",
        action="store_true",
        help="have a no-op server answer as many requests as the service does, while a bare session is measured",
    )
    parser.add_argument(
        "--cores", type=int, help="for each server; the rest for the load generator"
    )
    parser.add_argument("--connections", nargs="+", type=int, default=CONNECTIONS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument(
        "--open-seconds", type=float, default=8.0, help="of each one of the open loop"
    )
    parser.add_argument("--out", type=Path, help="write the JSON line to this file, too")
    options = parser.parse_args()
    mix = traffic.texts(traffic.MIXES[options.mix])
    texts = options.texts.read_text().splitlines() if options.texts else mix
    described = machine.describe()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = servers.to_bundle(Path(sys.executable), options.bundle or models.minilm(), scratch)
        full = bundle.load(model)
        run = run_record.describe_run(model)
        sizes = [len(encoding) for encoding in limit.encode(full, texts)]
        tokens = float(np.mean(sizes))
        print(f"{described}\n{len(texts)} texts of {tokens:.0f} tokens on average")
        contenders = [*variants(full, texts, scratch)]
        if options.cores:
            contenders = share_cores(contenders, options.cores)
        tested = rounds.measure(
            contenders,
            "embed",
            model,
            texts,
            scratch,
            connections=options.connections,
            shares=[CALM],
            weights=sizes,
            rounds=options.rounds,
            seconds=options.seconds,
            open_seconds=options.open_seconds,
            noop_load=NOOP_LOADS if options.beside_noop else None,
        )
        alone = not (options.texts or options.cores) and 1 in options.connections
        found = one_connection.measure(model, scratch, number=options.rounds) if alone else None
    rows = rounds.summaries(tested)
    wanted = [*goals(tested, options.connections, described["flags"])]
    rounds.show(rows)
    if found:
        one_connection.show(found)
        wanted += one_connection.goals(found)
    goal_checks.show(wanted)
    results = {
        "run": run,
        "machine": described,
        "cores": options.cores,
        "beside_noop": options.beside_noop,
        "texts": {"mix": options.mix, "count": len(texts), "mean_tokens": tokens},
        "contenders": rows,
        "one_connection": found,
        "checks": [check.as_json() for check in wanted],
    }
    print(json.dumps(results))
    if options.out:
        options.out.write_text(json.dumps(results) + "\n")


def share_cores(contenders: Sequence[Server], count: int) -> list[Server]:
    """Pin contenders to the first cores, and this process to the others, if there are any."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[count:] or cores)
    return [servers.pinned(one, cores[:count]) for one in contenders]


def goals(
    tested: Sequence[rounds.Tested], connections: Sequence[int], flags: Sequence[str]
) -> Iterator[Check]:
    """Yield the checks of the service's goals."""
    named = goal_checks.by_name(tested)
    fp32, int8, unbatched = (
        named(name) for name in ("packed fp32", "packed int8", "one by one fp32")
    )
    baselines = {precision: named(f"bare {precision}") for precision in OF_BARE}
    for one, precision in ((fp32, "fp32"), (int8, "int8")):
        for load in sorted({32, 128} & {*connections}):
            what = f"{precision}: of the bare session, at {load} connections"
            yield Check(
                what, goal_checks.ratios(one, baselines[precision], load), OF_BARE[precision]
            )
        if 1 in connections:
            what = f"{precision}: p50 beyond the bare session's, 1 connection"
            added = goal_checks.added_ms(one, baselines[precision])
            yield Check(what, added, ADDED_MS, at_most=True, unit="ms")
    faster = max([times for flag, times in INT8.items() if flag in flags], default=1.0)
    for load in sorted({32, 128} & {*connections}):
        yield Check(
            f"int8: times fp32, at {load} connections", goal_checks.ratios(int8, fp32, load), faster
        )
    for load in connections:
        what = f"batching: times the rate without, at {load} connections"
        yield Check(what, goal_checks.ratios(fp32, unbatched, load), 1.0)
    many = [load for load in sorted(connections) if load >= 8]
    for one, precision in ((fp32, "fp32"), (int8, "int8")):
        if len(many) > 1:
            what = f"{precision}: throughput kept with more connections"
            yield Check(what, goal_checks.least_kept(one, baselines[precision], many), KEPT)
            what = f"{precision}: p99's growth by that of connections"
            yield Check(
                what, goal_checks.tail_growth(one, baselines[precision], many), 1.0, at_most=True
            )
        calm = goal_checks.calm_tail(one, f"{CALM:.0%}")
        what = f"{precision}: p99 by p50, offered {CALM:.0%} of capacity"
        yield Check(what, calm, TAIL, at_most=True)


def variants(full: bundle.Bundle, texts: Sequence[str], scratch: Path) -> Iterator[Server]:
    """Yield the compared servers; ratios are relative to the first."""
    fp32, int8 = servers.named("quartet fp32"), servers.named("quartet int8")
    padded = only_portable(full, scratch / "padded")
    yield replace(fp32, name="packed fp32")
    yield replace(fp32, name="one by one fp32", env={"QUARTET_MAX_BATCH_SIZE": "1"})
    yield replace(fp32, name="padded fp32", prepare=lambda *_: padded)
    yield replace(fp32, name="fp32 in one process", env={"QUARTET_HTTP_WORKERS": "0"})
    yield onnxruntime_baseline.server("embed", "fp32", texts, scratch)
    yield onnxruntime_baseline.server("embed", "int8", texts, scratch)
    yield replace(int8, name="packed int8")
    yield replace(int8, name="int8 in one process", env={"QUARTET_HTTP_WORKERS": "0"})


def only_portable(full: bundle.Bundle, out: Path) -> Path:
    """Write the bundle without its packed graphs, so that the server runs the padded one."""
    out.mkdir()
    manifest = full.manifest.model_dump(exclude_none=True)
    manifest["graphs"] = [g for g in manifest["graphs"] if g["layout"] == "portable"]
    manifest["default_precision"] = "fp32"
    for name in bundle.Manifest.model_validate(manifest).files():
        shutil.copyfile(full.file(name), out / name)
    (out / bundle.MANIFEST).write_text(json.dumps(manifest))
    return out


if __name__ == "__main__":
    main()
