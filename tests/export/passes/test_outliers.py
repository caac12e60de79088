"""Outlier channels that stay in fp32, against the exact graph and against int8 without them."""

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from export.passes import row_steps
from export.passes.outliers import find_layers
from export.passes.quantize import LEAST, quantize
from export.passes.row_steps import choose_outliers
from service.core.session import ort
from tests.export.helpers import copied, run_graph
from tests.export.passes.test_quantize import feeds, normal

Floats = NDArray[np.float32]

NAME = "model.encoder.layers.0"
LARGE = [3, 40]  # channels after the activation
ROWS, HIDDEN, INNER = 400, 32, 64


def outlying(seed: int = 0) -> Floats:
    """Inputs of which two channels are much larger than the others, in most rows."""
    x = normal(ROWS, INNER, seed=seed)
    x[:, LARGE] *= 20
    return x


def feed_forward(activation: str = "Gelu", *, read_twice: bool = False) -> onnx.ModelProto:
    """y = down(activation(up(x))); some rows of the first weight are large, so that their channels are outliers."""
    up, down = normal(INNER, HIDDEN, seed=1) / 6, normal(HIDDEN, INNER, seed=2) / 8
    up[LARGE] *= 20
    weights = {
        f"{NAME}.up.weight": up,
        f"{NAME}.up.bias": normal(INNER, seed=3) / 6,
        f"{NAME}.down.weight": down,
        f"{NAME}.down.bias": normal(HIDDEN, seed=4),
    }
    nodes = [
        helper.make_node(
            "Gemm", ["x", f"{NAME}.up.weight", f"{NAME}.up.bias"], ["inner"], name="up", transB=1
        ),
        helper.make_node(activation, ["inner"], ["active"], name="activation"),
        helper.make_node(
            "Gemm",
            ["active", f"{NAME}.down.weight", f"{NAME}.down.bias"],
            ["y"],
            name="down",
            transB=1,
        ),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T", HIDDEN])]
    if read_twice:
        nodes.append(helper.make_node("ReduceMax", ["active"], ["largest"]))
        outputs.append(helper.make_tensor_value_info("largest", TensorProto.FLOAT, [1, 1]))
    graph = helper.make_graph(
        nodes,
        "feed forward",
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["T"]),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", HIDDEN]),
        ],
        outputs,
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    domains = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10)


def measured(proto: onnx.ModelProto, x: Floats) -> dict[str, Floats]:
    """The inputs of both products."""
    looking = copied(proto)
    looking.graph.output.append(helper.make_empty_tensor_value_info("active"))
    return {"x": x, "active": run_graph(looking, feeds(x))["active"]}


def squared_error(proto: onnx.ModelProto, quantized: onnx.ModelProto, x: Floats) -> float:
    exact, found = (run_graph(each, feeds(x))["y"] for each in (proto, quantized))
    return float(np.mean((exact - found) ** 2))


def test_the_channels_that_decide_the_scales_are_chosen():
    chosen = choose_outliers(outlying())
    assert {*LARGE} <= {*chosen.tolist()}
    assert chosen.tolist() == sorted(chosen.tolist())
    assert len(chosen) <= row_steps.OUTLIERS


def test_equally_large_channels_are_not():
    assert 0 == len(choose_outliers(normal(ROWS, INNER)))


@pytest.mark.parametrize("activation", ["Gelu", "Relu"])
def test_outliers_of_a_feed_forward_layer_stay_exact(activation, monkeypatch):
    """The squared error is below a quarter of that of int8 alone, on text that was not measured."""
    proto, unseen = feed_forward(activation), normal(ROWS, HIDDEN, seed=9)
    inputs = measured(proto, normal(ROWS, HIDDEN, seed=8))
    split = squared_error(proto, quantize(proto, inputs), unseen)
    monkeypatch.setattr(row_steps, "WORTH", 0.0)
    assert split < 0.25 * squared_error(proto, quantize(proto, inputs), unseen)


@pytest.mark.parametrize("activation", ["Gelu", "Relu"])
def test_passes_over_an_activation(activation, tmp_path):
    """The rows' smallest numbers are known, not computed, and the runtime fuses no bias with the activation."""
    proto = feed_forward(activation)
    exact = measured(proto, normal(ROWS, HIDDEN, seed=8))
    assert exact["active"].min() >= LEAST[activation]
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(quantize(proto, exact).SerializeToString(), options)
    nodes = onnx.load(tmp_path / "optimized.onnx").graph.node
    assert activation in {node.op_type for node in nodes}
    assert "active" not in {node.input[0] for node in nodes if node.op_type == "ReduceMin"}


def test_rows_do_not_depend_on_each_other():
    """A row's result is the same, to the bit, alone and with others."""
    proto = feed_forward()
    x = normal(ROWS, HIDDEN, seed=8)
    quantized = quantize(proto, measured(proto, x))
    together = run_graph(quantized, feeds(x))["y"]
    for row in (0, 7, ROWS - 1):
        alone = run_graph(quantized, feeds(x[row : row + 1]))["y"]
        np.testing.assert_array_equal(alone[0], together[row])


def test_an_activation_that_another_node_reads_stays_whole():
    proto = feed_forward(read_twice=True)
    assert [] == [*find_layers(proto.graph)]
    x = normal(ROWS, HIDDEN, seed=8)
    quantized = quantize(proto, measured(proto, x))
    (exact, found) = (run_graph(each, feeds(x))["largest"] for each in (proto, quantized))
    np.testing.assert_allclose(found, exact, rtol=0.1)


def residual_norm() -> onnx.ModelProto:
    """y = product(norm(x)) + norm(x), [T, 64]: the norm's output cannot be smoothed by the norm itself."""
    weight = f"{NAME}.attention.qkv.weight"
    gain = np.ones(INNER, np.float32)
    gain[LARGE] = 20
    graph = helper.make_graph(
        [
            helper.make_node("LayerNormalization", ["x", "gain"], ["n"], name="norm", epsilon=1e-5),
            helper.make_node("Gemm", ["n", weight, "bias"], ["product"], name="product", transB=1),
            helper.make_node("Add", ["product", "n"], ["y"]),
        ],
        "residual",
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["T"]),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", INNER]),
        ],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T", INNER]),
            helper.make_tensor_value_info("n", TensorProto.FLOAT, ["T", INNER]),
        ],
        [
            numpy_helper.from_array(gain, "gain"),
            numpy_helper.from_array(normal(INNER, INNER, seed=1) / 8, weight),
            numpy_helper.from_array(normal(INNER, seed=2), "bias"),
        ],
    )
    domains = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10)


def test_outliers_of_a_norm_stay_exact(monkeypatch):
    """The squared error is below 0.6 of that of smoothing alone, on text that was not measured."""
    proto, unseen = residual_norm(), normal(ROWS, INNER, seed=9)
    inputs = {"n": run_graph(proto, feeds(normal(ROWS, INNER, seed=8)))["n"]}
    split = squared_error(proto, quantize(proto, inputs), unseen)
    monkeypatch.setattr(row_steps, "WORTH", 0.0)
    alone = squared_error(proto, quantize(proto, inputs), unseen)
    assert split < 0.6 * alone
