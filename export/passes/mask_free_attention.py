"""Mask-free attention: hide padding in the keys, so that ONNX Runtime can use its blockwise kernel.

ONNX Runtime's `MultiHeadAttention` has two kernels on a CPU. One writes all scores, `[B, N, S, S]`, to memory. The
other computes them a block at a time (Dao et al. 2022, FlashAttention), and takes no mask. This pass replaces the mask
by one more dimension in each head: 1 in all queries, 0 in the keys of tokens, and a large negative number in the keys
of empty slots, which gives them no weight. The product that computes queries and keys computes the first two as well.
Each run only overwrites the keys of empty slots. `NonZero` returns the index of each empty slot once, so `ScatterND`
writes no slot twice, which would have an undefined result on CUDA.

B sequences, S longest, N heads, D head size, H hidden, P slots without a token
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from export.passes.graph_utils import attribute, producers, replace_nodes, with_inputs

PREFIX = "maskless."  # of the names of added tensors, which contain no weights of the model
FAR = -1e9  # a score that softmax turns to 0 next to that of any real key
# The operators from an attention's queries back to the product that computes them.
PATH = ("Split", "Reshape", "Gather", "Gemm")

# Two rows that are added to a product's weight and bias: the last dimension of each head's keys and of its queries.
ADDED_ROWS = {1: "maskless.weight", 2: "maskless.bias"}  # [2, H], [2]
NO_BIAS = "maskless.no_bias"  # [3ND]
ROWS = "maskless.rows"  # [3ND + 2N]: indices of the old and the added rows, by head
SIZES = "maskless.sizes"  # [3]: of queries, keys and values
PLACES = "maskless.places"  # [P, 2]: sequence and slot of each empty slot
KEYS = "maskless.keys"  # [P, N * (D + 1)]: the keys of empty slots
KEY = "maskless.key"  # [1, N * (D + 1)]
ZERO, ONE, AXIS = "maskless.zero", "maskless.one", "maskless.axis"


class Attention(NamedTuple):
    """An attention, the Split of its inputs, and the product that computes them."""

    node: NodeProto
    split: NodeProto
    product: NodeProto


def drop_masks(model: onnx.ModelProto) -> None:
    """Rewrite, in place, each attention of a packed graph that has lengths and whose inputs come from one product.

    Attentions with a bias or a causal mask, which the blockwise kernel does not take either, with rotated queries and
    keys, and with other sizes than the first are not changed. The stored weights are not changed, so that graphs can
    share them: the runtime widens them when it opens the graph, or `fold` does.
    """
    graph = model.graph
    attentions = [*_attentions(graph)]
    if not attentions:
        return
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    sizes = [
        (attribute(node, "num_heads"), *shapes[product.input[1]]) for node, _, product in attentions
    ]
    heads, rows, hidden = sizes[0]
    attentions = [a for a, size in zip(attentions, sizes, strict=True) if size == sizes[0]]
    for _, _, product in attentions:
        if len(product.input) == 2:  # a bias of zeros is not in the graph
            product.input.append(NO_BIAS)
    names = {(a.product.input[i], rows) for a in attentions for i, rows in ADDED_ROWS.items()}
    widen = [node for name, rows in sorted(names) for node in _widen(name, rows)]
    for _, _, product in attentions:
        product.input[1:] = [f"{name}.wide" for name in product.input[1:]]
    replaced = {split.output[0]: [_split(split)] for _, split, _ in attentions}
    replaced |= {node.output[0]: _attend(node) for node, _, _ in attentions}
    rest = [new for node in graph.node for new in replaced.get(node.output[0], [node])]
    graph.initializer.extend(_constants(heads, rows // 3, hidden))
    replace_nodes(graph, [*widen, *_empty_slots(), *rest])


def _attentions(graph: onnx.GraphProto) -> Iterator[Attention]:
    made = producers(graph)
    for node in graph.node:
        is_causal = attribute(node, "unidirectional")
        # A sixth input is a bias.
        if node.op_type == "MultiHeadAttention" and len(node.input) == 5 and not is_causal:
            path = [*_back(node, made)]
            if tuple(step.op_type for step in path) == PATH:
                split, *_, product = path
                if split.output[:] == node.input[:3]:
                    yield Attention(node, split, product)


def _back(node: NodeProto, made: Mapping[str, NodeProto]) -> Iterator[NodeProto]:
    """Yield the nodes before this one, each by its first input, as many as PATH has."""
    for _ in PATH:
        if node.input[0] not in made:
            return
        node = made[node.input[0]]
        yield node


def _constants(heads: int, width: int, hidden: int) -> list[TensorProto]:
    wide = width + heads
    of_head = np.arange(width).reshape(heads, -1)
    last = np.full((heads, 1), 3 * width)
    query, key = np.hstack([of_head, last + 1]), np.hstack([width + of_head, last])
    value = 2 * width + of_head
    far = np.where(key < 3 * width, 0, FAR).astype(np.float32)
    values = {
        NO_BIAS: np.zeros(3 * width, dtype=np.float32),
        ADDED_ROWS[1]: np.zeros((2, hidden), dtype=np.float32),
        ADDED_ROWS[2]: np.array([0, 1], dtype=np.float32),
        ROWS: np.concatenate([part.ravel() for part in (query, key, value)]),
        SIZES: np.array([wide, wide, width]),
        KEY: far.reshape(1, wide),
        ZERO: np.array(0),
        ONE: np.array(1),
        AXIS: np.array([1]),
    }
    return [numpy_helper.from_array(array, name) for name, array in values.items()]


def _widen(name: str, rows: str) -> list[NodeProto]:
    """Return the nodes that append rows to a weight or bias, and put each head's rows together."""
    return [
        helper.make_node("Concat", [name, rows], [f"{name}.more"], axis=0),
        helper.make_node("Gather", [f"{name}.more", ROWS], [f"{name}.wide"]),
    ]


def _empty_slots() -> list[NodeProto]:
    """Return the nodes that find the empty slots of a batch, and their keys, which all layers share."""
    longest, slots, ends, empty, nonzero = (f"{PLACES}.{step}" for step in range(5))
    number, shape = f"{KEYS}.number", f"{KEYS}.shape"
    return [
        helper.make_node("Shape", ["unpack"], [f"{longest}.shape"], start=1),
        helper.make_node("Squeeze", [f"{longest}.shape"], [longest]),
        helper.make_node("Range", [ZERO, longest, ONE], [slots]),  # [S]
        helper.make_node("Unsqueeze", ["lengths", AXIS], [ends]),  # [B, 1]
        helper.make_node("GreaterOrEqual", [slots, ends], [empty]),  # [B, S]
        helper.make_node("NonZero", [empty], [nonzero]),  # [2, P]
        helper.make_node("Transpose", [nonzero], [PLACES], perm=[1, 0]),
        helper.make_node("Shape", [PLACES], [number], end=1),
        helper.make_node("Concat", [number, AXIS], [shape], axis=0),  # P, 1
        helper.make_node("Expand", [KEY, shape], [KEYS]),
    ]


def _split(node: NodeProto) -> NodeProto:
    """Return a Split into queries and keys of D + 1 and values of D numbers per head."""
    return helper.make_node("Split", [node.input[0], SIZES], node.output, node.name, axis=-1)


def _attend(node: NodeProto) -> list[NodeProto]:
    """Return the attention without lengths, with the scale of the original head size D."""
    query, key, value = node.input[:3]
    hiding = helper.make_node("ScatterND", [key, PLACES, KEYS], [f"{key}.hiding"])
    return [hiding, with_inputs(node, [query, f"{key}.hiding", value])]
