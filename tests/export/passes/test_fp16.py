"""The fp16 graph for CUDA: its names, what is fp16 in it and what is not, and that it answers as PyTorch does."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper

from export import cuda_emulator, from_checkpoint, trace_graphs, verify
from export.goldens import run_torch, torch_outputs
from export.passes import fp16 as half
from model.checkpoints.reader import load_model
from model.config import BertConfig
from model.heads import EncoderWithHeads
from service.core import bundle
from service.core.encode import Encoding
from service.core.goldens import cosine
from service.core.packing import Packed, make_layout
from service.core.session import ort, packed_feeds
from tests.export.helpers import Arrays, batch, open_graph
from tests.model.helpers import perturb
from tests.tiny import HEADS

pytestmark = pytest.mark.slow

ROUNDING = 1e-4  # of a cosine: fp16 costs these models 6e-6 at most, a wrong position or slot 2e-2 and more
LENGTHS = {"one": [9], "equal": [6, 6, 6], "mixed": [1, 30, 2, 512, 7]}
FLOAT, HALF, INT32, INT64 = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.INT32,
    TensorProto.INT64,
)


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Path) -> EncoderWithHeads:
    return load_model(tiny_checkpoint)


@pytest.fixture(scope="module")
def halved(gpu_bundle: Path) -> onnx.ModelProto:
    """The graph with its weights, as it lies in the bundle."""
    return onnx.load(gpu_bundle / "fp16.onnx")


def signature(values: Sequence[onnx.ValueInfoProto]) -> dict[str, tuple[int, list[str | int]]]:
    """The type and shape of each."""
    return {
        value.name: (
            value.type.tensor_type.elem_type,
            [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
        )
        for value in values
    }


def types(proto: onnx.ModelProto) -> dict[str, int]:
    """The type of every value in a graph; shape inference does not know the fused norm, which has the type of a sum."""
    known = with_attention_on_a_cpu(proto)
    for node in known.graph.node:
        if node.op_type == "SkipLayerNormalization":
            added = helper.make_node("Add", node.input[:2], node.output)
            node.CopyFrom(added)
    typed = onnx.shape_inference.infer_shapes(known).graph
    values = [*typed.input, *typed.output, *typed.value_info]
    found = {value.name: value.type.tensor_type.elem_type for value in values}
    return found | {tensor.name: tensor.data_type for tensor in typed.initializer}


def with_attention_on_a_cpu(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with what a CPU has for packed attention: a gather, attention in fp32, and a gather back."""
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    nodes = []
    for node in proto.graph.node:
        if node.op_type != "PackedMultiHeadAttention":
            nodes.append(node)
            continue
        out = node.output[0]
        for name in node.input[:3]:
            nodes.append(helper.make_node("Cast", [name], [f"{name}.wide"], to=FLOAT))
            nodes.append(helper.make_node("Gather", [f"{name}.wide", "unpack"], [f"{name}.slots"]))
        slots = [f"{name}.slots" for name in node.input[:3]]
        nodes += [
            helper.make_node("Cast", ["lengths"], [f"{out}.lengths"], to=INT32),
            helper.make_node(
                "MultiHeadAttention",
                [*slots, "", f"{out}.lengths"],
                [f"{out}.slots"],
                domain="com.microsoft",
                num_heads=node.attribute[0].i,
            ),
            helper.make_node("Shape", [f"{out}.slots"], [f"{out}.width"], start=2),
            helper.make_node("Concat", ["every", f"{out}.width"], [f"{out}.flat"], axis=0),
            helper.make_node("Reshape", [f"{out}.slots", f"{out}.flat"], [f"{out}.rows"]),
            helper.make_node("Gather", [f"{out}.rows", "pack"], [f"{out}.packed"]),
            helper.make_node("Cast", [f"{out}.packed"], [out], to=HALF),
        ]
    del changed.graph.node[:]
    changed.graph.node.extend(nodes)
    changed.graph.initializer.append(helper.make_tensor("every", INT64, [1], [-1]))
    for name, shape in (("unpack", ["B", "S"]), ("pack", ["T"])):
        changed.graph.input.append(helper.make_tensor_value_info(name, INT64, shape))
    return changed


