"""Compute once, before a graph is written, what its weights alone decide.

Such as the keys and queries of DeBERTa's distances, for which a runtime would else multiply matrices in every batch,
and which would be quantised as if they were tokens.
"""

from collections.abc import Iterable

import onnx
from onnx import NodeProto, helper, numpy_helper

from export.passes.graph_utils import drop_unused
from service.core.session import ort


def fold(model: onnx.ModelProto) -> None:
    """Replace the nodes that depend on no input by their results, and drop what nothing uses any more."""
    graph = model.graph
    known = {tensor.name for tensor in graph.initializer}
    fixed: list[NodeProto] = []
    rest: list[NodeProto] = []
    for node in graph.node:  # each after those that it depends on
        if {*filter(None, node.input)} <= known:
            fixed.append(node)
            known.update(node.output)
        else:
            rest.append(node)
    wanted = _named(rest, outputs=False) | {value.name for value in graph.output}
    found = sorted(wanted & _named(fixed, outputs=True))
    if found:
        graph.initializer.extend(_computed(model, fixed, found))
    del graph.node[:]
    graph.node.extend(rest)
    drop_unused(graph)


def _named(nodes: Iterable[NodeProto], *, outputs: bool) -> set[str]:
    return {name for node in nodes for name in (node.output if outputs else node.input)}


def _computed(
    model: onnx.ModelProto, nodes: list[NodeProto], names: list[str]
) -> list[onnx.TensorProto]:
    """The values of that name, which these nodes compute."""
    outputs = [helper.make_empty_tensor_value_info(name) for name in names]
    used = [
        tensor for tensor in model.graph.initializer if tensor.name in _named(nodes, outputs=False)
    ]
    part = helper.make_graph(nodes, "fixed", [], outputs, used)
    alone = helper.make_model(part, opset_imports=model.opset_import, ir_version=model.ir_version)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # it runs once
    session = ort.InferenceSession(
        alone.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    values = session.run(names, {})
    return [numpy_helper.from_array(value, name) for name, value in zip(names, values, strict=True)]
