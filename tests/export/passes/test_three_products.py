"""Three products instead of one and a Split: the same outputs, and rotated queries and keys are unchanged."""

from collections import Counter

import numpy as np
import onnx
import pytest

from export import cuda_emulator, trace_graphs
from export.passes import fp16
from export.passes.three_products import split_products
from model.config import BertConfig
from model.families.albert import AlbertConfig
from model.families.nomic_bert import NomicBertConfig
from model.heads import EncoderWithHeads
from service.core.manifest import Head
from tests.export.helpers import SMALL, batch, copied
from tests.model.helpers import perturb

pytestmark = pytest.mark.slow

HEADS = {"vectors": Head(task="embedding", pooling="mean", dimensions=32)}
LAYERS = SMALL["num_hidden_layers"]


def traced(config: BertConfig) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """A graph before and after the pass."""
    model = perturb(EncoderWithHeads(config, HEADS))
    before = trace_graphs.export_cuda(fp16.halved(model))
    after = copied(before)
    split_products(after)
    onnx.checker.check_model(after)
    return before, after


def count(graph: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in graph.graph.node)


def test_same_outputs(tmp_path):
    """Rows of a matrix multiply the same numbers in one product and in three: the outputs are equal."""
    before, after = traced(BertConfig(**SMALL))
    assert (LAYERS, 0) == (count(before)["Split"], count(after)["Split"])
    assert 2 * LAYERS == count(after)["Gemm"] - count(before)["Gemm"]
    packed = batch([1, 30, 2, 56, 7], 50)
    outputs = []
    for graph in (before, after):
        onnx.save(graph, tmp_path / "fp16.onnx")
        outputs.append(cuda_emulator.emulated(tmp_path / "fp16.onnx")(packed)["vectors"])
    np.testing.assert_array_equal(*outputs)


def test_shared_layers_share_weights():
    """ALBERT's depths have one layer's weights, once."""
    _, after = traced(AlbertConfig(**SMALL))
    parts = [t.name for t in after.graph.initializer if "qkv.weight" in t.name]
    assert 3 == len(parts) == len({*parts})


def test_rotated_is_unchanged():
    before, after = traced(NomicBertConfig(**SMALL))
    assert count(before) == count(after)
