"""Biases that a norm adds, and those that attention makes superfluous: the outputs stay the same."""

from functools import cache

import numpy as np
import onnx
import pytest

from export import cuda_emulator, from_checkpoint
from export.goldens import torch_outputs
from export.passes.biases import BIAS, move_biases
from export.passes.graph_utils import producers
from model.config import BertConfig
from model.families.albert import AlbertConfig
from model.families.deberta import DebertaV2Config
from model.families.mpnet import MPNetConfig
from model.heads import EncoderWithHeads
from service.core.goldens import cosine
from service.core.manifest import Head
from tests.export.helpers import SMALL, batch, copied
from tests.model.helpers import perturb

pytestmark = pytest.mark.slow

HEADS = {"vectors": Head(task="embedding", pooling="mean", dimensions=32)}
PACKED = batch([1, 30, 2, 56, 7], 50)
CONFIGS = {
    "bert": BertConfig(**SMALL),
    "shared layers": AlbertConfig(**SMALL),
    "with a bias of scores": MPNetConfig(**SMALL),
    "keys that meet distances": DebertaV2Config(
        **SMALL, relative_attention=True, pos_att_type=("p2c", "c2p")
    ),
}


@cache
def traced(kind: str) -> tuple[EncoderWithHeads, onnx.ModelProto]:
    """A model, with biases so large that a lost one shows, and its graph."""
    model = perturb(EncoderWithHeads(CONFIGS[kind], HEADS), scale=0.2)
    return model, from_checkpoint.trace_cuda(model, PACKED)


@pytest.mark.parametrize("kind", CONFIGS)
def test_same_as_torch(kind, tmp_path):
    """The outputs differ from PyTorch's in fp32 by rounding."""
    model, graph = traced(kind)
    onnx.save(graph, tmp_path / "fp16.onnx")
    evaluated = cuda_emulator.emulated(tmp_path / "fp16.onnx")(PACKED)["vectors"]
    assert cosine(torch_outputs(model, PACKED)["vectors"], evaluated) > 1 - 1e-4


@pytest.mark.parametrize("kind", ["bert", "shared layers", "with a bias of scores"])
def test_which_products_have_a_bias(kind):
    """In a layer, the products for queries and before the activation; a norm adds each remaining bias."""
    graph = traced(kind)[1].graph
    made = producers(graph)
    products = [n for n in graph.node if n.op_type == "Gemm" and "layers" in n.input[1]]
    with_bias = {node.output[0] for node in products if len(node.input) > BIAS}
    attentions = [n for n in graph.node if n.op_type == "PackedMultiHeadAttention"]
    before_activation = {n.input[0] for n in graph.node if n.op_type == "Gelu"}
    assert with_bias == {n.input[0] for n in attentions} | before_activation
    norms = [n for n in graph.node if n.op_type == "SkipLayerNormalization"]
    after_products = [n for n in norms if made[n.input[0]] in products]
    assert {5} == {len(node.input) for node in after_products}


def test_values_pass_attention():
    """The bias of values joins that of the next product through its matrix, rounded once."""
    model, proto = traced("bert")
    graph = proto.graph
    attention = model.encoder.layers[0].attention
    width = SMALL["hidden_size"]
    own, value = attention.output.bias.half(), attention.qkv.bias.half()[2 * width :]
    expected = own.double() + attention.output.weight.half().double() @ value.double()
    (moved,) = (
        onnx.numpy_helper.to_array(t)
        for t in graph.initializer
        if t.name.endswith("layers.0.attention.output.weight.moved_bias")
    )
    np.testing.assert_array_equal(moved, expected.detach().numpy().astype(np.float16))


def test_twice_is_once():
    _, once = traced("bert")
    twice = copied(once)
    move_biases(twice)
    assert once == twice
