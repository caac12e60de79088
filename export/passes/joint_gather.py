"""Joint gather: gather all parts of a product into slots at once, and split them there.

`attention` takes queries, keys and values apart, and gathers each. This pass replaces

    Split -> three times Gather, Reshape      by      Gather -> Reshape -> Split

B sequences, S longest
"""

from collections.abc import Iterator

import onnx
from onnx import NodeProto, helper

from export.passes.graph_utils import Weights, attribute, count_readers, producers, replace_nodes


def join_gathers(model: onnx.ModelProto) -> None:
    """Rewrite, in place, each Split of which all parts are gathered by one index and reshaped to `[B, S, -1]`."""
    graph = model.graph
    joined: dict[str, list[NodeProto]] = {}  # the new nodes by an output of the old ones
    for split, gathers, reshapes in _find(graph):
        joined |= {node.output[0]: [] for node in (split, *gathers, *reshapes)}
        first = min(reshapes, key=[*graph.node].index)
        rows, slots = f"{split.output[0]}.rows", f"{split.output[0]}.slots"
        outputs = [reshape.output[0] for reshape in reshapes]
        joined[first.output[0]] = [
            helper.make_node("Gather", [split.input[0], gathers[0].input[1]], [rows]),
            helper.make_node("Reshape", [rows, reshapes[0].input[1]], [slots]),
            helper.make_node("Split", [slots, split.input[1]], outputs, axis=-1),
        ]
    nodes = [new for node in graph.node for new in joined.get(node.output[0], [node])]
    replace_nodes(graph, nodes)


def _find(graph: onnx.GraphProto) -> Iterator[tuple[NodeProto, list[NodeProto], list[NodeProto]]]:
    """Yield each Split with the Gather and the Reshape of each of its outputs."""
    made, readers, weights = producers(graph), count_readers(graph), Weights(graph)
    reader = {name: node for node in graph.node for name in node.input[:1]}

    def sole_reader(name: str, operator: str) -> NodeProto | None:
        node = reader.get(name)
        return node if node and node.op_type == operator and readers[name] == 1 else None

    for split in graph.node:
        if split.op_type != "Split" or attribute(split, "axis") != 1 or len(split.input) == 1:
            continue
        gathers = [node for name in split.output if (node := sole_reader(name, "Gather"))]
        reshapes = [node for g in gathers if (node := sole_reader(g.output[0], "Reshape"))]
        if len(reshapes) < len(split.output) or any(attribute(g, "axis") for g in gathers):
            continue
        if len({(g.input[1], r.input[1]) for g, r in zip(gathers, reshapes, strict=True)}) == 1:
            shape = made.get(reshapes[0].input[1])
            if shape and shape.input[-1] in weights and weights[shape.input[-1]] == -1:
                yield split, gathers, reshapes
