"""Throughput and latency of `/embed` through HTTP: packed against padded, batched against not, and the bare session.

    python -m benchmarks.bench [--bundle DIR] [--mix news] [--servers NAME ...] [--rounds N] [--seconds N]

Six servers of the same weights (MiniLM, by default) are measured in interleaved rounds: the packed fp32 graph, the same
without batching, the portable padded fp32 graph, the packed int8 graph; and both packed graphs with HTTP and inference
in one process. The bare packed sessions of both precisions are measured in the same rounds: no HTTP, the same texts in
sorted batches (`benchmarks/lib/onnxruntime_baseline.py`).
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.lib import models, onnxruntime_baseline, rounds, run_record, servers, traffic
from benchmarks.lib.servers import Server
from service.core import bundle
from service.core.manifest import Manifest


def main() -> None:
    parser = rounds.parser(__doc__, (1, 8, 32, 128, 256))
    parser.add_argument("--bundle", type=Path, help="a full bundle; MiniLM is exported by default")
    parser.add_argument("--mix", choices=traffic.MIXES, default="news", help="lengths of texts")
    parser.add_argument("--servers", nargs="+", metavar="NAME", help="all by default")
    options = parser.parse_args()
    texts = traffic.texts(traffic.MIXES[options.mix])
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = servers.to_bundle(Path(sys.executable), options.bundle or models.minilm(), scratch)
        full = bundle.load(model)
        sizes = [len(encoding) for encoding in onnxruntime_baseline.encode(full, texts)]
        described = {"mix": options.mix, "count": len(texts), "mean_tokens": float(np.mean(sizes))}
        print(described)
        chosen = servers.chosen(options.servers, [*variants(full, texts, scratch)])
        rows = rounds.table(chosen, "embed", model, texts, scratch, options, weights=sizes)
        run_record.write({"texts": described, "contenders": rows}, options.out, model)


def variants(full: bundle.Bundle, texts: Sequence[str], scratch: Path) -> Iterator[Server]:
    """Yield the compared servers; ratios are relative to the first."""
    fp32, int8 = servers.named("quartet fp32"), servers.named("quartet int8")
    padded = only_portable(full, scratch / "padded")
    yield replace(fp32, name="packed fp32")
    yield replace(fp32, name="one by one fp32", env={"QUARTET_MAX_BATCH_SIZE": "1"})
    yield replace(fp32, name="padded fp32", prepare=lambda *_: padded)
    yield replace(fp32, name="fp32 in one process", env={"QUARTET_HTTP_WORKERS": "0"})
    yield onnxruntime_baseline.server("fp32", texts, scratch)
    yield onnxruntime_baseline.server("int8", texts, scratch)
    yield replace(int8, name="packed int8")
    yield replace(int8, name="int8 in one process", env={"QUARTET_HTTP_WORKERS": "0"})


def only_portable(full: bundle.Bundle, out: Path) -> Path:
    """Write the bundle without its packed graphs, so that the server runs the padded one."""
    out.mkdir()
    manifest = full.manifest.model_dump(exclude_none=True)
    manifest["graphs"] = [g for g in manifest["graphs"] if g["layout"] == "portable"]
    manifest["default_precision"] = "fp32"
    for name in Manifest.model_validate(manifest).files():
        shutil.copyfile(full.file(name), out / name)
    (out / bundle.MANIFEST).write_text(json.dumps(manifest))
    return out


if __name__ == "__main__":
    main()
