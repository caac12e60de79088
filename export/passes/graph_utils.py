"""Helpers of the passes over a graph: attributes and producers of nodes, copies, and removal of unused parts."""

from collections.abc import Iterable

import onnx
from onnx import NodeProto


def attribute(node: NodeProto, name: str, default: int = 0) -> int:
    """Return an integer attribute of a node, or the operator's default."""
    return next((found.i for found in node.attribute if found.name == name), default)


def producers(graph: onnx.GraphProto) -> dict[str, NodeProto]:
    """Return the node that computes each value, by the value's name."""
    return {output: node for node in graph.node for output in node.output}


def with_inputs(node: NodeProto, names: Iterable[str]) -> NodeProto:
    """Return a copy of a node with other inputs."""
    new = NodeProto()
    new.CopyFrom(node)
    new.input[:] = names
    return new


def drop_unused_nodes(graph: onnx.GraphProto) -> None:
    """Remove the nodes that no output depends on, and then their weights."""
    wanted = {value.name for value in graph.output}
    kept: list[NodeProto] = []
    for node in reversed(graph.node):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted.update(node.input)
    del graph.node[:]
    graph.node.extend(reversed(kept))
    drop_unused_weights(graph)


def drop_unused_weights(graph: onnx.GraphProto) -> None:
    """Remove the weights that no node reads."""
    used = {name for node in graph.node for name in node.input}
    used |= {value.name for value in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
