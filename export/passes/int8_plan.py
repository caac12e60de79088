"""The plan of an int8 graph: how each input of a matrix product is quantized, and how the weights are rounded.

Without measured inputs, the weights are rounded each by itself. Measured inputs (`export.calibration`) decide more:

- Inputs that a LayerNormalization computes are smoothed: their mean is subtracted, and channels with large inputs are
  divided by constants that the weight is multiplied by (as in Xiao et al. 2023, SmoothQuant).
- Inputs with a lower bound near zero, as of GELU, have most of their 256 numbers above the zero point.
- The few channels that make the steps of most rows large stay in fp32 (as in Dettmers et al. 2022, LLM.int8()).
- The weights are rounded so that their errors compensate for each other, and the mean error moves to the bias.

N outputs, K inputs, T tokens
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto

from export.passes.graph_utils import Weights, count_readers, is_trunk_product, producers
from export.passes.outliers import find_layers
from export.passes.rounding import TINY, compensated, nearest, pairwise
from export.passes.row_steps import (
    ZERO_POINTS,
    Channels,
    Floats,
    best_zero_point,
    choose_outliers,
    row_scales,
    without,
)

SMOOTHING = 0.65  # how much of the size of a channel's inputs moves to its weights
FLOOR = 1e-5  # of the largest channel, below which the size of a channel does not count


@dataclass(frozen=True)
class Matrix:
    """A rounded weight. rounded: [N, K]; scales: of its rows, [N]; correction: what is added to the bias, [N]"""

    rounded: NDArray[np.int8]
    scales: Floats
    correction: Floats | None = None


@dataclass(frozen=True)
class Plan:
    """How one input of products is quantized: as (x - center) * factor, [K] each, as far as these are not None.

    matrices: the weights of the products by name, with zeros for the outliers
    outliers: channels that stay in fp32, and are zero in the quantized input
    """

    matrices: Mapping[str, Matrix]
    zero_point: int = ZERO_POINTS[0]
    center: Floats | None = None
    factor: Floats | None = None
    outliers: Channels | None = None

    @property
    def smooth(self) -> bool:
        return self.factor is not None


def plan_products(
    graph: onnx.GraphProto, inputs: Mapping[str, Floats], trunk: str, split: Mapping[str, Channels]
) -> dict[str, Plan]:
    """Return the plan of each input of the encoder's products. inputs: measured, [T, K]; split: see `split_outliers`"""
    weights = Weights(graph)
    normed = {n for n, node in producers(graph).items() if node.op_type == "LayerNormalization"}
    kept = normed & foldable_inputs(graph, trunk) | {
        layer.up.input[0] for layer in find_layers(graph, trunk)
    }
    plans: dict[str, Plan] = {}
    for names, matrices in _groups(node for node in graph.node if is_trunk_product(node, trunk)):
        exact = {name: weights.floats(name) for name in sorted(matrices)}
        measured = [inputs[name] for name in sorted(names) if name in inputs]
        x = next(iter(measured), None)
        if len(measured) > 1:
            x = np.concatenate(measured)[:: len(measured)]
        smooth = names <= normed
        outliers = next((split[name] for name in names if name in split), None)
        if x is None:
            plan = _plain(exact)
        elif smooth:
            plan = _smoothed(exact, x) if names & kept else _split(exact, x)
        else:
            plan = _rounded(exact, x, outliers)
        plans |= dict.fromkeys(names, plan)
    return plans


def foldable_inputs(graph: onnx.GraphProto, trunk: str) -> set[str]:
    """Return the inputs that only the encoder's products read, so that the node before them can change them."""
    readers = count_readers(graph)
    products = Counter(node.input[0] for node in graph.node if is_trunk_product(node, trunk))
    return {x for x, number in products.items() if readers[x] == number}


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


def _plain(exact: Mapping[str, Floats]) -> Plan:
    """Return the plan of an input that was not measured."""
    scales = {name: pairwise(weight) for name, weight in exact.items()}
    return Plan({name: Matrix(nearest(w, scales[name]), scales[name]) for name, w in exact.items()})


def _smoothed(exact: Mapping[str, Floats], x: Floats) -> Plan:
    """Return the plan of a norm's output x, [T, K], all of whose channels are quantized."""
    center = x.mean(axis=0)
    size = _sizes(x - center, exact)
    moved: Floats = np.asarray((x - center) / size, dtype=np.float32)
    plan = _rounded({name: weight * size for name, weight in exact.items()}, moved)
    matrices = {
        name: replace(matrix, correction=exact[name] @ center + matrix.correction)
        for name, matrix in plan.matrices.items()
    }
    return replace(plan, matrices=matrices, center=center, factor=np.reciprocal(size))


def _split(exact: Mapping[str, Floats], x: Floats) -> Plan:
    """Return the plan of a norm's output x, [T, K], not centered, whose outliers stay in fp32 if that is worth it."""
    size = _sizes(x, exact)
    moved: Floats = np.asarray(x / size, dtype=np.float32)
    outliers = choose_outliers(moved)
    if len(outliers) == 0:
        return _smoothed(exact, x)
    resized = {name: weight * size for name, weight in exact.items()}
    factor = np.reciprocal(size)
    factor[outliers] = 0
    return replace(_rounded(resized, moved, outliers), factor=factor)


def _rounded(exact: Mapping[str, Floats], x: Floats, outliers: Channels | None = None) -> Plan:
    """Return the plan of an input x, [T, K], whose outliers stay in fp32."""
    if outliers is not None:
        x = without(x, outliers)
        exact = {name: without(weight, outliers) for name, weight in exact.items()}
    zero_point = best_zero_point(x)
    row_steps = row_scales(x, zero_point)
    quantized = np.divide(x, row_steps)
    np.rint(quantized, out=quantized)
    quantized *= row_steps
    mean = x.mean(axis=0)
    matrices = {}
    for name, weight in exact.items():
        steps = pairwise(weight)
        rounded = compensated(weight, steps, quantized)
        matrices[name] = Matrix(rounded, steps, (weight - rounded * steps[:, None]) @ mean)
    return Plan(matrices, zero_point, outliers=outliers)


def _sizes(x: Floats, exact: Mapping[str, Floats]) -> Floats:
    """Return what the inputs x, [T, K], of weights [N, K] are divided by, and their columns multiplied by."""
    inputs = np.abs(x).max(axis=0)
    columns = np.abs(np.concatenate([*exact.values()])).max(axis=0)
    inputs = np.maximum(inputs, FLOOR * inputs.max() + TINY)
    columns = np.maximum(columns, FLOOR * columns.max() + TINY)
    sizes = inputs**SMOOTHING / columns ** (1 - SMOOTHING)
    return np.asarray(sizes / sizes.mean(), dtype=np.float32)
