"""Padding that attention need not be told of, so that it may take the runtime's faster way.

ONNX Runtime's `MultiHeadAttention` has two ways on a CPU. One writes all scores, `[B, N, S, S]`, to memory; the other
computes them a block at a time (Dao et al. 2022, FlashAttention), and takes no mask. So that none is needed, every head
gets one number more: 1 in all queries, 0 in all keys, and in the keys of slots without a token one so negative that
they have no weight. The product that makes queries and keys makes the first two as well; what is left to a run is to
overwrite the keys of empty slots.

B sequences, S longest, N heads, D head size, H hidden, P slots without a token
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from export.passes.graph_utils import attribute, producers, reading

PREFIX = "maskless."  # of the names of all that has no weight in it
FAR = -1e9  # as a score: beside that of any real key nothing is left of it
# From an attention's queries back to the product that they are columns of.
WAY = ("Split", "Reshape", "Gather", "Gemm")

# What a product's weight and its bias have two rows more of: the last number of each head's keys and of its queries.
MORE = {1: "maskless.weight", 2: "maskless.bias"}  # [2, H], [2]
NO_BIAS = "maskless.no_bias"  # [3H]
ROWS = "maskless.rows"  # [3H + 2N]: of those and these
SIZES = "maskless.sizes"  # [3]: of queries, keys and values
PLACES = "maskless.places"  # [P, 2]: sequence and slot of what is empty
KEYS = "maskless.keys"  # [P, N * (D + 1)]: what stands there
KEY = "maskless.key"  # [1, N * (D + 1)]
ZERO, ONE, AXIS = "maskless.zero", "maskless.one", "maskless.axis"


class Attention(NamedTuple):
    """An attention, what splits its inputs apart, and the product that makes them."""

    node: NodeProto
    split: NodeProto
    product: NodeProto


def drop_masks(model: onnx.ModelProto) -> None:
    """Rewrite, in place, each attention of a packed graph that is told lengths and takes its inputs from one product.

    Others stay as they are: those with a bias, which the faster way does not take either, and those that turn their
    queries and keys. The weights stay too, so that graphs can share them; they are widened when a runtime opens the
    graph, or by `fold`.
    """
    graph = model.graph
    found = [*_attentions(graph)]
    if not found:
        return
    shapes = {tensor.name: tensor.dims for tensor in graph.initializer}
    heads = attribute(found[0].node, "num_heads")
    hidden = shapes[found[0].product.input[1]][0] // 3
    for _, _, product in found:
        if len(product.input) == 2:  # a bias of zeros is not in the graph
            product.input.append(NO_BIAS)
    own = {(own.product.input[i], more) for own in found for i, more in MORE.items()}
    widen = [node for name, more in sorted(own) for node in _widen(name, more)]
    for _, _, product in found:
        product.input[1:] = [f"{name}.wide" for name in product.input[1:]]
    instead = {split.output[0]: [_split(split)] for _, split, _ in found}
    instead |= {node.output[0]: _attend(node, hidden // heads) for node, _, _ in found}
    rest = [new for node in graph.node for new in instead.get(node.output[0], [node])]
    graph.initializer.extend(_constants(heads, hidden))
    del graph.node[:]
    graph.node.extend([*widen, *_empty_slots(), *rest])


def _attentions(graph: onnx.GraphProto) -> Iterator[Attention]:
    made = producers(graph)
    for node in graph.node:
        if node.op_type == "MultiHeadAttention" and len(node.input) == 5:  # a sixth is a bias
            way = [*_back(node, made)]
            if tuple(step.op_type for step in way) == WAY:
                split, *_, product = way
                if split.output[:] == node.input[:3]:
                    yield Attention(node, split, product)


def _back(node: NodeProto, made: Mapping[str, NodeProto]) -> Iterator[NodeProto]:
    """The nodes before this one, each by its first input, as far as the way goes."""
    for _ in WAY:
        if node.input[0] not in made:
            return
        node = made[node.input[0]]
        yield node


def _constants(heads: int, hidden: int) -> list[TensorProto]:
    wide = hidden + heads
    of_head = np.arange(hidden).reshape(heads, -1)
    last = np.full((heads, 1), 3 * hidden)
    query, key = np.hstack([of_head, last + 1]), np.hstack([hidden + of_head, last])
    value = 2 * hidden + of_head
    far = np.where(key < 3 * hidden, 0, FAR).astype(np.float32)
    values = {
        NO_BIAS: np.zeros(3 * hidden, dtype=np.float32),
        MORE[1]: np.zeros((2, hidden), dtype=np.float32),
        MORE[2]: np.array([0, 1], dtype=np.float32),
        ROWS: np.concatenate([part.ravel() for part in (query, key, value)]),
        SIZES: np.array([wide, wide, hidden]),
        KEY: far.reshape(1, wide),
        ZERO: np.array(0),
        ONE: np.array(1),
        AXIS: np.array([1]),
    }
    return [numpy_helper.from_array(array, name) for name, array in values.items()]


def _widen(name: str, more: str) -> list[NodeProto]:
    return [
        helper.make_node("Concat", [name, more], [f"{name}.more"], axis=0),
        helper.make_node("Gather", [f"{name}.more", ROWS], [f"{name}.wide"]),
    ]


def _empty_slots() -> list[NodeProto]:
    """Those of a batch, and the keys that stand there in all layers."""
    longest, slots, ends, empty, found = (f"{PLACES}.{step}" for step in range(5))
    number, shape = f"{KEYS}.number", f"{KEYS}.shape"
    return [
        helper.make_node("Shape", ["unpack"], [f"{longest}.shape"], start=1),
        helper.make_node("Squeeze", [f"{longest}.shape"], [longest]),
        helper.make_node("Range", [ZERO, longest, ONE], [slots]),  # [S]
        helper.make_node("Unsqueeze", ["lengths", AXIS], [ends]),  # [B, 1]
        helper.make_node("GreaterOrEqual", [slots, ends], [empty]),  # [B, S]
        helper.make_node("NonZero", [empty], [found]),  # [2, P]
        helper.make_node("Transpose", [found], [PLACES], perm=[1, 0]),
        helper.make_node("Shape", [PLACES], [number], end=1),
        helper.make_node("Concat", [number, AXIS], [shape], axis=0),  # P, 1
        helper.make_node("Expand", [KEY, shape], [KEYS]),
    ]


def _split(node: NodeProto) -> NodeProto:
    """The same into parts that are not of one size."""
    return helper.make_node("Split", [node.input[0], SIZES], node.output, node.name, axis=-1)


def _attend(node: NodeProto, head_size: int) -> list[NodeProto]:
    """The same without lengths. Scores are scaled by the size that a head had, unless by something else."""
    query, key, value = node.input[:3]
    hiding = helper.make_node("ScatterND", [key, PLACES, KEYS], [f"{key}.hiding"])
    attend = reading(node, [query, f"{key}.hiding", value])
    if not any(attribute.name == "scale" for attribute in node.attribute):
        attend.attribute.append(helper.make_attribute("scale", head_size**-0.5))
    return [hiding, attend]