def save(proto: onnx.ModelProto, folder: Path) -> Path:
    onnx.save(proto, folder / "half.onnx")
    return folder / "half.onnx"


def cosines(expected: Arrays, found: Arrays) -> dict[str, float]:
    assert [*expected] == [*found]
    return {name: cosine(found[name], value) for name, value in expected.items()}


# -- the contract ---------------------------------------------------------------------------------


def test_inputs(halved):
    """The graph takes the packed arrays, and the layout as CUDA's attention reads it."""
    assert {
        "input_ids": (INT64, ["T"]),
        "token_type_ids": (INT64, ["T"]),
        "position_ids": (INT64, ["T"]),
        "lengths": (INT64, ["B"]),
        "token_offset": (INT32, ["B", "S"]),
        "cu_seqlens": (INT32, ["B + 1"]),
    } == signature(halved.graph.input)


def test_outputs(halved, traced):
    """The outputs have the names, order, types and shapes of the fp32 graph's outputs."""
    expected = signature(traced.packed.graph.output)
    assert [*expected.items()] == [*signature(halved.graph.output).items()]
    assert {FLOAT} == {kind for kind, _ in expected.values()}


def test_operators(halved, traced):
    """Attention is one node per layer, a norm includes its sum, and two more products replace a Split per layer."""
    found = Counter((node.domain, node.op_type) for node in halved.graph.node)
    foreign = {name: count for name, count in found.items() if name[0] not in ("", "ai.onnx")}
    expected = Counter(node.op_type for node in traced.packed.graph.node)
    assert {
        ("com.microsoft", "PackedMultiHeadAttention"): 2,
        ("com.microsoft", "SkipLayerNormalization"): expected["LayerNormalization"],
    } == foreign
    assert expected["Gemm"] + 2 * 2 == found["", "Gemm"]
    for kind in ("Gelu", "Tanh"):
        assert expected[kind] == found["", kind], kind


def test_attention_inputs(halved):
    """The inputs are query, key, value, no bias and two layout arrays; an attribute has the number of heads."""
    nodes = [n for n in halved.graph.node if n.op_type == "PackedMultiHeadAttention"]
    for node in nodes:
        assert ["", "token_offset", "cu_seqlens"] == node.input[3:]
        assert [("num_heads", 4)] == [(a.name, a.i) for a in node.attribute]


def test_what_is_half(halved):
    """The layers compute in fp16, sums and norms included; pooling and heads in fp32."""
    kinds = types(halved)
    for node in halved.graph.node:
        if node.op_type in ("Tanh", "ReduceSum"):
            assert FLOAT == kinds[node.output[0]], node.name
        elif node.op_type in ("Gelu", "PackedMultiHeadAttention"):
            assert HALF == kinds[node.input[0]], node.name
        elif node.op_type == "SkipLayerNormalization":
            weights = [kinds[name] for name in node.input if "model." in name]
            assert {HALF} == {*weights}, node.name
        elif node.op_type == "Gemm":
            assert ("heads." in node.input[1]) == (FLOAT == kinds[node.output[0]]), node.input[1]


def test_weights(halved, gpu_bundle):
    """Matrices of the shared encoder are stored in fp16, once, in a file next to the graph."""
    trunk = [t for t in halved.graph.initializer if "encoder." in t.name and len(t.dims) == 2]
    assert {HALF} == {tensor.data_type for tensor in trunk}
    record = next(g for g in bundle.load(gpu_bundle).manifest.graphs if g.precision == "fp16")
    assert ("packed", "cuda", False) == (record.layout, record.provider, record.attention_bias)
    assert record.weights is not None
    fp16, fp32 = (
        (gpu_bundle / name).stat().st_size for name in (record.weights.file, "weights.bin")
    )
    assert fp16 < 0.7 * fp32  # the tiny model's pages are half empty
    assert (gpu_bundle / "fp16.onnx").stat().st_size < 0.2 * fp16


