"""Batch-invariant int8 graphs.

ONNX Runtime's `quantize_dynamic` measures one activation scale over the whole packed batch, so that the outputs of a
text depend on the other texts. Here every token, a row of the packed matrix, has its own scale (as in Yao et al. 2022,
ZeroQuant), and every output channel of a weight has one. Integer products are exact, so a row's result is the
same in any batch.

Weights have 7 bits, because AVX2 adds two products of 8-bit numbers in 16 bits and saturates at the full range.
The embedding table is stored in 8 bits with a scale per row; the heads, small and sensitive, stay in fp32. A head over
the vocabulary multiplies by the embedding table itself, so its activations have 7 bits.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from export.passes.fold import fold
from export.passes.graph_utils import WORDS, attribute, drop_unused_weights, takes_words

WEIGHT_LEVELS = 63  # 7 bits, signed
ACTIVATION_LEVELS = 127
TABLE_LEVELS = 127  # of the embedding table
ZERO_POINT = 128  # activations are unsigned, because x86 multiplies u8 x s8 fastest
ZERO_POINTS = "quantize.zero_points"
TINY = 1e-20  # keeps an all-zero row's scale above zero


def quantize(model: onnx.ModelProto, trunk: str = "encoder.layers") -> onnx.ModelProto:
    """Return an int8 copy of a packed fp32 graph: the encoder's matrix products and the word embeddings.

    trunk: names of weights that contain it are quantized
    Raises ValueError for a matrix that another operator than Gemm uses.
    """
    quantized = onnx.ModelProto()
    quantized.CopyFrom(model)
    fold(quantized)  # weights that the runtime would compute from others
    graph = quantized.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    parts = {node.output[0]: node for node in graph.node if takes_words(node)}
    constants = _Constants(graph)
    nodes: list[NodeProto] = [*_zero_points()]
    for node in graph.node:
        if node.op_type == "Gemm" and trunk in node.input[1]:
            nodes += _product(node, _array(weights[node.input[1]]), constants)
        elif node.op_type == "Gemm" and node.input[1].endswith(WORDS):
            nodes += _vocabulary_product(node, _array(weights[node.input[1]]), constants)
        elif node.op_type == "Gemm" and node.input[1] in parts:
            part = parts[node.input[1]]
            nodes += _vocabulary_product(node, _array(weights[part.input[0]]), constants, part)
        elif node.output[0] in parts:
            continue
        elif node.op_type == "Gather" and node.input[0].endswith(WORDS):
            nodes += _lookup(node, _array(weights[node.input[0]]), constants)
        else:
            nodes.append(node)
    left = [
        name
        for node in nodes
        for name in node.input
        if trunk in name and _is_matrix(weights.get(name))
    ]
    if left:
        raise ValueError(f"cannot quantise this graph: {left[0]} is used in a way not known here")
    del graph.node[:]
    graph.node.extend(nodes)
    drop_unused_weights(graph)
    onnx.checker.check_model(quantized)
    return quantized


def _is_matrix(tensor: onnx.TensorProto | None) -> bool:
    return tensor is not None and len(tensor.dims) == 2


class _Constants:
    """Initializers of a graph, added once each."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.names = {tensor.name for tensor in graph.initializer}

    def add(self, name: str, value: NDArray[Any] | np.generic) -> str:
        if name not in self.names:
            self.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
            self.names.add(name)
        return name


def weight_scales(weight: NDArray[np.float32], levels: int) -> NDArray[np.float32]:
    """Return a scale per row, [N], of a weight [N, K], so that the row's largest magnitude is `levels`."""
    scales = np.abs(weight).max(axis=1) / levels
    return np.asarray(np.maximum(scales, TINY), dtype=np.float32)


def _rounded(weight: NDArray[np.float32], scales: NDArray[np.float32]) -> NDArray[np.int8]:
    return np.asarray(np.rint(weight / scales[:, None]), dtype=np.int8)


def _product(
    node: NodeProto, weight: NDArray[np.float32], constants: _Constants
) -> Iterator[NodeProto]:
    """Yield the nodes of x @ W.T + b with a scale per row of x and per row of W.

    The weight's scale is applied first: in the other order a fusion of ONNX Runtime computes wrong outputs without an
    error.
    """
    assert attribute(node, "transB") == 1, f"{node.name}: expected a transposed weight"
    x, name, *bias = node.input  # a bias of zeros is not in the graph
    row, quantized = _quantized_rows(x)
    if row not in constants.names:
        constants.names.add(row)
        yield from _quantize_rows(x, constants, ACTIVATION_LEVELS, ZERO_POINTS)
    scales = weight_scales(weight, WEIGHT_LEVELS)
    matrix = constants.add(f"{name}.int8", _rounded(weight, scales).T.copy())
    scale = constants.add(f"{name}.scale", scales)
    one = constants.add("quantize.one", np.float32(1))
    zero = constants.add("quantize.zero_point", np.uint8(ZERO_POINT))
    yield from _multiply(node, [quantized, matrix, one, scale, zero], row, bias)


def _multiply(
    node: NodeProto, operands: list[str], row: str, bias: list[str]
) -> Iterator[NodeProto]:
    """Yield the nodes of an integer product, times the scales of its rows, plus a bias if there is one."""
    out = node.output[0]
    yield helper.make_node(
        "MatMulIntegerToFloat",
        operands,
        [f"{out}.unscaled"],
        domain="com.microsoft",
        name=f"{node.name}.int8",
    )
    scaled = f"{out}.scaled" if bias else out
    yield helper.make_node("Mul", [f"{out}.unscaled", row], [scaled])
    if bias:
        yield helper.make_node("Add", [scaled, *bias], [out])


