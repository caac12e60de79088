"""Attention in blocks of a window gives the outputs of attention to all keys with a bias."""

import numpy as np
import onnx
import pytest

from export import trace_graphs
from export.passes import sliding_window
from export.passes.portable import make_portable
from export.passes.quantize import quantize
from export.passes.sliding_window import MARK, lower_windows
from model.families.registry import family_named
from model.heads import EncoderWithHeads
from service.core.manifest import Head
from tests.export.helpers import assert_same_as_torch, batch, copied, run_packed, run_portable
from tests.model.helpers import perturb

pytestmark = pytest.mark.slow

LENGTHS = [1, 70, 12, 19, 20, 21, 2, 33]
SHAPE = {
    **{"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"intermediate_size": 48, "max_position_embeddings": 128, "pad_token_id": 0},
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window_pattern": 2}
# Three tokens on each side of a query or, where it is causal, before it.
CONFIGS = {
    "equal": ("modernbert", {"local_attention": 6, "global_attn_every_n_layers": 2}),
    "grouped": (
        "gemma3_text",
        {**GROUPED, "sliding_window": 6, "use_bidirectional_attention": True},
    ),
    "causal": ("gemma3_text", {**GROUPED, "sliding_window": 4}),
}
HEADS = {
    "tokens": Head(task="ner", labels=("O", "B-X", "I-X")),
    "first": Head(task="embedding", pooling="cls", dimensions=32),
}


@pytest.fixture(scope="module", params=CONFIGS)
def model(request) -> EncoderWithHeads:
    family, fields = CONFIGS[request.param]
    config = family_named(family).config.from_dict({"model_type": family, **SHAPE, **fields})
    return perturb(EncoderWithHeads(config, HEADS))


@pytest.fixture(scope="module")
def trace(model: EncoderWithHeads) -> onnx.ModelProto:
    return trace_graphs.trace_packed(model)


@pytest.mark.parametrize("block", [4, 16])
def test_blocks(block, model, trace, monkeypatch):
    """Long and short sequences of a batch have PyTorch's outputs, at int8 those without blocks, and the same alone."""
    monkeypatch.setattr(sliding_window, "BLOCK", block)
    monkeypatch.setattr(sliding_window, "SHORT", 16)
    proto = copied(trace)
    lower_windows(proto)
    packed = batch(LENGTHS, 50)
    fp32, int8 = ((graph, run_packed(graph, packed)) for graph in (proto, quantize(proto)))
    assert_same_as_torch(model, fp32[1], packed)
    whole = run_packed(quantize(trace), packed)
    np.testing.assert_allclose(int8[1]["tokens"], whole["tokens"], atol=0.02)
    ends = np.cumsum(packed.lengths)
    for index, (end, length) in enumerate(zip(ends, LENGTHS, strict=True)):
        alone = batch([length], 50)
        alone.input_ids[:] = packed.input_ids[end - length : end]
        alone.token_type_ids[:] = packed.token_type_ids[end - length : end]
        for graph, found in (fp32, int8):
            own, tokens = run_packed(graph, alone), found["tokens"][end - length : end]
            np.testing.assert_array_equal(own["tokens"], tokens)
            np.testing.assert_allclose(own["first"][0], found["first"][index], atol=1e-6)


def test_cost(trace):
    """Each marked attention has queries and keys of blocks; short batches have the scores that they had."""
    marked = [node for node in trace.graph.node if node.doc_string.startswith(MARK)]
    assert ["reach 3"] * 2 == [node.doc_string for node in marked]
    proto = copied(trace)
    lower_windows(proto)
    attentions = [node for node in proto.graph.node if node.op_type == "MultiHeadAttention"]
    windows = [node for node in attentions if node.input[4].startswith("window.3.")]
    assert [node.output[0] for node in marked] == [node.output[0] for node in windows]
    packed = batch([9, 30, 2], 50)
    before, after = run_packed(trace, packed), run_packed(proto, packed)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_portable(model, trace):
    """The portable graph is made of the trace, and keeps the bias."""
    packed = batch(LENGTHS, 50)
    assert_same_as_torch(model, run_portable(make_portable(trace), model, packed), packed)
