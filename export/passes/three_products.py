"""Three products: in a graph for CUDA, queries, keys and values each have a product of their own.

PyTorch's model computes them as one product and splits its output. CUDA's attention takes three tensors, so ONNX
Runtime copies the output to three. On one H200, the prototype of this pass reached 1.04 times the throughput of
BERT-base at 64 x 128 tokens and 1.02 times that of MiniLM's shape; after `half_stream` and `biases`, 1.09 and 1.14
times. A single text takes about 0.1 ms more, because two more products are launched per layer
(research/2026-11-26-gpu-first-measurements.md).

H hidden, N heads, K heads of keys and values, D head size
"""

import numpy as np
import onnx
from onnx import NodeProto, helper

from export.passes.graph_utils import Weights, count_readers, producers, replace_nodes


def split_products(model: onnx.ModelProto) -> None:
    """Rewrite, in place, each product whose only reader splits it into three parts, so not rotated ones."""
    graph = model.graph
    made, readers, weights = producers(graph), count_readers(graph), Weights(graph)
    nodes: list[NodeProto] = []
    for node in graph.node:
        is_split = node.op_type == "Split" and len(node.output) == 3
        product = made.get(node.input[0]) if is_split else None
        if product is not None and product.op_type == "Gemm" and readers[node.input[0]] == 1:
            nodes += _parts(product, node, weights)
        else:
            nodes.append(node)
    replace_nodes(graph, nodes)


def _parts(product: NodeProto, split: NodeProto, weights: Weights) -> list[NodeProto]:
    """Return a product for each output of a Split, with its rows of the weight [ND + 2KD, H] and of the bias."""
    ends = np.cumsum(weights[split.input[1]])[:-1]
    tensors = [np.split(weights[name], ends) for name in product.input[1:]]
    return [
        helper.make_node(
            "Gemm",
            [
                product.input[0],
                *(
                    weights.add(f"{name}.{part}", rows[part])
                    for name, rows in zip(product.input[1:], tensors, strict=True)
                ),
            ],
            [output],
            f"{product.name}.{part}",
            transB=1,
        )
        for part, output in enumerate(split.output)
    ]
