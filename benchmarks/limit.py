"""The service's throughput relative to the machine's limit (roofline), and the cost of each step.

    python -m benchmarks.limit [--bundle DIR] [--mix news] [--seconds N]

From the top: the rate at which the machine multiplies matrices, the tokens per second that this allows for the model,
what the bare packed session reaches without HTTP, and what the service answers through HTTP. Then the cost of each step
of a request besides the run itself, timed separately, for single texts and for batches of 8.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import orjson

from benchmarks.lib import machine, models, rounds, run_record, servers, traffic
from benchmarks.lib.onnxruntime_baseline import Bare, packed_graph
from export.verify import graph_runner
from service.api import schemas
from service.core import bundle, decode
from service.core.encode import Encoder, Encoding
from service.core.packing import pack
from service.core.session import ort
from service.settings import usable_cores

SIDE = 1024  # of the square matrices whose product is the machine's rate
PRODUCTS = {"MatMul", "Gemm", "MatMulInteger", "MatMulIntegerToFloat", "QGemm"}
ATTENTIONS = {"MultiHeadAttention", "PackedMultiHeadAttention"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, help="a full bundle; MiniLM is exported by default")
    parser.add_argument("--mix", choices=traffic.MIXES, default="news")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    given = parser.parse_args()
    texts = traffic.texts(traffic.MIXES[given.mix])
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = servers.to_bundle(Path(sys.executable), given.bundle or models.minilm(), scratch)
        run = run_record.describe_run(model)
        results = measure(bundle.load(model), texts, given.seconds, scratch)
    show(results)
    print(json.dumps({"run": run, **results}, default=float))


def measure(full: bundle.Bundle, texts: list[str], seconds: float, scratch: Path) -> dict:
    encodings = encode(full, texts)
    tokens = float(np.mean([len(encoding) for encoding in encodings]))
    found = {}
    for precision in ("fp32", "int8"):
        flops = flops_per_token(full, precision, encodings)
        rate = matmul_rate(precision)
        bare = Bare(full, precision, [(encoding,) for encoding in encodings]).trials
        http = through_http(full.path, precision, texts, seconds, scratch)
        found[precision] = {
            "matmul_gflops": rate / 1e9,
            "gflop_per_1000_tokens": flops / 1e6,
            "tokens_per_second": {
                "allowed": rate / flops,
                "bare": max(bare.values()) * tokens,
                "http": max(http.values()) * tokens,
            },
            "bare_texts_per_second": bare,
            "http_texts_per_second": http,
            "steps_us_per_text": steps(full, precision, texts),
        }
    return {
        "machine": machine.describe(),
        "texts": {"count": len(texts), "mean_tokens": tokens},
        "precisions": found,
    }


def encode(full: bundle.Bundle, texts: Sequence[str]) -> list[Encoding]:
    encoder = Encoder.from_file(full.file("tokenizer.json"), full.manifest.max_length)
    return [item.windows[0] for item in encoder.texts(texts)]


# -- the machine and the model ----------------------------------------------------------------------------------------


def matmul_rate(precision: str) -> float:
    """Operations per second of the runtime's own matrix product on all usable cores, the best of 20."""
    whole = precision == "int8"
    kind, left = ("MatMulInteger", np.uint8) if whole else ("MatMul", np.float32)
    right = np.int8 if whole else np.float32
    weights = np.random.default_rng(0).integers(-63, 64, (SIDE, SIDE)).astype(right)
    types = {np.uint8: onnx.TensorProto.UINT8, np.float32: onnx.TensorProto.FLOAT}
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(kind, ["a", "b"], ["c"])],
        "product",
        [onnx.helper.make_tensor_value_info("a", types[left], [None, SIDE])],
        [
            onnx.helper.make_tensor_value_info(
                "c", onnx.TensorProto.INT32 if whole else types[left], [None, SIDE]
            )
        ],
        [onnx.numpy_helper.from_array(weights, "b")],
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = usable_cores()
    session = ort.InferenceSession(model.SerializeToString(), options)
    feeds = {"a": np.ones((SIDE, SIDE), left)}
    return 2 * SIDE**3 / min(timed(lambda: session.run(None, feeds)) for _ in range(20))


