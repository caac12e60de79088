"""Throughput and latency of `/embed` through HTTP: packed against padded, batched against not, and the bare session.

    python -m benchmarks.bench [--bundle DIR] [--mix news] [--rounds N] [--seconds N]

The same weights (MiniLM, by default) are served by four servers, in interleaved rounds: the packed fp32 graph, the same
without batching, the portable padded fp32 graph, the packed int8 graph. Beside them stands the bare packed session, in
one process, without HTTP, on the same texts in sorted batches.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import limit, machine, models, rounds, servers, traffic
from benchmarks.servers import Server
from service import bundle

CONNECTIONS = (1, 8, 32, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, help="a full bundle; MiniLM is exported by default")
    parser.add_argument("--texts", type=Path, help="one text per line, instead of a mix")
    parser.add_argument("--mix", choices=traffic.MIXES, default="news", help="lengths of texts")
    parser.add_argument("--connections", nargs="+", type=int, default=CONNECTIONS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--out", type=Path, help="write the JSON line to this file, too")
    given = parser.parse_args()
    mix = traffic.texts(traffic.MIXES[given.mix])
    texts = given.texts.read_text().splitlines() if given.texts else mix
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = servers.to_bundle(Path(sys.executable), given.bundle or models.minilm(), scratch)
        full = bundle.load(model)
        encodings = limit.encode(full, texts)
        tokens = float(np.mean([len(encoding) for encoding in encodings]))
        print(f"{machine.describe()}\n{len(texts)} texts of {tokens:.0f} tokens on average")
        bare = {
            precision: limit.bare_sessions(full, precision, encodings)
            for precision in ("fp32", "int8")
        }
        rows = rounds.summaries(
            rounds.measure(
                [*variants(full, scratch)],
                "embed",
                model,
                texts,
                scratch,
                connections=given.connections,
                rounds=given.rounds,
                seconds=given.seconds,
            )
        )
    rounds.show(rows)
    show(bare, rows)
    results = {
        "machine": machine.describe(),
        "texts": {"count": len(texts), "mean_tokens": tokens},
        "bare": bare,
        "http": rows,
    }
    print(json.dumps(results))
    if given.out:
        given.out.write_text(json.dumps(results) + "\n")


def variants(full: bundle.Bundle, scratch: Path) -> Iterator[Server]:
    """The servers that are compared; the others' ratios are to the first."""
    fp32, int8 = servers.named("quartet fp32"), servers.named("quartet int8")
    padded = only_portable(full, scratch / "padded")
    yield replace(fp32, name="packed fp32")
    yield replace(fp32, name="one by one fp32", env={"QUARTET_MAX_BATCH_SIZE": "1"})
    yield replace(fp32, name="padded fp32", prepare=lambda *_: padded)
    yield replace(int8, name="packed int8")


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


def show(bare: dict[str, dict[str, float]], rows: list[dict]) -> None:
    """The bare session, and how much of its best each server reached."""
    print()
    for precision, found in bare.items():
        print(f"bare packed {precision} session, texts/s:")
        for name, value in found.items():
            print(f"    {name:<32}{value:>6.0f}")
    for row in rows:
        best = max(bare[row["server"].split()[-1]].values())
        shares = "  ".join(f"{load}: {w['rate'] / best:.2f}" for load, w in row["closed"].items())
        print(f"{row['server']:<24}of the best bare session, by connections: {shares}")


if __name__ == "__main__":
    main()
