"""What a GPU allows, and how much of it the bare session and the service reach.

    python -m benchmarks.gpu [--bundle DIR] [--rounds N] [--seconds N] [--out FILE]

From above: the rate at which the device multiplies matrices, the tokens per second that this allows for the model's
layers on texts of 128 tokens, what the bare packed session reaches in batches of several sizes, and texts per second
through HTTP in requests of 64, each at fp16 and at fp32. Without a GPU it says so in one line and ends with status 1.
"""

import argparse
import datetime
import re
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from benchmarks.lib import machine, models, rounds, run_record, servers, traffic
from benchmarks.lib.onnxruntime_baseline import encode, packed_graph
from service.core import bundle
from service.core.bundle import Bundle
from service.core.cuda import CUDA
from service.core.device_kind import DeviceKind
from service.core.encode import Encoding
from service.core.packing import pack
from service.core.session import Session, SessionOptions, device_problem, ort
from service.settings import usable_cores

SIDE = 8192  # of the square matrices whose product is the device's rate
TYPES = {"fp16": np.float16, "fp32": np.float32}
TOKENS = 128
BATCHES = (1, 8, 32, 64, 128)
PER_REQUEST = 64
CONNECTIONS = (1, 4, 16)
PRODUCTS = {"MatMul", "Gemm", "MatMulInteger", "MatMulIntegerToFloat", "QGemm"}
ATTENTIONS = {"MultiHeadAttention", "PackedMultiHeadAttention"}
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, help="with fp32 and fp16; MiniLM's by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--out", type=Path, help="the JSON file; one in benchmarks/results else")
    given = parser.parse_args()
    if problem := device_problem(CUDA):
        print(f"bench-gpu: nothing measured: {problem}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        path = given.bundle or export(Path(folder))
        results = measure(bundle.load(path), Path(folder), given.rounds, given.seconds)
        results["machine"]["gpu"] = gpu_name()
        show(results)
        name = re.sub(r"\W+", "-", gpu_name().partition(",")[0].lower())
        out = given.out or RESULTS / f"{datetime.date.today()}-gpu-{name}.json"
        run_record.write(results, out, path)
    print(f"written to {out}")
    return 0


def export(scratch: Path) -> Path:
    """MiniLM at fp32 and fp16."""
    out = scratch / "minilm"
    command = [sys.executable, "-m", "export", str(models.minilm()), str(out)]
    servers.run_once([*command, "--precision", "fp32", "fp16"], scratch / "export.log")
    return out


def gpu_name() -> str:
    """The device and its driver, as `nvidia-smi` names them."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def measure(
    full: Bundle,
    scratch: Path,
    number: int,
    seconds: float,
    *,
    kind: DeviceKind = CUDA,
    precisions: Sequence[str] = ("fp16", "fp32"),
    side: int = SIDE,
    batches: Sequence[int] = BATCHES,
) -> dict:
    """Measure all figures on a provider, each the median of `number` rounds."""
    (first,) = encode(full, [""])
    text = repeated(first, TOKENS)
    sessions = {
        precision: Session(
            full, packed_graph(full, precision), kind, SessionOptions(usable_cores())
        )
        for precision in precisions
    }
    bare: dict[str, dict[int, list[float]]] = {p: {n: [] for n in batches} for p in precisions}
    for turn in range(number):
        for precision in precisions[:: 1 if turn % 2 else -1]:
            for size in batches:
                packed = pack([text] * size)
                runs = per_second(lambda p=precision, x=packed: sessions[p].run(x), seconds)
                bare[precision][size].append(runs * size * TOKENS)
    sessions.clear()  # the servers are to have the device's memory
    http = through_http(full.path, scratch, precisions, kind, number, seconds)
    found = {}
    for precision in precisions:
        rate = matmul_rate(TYPES[precision], side, kind)
        flops = flops_per_token(full, precision, [text])
        found[precision] = {
            "matmul_tflops": rate / 1e12,
            "allowed_tokens_per_second": rate / flops,
            "bare_tokens_per_second": {n: float(np.median(r)) for n, r in bare[precision].items()},
            "http_texts_per_second": http[precision],
        }
    return {"machine": machine.describe(), "tokens": TOKENS, "precisions": found}


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


def repeated(encoding: Encoding, length: int) -> Encoding:
    at = np.zeros(length, dtype=np.intp)
    fields = ("input_ids", "token_type_ids", "offsets", "words", "sequence")
    return Encoding(*(getattr(encoding, name)[at] for name in fields))


def per_second(work: Callable[[], object], seconds: float) -> float:
    """How often work is done in a second, once it has been done a few times."""
    for _ in range(3):
        work()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        work()
        count += 1
    return count / (time.perf_counter() - began)


def matmul_rate(number: type, side: int, kind: DeviceKind) -> float:
    """Operations per second of the runtime's own matrix product, the best of 20; matrices stay on the device."""
    element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(number))
    values = [onnx.helper.make_tensor_value_info(n, element, [side, side]) for n in "abc"]
    product = onnx.helper.make_node("MatMul", ["a", "b"], ["c"])
    graph = onnx.helper.make_graph([product], "product", values[:2], values[2:])
    opsets = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = [(kind.provider, kind.options)]
    session = ort.InferenceSession(model.SerializeToString(), providers=options, enable_fallback=0)
    binding = session.io_binding()
    matrix = np.random.default_rng(0).standard_normal((side, side)).astype(number)
    for name in "ab":
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(matrix, kind.name, 0))
    binding.bind_output("c", kind.name)
    binding.synchronize_inputs()  # copies are asynchronous, and a run does not wait for them
    times = timeit.repeat(lambda: session.run_with_iobinding(binding), number=1, repeat=20)
    return 2 * side**3 / min(times)


def through_http(
    path: Path,
    scratch: Path,
    precisions: Sequence[str],
    kind: DeviceKind,
    number: int,
    seconds: float,
) -> dict[str, dict[int, float]]:
    """Texts per second by connections: the news mix, in requests of 64."""
    texts = traffic.texts(traffic.MIXES["news"], count=10 * PER_REQUEST)
    requests = [texts[at : at + PER_REQUEST] for at in range(0, len(texts), PER_REQUEST)]
    env = {"QUARTET_PROVIDER": kind.name}
    chosen = [replace(servers.quartet(precision), env=env) for precision in precisions]
    tested = rounds.measure(
        chosen,
        "embed",
        path,
        requests,
        scratch,
        connections=CONNECTIONS,
        rounds=number,
        seconds=seconds,
    )
    for one in tested:
        if one.skipped:
            raise servers.StartError(f"{one.name}: {one.skipped}")
    return {
        precision: {
            load: PER_REQUEST * float(np.median([window.rate for window in windows]))
            for load, windows in one.closed.items()
        }
        for precision, one in zip(precisions, tested, strict=True)
    }


def show(results: dict) -> None:
    print(results["machine"])
    for precision, found in results["precisions"].items():
        allowed = found["allowed_tokens_per_second"]
        print(f"\n{precision}: the device multiplies at {found['matmul_tflops']:.1f} TFLOP/s")
        print(f"  which allows {allowed:,.0f} tokens/s in texts of {results['tokens']}")
        for size, rate in found["bare_tokens_per_second"].items():
            print(f"  bare, batches of {size:<4}{rate:>12,.0f} tokens/s {rate / allowed:>6.3f}")
        for load, rate in found["http_texts_per_second"].items():
            print(f"  HTTP, {load:>2} connections{rate:>12,.0f} texts/s, in requests of 64")


if __name__ == "__main__":
    sys.exit(main())
