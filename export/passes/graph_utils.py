"""What passes over a graph have in common: asking a node, writing it anew, and dropping what nobody reads."""

from collections.abc import Iterable

import onnx
from onnx import NodeProto


def attribute(node: NodeProto, name: str, default: int = 0) -> int:
    """A whole number that a node is told, or what the operator takes where it is not."""
    return next((found.i for found in node.attribute if found.name == name), default)


def producers(graph: onnx.GraphProto) -> dict[str, NodeProto]:
    """The node that each value comes from."""
    return {output: node for node in graph.node for output in node.output}


def reading(node: NodeProto, names: Iterable[str]) -> NodeProto:
    """The same node with other inputs."""
    new = NodeProto()
    new.CopyFrom(node)
    new.input[:] = names
    return new


def drop_unread(graph: onnx.GraphProto) -> None:
    """Forget the nodes of whose results nothing comes, and then the weights."""
    wanted = {value.name for value in graph.output}
    kept: list[NodeProto] = []
    for node in reversed(graph.node):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted.update(node.input)
    del graph.node[:]
    graph.node.extend(reversed(kept))
    drop_unused(graph)


def drop_unused(graph: onnx.GraphProto) -> None:
    """Forget the weights that no node reads."""
    used = {name for node in graph.node for name in node.input}
    used |= {value.name for value in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
