"""Attention without a mask gives what attention with one gives, and is there wherever it can be."""

from collections import Counter

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from export import trace_graphs
from export.passes.fold import fold
from export.passes.mask_free_attention import PLACES, drop_masks
from model.config import BertConfig
from model.families.albert import AlbertConfig
from model.families.modernbert import ModernBertConfig
from model.heads import EncoderWithHeads
from service.core.manifest import Head
from tests.export.helpers import SMALL, assert_same_as_torch, batch, copied, run_packed, run_value
from tests.model.helpers import perturb

pytestmark = pytest.mark.slow

HEADS = {
    "answers": Head(task="qa"),
    "vectors": Head(task="embedding", pooling="mean", dimensions=32),
}
LENGTHS = {"one": [9], "equal": [6, 6, 6], "mixed": [1, 30, 2, 64, 7]}


def attentions(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in proto.graph.node if node.op_type == "MultiHeadAttention"]


def bert(**fields: object) -> EncoderWithHeads:
    return perturb(EncoderWithHeads(BertConfig(**{**SMALL, **fields}), HEADS))


def test_no_attention_has_a_mask(traced):
    """BERT's have three inputs, and the scale of the heads' own size, not of what they have grown to."""
    for node in attentions(traced.packed):
        assert 3 == len(node.input)
        (scale,) = (a.f for a in node.attribute if a.name == "scale")
        assert scale == pytest.approx(16**-0.5)


def test_empty_slots_are_found_once(traced):
    """What all layers have in common is computed once in a batch."""
    kinds = Counter(node.op_type for node in traced.packed.graph.node)
    assert (1, 1, 2) == (kinds["NonZero"], kinds["Expand"], kinds["ScatterND"])


def test_empty_slots_are_distinct(traced):
    """`ScatterND` is defined on every device: each empty slot is an index once, and no slot of a token is."""
    packed = batch([1, 30, 2, 60, 7], 50)
    places = run_value(traced.packed, PLACES, packed)
    rows, columns = np.nonzero(np.arange(60) >= packed.lengths[:, None])
    assert sorted(zip(rows, columns, strict=True)) == sorted(map(tuple, places))


def test_weights_stay(traced):
    """The product's weight is the model's, as in the portable graph; folded, it has a row more for each head."""
    name = "model.encoder.layers.0.attention.qkv.weight"
    folded = copied(traced.packed)
    fold(folded)
    found = {
        tensor.name: numpy_helper.to_array(tensor)
        for proto in (traced.packed, folded)
        for tensor in proto.graph.initializer
    }
    wide = found[f"{name}.wide"]
    assert (3 * 64, 64) == found[name].shape
    assert (3 * 64 + 2 * 4, 64) == wide.shape
    of_queries = wide[: 4 * 17].reshape(4, 17, 64)
    np.testing.assert_array_equal(of_queries[:, :16].reshape(64, 64), found[name][:64])
    assert not of_queries[:, 16].any()
    np.testing.assert_array_equal(wide[-64:], found[name][-64:])


MODELS = {
    "each layer its own weights": bert(),
    "all layers the same": perturb(
        EncoderWithHeads(AlbertConfig(**SMALL, embedding_size=16), HEADS)
    ),
}


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def exported(request: pytest.FixtureRequest) -> tuple[EncoderWithHeads, onnx.ModelProto]:
    return request.param, trace_graphs.export_packed(request.param)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_same_as_torch(exported, lengths):
    """The graph without masks gives PyTorch's results for all contents of padding positions."""
    model, proto = exported
    assert {3} == {len(node.input) for node in attentions(proto)}
    packed = batch(lengths, 50)
    assert_same_as_torch(model, run_packed(proto, packed), packed)


def test_without_a_bias():
    """A product whose bias was all zeros, and so left out by the tracer, gets one for the queries' ones."""
    model = bert()
    with torch.no_grad():
        for layer in model.encoder.layers:
            layer.attention.qkv.bias.zero_()
    proto = trace_graphs.export_packed(model)
    assert {3} == {len(node.input) for node in attentions(proto)}
    packed = batch([3, 64, 17], 50)
    assert_same_as_torch(model, run_packed(proto, packed), packed)


def test_far_from_every_score():
    """Padding gets no weight even next to keys of low scores: its scores are far below zero."""
    model = bert(num_hidden_layers=1)
    with torch.no_grad():  # every query times every key is some -7,000, give or take little
        attention = model.encoder.layers[0].attention
        attention.qkv.weight[:64] *= 1e-4
        attention.qkv.bias[:32], attention.qkv.bias[32:64] = -30.0, 30.0
    packed = batch([2, 40], 50)
    assert_same_as_torch(model, run_packed(trace_graphs.export_packed(model), packed), packed)


def test_what_turns_its_queries_keeps_the_mask():
    """ModernBERT rotates queries and keys after the product: its attention reads lengths as before."""
    config = ModernBertConfig(**SMALL)
    proto = trace_graphs.export_packed(perturb(EncoderWithHeads(config, HEADS)))
    assert all(node.input[4] for node in attentions(proto))
    before = proto.SerializeToString(deterministic=True)
    drop_masks(proto)
    assert before == proto.SerializeToString(deterministic=True)
