"""Batch-invariant int8 graphs.

ONNX Runtime's `quantize_dynamic` measures one activation scale over the whole packed batch, so that the outputs of a
text depend on the other texts. Here every token, a row of the packed matrix, has its own scale (as in Yao et al. 2022,
ZeroQuant), and every output channel of a weight has one. Integer products are exact, so a row's result is the
same in any batch.

Weights have 8 bits, but neighbors of one sign add up to at most 128, because AVX2 adds two products in 16 bits
(`export.passes.rounding`). How inputs and weights are quantized is planned in `export.passes.int8_plan`. The embedding
table is stored in 8 bits with a scale per row; the heads, small and sensitive, stay in fp32. A head over the vocabulary
multiplies by the embedding table itself, so its activations have 7 bits.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from export.passes.fold import fold
from export.passes.graph_utils import (
    TRUNK,
    WORDS,
    Weights,
    attribute,
    check_model,
    is_trunk_product,
    replace_nodes,
    takes_words,
    with_inputs,
)
from export.passes.int8_plan import Plan, foldable_inputs, plan_products
from export.passes.outliers import outlier_name, split_outliers
from export.passes.rounding import LEVELS, TINY, largest, nearest
from export.passes.row_steps import MOST, Channels

# Lower bounds of activations, exact GELU and its approximation by tanh: rows need no minimum of their own.
LEAST = {"Gelu": -0.1701, "Relu": 0.0}
NARROW_MOST = 127  # of activations that the 8-bit embedding table multiplies
NARROW_ZERO_POINT = 64


def quantize(
    model: onnx.ModelProto,
    inputs: Mapping[str, NDArray[np.float32]] | None = None,
    trunk: str = TRUNK,
) -> onnx.ModelProto:
    """Return an int8 copy of a packed fp32 graph: the encoder's matrix products and the word embeddings.

    inputs: of the products, [T, K] by name, for some text (`export.calibration`); None where they were not measured
    trunk: names of weights that contain it are quantized
    Raises ValueError for a matrix that another operator than Gemm uses.
    """
    quantized = onnx.ModelProto()
    quantized.CopyFrom(model)
    fold(quantized)  # weights that the runtime would compute from others
    graph = quantized.graph
    inputs = inputs or {}
    split = split_outliers(graph, inputs, trunk)
    weights = Weights(graph)
    matrices = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 2}
    weights.names |= {outlier_name(x) for x in split}
    parts = {node.output[0]: node for node in graph.node if takes_words(node)}
    plans = plan_products(graph, inputs, trunk, split)
    folded = {x for x in foldable_inputs(graph, trunk) if plans[x].smooth}
    least = {n.output[0]: LEAST[n.op_type] for n in graph.node if n.op_type in LEAST}
    nodes: list[NodeProto] = []
    for node in graph.node:
        if is_trunk_product(node, trunk):
            x = node.input[0]
            nodes += _product(node, plans[x], weights, folded=x in folded, least=least.get(x))
        elif node.output[0] in folded:
            nodes.append(_smooth_norm(node, plans[node.output[0]], weights))
        elif node.op_type == "Gemm" and node.input[1].endswith(WORDS):
            nodes += _vocabulary_product(node, weights.floats(node.input[1]), weights)
        elif node.op_type == "Gemm" and node.input[1] in parts:
            part = parts[node.input[1]]
            nodes += _vocabulary_product(node, weights.floats(part.input[0]), weights, part)
        elif node.output[0] in parts:
            continue
        elif node.op_type == "Gather" and node.input[0].endswith(WORDS):
            nodes += _lookup(node, weights.floats(node.input[0]), weights)
        else:
            nodes.append(node)
    left = [name for node in nodes for name in node.input if name in matrices and trunk in name]
    if left:
        raise ValueError(f"cannot quantise this graph: {left[0]} is used in a way not known here")
    points = [
        node
        for point in sorted({plan.zero_point for plan in plans.values()})
        for node in _zero_points(point, _shared_zero_points(point), "input_ids")
    ]
    replace_nodes(graph, [*points, *nodes])
    check_model(quantized)
    return quantized


def _smooth_norm(node: NodeProto, plan: Plan, weights: Weights) -> NodeProto:
    """Return a norm that computes the smoothed output."""
    assert plan.center is not None
    assert plan.factor is not None
    weight, *bias = (weights.floats(name) for name in node.input[1:])
    x = node.output[0]
    names = [
        weights.add(f"{x}.norm.weight", weight * plan.factor),
        weights.add(f"{x}.norm.bias", (sum(bias, start=-plan.center)) * plan.factor),
    ]
    norm = with_inputs(node, [node.input[0], *names])
    norm.output[:] = [_smoothed(x)]
    return norm


def _smoothed(x: str) -> str:
    return f"{x}.smooth"


def _smooth(x: str, plan: Plan, weights: Weights) -> Iterator[NodeProto]:
    """Yield the nodes of (x - center) * factor."""
    assert plan.factor is not None
    centered = x
    if plan.center is not None:
        centered = f"{x}.centered"
        center = weights.add(f"{x}.center", plan.center)
        yield helper.make_node("Sub", [x, center], [centered])
    factor = weights.add(f"{x}.factor", plan.factor)
    yield helper.make_node("Mul", [centered, factor], [_smoothed(x)])


def _product(
    node: NodeProto, plan: Plan, weights: Weights, *, folded: bool, least: float | None
) -> Iterator[NodeProto]:
    """Yield the nodes of x @ W.T + b with a scale per row of x and per row of W.

    The weight's scale is applied first: in the other order a fusion of ONNX Runtime computes wrong outputs without an
    error.

    folded: whether the norm before x already smooths it
    least: a lower bound of x, if it is known
    """
    assert attribute(node, "transB") == 1, f"{node.name}: expected a transposed weight"
    x, name, *bias = node.input  # a bias of zeros is not in the graph
    matrix = plan.matrices[name]
    values = _smoothed(x) if plan.smooth else x
    row, quantized = _quantized_rows(values)
    if row not in weights.names:
        weights.names.add(row)
        if plan.smooth and not folded:
            yield from _smooth(x, plan, weights)
        yield from _quantize_rows(values, weights, MOST, plan.zero_point, least=least)
    operands = [
        quantized,
        weights.add(f"{name}.int8", matrix.rounded.T.copy()),
        weights.add("quantize.one", np.float32(1)),
        weights.add(f"{name}.scale", matrix.scales),
        weights.add(f"quantize.zero_point.{plan.zero_point}", np.uint8(plan.zero_point)),
    ]
    if matrix.correction is not None:
        corrected = sum((weights.floats(b) for b in bias), start=matrix.correction)
        bias = [weights.add(f"{node.output[0]}.bias", corrected)]
    if plan.outliers is not None:
        columns = weights.floats(name)[:, plan.outliers]
        weight = weights.add(f"{name}.outliers", columns.copy())
        yield from _take_outliers(x, plan.outliers, weights)
        added = f"{node.output[0]}.outliers"
        yield helper.make_node("Gemm", [outlier_name(x), weight, *bias], [added], transB=1)
        yield from _multiply(node, operands, row, [added])
    elif bias:
        # The runtime would fuse Add and Gelu to BiasGelu, which takes longer than both.
        negative = weights.add(f"{bias[0]}.negative", -weights.floats(bias[0]))
        yield from _multiply(node, operands, row, [negative], "Sub")
    else:
        yield from _multiply(node, operands, row, [])


def _take_outliers(x: str, channels: Channels, weights: Weights) -> Iterator[NodeProto]:
    """Yield the node that takes the outlier channels of x, [T, K], unless the graph has them already."""
    out = outlier_name(x)
    if out not in weights.names:
        weights.names.add(out)
        indices = weights.add(f"{out}.channels", channels.astype(np.int64))
        yield helper.make_node("Gather", [x, indices], [out], axis=1)


def _multiply(
    node: NodeProto, operands: list[str], row: str, bias: list[str], adds: str = "Add"
) -> Iterator[NodeProto]:
    """Yield the nodes of an integer product, times the scales of its rows, plus a bias or [T, N] if there is one.

    adds: the operator for the bias
    """
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
        yield helper.make_node(adds, [scaled, *bias], [out])


def _vocabulary_product(
    node: NodeProto, table: NDArray[np.float32], weights: Weights, part: NodeProto | None = None
) -> Iterator[NodeProto]:
    """Yield the nodes of x @ table.T + b for the 8-bit table of `_lookup`, or for the rows that `part` takes.

    x has 7 bits: two products of a 7-bit and an 8-bit number fit in 16 bits, as in the other products.
    """
    assert attribute(node, "transB") == 1, f"{node.name}: expected a transposed weight"
    x, name, *bias = node.input
    zero = weights.add("quantize.narrow_zero_point", np.uint8(NARROW_ZERO_POINT))
    row, quantized = _quantized_rows(x)
    axes = weights.add("quantize.axes", np.array([1], dtype=np.int64))
    if row not in weights.names:
        weights.names.add(row)
        yield from _quantize_rows(x, weights, NARROW_MOST, NARROW_ZERO_POINT, f"{x}.scales")
    rows, scale = _add_table(part.input[0] if part else name, table, weights)
    columns = f"{name}.columns"
    if columns not in weights.names:  # another head may have the same table
        weights.names.add(columns)
        if part is not None:
            yield helper.make_node("Slice", [rows, *part.input[1:]], [f"{name}.rows"])
            yield helper.make_node("Slice", [scale, *part.input[1:]], [f"{name}.row_scales"])
            rows, scale = f"{name}.rows", f"{name}.row_scales"
        yield helper.make_node("Transpose", [rows], [columns], perm=[1, 0])
        yield helper.make_node("Squeeze", [scale, axes], [f"{name}.scales"])
    one = weights.add("quantize.one", np.float32(1))
    operands = [quantized, columns, one, f"{name}.scales", zero]
    yield from _multiply(node, operands, row, bias)


def _quantized_rows(x: str) -> tuple[str, str]:
    """Return the names of a tensor's row scales [T, 1] and of its quantized form [T, K]."""
    return f"{x}.row_scale", f"{x}.uint8"


