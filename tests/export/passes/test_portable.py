"""Portable graphs: attention written out is that of ONNX Runtime's operator."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from export.passes.portable import make_portable
from service.core.packing import make_layout
from tests.export.helpers import run_graph

HEADS, WIDTH, LENGTHS = 2, 8, [5, 3, 1]


def attention(**attributes: int) -> onnx.ModelProto:
    """A packed graph of one attention, whose inputs are embeddings of the tokens."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((30, WIDTH)).astype(np.float32)
    constants = {
        "table": table,
        "flat": np.array([-1]),
        "shape": np.array([3, 5, WIDTH]),
        "rows": np.array([-1, WIDTH]),
    }
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["x"]),
        helper.make_node("Reshape", ["unpack", "flat"], ["index"]),
        helper.make_node("Gather", ["x", "index"], ["tokens"]),
        helper.make_node("Reshape", ["tokens", "shape"], ["slots"]),
        helper.make_node("Cast", ["lengths"], ["keys"], to=TensorProto.INT32),
        helper.make_node(
            "MultiHeadAttention",
            ["slots", "slots", "slots", "", "keys"],
            ["context"],
            domain="com.microsoft",
            num_heads=HEADS,
            scale=0.5,
            **attributes,
        ),
        helper.make_node("Reshape", ["context", "rows"], ["contexts"]),
        helper.make_node("Reshape", ["pack", "flat"], ["places"]),
        helper.make_node("Gather", ["contexts", "places"], ["out"]),
    ]
    shapes = {"input_ids": ["T"], "lengths": ["B"], "unpack": ["B", "S"], "pack": ["T"]}
    graph = helper.make_graph(
        nodes,
        "attention",
        [helper.make_tensor_value_info(n, TensorProto.INT64, s) for n, s in shapes.items()],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["T", WIDTH])],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("unidirectional", [0, 1])
def test_attention(unidirectional):
    """Attention gives the same vectors for tokens, also where each query has only the keys up to it."""
    packed = attention(unidirectional=unidirectional)
    layout = make_layout(LENGTHS)
    ids = np.arange(len(layout.pack))
    feeds = {"lengths": layout.lengths, "unpack": layout.unpack, "pack": layout.pack}
    expected = run_graph(packed, {"input_ids": ids, **feeds})["out"]

    mask = np.arange(5) < layout.lengths[:, None]
    padded = {"input_ids": ids[layout.unpack], "attention_mask": mask.astype(np.int64)}
    found = run_graph(make_portable(packed), {**padded, "token_type_ids": 0 * layout.unpack})["out"]

    np.testing.assert_allclose(found[mask], expected, rtol=0, atol=1e-5)