def test_only_the_kernel_is_missing_on_a_cpu(gpu_bundle):
    """The runtime finds the graph's names, types and attributes right, and then no CPU kernel for its attention."""
    with pytest.raises(Exception, match=r"NOT_IMPLEMENTED.*PackedMultiHeadAttention"):
        ort.InferenceSession(gpu_bundle / "fp16.onnx", providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("name", ["token_offset", "cu_seqlens"])
def test_head_named_as_an_input(name, tiny):
    """A head cannot bear the name of CUDA's inputs either."""
    model = EncoderWithHeads(tiny.config, {name: HEADS["answers"]})
    with pytest.raises(ValueError, match=f"{name}.*input"):
        trace_graphs.export_cuda(model)


# -- what it answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
class TestParity:
    def test_emulated(self, lengths, tiny, gpu_bundle):
        """Evaluated node by node, the graph gives PyTorch's outputs for all heads, but for fp16's rounding."""
        packed = batch(lengths, tiny.config.vocab_size)
        found = cuda_emulator.emulated(gpu_bundle / "fp16.onnx")(packed)
        assert min(cosines(torch_outputs(tiny, packed), found).values()) > 1 - ROUNDING
        assert {np.dtype(np.float32)} == {value.dtype for value in found.values()}

    def test_wider_slots(self, lengths, tiny, gpu_bundle):
        """More slots than the longest text has change nothing."""
        packed = batch(lengths, tiny.config.vocab_size)
        evaluated = cuda_emulator.evaluator(gpu_bundle / "fp16.onnx")
        wider = replace(packed, layout=packed.layout.widen(48))
        one, wide = (
            evaluated.run(None, packed_feeds(each, evaluated.input_names))
            for each in (packed, wider)
        )
        for expected, found in zip(one, wide, strict=True):
            np.testing.assert_array_equal(found, expected)

    def test_half_in_pytorch(self, lengths, tiny, gpu_bundle):
        """So does PyTorch in the same precisions: the two differ by the order of their sums."""
        packed = batch(lengths, tiny.config.vocab_size)
        found = cuda_emulator.emulated(gpu_bundle / "fp16.onnx")(packed)
        expected = torch_outputs(half.halved(tiny), packed)
        assert min(cosines(expected, found).values()) > 1 - ROUNDING

    def test_in_the_runtime(self, lengths, tiny, halved):
        """So does ONNX Runtime on a CPU, once its attention there is put in the place of CUDA's."""
        packed = batch(lengths, tiny.config.vocab_size)
        session = open_graph(with_attention_on_a_cpu(halved))
        layout = packed.layout
        feeds = {
            "input_ids": packed.input_ids,
            "token_type_ids": packed.token_type_ids,
            "position_ids": packed.position_ids,
            "lengths": layout.lengths,
            "token_offset": layout.token_offset(),
            "cu_seqlens": layout.cu_seqlens,
            "unpack": layout.unpack,
            "pack": layout.pack,
        }
        needed = {value.name: feeds[value.name] for value in session.get_inputs()}
        found = dict(zip(HEADS, session.run([*HEADS], needed), strict=True))
        assert min(cosines(torch_outputs(tiny, packed), found).values()) > 1 - ROUNDING


def huge(norm: float) -> EncoderWithHeads:
    """A layer that adds 40,000 to a channel in which a norm gave 8 times the given."""
    config = BertConfig(
        vocab_size=40,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=80,
        max_position_embeddings=64,
    )
    model = perturb(EncoderWithHeads(config, {"embeddings": HEADS["embeddings"]}), scale=0.02)
    (layer,) = model.encoder.layers
    with torch.no_grad():
        layer.attention.output.bias[3] = 40_000
        layer.attention_norm.weight[3] = norm
        layer.feed_forward.down.bias[3] = 40_000
    return model


class TestOverflow:
    PACKED = batch([3, 17, 8], 40)

    def test_sums_and_norms(self, tmp_path):
        """Sums beyond 65,504 and norms of such numbers are right, where fp16 throughout has none left."""
        model = huge(norm=5000)
        expected = torch_outputs(model, self.PACKED)
        path = save(from_checkpoint.trace_cuda(model, self.PACKED), tmp_path)
        found = cuda_emulator.emulated(path)(self.PACKED)
        assert cosines(expected, found)["embeddings"] > verify.FP16_COSINE
        assert not np.isfinite(torch_outputs(model.half(), self.PACKED)["embeddings"]).any()

    def test_products_that_overflow_are_refused(self, tmp_path):
        """The inputs of a matrix product must fit fp16; otherwise the check reports the product."""
        model = huge(norm=9000)
        expected = torch_outputs(model, self.PACKED)
        path = save(from_checkpoint.trace_cuda(model, self.PACKED), tmp_path)
        found = cuda_emulator.emulated(path)(self.PACKED)
        with pytest.raises(verify.ParityError, match="fp16: head embeddings has cosine nan"):
            verify.check_half([expected], [found], "fp16")


# -- the emulation itself -------------------------------------------------------------------------


def attention_graph(folder: Path) -> Path:
    """Packed attention alone, of two heads, in fp32."""
    names = ["input_ids", "key", "value", "token_offset", "cu_seqlens"]
    kinds = [(FLOAT, ["T", 8])] * 3 + [(INT32, ["B", "S"]), (INT32, ["B + 1"])]
    node = helper.make_node(
        "PackedMultiHeadAttention",
        [*names[:3], "", *names[3:]],
        ["context"],
        domain="com.microsoft",
        num_heads=2,
    )
    described = [helper.make_tensor_value_info(n, *k) for n, k in zip(names, kinds, strict=True)]
    out = [helper.make_tensor_value_info("context", FLOAT, ["T", 8])]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_graph([node], "attention", described, out)
    return save(helper.make_model(made, opset_imports=opsets), folder)


def by_definition(parts: Sequence[NDArray[np.float32]], lengths: Sequence[int]) -> np.ndarray:
    """softmax(Q Kᵀ / √D) V, one sequence and one head after the other."""
    rows = []
    starts = np.cumsum([0, *lengths])
    for begin, end in itertools.pairwise(starts):
        heads = []
        for columns in (slice(0, 4), slice(4, 8)):
            query, key, value = (part[begin:end, columns] for part in parts)
            scores = np.exp(query @ key.T / 2)
            heads.append(scores / scores.sum(axis=1, keepdims=True) @ value)
        rows.append(np.concatenate(heads, axis=1))
    return np.concatenate(rows)


def test_attention_is_the_definition(tmp_path, monkeypatch):
    """Real tokens' slots come first in `token_offset`; the order of the padding's after them is of no matter."""
    lengths = [3, 1, 5]
    layout = make_layout(lengths)
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal((9, 8)).astype(np.float32) for _ in range(3)]
    offsets = layout.token_offset()
    backwards = offsets.reshape(-1).copy()
    backwards[9:] = backwards[:8:-1]
    run = cuda_emulator.emulated(attention_graph(tmp_path))
    for given in (offsets, backwards.reshape(offsets.shape)):
        feeds = {"input_ids": parts[0], "key": parts[1], "value": parts[2]}
        layouts = {"token_offset": given, "cu_seqlens": layout.cu_seqlens}
        monkeypatch.setattr(cuda_emulator, "packed_feeds", lambda *_, f=feeds | layouts: f)
        found = run(batch(lengths, 9))["context"]
        np.testing.assert_allclose(found, by_definition(parts, lengths), rtol=0, atol=1e-6)


