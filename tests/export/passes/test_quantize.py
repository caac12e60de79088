"""int8 products and tables, node by node, against numpy."""

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from export.passes.quantize import quantize
from export.passes.rounding import nearest, pairwise
from tests.conftest import Traced
from tests.export.helpers import copied, run_graph
from tests.export.passes.test_rounding import largest_pair

Floats = NDArray[np.float32]

WEIGHT = "model.encoder.layers.0.attention.qkv.weight"
TABLE = "model.encoder.embeddings.word.weight"


def graph_of(
    node: onnx.NodeProto, constants: dict[str, Floats], inputs: dict[str, tuple[int, list]]
) -> onnx.ModelProto:
    """A graph of one node that gives y."""
    graph = helper.make_graph(
        [node],
        "one node",
        [helper.make_tensor_value_info(name, *described) for name, described in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T", None])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    domains = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10)


IDS = (TensorProto.INT64, ["T"])


def linear(weight: Floats, bias: Floats, name: str = WEIGHT) -> onnx.ModelProto:
    """y = x @ weight.T + bias, in a graph that has token ids as ours have."""
    node = helper.make_node("Gemm", ["x", name, "bias"], ["y"], name="product", transB=1)
    x = (TensorProto.FLOAT, ["T", weight.shape[1]])
    return graph_of(node, {name: weight, "bias": bias}, {"input_ids": IDS, "x": x})


def run_linear(weight: Floats, bias: Floats, x: Floats) -> Floats:
    """The quantised product."""
    ids = np.zeros(len(x), dtype=np.int64)
    return run_graph(quantize(linear(weight, bias)), {"input_ids": ids, "x": x})["y"]


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def int8_product(x: Floats, weight: Floats, bias: Floats, zero: int = 128) -> Floats:
    """The same product written out: a scale per row of x and per row of the weight."""
    above, below = (
        x.max(axis=1) * np.float32(1 / (255 - zero)),
        x.min(axis=1) * np.float32(-1 / zero),
    )
    rows = np.maximum(np.maximum(above, below), np.float32(1e-20))[:, None]
    columns = pairwise(weight)
    whole = np.clip(np.rint(x / rows), -zero, 255 - zero).astype(np.int64)
    product = whole @ nearest(weight, columns).astype(np.int64).T
    return (product * columns * rows + bias).astype(np.float32)


def initializers(proto: onnx.ModelProto) -> dict[str, NDArray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


class TestProduct:
    weight, bias = normal(24, 16, seed=1), normal(24, seed=2)

    def run(self, x: Floats) -> Floats:
        return run_linear(self.weight, self.bias, x)

    @pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
    def test_as_in_numpy(self, scale):
        """The graph computes what the formula says, for activations of any size."""
        x = normal(40, 16) * np.float32(scale)
        expected = int8_product(x, self.weight, self.bias)
        np.testing.assert_allclose(self.run(x), expected, rtol=1e-5, atol=1e-5 * scale)

    def test_near_fp32(self):
        """And that is near the exact product: a few hundredths of an activation's size."""
        x = normal(40, 16)
        expected = x @ self.weight.T + self.bias
        assert np.abs(self.run(x) - expected).max() < 0.02 * np.abs(expected).max()

    def test_rows_know_nothing_of_each_other(self):
        """A row's result is the same, to the bit, alone and next to rows a million times as large."""
        x = normal(9, 16) * np.float32(10.0) ** np.arange(-4, 5, dtype=np.float32)[:, None]
        together = self.run(x)
        for index, row in enumerate(x):
            np.testing.assert_array_equal(self.run(row[None]), together[index : index + 1])

    def test_zero_rows(self):
        """A row of zeros gives the bias: no division by zero, and no harm to the others."""
        x = np.stack([np.zeros(16, np.float32), normal(16)])
        found = self.run(x)
        np.testing.assert_array_equal(found[0], self.bias)
        np.testing.assert_allclose(found, int8_product(x, self.weight, self.bias), atol=1e-5)

    def test_zero_weights(self):
        """A row of zeros in the weight gives zeros, too."""
        weight = self.weight * (np.arange(24) != 3)[:, None].astype(np.float32)
        found = run_linear(weight, self.bias, normal(5, 16))
        np.testing.assert_array_equal(found[:, 3], np.full(5, self.bias[3]))

    def test_heads_stay_exact(self):
        """A product outside the trunk is left as it was."""
        exact = linear(self.weight, self.bias, name="model.heads.sentiment.classifier.weight")
        assert exact.graph.node[0] == quantize(exact).graph.node[-1]


def smoothed_graph(*, residual: bool, bias: bool = True) -> tuple[onnx.ModelProto, Floats, Floats]:
    """norm(x) @ weight.T + bias, whose residual is added or not; x with large channels; the exact result."""
    x = normal(400, 16) * np.where(np.arange(16) == 5, 20, 1).astype(np.float32) + np.float32(1)
    constants = {
        WEIGHT: normal(16, 16, seed=1),
        "bias": normal(16, seed=2),
        "gain": np.where(np.arange(16) == 3, 30, 1).astype(np.float32),
        "shift": normal(16, seed=3),
    }
    norm = ["x", "gain", "shift"] if bias else ["x", "gain"]
    proto = graph_of(
        helper.make_node("LayerNormalization", norm, ["n"], name="norm", epsilon=1e-5),
        constants,
        {"input_ids": IDS, "x": (TensorProto.FLOAT, ["T", 16])},
    )
    out = "product" if residual else "y"
    gemm = helper.make_node("Gemm", ["n", WEIGHT, "bias"], [out], name="product", transB=1)
    proto.graph.node.append(gemm)
    if residual:
        proto.graph.node.append(helper.make_node("Add", [out, "n"], ["y"]))
    looking = copied(proto)
    looking.graph.output.append(helper.make_empty_tensor_value_info("n"))
    exact = run_graph(looking, feeds(x))
    return proto, exact["n"], exact["y"]


def feeds(x: Floats) -> dict[str, NDArray]:
    return {"input_ids": np.zeros(len(x), np.int64), "x": x}


class TestMeasuredInputs:
    x = normal(400, 16) * np.where(np.arange(16) == 5, 20, 1).astype(np.float32) + np.float32(1)

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("residual", [True, False])
    def test_smoothing_after_a_norm(self, residual, bias):
        """A large channel after a norm costs other channels no precision. The error is at most half of that without."""
        proto, inputs, exact = smoothed_graph(residual=residual, bias=bias)
        errors = [
            np.sqrt(
                np.mean((run_graph(quantize(proto, measured), feeds(self.x))["y"] - exact) ** 2)
            )
            for measured in ({"n": inputs}, None)
        ]
        assert errors[0] < 0.5 * errors[1]

    @pytest.mark.parametrize(("residual", "extra"), [(True, 1), (False, 0)])
    def test_a_norm_that_only_products_read_does_the_smoothing(self, residual, extra):
        """Smoothing costs no operator there, and a product where a residual reads the norm, too."""
        proto, inputs, _ = smoothed_graph(residual=residual)
        nodes = quantize(proto, {"n": inputs}).graph.node
        assert extra == sum("n.factor" in node.input for node in nodes)
        assert 1 == sum(node.op_type == "LayerNormalization" for node in nodes)

    def test_inputs_with_a_lower_bound(self):
        """Inputs that are hardly below zero have a low zero point, which gives smaller steps above zero."""
        weight, bias = normal(24, 16, seed=1), normal(24, seed=2)
        x = np.abs(normal(400, 16)) * np.float32(4) - np.float32(0.1)
        proto = quantize(linear(weight, bias), {"x": x})
        (zero,) = [v for n, v in initializers(proto).items() if "zero_point." in n]
        assert int(zero) in (8, 16)
        exact = x @ weight.T + bias
        errors = [
            np.abs(run_graph(quantized, feeds(x))["y"] - exact).mean()
            for quantized in (proto, quantize(linear(weight, bias)))
        ]
        assert errors[0] < 0.8 * errors[1]

    def test_lower_inputs_than_measured(self):
        """Rows below the measured bound get a larger step and are not clipped."""
        weight, bias = normal(24, 16, seed=1), normal(24, seed=2)
        proto = quantize(linear(weight, bias), {"x": np.abs(normal(400, 16))})
        x = normal(50, 16)
        exact = x @ weight.T + bias
        assert np.abs(run_graph(proto, feeds(x))["y"] - exact).max() < 0.1 * np.abs(exact).max()

    def test_rows_know_nothing_of_each_other(self):
        """A row's result is the same, to the bit, alone and with others, smoothed or not."""
        proto, inputs, _ = smoothed_graph(residual=True)
        quantized = quantize(proto, {"n": inputs})
        together = run_graph(quantized, feeds(self.x))["y"]
        for row in (0, 7, 399):
            alone = run_graph(quantized, feeds(self.x[row : row + 1]))["y"]
            np.testing.assert_array_equal(alone[0], together[row])

    def test_layers_that_share_weights(self):
        """Two products with one weight share its rounded form."""
        weight, bias = normal(16, 16, seed=1) / np.float32(4), normal(16, seed=2)
        proto = linear(weight, bias)
        proto.graph.node[0].output[0] = "between"
        again = helper.make_node("Gemm", ["between", WEIGHT, "bias"], ["y"], name="two", transB=1)
        proto.graph.node.append(again)
        x = normal(300, 16)
        between = x @ weight.T + bias
        quantized = quantize(proto, {"x": x, "between": between})
        assert 1 == sum(value.dtype == np.int8 for value in initializers(quantized).values())
        exact = between @ weight.T + bias
        assert (
            np.abs(run_graph(quantized, feeds(x))["y"] - exact).max() < 0.05 * np.abs(exact).max()
        )


class TestLookup:
    @pytest.fixture
    def table(self) -> Floats:
        table = normal(30, 8) * np.float32(10.0) ** np.arange(-15, 15, dtype=np.float32)[:, None]
        table[4] = 0
        return table

    def run(self, table: Floats, ids: list[int]) -> Floats:
        node = helper.make_node("Gather", [TABLE, "input_ids"], ["y"], name="lookup")
        lookup = graph_of(node, {TABLE: table}, {"input_ids": IDS})
        return run_graph(quantize(lookup), {"input_ids": np.asarray(ids)})["y"]

    def test_within_half_a_step(self, table):
        """Each row is off by at most half of its own step, however large its neighbours are."""
        steps = np.abs(table).max(axis=1, keepdims=True) / 127
        assert (np.abs(self.run(table, [*range(30)]) - table) <= 0.501 * steps).all()

    def test_zero_row(self, table):
        """A row of zeros stays one."""
        np.testing.assert_array_equal(self.run(table, [4]), np.zeros((1, 8), np.float32))


def vocabulary(table: Floats, bias: Floats) -> onnx.ModelProto:
    """y = table[input_ids] @ table.T + bias, as a masked language model on nothing but the embeddings."""
    lookup = helper.make_node("Gather", [TABLE, "input_ids"], ["x"], name="lookup")
    product = helper.make_node("Gemm", ["x", TABLE, "bias"], ["y"], name="product", transB=1)
    proto = graph_of(lookup, {TABLE: table, "bias": bias}, {"input_ids": IDS})
    proto.graph.node.append(product)
    return proto


class TestVocabulary:
    table, bias = normal(50, 24, seed=3) + np.float32(0.5), normal(50, seed=4)

    def test_two_heads_share_a_table(self):
        """As fill-mask and sparse heads of one checkpoint do: each has its own logits."""
        proto = vocabulary(self.table, self.bias)
        second = helper.make_node("Gemm", ["x", TABLE, "bias"], ["z"], name="second", transB=1)
        proto.graph.node.append(second)
        proto.graph.output.append(proto.graph.output[0])
        proto.graph.output[1].name = "z"
        found = run_graph(quantize(proto), {"input_ids": np.arange(50)})
        np.testing.assert_array_equal(found["y"], found["z"])

    def test_stored_once(self):
        """The table that is looked up is the matrix of the product, and no other of its size is in the graph."""
        quantized = quantize(vocabulary(self.table, self.bias))
        large = {name: v.shape for name, v in initializers(quantized).items() if v.size >= 50 * 24}
        assert {f"{TABLE}.int8": (50, 24)} == large

    def test_as_in_numpy(self):
        """Logits are products of the 8-bit table and of rows of 7 bits, each with its own scale."""
        ids = np.arange(50)[::3]
        steps = np.abs(self.table).max(axis=1, keepdims=True) / np.float32(127)
        whole = np.rint(self.table / steps)
        x = (whole * steps)[ids]
        above, below = (f(x, axis=1, keepdims=True) for f in (np.max, np.min))
        rows = np.maximum(above * np.float32(1 / 63), below * np.float32(-1 / 64))
        expected = (np.rint(x / rows) @ whole.T) * steps.T * rows + self.bias
        found = run_graph(quantize(vocabulary(self.table, self.bias)), {"input_ids": ids})["y"]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)

    def test_near_fp32(self):
        """And these are near the exact logits."""
        ids = np.arange(50)
        expected = self.table @ self.table.T + self.bias
        found = run_graph(quantize(vocabulary(self.table, self.bias)), {"input_ids": ids})["y"]
        assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()

    def test_two_products_fit_in_16_bits(self):
        """The largest activations and weights do not saturate where a processor adds two products in 16 bits."""
        table = np.ones((4, 24), np.float32)
        proto = quantize(vocabulary(table, np.zeros(4, np.float32)))
        found = run_graph(proto, {"input_ids": np.arange(4)})["y"]
        np.testing.assert_allclose(found, np.full((4, 4), 24), rtol=1e-5)
        (zero,) = [v for n, v in initializers(proto).items() if n == "quantize.narrow_zero_point"]
        assert 2 * (63 + int(zero)) * 127 < 2**15

    @pytest.mark.parametrize("ids", [[], [7]], ids=["none", "one"])
    def test_few_rows(self, ids):
        """There are as many rows of logits as tokens, also none."""
        asked = {"input_ids": np.array(ids, np.int64)}
        assert (len(ids), 50) == run_graph(quantize(vocabulary(self.table, self.bias)), asked)[
            "y"
        ].shape

    def test_rows_know_nothing_of_each_other(self):
        """A row's logits are the same, to the bit, alone and with others."""
        proto = quantize(vocabulary(self.table, self.bias))
        together = run_graph(proto, {"input_ids": np.arange(50)})["y"]
        for index in (0, 7, 49):
            alone = run_graph(proto, {"input_ids": np.array([index])})["y"]
            np.testing.assert_array_equal(together[index : index + 1], alone)


class TestWholeModel:
    @pytest.fixture(scope="class")
    @classmethod
    def quantized(cls, traced: Traced) -> onnx.ModelProto:
        return quantize(traced.packed)

    def test_the_encoder_is_quantized(self, quantized):
        """The four products of every layer are whole; the heads' stay exact, as does attention."""
        kinds = [node.op_type for node in quantized.graph.node]
        assert 2 * 4 == kinds.count("MatMulIntegerToFloat")
        assert 2 == kinds.count("MultiHeadAttention")
        exact = [node.input[1] for node in quantized.graph.node if node.op_type == "Gemm"]
        assert exact
        assert all(".heads." in name for name in exact)

    def test_no_pair_of_weights_saturates(self, quantized):
        """In every matrix of the trunk, neighbors of one sign add up to at most 128, and some come near it."""
        whole = {n: v for n, v in initializers(quantized).items() if v.dtype == np.int8}
        whole.pop(f"{TABLE}.int8")
        assert 2 * 4 == len(whole)
        for value in whole.values():
            assert 120 < largest_pair(value.T) <= 128

    def test_exact_weights_are_gone(self, traced, quantized):
        """The fp32 weights are removed: the graph is about a quarter as large."""
        assert quantized.ByteSize() < 0.5 * traced.packed.ByteSize()
        assert TABLE not in initializers(quantized)

    def test_the_original_is_untouched(self, traced):
        """Quantising copies: the fp32 graph is exported after it."""
        before = traced.packed.SerializeToString(deterministic=True)
        quantize(traced.packed)
        assert before == traced.packed.SerializeToString(deterministic=True)


def test_foreign_layouts_are_our_bug():
    """A product whose weight is not transposed is not one of ours; it is not quantised wrong."""
    model = linear(normal(16, 16), normal(16))
    model.graph.node[0].attribute[0].i = 0
    with pytest.raises(AssertionError, match="transposed"):
        quantize(model)


def test_without_a_bias():
    """A product whose bias was all zeros, and so left out by the tracer, is quantised alike."""
    weight, x, zeros = normal(16, 32), normal(5, 32, seed=1), np.zeros(16, dtype=np.float32)
    proto = linear(weight, zeros)
    del proto.graph.node[0].input[2]
    found = run_graph(quantize(proto), {"input_ids": np.zeros(5, dtype=np.int64), "x": x})["y"]
    np.testing.assert_array_equal(found, run_linear(weight, zeros, x))


def test_a_product_in_another_form():
    """A graph whose matrices are used in a way that is not known would stay exact in silence: it is refused."""
    node = helper.make_node("MatMul", ["x", WEIGHT], ["y"], name="product")
    x = (TensorProto.FLOAT, ["T", 32])
    proto = graph_of(node, {WEIGHT: normal(32, 16)}, {"input_ids": IDS, "x": x})
    with pytest.raises(ValueError, match=f"cannot quantise this graph: {WEIGHT}"):
        quantize(proto)