def _quantize_rows(
    x: str,
    weights: Weights,
    most: int,
    zero_point: int,
    like: str | None = None,
    least: float | None = None,
) -> Iterator[NodeProto]:
    """Yield the nodes that quantize rows to numbers from 0 to `most`.

    The scale comes from the largest and the smallest number of each row: a tensor of magnitudes would cost memory
    traffic.

    like: a value with as many rows, for zero points of its own; None for those that all inputs share
    least: a lower bound of x, with which no row needs its smallest number; None where none is known
    """
    row, quantized = _quantized_rows(x)
    above = weights.add(f"quantize.above.{most - zero_point}", np.float32(1 / (most - zero_point)))
    below = weights.add(f"quantize.below.{zero_point}", np.float32(-1 / zero_point))
    floor = max(TINY, -(least or 0) / zero_point)
    ends = [f"{x}.above", weights.add(f"quantize.floor.{floor:.3g}", np.float32(floor))]
    axes = weights.add("quantize.axes", np.array([1], dtype=np.int64))
    yield helper.make_node("ReduceMax", [x, axes], [f"{x}.max"], keepdims=1)
    yield helper.make_node("Mul", [f"{x}.max", above], [f"{x}.above"])
    if least is None:
        ends.append(f"{x}.below")
        yield helper.make_node("ReduceMin", [x, axes], [f"{x}.min"], keepdims=1)
        yield helper.make_node("Mul", [f"{x}.min", below], [f"{x}.below"])
    yield helper.make_node("Max", ends, [row])
    yield helper.make_node("Squeeze", [row, axes], [f"{x}.scales"])
    points = _shared_zero_points(zero_point) if like is None else f"{x}.zero_points"
    if like is not None:
        yield from _zero_points(zero_point, points, like)
    yield helper.make_node("QuantizeLinear", [x, f"{x}.scales", points], [quantized], axis=0)