def _vocabulary_product(
    node: NodeProto,
    table: NDArray[np.float32],
    constants: _Constants,
    part: NodeProto | None = None,
) -> Iterator[NodeProto]:
    """Yield the nodes of x @ table.T + b for the 8-bit table that `_lookup` reads, which is stored once.

    x has 7 bits: two products of a 7-bit and an 8-bit number fit in 16 bits, as in the other products.
    part: the node that takes some rows of the table, if the product does not use all
    """
    assert attribute(node, "transB") == 1, f"{node.name}: expected a transposed weight"
    x, name, *bias = node.input
    zero = constants.add("quantize.narrow_zero_point", np.uint8(WEIGHT_LEVELS + 1))
    row, quantized = _quantized_rows(x)
    axes = constants.add("quantize.axes", np.array([1], dtype=np.int64))
    if row not in constants.names:
        constants.names.add(row)
        yield from _quantize_rows(x, constants, WEIGHT_LEVELS, f"{x}.zero_points")
    rows, scale = _add_table(part.input[0] if part else name, table, constants)
    if part is not None:
        yield helper.make_node("Slice", [rows, *part.input[1:]], [f"{name}.rows"])
        yield helper.make_node("Slice", [scale, *part.input[1:]], [f"{name}.row_scales"])
        rows, scale = f"{name}.rows", f"{name}.row_scales"
    yield helper.make_node("Transpose", [rows], [f"{name}.columns"], perm=[1, 0])
    yield helper.make_node("Squeeze", [scale, axes], [f"{name}.scales"])
    one = constants.add("quantize.one", np.float32(1))
    operands = [quantized, f"{name}.columns", one, f"{name}.scales", zero]
    yield from _multiply(node, operands, row, bias)


def _quantized_rows(x: str) -> tuple[str, str]:
    """Return the names of a tensor's row scales [T, 1] and of its quantized form [T, K]."""
    return f"{x}.row_scale", f"{x}.uint8"


def _quantize_rows(
    x: str, constants: _Constants, most: int, zero_points: str
) -> Iterator[NodeProto]:
    """Yield the nodes that quantize rows to numbers from -`most` to `most`, before the zero points are added.

    The scale comes from the largest and the smallest number of each row: a tensor of magnitudes would cost memory
    traffic.
    """
    row, quantized = _quantized_rows(x)
    name = "quantize.levels" if most == ACTIVATION_LEVELS else "quantize.narrow_levels"
    levels = constants.add(name, np.float32(1 / most))
    tiny = constants.add("quantize.tiny", np.float32(TINY))
    axes = constants.add("quantize.axes", np.array([1], dtype=np.int64))
    yield helper.make_node("ReduceMax", [x, axes], [f"{x}.max"], keepdims=1)
    yield helper.make_node("ReduceMin", [x, axes], [f"{x}.min"], keepdims=1)
    yield helper.make_node("Neg", [f"{x}.min"], [f"{x}.below"])
    yield helper.make_node("Max", [f"{x}.max", f"{x}.below", tiny], [f"{x}.magnitude"])
    yield helper.make_node("Mul", [f"{x}.magnitude", levels], [row])
    yield helper.make_node("Squeeze", [row, axes], [f"{x}.scales"])
    if zero_points != ZERO_POINTS:
        yield from _zero_points(f"{x}.scales", zero_points, most + 1)
    yield helper.make_node("QuantizeLinear", [x, f"{x}.scales", zero_points], [quantized], axis=0)


def _zero_points(
    like: str = "input_ids", output: str = ZERO_POINTS, zero_point: int = ZERO_POINT
) -> Iterator[NodeProto]:
    """Yield nodes for [T] equal zero points: with a scale per row, QuantizeLinear requires one per row."""
    value = numpy_helper.from_array(np.array([zero_point], dtype=np.uint8))
    yield helper.make_node("Shape", [like], [f"{output}.shape"])
    yield helper.make_node("ConstantOfShape", [f"{output}.shape"], [output], value=value)


def _lookup(
    node: NodeProto, table: NDArray[np.float32], constants: _Constants
) -> Iterator[NodeProto]:
    """Yield the nodes that read rows of an 8-bit embedding table and multiply each by its scale."""
    name, ids, out = node.input[0], node.input[1], node.output[0]
    rows, scale = _add_table(name, table, constants)
    yield helper.make_node("Gather", [rows, ids], [f"{out}.int8"])
    yield helper.make_node("Cast", [f"{out}.int8"], [f"{out}.float"], to=TensorProto.FLOAT)
    yield helper.make_node("Gather", [scale, ids], [f"{out}.scale"])
    yield helper.make_node("Mul", [f"{out}.float", f"{out}.scale"], [out])


def _add_table(name: str, table: NDArray[np.float32], constants: _Constants) -> tuple[str, str]:
    """Return the names of the 8-bit embedding table [V, E] and of its scales [V, 1]."""
    scales = weight_scales(table, TABLE_LEVELS)
    rows = constants.add(f"{name}.int8", _rounded(table, scales))
    return rows, constants.add(f"{name}.scale", scales[:, None].copy())


def _array(tensor: TensorProto) -> NDArray[np.float32]:
    return numpy_helper.to_array(tensor).astype(np.float32)
