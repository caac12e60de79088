"""Where only first tokens are looked at, the last layer computes only those; the results are the same."""

import dataclasses

import numpy as np
import onnx
import pytest

from export import trace_graphs
from export.passes.first_token_only import narrow
from export.passes.quantize import quantize
from model.config import BertConfig
from model.families.deberta import DebertaV2Config
from model.families.modernbert import ModernBertConfig
from model.families.mpnet import MPNetConfig
from model.families.nomic_bert import NomicBertConfig
from model.heads import EncoderWithHeads
from service.core.manifest import Head
from tests.export.helpers import (
    SMALL,
    assert_close,
    assert_same_as_torch,
    batch,
    copied,
    run_graph,
    run_packed,
    run_value,
)
from tests.model.helpers import perturb

pytestmark = pytest.mark.slow

FIRSTS = {
    "topics": Head(task="classification", labels=("a", "b", "c")),
    "vectors": Head(task="embedding", pooling="cls", dimensions=32),
}
CONFIGS = {
    "bert": BertConfig(**SMALL),
    "with a bias of scores": MPNetConfig(**SMALL),
    "normed before": ModernBertConfig(**SMALL),
    "with a gate, told lengths": NomicBertConfig(**SMALL),
    "with a bias from queries": DebertaV2Config(**{**DebertaV2Config.released, **SMALL}),
}
LENGTHS = {"one": [9], "equal": [6, 6, 6], "mixed": [1, 30, 2, 60, 7]}


@dataclasses.dataclass(frozen=True)
class Graphs:
    model: EncoderWithHeads
    whole: onnx.ModelProto
    narrow: onnx.ModelProto


def narrowed(proto: onnx.ModelProto) -> onnx.ModelProto:
    copy = copied(proto)
    narrow(copy)
    onnx.checker.check_model(copy)
    return copy


@pytest.fixture(scope="module", params=CONFIGS.values(), ids=CONFIGS)
def graphs(request: pytest.FixtureRequest) -> Graphs:
    model = perturb(EncoderWithHeads(request.param, FIRSTS))
    whole = trace_graphs.export_packed(model)
    return Graphs(model, whole, narrowed(whole))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
class TestResults:
    def test_same_as_torch(self, graphs, lengths):
        """The narrow graph answers as PyTorch does, in every batch."""
        packed = batch(lengths, 50)
        assert_same_as_torch(graphs.model, run_packed(graphs.narrow, packed), packed)

    def test_int8_same_as_before(self, graphs, lengths):
        """Rows have scales of their own, so at int8 fewer of them change nothing either."""
        whole = quantize(graphs.whole)
        packed = batch(lengths, 50)
        assert_close(run_packed(whole, packed), run_packed(narrowed(whole), packed))


def test_products_are_of_first_tokens(graphs):
    """Of the last layer's products all but queries, keys and values are of a row for each sequence."""
    packed = batch([5, 9, 3], 50)
    found = {
        node.input[1].removesuffix(".weight").split("encoder.layers.")[-1]: len(
            run_value(graphs.narrow, node.output[0], packed)
        )
        for node in graphs.narrow.graph.node
        if node.op_type == "Gemm" and "encoder.layers" in node.input[1]
    }
    of_firsts = {name for name, count in found.items() if count == 3}
    assert {"1.attention.output", "1.feed_forward.up", "1.feed_forward.down"} == of_firsts
    assert {17} == {count for name, count in found.items() if name not in of_firsts}


def test_attention_of_first_queries():
    """BERT's last attention has one query for each sequence; the one before has all."""
    proto = narrowed(trace_graphs.export_packed(perturb(EncoderWithHeads(CONFIGS["bert"], FIRSTS))))
    first, last = (n.output[0] for n in proto.graph.node if n.op_type == "MultiHeadAttention")
    for value, queries in ((first, 9), (last, 1)):
        assert (3, queries, 32) == run_value(proto, value, batch([5, 9, 3], 50)).shape


def test_a_head_that_reads_all_tokens(traced):
    """With a head that reads all tokens, the graph stays as it is."""
    assert traced.packed == narrowed(traced.packed)


def test_nothing_is_left_behind(graphs):
    """Every node's result is read, and every weight."""
    proto = graphs.narrow.graph
    read = {name for node in proto.node for name in node.input}
    read |= {value.name for value in proto.output}
    assert all(read.intersection(node.output) for node in proto.node)
    assert read.issuperset(tensor.name for tensor in proto.initializer)


def test_rows_of_another_place():
    """A node that gathers rows by another index is not a head: the graph is not narrowed for it."""
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["T", 2])
    unpack = onnx.helper.make_tensor_value_info("unpack", onnx.TensorProto.INT64, ["B", "S"])
    y = onnx.helper.make_empty_tensor_value_info("y")
    constants = {"second": np.array(1), "flat": np.array([-1])}
    nodes = [
        onnx.helper.make_node("Tanh", ["x"], ["bent"]),
        onnx.helper.make_node("Gather", ["unpack", "second"], ["column"], axis=1),
        onnx.helper.make_node("Reshape", ["column", "flat"], ["index"]),
        onnx.helper.make_node("Gather", ["bent", "index"], ["y"], axis=0),
    ]
    made = onnx.helper.make_graph(
        nodes,
        "seconds",
        [x, unpack],
        [y],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opset = [onnx.helper.make_opsetid("", 20)]
    proto = onnx.helper.make_model(made, opset_imports=opset, ir_version=10)
    before = copied(proto)
    narrow(proto)
    assert before == proto
    feeds = {"x": np.eye(2, dtype=np.float32), "unpack": np.array([[0, 1]])}
    np.testing.assert_array_equal(run_graph(proto, feeds)["y"], np.tanh([[0, 1]], dtype=np.float32))