def _zero_points(zero_point: int, output: str, like: str) -> Iterator[NodeProto]:
    """Yield nodes for [T] equal zero points: with a scale per row, QuantizeLinear requires one per row."""
    value = numpy_helper.from_array(np.array([zero_point], dtype=np.uint8))
    yield helper.make_node("Shape", [like], [f"{output}.shape"])
    yield helper.make_node("ConstantOfShape", [f"{output}.shape"], [output], value=value)


def _shared_zero_points(zero_point: int) -> str:
    return f"quantize.zero_points.{zero_point}"


def _lookup(node: NodeProto, table: NDArray[np.float32], weights: Weights) -> Iterator[NodeProto]:
    """Yield the nodes that read rows of an 8-bit embedding table and multiply each by its scale."""
    name, ids, out = node.input[0], node.input[1], node.output[0]
    rows, scale = _add_table(name, table, weights)
    yield helper.make_node("Gather", [rows, ids], [f"{out}.int8"])
    yield helper.make_node("Cast", [f"{out}.int8"], [f"{out}.float"], to=TensorProto.FLOAT)
    yield helper.make_node("Gather", [scale, ids], [f"{out}.scale"])
    yield helper.make_node("Mul", [f"{out}.float", f"{out}.scale"], [out])


def _add_table(name: str, table: NDArray[np.float32], weights: Weights) -> tuple[str, str]:
    """Return the names of the 8-bit embedding table [V, E] and of its scales [V, 1]."""
    scales = largest(table, LEVELS)
    rows = weights.add(f"{name}.int8", nearest(table, scales))
    return rows, weights.add(f"{name}.scale", scales[:, None].copy())
