"""The plan of an int8 graph: how each input of a matrix product is quantized, and how the weights are rounded.

Without measured inputs, the weights are rounded each by itself. Measured inputs (`export.calibration`) decide more:

- Inputs that a LayerNormalization computes are smoothed: their mean is subtracted, and channels with large inputs are
  divided by constants that the weight is multiplied by (as in Xiao et al. 2023, SmoothQuant).
- Inputs with a lower bound near zero, as of GELU, have most of their 256 numbers above the zero point.
- The weights are rounded so that their errors compensate for each other, and the mean error moves to the bias.

N outputs, K inputs, T tokens
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, numpy_helper

from export.passes.graph_utils import producers
from export.passes.rounding import TINY, compensated, nearest, pairwise

TRUNK = "encoder.layers"
MOST = 255  # activations are unsigned, because x86 multiplies u8 x s8 fastest
ZERO_POINTS = (128, 64, 32, 16, 8)  # the first one where no inputs were measured
SMOOTHING = 0.65  # how much of the size of a channel's inputs moves to its weights
FLOOR = 1e-5  # of the largest channel, below which the size of a channel does not count

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Matrix:
    """A rounded weight. rounded: [N, K]; scales: of its rows, [N]; correction: what is added to the bias, [N]"""

    rounded: NDArray[np.int8]
    scales: Floats
    correction: Floats | None = None


@dataclass(frozen=True)
class Plan:
    """How one input of products is quantized: as (x - center) * factor, [K] each, where these are not None.

    matrices: the weights of the products by name
    """

    matrices: Mapping[str, Matrix]
    zero_point: int = ZERO_POINTS[0]
    center: Floats | None = None
    factor: Floats | None = None

    @property
    def smooth(self) -> bool:
        return self.factor is not None


def is_trunk_product(node: NodeProto, trunk: str = TRUNK) -> bool:
    """Return whether a node multiplies by a weight of the encoder's layers."""
    return node.op_type == "Gemm" and trunk in node.input[1]


def plan_products(
    graph: onnx.GraphProto, inputs: Mapping[str, Floats], trunk: str
) -> dict[str, Plan]:
    """Return the plan of every input of the encoder's products, by the input's name.

    inputs: the measured ones, [T, K] by name
    """
    weights = {tensor.name: tensor for tensor in graph.initializer}
    normed = {n for n, node in producers(graph).items() if node.op_type == "LayerNormalization"}
    plans: dict[str, Plan] = {}
    for names, matrices in _groups(node for node in graph.node if is_trunk_product(node, trunk)):
        exact = {name: to_floats(weights[name]) for name in sorted(matrices)}
        measured = [inputs[name] for name in sorted(names) if name in inputs]
        x = np.concatenate(measured)[:: len(measured)] if measured else None
        plans |= dict.fromkeys(names, _plan(exact, x, smooth=names <= normed))
    return plans


def _groups(products: Iterable[NodeProto]) -> Iterator[tuple[set[str], set[str]]]:
    """Yield inputs and weights of the products that share one or the other: layers may have the same weights."""
    groups: list[tuple[set[str], set[str]]] = []
    for node in products:
        names, matrices = {node.input[0]}, {node.input[1]}
        for group in [g for g in groups if g[0] & names or g[1] & matrices]:
            groups.remove(group)
            names |= group[0]
            matrices |= group[1]
        groups.append((names, matrices))
    yield from groups


def _plan(exact: Mapping[str, Floats], x: Floats | None, *, smooth: bool) -> Plan:
    """Return the plan of an input x, [T, K], None where it was not measured."""
    if x is None:
        scales = {name: pairwise(weight) for name, weight in exact.items()}
        return Plan(
            {name: Matrix(nearest(w, scales[name]), scales[name]) for name, w in exact.items()}
        )
    center, size = np.zeros(x.shape[1], np.float32), np.ones(x.shape[1], np.float32)
    if smooth:
        center = x.mean(axis=0)
        size = _sizes(x - center, np.concatenate([*exact.values()]))
    moved = (x - center) / size
    zero_point = min(ZERO_POINTS, key=lambda point: float(np.mean(row_scales(moved, point) ** 2)))
    row_steps = row_scales(moved, zero_point)
    quantized = np.rint(moved / row_steps) * row_steps
    matrices = {}
    for name, weight in exact.items():
        resized = weight * size
        steps = pairwise(resized)
        rounded = compensated(resized, steps, quantized)
        lost = (resized - rounded * steps[:, None]) @ moved.mean(axis=0)
        matrices[name] = Matrix(rounded, steps, weight @ center + lost)
    return Plan(matrices, zero_point, *((center, 1 / size) if smooth else ()))


def _sizes(x: Floats, weight: Floats) -> Floats:
    """Return what the inputs x, [T, K], of a weight [N, K] are divided by, and its columns multiplied by."""
    inputs, columns = np.abs(x).max(axis=0), np.abs(weight).max(axis=0)
    inputs = np.maximum(inputs, FLOOR * inputs.max() + TINY)
    columns = np.maximum(columns, FLOOR * columns.max() + TINY)
    sizes = inputs**SMOOTHING / columns ** (1 - SMOOTHING)
    return np.asarray(sizes / sizes.mean(), dtype=np.float32)


def row_scales(x: Floats, zero_point: int, most: int = MOST) -> Floats:
    """Return the scale of each row of x, [T, 1], with which the row fits in numbers from 0 to `most`."""
    above = x.max(axis=1, keepdims=True) / np.float32(most - zero_point)
    below = x.min(axis=1, keepdims=True) / np.float32(-zero_point)
    return np.asarray(np.maximum(np.maximum(above, below), TINY), dtype=np.float32)


def to_floats(tensor: TensorProto) -> Floats:
    return numpy_helper.to_array(tensor).astype(np.float32)
