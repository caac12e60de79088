"""Fewer biases: in a graph for CUDA, the norm after a product adds the product's bias, and keys and values have none.

On CUDA, ONNX Runtime writes a product's bias to the whole output before the product. A norm that reads the output adds
the bias at no cost. The biases of keys and values can be removed:

    keys     b adds q · b to all scores of a query q, and softmax ignores what all scores have in common
    values   the weights of a query sum to one, so attention passes b unchanged: W b joins the bias of the product W

On one H200, the prototype of this pass, after `half_stream`, reached 1.12 times the throughput of MiniLM's shape at
64 x 128 tokens, and 1.00 times that of BERT-base (research/2026-11-26-gpu-first-measurements.md).

H hidden
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto

from export.passes.graph_utils import Weights, count_readers, producers, replace_nodes

BIAS = 2  # place among the inputs of Gemm
KEY, VALUE = 1, 2  # places among the inputs of PackedMultiHeadAttention


def move_biases(model: onnx.ModelProto) -> None:
    """Rewrite, in place, the products before each SkipLayerNormalization.

    Call it after `fuse_norms` and `split_products`. Keys and values that another node than attention reads, as in
    DeBERTa, keep their biases.
    """
    graph = model.graph
    made, readers, weights = producers(graph), count_readers(graph), Weights(graph)
    for norm in graph.node:
        if norm.op_type != "SkipLayerNormalization":
            continue
        product = _own_product(norm.input[0], made, readers)
        if product is None:
            continue
        bias = _bias(product, weights)
        attention = made.get(product.input[0])
        if attention and attention.op_type == "PackedMultiHeadAttention":
            _drop_bias(_own_product(attention.input[KEY], made, readers))
            value = _own_product(attention.input[VALUE], made, readers)
            if value is not None and readers[attention.output[0]] == 1:
                matrix = weights[product.input[1]].astype(np.float64)  # [H, H]
                bias = bias + matrix @ _bias(value, weights)
                _drop_bias(value)
        if bias.any():
            name = weights.add(f"{product.input[1]}.moved_bias", bias.astype(np.float16))
            norm.input.append(name)
        _drop_bias(product)
    replace_nodes(graph, graph.node)


def _own_product(
    name: str, made: Mapping[str, NodeProto], readers: Counter[str]
) -> NodeProto | None:
    """Return the product that computes a value which one node reads; None for another value."""
    node = made.get(name)
    return node if node and node.op_type == "Gemm" and readers[name] == 1 else None


def _bias(product: NodeProto, weights: Weights) -> NDArray[np.float64]:
    """Return a product's bias; zeros if it has none."""
    if len(product.input) > BIAS:
        return weights[product.input[BIAS]].astype(np.float64)
    return np.zeros(len(weights[product.input[1]]))


def _drop_bias(product: NodeProto | None) -> None:
    if product is not None:
        del product.input[BIAS:]
