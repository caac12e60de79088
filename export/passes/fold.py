"""Constant folding: compute the values that depend on weights alone before a graph is written.

An example are the keys and queries of DeBERTa's distances. Without the pass, a runtime would multiply their matrices in
every batch, and the int8 pass would quantize them like tokens.
"""

import math
from collections.abc import Iterable

import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from export.passes.graph_utils import read_tensor, replace_nodes, takes_words
from service.core.session import ort

LARGE = 4096  # numbers


def fold(model: onnx.ModelProto) -> None:
    """Replace the nodes that depend on no input by their results; large fp16 weights and word embeddings stay."""
    graph = model.graph
    known = {tensor.name for tensor in graph.initializer}
    half = {
        tensor.name
        for tensor in graph.initializer
        if tensor.data_type == TensorProto.FLOAT16 and math.prod(tensor.dims) >= LARGE
    }
    fixed: list[NodeProto] = []
    rest: list[NodeProto] = []
    for node in graph.node:  # in topological order
        widens = node.op_type == "Cast" and node.input[0] in half
        stays = widens or takes_words(node)
        if {*filter(None, node.input)} <= known and not stays:
            fixed.append(node)
            known.update(node.output)
        else:
            rest.append(node)
    used = _named(rest, outputs=False) | {value.name for value in graph.output}
    names = sorted(used & _named(fixed, outputs=True))
    if names:
        graph.initializer.extend(_computed(model, fixed, names))
    replace_nodes(graph, rest)


def _named(nodes: Iterable[NodeProto], *, outputs: bool) -> set[str]:
    return {name for node in nodes for name in (node.output if outputs else node.input)}


def _computed(
    model: onnx.ModelProto, nodes: list[NodeProto], names: list[str]
) -> list[onnx.TensorProto]:
    """Run nodes without inputs, and return their outputs of these names."""
    outputs = [helper.make_empty_tensor_value_info(name) for name in names]
    read = _named(nodes, outputs=False)
    used = [
        numpy_helper.from_array(read_tensor(tensor), tensor.name)
        for tensor in model.graph.initializer
        if tensor.name in read
    ]
    part = helper.make_graph(nodes, "fixed", [], outputs, used)
    folded = helper.make_model(part, opset_imports=model.opset_import, ir_version=model.ir_version)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # it runs once
    session = ort.InferenceSession(
        folded.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    values = session.run(names, {})
    return [numpy_helper.from_array(value, name) for name, value in zip(names, values, strict=True)]