def wrong_offsets(packed: Packed) -> Arrays:
    counted = np.arange(packed.layout.unpack.size, dtype=np.int32)
    return {"token_offset": counted.reshape(packed.layout.unpack.shape)}


def wrong_positions(packed: Packed) -> Arrays:
    return {"position_ids": np.arange(len(packed.input_ids)) % 512}


@pytest.mark.parametrize("change", [wrong_offsets, wrong_positions])
def test_wrong_wiring_is_found(change, tiny, gpu_bundle, monkeypatch):
    """Tokens in others' slots, or positions that run on, cost far more than fp16's rounding may."""
    assert callable(change)
    whole = cuda_emulator.packed_feeds
    monkeypatch.setattr(cuda_emulator, "packed_feeds", lambda p, names: whole(p, names) | change(p))
    packed = batch([9, 30, 4], tiny.config.vocab_size)
    found = cuda_emulator.emulated(gpu_bundle / "fp16.onnx")(packed)
    assert max(cosines(torch_outputs(tiny, packed), found).values()) < 1 - 5 * (
        1 - verify.FP16_COSINE
    )


def test_minilm(minilm_folder, tmp_path):
    """fp16 costs the real MiniLM, all of whose norms fit it, less than a hundredth of what the goldens allow."""
    from model.checkpoints.source import read_source

    model = read_source(minilm_folder).model
    proto = from_checkpoint.trace_cuda(model, batch([9, 40], 30522))
    assert 13 == sum(node.op_type == "SkipLayerNormalization" for node in proto.graph.node)
    trace_graphs.save_sharing_weights(
        {tmp_path / "fp16.onnx": proto}, tmp_path / "fp16.weights.bin"
    )
    packed = batch([12, 256, 3, 77], 30522)
    found = cuda_emulator.emulated(tmp_path / "fp16.onnx")(packed)
    expected = torch_outputs(model, packed)
    assert 1 - cosines(expected, found)["embedding"] < 0.01 * (1 - verify.FP16_COSINE)