def flops_per_token(full: bundle.Bundle, precision: str, encodings: Sequence[Encoding]) -> float:
    """Return multiplications and additions per token in the layers of the packed graph, for these texts.

    The sum over matrix products and attention; heads add little. A graph may compute less, where no head reads
    all tokens of the last layer.
    """
    model = onnx.load(full.file(packed_graph(full, precision).file), load_external_data=False)
    shapes = {value.name: value.dims for value in model.graph.initializer}
    products = [
        shapes[node.input[1].removesuffix(".wide")]  # which the runtime puts together
        for node in model.graph.node
        if node.op_type in PRODUCTS and "encoder.layers" in node.input[1]
    ]
    attentions = sum(node.op_type in ATTENTIONS for node in model.graph.node)
    hidden = min(shape[0] for shape in products)
    lengths = np.asarray([len(encoding) for encoding in encodings], dtype=float)
    attended = (lengths**2).sum() / lengths.sum()
    return sum(2.0 * a * b for a, b in products) + attentions * 4 * hidden * attended


def chunks(items: Sequence[Encoding], size: int) -> list[Sequence[Encoding]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


# -- the service ------------------------------------------------------------------------------------------------------


def through_http(
    path: Path, precision: str, texts: list[str], seconds: float, scratch: Path
) -> dict[str, float]:
    (tested,) = rounds.measure(
        [servers.named(f"quartet {precision}")],
        "embed",
        path,
        texts,
        scratch,
        connections=(32, 128),
        rounds=1,
        seconds=seconds,
    )
    return {f"{load} connections": windows[0].rate for load, windows in tested.closed.items()}


def steps(full: bundle.Bundle, precision: str, texts: Sequence[str]) -> dict[str, float]:
    """Microseconds per text of each step that the service takes, alone on the machine, in batches of 8."""
    encoder = Encoder.from_file(full.file("tokenizer.json"), full.manifest.max_length)
    session = graph_runner(full, packed_graph(full, precision), usable_cores())
    head = next(n for n, h in full.manifest.heads.items() if h.task == "embedding")
    bodies = [orjson.dumps({"inputs": text, "truncate": True}) for text in texts]
    batches = chunks(sorted(encode(full, texts), key=len), 8)
    outputs = list(itertools.chain.from_iterable(map(session, batches)))
    vectors = [one(output[head]) for output in outputs]
    work: dict[str, Callable[[], object]] = {
        "parse": lambda: [
            schemas.parse(schemas.EmbedRequest, orjson.loads(body), 1024) for body in bodies
        ],
        "encode": lambda: [encoder.texts([text]) for text in texts],
        "pad": lambda: [pack(batch) for batch in batches],
        "run": lambda: [session(batch) for batch in batches],
        "decode": lambda: [one(output[head]) for output in outputs],
        "serialise": lambda: [
            orjson.dumps({"embeddings": [vector]}, option=orjson.OPT_SERIALIZE_NUMPY)
            for vector in vectors
        ],
    }
    return {
        name: 1e6 * min(timed(step) for _ in range(3)) / len(texts) for name, step in work.items()
    }


def one(output: np.ndarray) -> np.ndarray:
    return decode.embed([output], [1], normalize=True, dimensions=None)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def show(results: dict) -> None:
    print(f"{results['machine']}\n{results['texts']}")
    for precision, found in results["precisions"].items():
        speed = found["tokens_per_second"]
        http = max(found["http_texts_per_second"].values())
        print(f"\n{precision}: the machine multiplies at {found['matmul_gflops']:.0f} GFLOP/s")
        for name, value in speed.items():
            print(f"  {name:<8}{value:>10,.0f} tokens/s {value / speed['allowed']:>6.2f}")
        for name, value in (
            found["bare_texts_per_second"] | found["http_texts_per_second"]
        ).items():
            print(f"  {name:<34}{value:>8.0f} texts/s")
        whole = 1e6 / http
        print(f"  of {whole:,.0f} us for a text through HTTP, alone and in batches of 8:")
        spent = found["steps_us_per_text"]
        for name, value in spent.items():
            print(f"    {name:<10}{value:>8.0f} us {value / whole:>6.1%}")
        rest = whole - sum(value for name, value in spent.items() if name != "pad")
        print(
            f"    {'rest':<10}{rest:>8.0f} us {rest / whole:>6.1%}  (sockets, waiting, worse batches)"
        )


if __name__ == "__main__":
    main()
