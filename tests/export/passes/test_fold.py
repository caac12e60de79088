"""What weights alone decide is computed once, and nothing else changes."""

from collections import Counter

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from export.passes.fold import fold
from tests.export.helpers import run_graph

RNG = np.random.default_rng(0)
WEIGHTS = {
    name: RNG.standard_normal((3, 3)).astype(np.float32) for name in ("table", "weight", "other")
}
X = RNG.standard_normal((2, 3)).astype(np.float32)


def graph(dtype: type[np.floating] = np.float32) -> onnx.ModelProto:
    """x times a product of weights, one of which has a second reader; and a weight without a reader."""
    weights = {**WEIGHTS, "unused": WEIGHTS["table"]}
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [
        helper.make_node("MatMul", ["table", "weight"], ["projected"]),
        helper.make_node("Tanh", ["projected"], ["bent"]),
        helper.make_node("MatMul", ["x", "bent"], ["scores"]),
        helper.make_node("MatMul", ["scores", "weight"], ["found"]),
        helper.make_node("MatMul", ["table", "other"], ["fixed"]),
    ]
    described = [helper.make_tensor_value_info("x", kind, ["T", 3])]
    outputs = [helper.make_tensor_value_info("found", kind, ["T", 3])]
    outputs.append(helper.make_tensor_value_info("fixed", kind, [3, 3]))
    initializers = [numpy_helper.from_array(w.astype(dtype), name) for name, w in weights.items()]
    made = helper.make_graph(nodes, "test", described, outputs, initializers)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def expected() -> dict[str, NDArray[np.float32]]:
    bent = np.tanh(WEIGHTS["table"] @ WEIGHTS["weight"])
    return {"found": X @ bent @ WEIGHTS["weight"], "fixed": WEIGHTS["table"] @ WEIGHTS["other"]}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_results_stay(dtype):
    """The same outputs, of which one is now but a weight."""
    model = graph(dtype)
    fold(model)
    found = run_graph(model, {"x": X.astype(dtype)})
    for name, value in expected().items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=32 * np.finfo(dtype).eps)


def test_what_is_left():
    """The products with the input, their factors, and no weight without a reader."""
    model = graph()
    fold(model)
    assert Counter(node.op_type for node in model.graph.node) == {"MatMul": 2}
    assert {t.name for t in model.graph.initializer} == {"bent", "weight", "fixed"}


def test_nothing_to_fold():
    """A graph in which all depends on the input stays as it is."""
    model = graph()
    del model.graph.node[:2], model.graph.node[2:]
    del model.graph.output[1]
    model.graph.node[0].input[1] = "table"
    before = [node.SerializeToString() for node in model.graph.node]
    fold(model)
    assert before == [node.SerializeToString() for node in model.graph.node]
    assert {t.name for t in model.graph.initializer} == {"table", "weight"}
    assert TensorProto.FLOAT == model.graph.initializer[0].data_type


@pytest.mark.parametrize(("rows", "operators"), [(2000, ["Cast", "MatMul"]), (3, ["MatMul"])])
def test_large_fp16_weights_are_not_stored_as_fp32_too(rows, operators):
    """A large fp16 weight that is widened stays as it is; the result for a small one is stored."""
    weight = RNG.standard_normal((3, rows)).astype(np.float16)
    made = helper.make_graph(
        [
            helper.make_node("Cast", ["half"], ["whole"], to=TensorProto.FLOAT),
            helper.make_node("MatMul", ["x", "whole"], ["y"]),
        ],
        "test",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T", rows])],
        [numpy_helper.from_array(weight, "half")],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    expected = run_graph(model, {"x": X})["y"]
    fold(model)
    assert operators == [node.op_type for node in model.graph.node]
    np.testing.assert_array_equal(expected, run_graph(model, {"x": X})["y"])