# -- on a device ----------------------------------------------------------------------------------


@pytest.fixture
def checked(gpu_bundle: Path, tiny: EncoderWithHeads) -> tuple:
    """What `check_on_gpu` is given, and a run that answers right."""
    opened = bundle.load(gpu_bundle)
    record = next(g for g in opened.manifest.graphs if g.precision == "fp16")
    zeros = np.zeros(5, dtype=np.int64)
    encodings = [Encoding(zeros, zeros, np.zeros((5, 2), np.int32), zeros, zeros)]
    expected = run_torch(tiny, encodings)
    return (opened, record, expected, encodings), verify.graph_runner(opened, record, threads=1)


def pretend_a_gpu(monkeypatch: pytest.MonkeyPatch, run: object) -> None:
    monkeypatch.setattr(verify, "device_problem", lambda kind: None)
    monkeypatch.setattr(verify, "gpu_runner", lambda *_: run)


def test_graph_is_run_where_there_is_a_gpu(checked, monkeypatch):
    given, run = checked
    pretend_a_gpu(monkeypatch, run)
    assert "run on a GPU" == verify.check_on_gpu(*given)


def test_gpu_that_answers_wrong(checked, monkeypatch):
    """A device that does not give PyTorch's answers ends the export."""
    given, run = checked
    pretend_a_gpu(monkeypatch, lambda e: [{n: -v for n, v in o.items()} for o in run(e)])
    with pytest.raises(verify.ParityError, match="fp16 on the GPU: head sentiment has cosine -1"):
        verify.check_on_gpu(*given)


def test_gpu_that_does_not_work(checked, monkeypatch):
    """One that cannot run leaves it at the emulation, and says why."""
    given, _ = checked

    def fail(_):
        raise RuntimeError("no CUDA-capable\n device")

    pretend_a_gpu(monkeypatch, fail)
    said = "emulated, not run on a GPU (no CUDA-capable device)"
    assert said == verify.check_on_gpu(*given)
