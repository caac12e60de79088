"""Attach a head to an external ONNX graph, so that its outputs have our names and shapes.

The operators are standard ones.

B sequences, S longest, H hidden
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper, version_converter
from onnx.compose import add_prefix

from export import trace_graphs
from export.external.onnx_source import Recipe
from export.passes.portable import make_portable
from export.trace_graphs import WEIGHTS
from model.checkpoints.hub_names import CheckpointError
from service.core import bundle

PREFIX = "given."  # of all original names, so that appended values cannot collide with them
POOLING_OPSET = 16  # the oldest that the nodes of a pooling can be converted to
POOLING_IR = 8  # the format of that opset
LARGE = 256  # numbers; a smaller tensor is no weight, but a scale, a bias or a shape
EXACT = {TensorProto.DOUBLE, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL}
PRECISIONS = {
    TensorProto.INT8: "int8",
    TensorProto.UINT8: "int8",
    TensorProto.FLOAT16: "fp16",
    TensorProto.FLOAT: "fp32",
}  # by the type of a weight; the first type present decides


def write_graph(graph: Path, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Write a graph with the recipe's head into the folder, and return the manifest's record of it.

    Raises CheckpointError for unsupported weights.
    """
    proto = onnx.load(graph, load_external_data=False)
    precision = precision_of(proto, graph)
    append_head(proto, recipe)
    path = folder / f"{precision}.onnx"
    has_weights = _save(proto, graph, path)
    return {
        **bundle.describe_file(path),
        "precision": precision,
        "layout": "padded",
        "provider": "cpu" if precision == "int8" else "any",
        "opset": opset_of(proto),
        "weights": bundle.describe_file(folder / WEIGHTS) if has_weights else None,
    }


def precision_of(proto: onnx.ModelProto, path: Path) -> str:
    """Return the precision of a graph's weights. Raises CheckpointError for a type that bundles do not support."""
    constants = [a.t for n in proto.graph.node if n.op_type == "Constant" for a in n.attribute]
    weights = [*proto.graph.initializer, *constants]
    types = {weight.data_type for weight in weights if np.prod(weight.dims) >= LARGE}
    unknown = types - {*PRECISIONS, *EXACT}
    if unknown:
        named = ", ".join(sorted(TensorProto.DataType.Name(kind) for kind in unknown))
        raise CheckpointError(f"{path}: cannot serve weights of {named}")
    bits = {a.i for node in proto.graph.node for a in node.attribute if a.name == "bits"} - {8}
    if bits:
        raise CheckpointError(f"{path}: cannot serve weights of {min(bits)} bits")
    return next((name for kind, name in PRECISIONS.items() if kind in types), "fp32")


def opset_of(proto: onnx.ModelProto) -> int:
    """Return the version of the standard operators."""
    return max((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=0)


def append_head(proto: onnx.ModelProto, recipe: Recipe) -> None:
    """Make the recipe's head the graph's only output. Besides the appended nodes, names change.

    The opset of a graph with pooling is raised where the nodes of the pooling need it.
    """
    if recipe.pooling is not None and opset_of(proto) < POOLING_OPSET:
        proto.CopyFrom(version_converter.convert_version(proto, POOLING_OPSET))
        proto.ir_version = max(proto.ir_version, POOLING_IR)
    add_prefix(proto, PREFIX, rename_inputs=False, rename_functions=False, inplace=True)
    graph, task = proto.graph, recipe.head.task
    outputs = [f"{task}.{name}" for name in recipe.outputs]
    graph.node.extend(
        helper.make_node("Cast", [f"{PREFIX}{name}"], [output], to=TensorProto.FLOAT)
        for name, output in zip(recipe.outputs, outputs, strict=True)
    )
    if recipe.pooling is not None:
        _append_pooling(proto, outputs[0], recipe)
    elif len(outputs) == 1:
        graph.node.append(helper.make_node("Identity", outputs, [task]))
    else:
        graph.node.extend(_stack(outputs, task))
        graph.initializer.append(numpy_helper.from_array(np.array([0, 0, 1]), f"{task}.column"))
    rows = (None, None) if recipe.head.per_token else (None,)
    del graph.output[:]
    graph.output.append(
        helper.make_tensor_value_info(task, TensorProto.FLOAT, [*rows, recipe.head.width])
    )


def _stack(values: Sequence[str], output: str) -> Iterator[NodeProto]:
    """Yield the nodes that stack values, `[B, S]` each -> `[B, S, 2]`."""
    columns = [f"{value}.column" for value in values]
    for value, column in zip(values, columns, strict=True):
        yield helper.make_node("Reshape", [value, f"{output}.column"], [column])
    yield helper.make_node("Concat", columns, [output], axis=2)


def _append_pooling(proto: onnx.ModelProto, states: str, recipe: Recipe) -> None:
    """Append the traced pooling of states, `[B, S, H]` -> `[B, D]`."""
    assert recipe.pooling is not None
    traced = trace_graphs.trace_pooling(recipe.pooling, recipe.width, recipe.head)
    head = version_converter.convert_version(make_portable(traced), opset_of(proto)).graph
    graph, shape = proto.graph, f"{states}.shape"
    flat = helper.make_node("Reshape", [states, shape], ["hidden_states"])
    graph.node.extend([flat, *head.node])
    rows = numpy_helper.from_array(np.array([-1, recipe.width]), shape)
    graph.initializer.extend([rows, *head.initializer])
    if "attention_mask" not in {value.name for value in graph.input}:
        graph.input.append(_like(graph.input, "attention_mask"))


def _like(inputs: Sequence[ValueInfoProto], name: str) -> ValueInfoProto:
    """Return another input with the shape of `input_ids`."""
    made = ValueInfoProto()
    made.CopyFrom(next(value for value in inputs if value.name == "input_ids"))
    made.name = name
    return made


def _save(proto: onnx.ModelProto, original: Path, path: Path) -> bool:
    """Write the graph and a copy of its external weights. Returns whether it has any.

    Raises CheckpointError for weights in several files, or in another directory.
    """
    external = [t for t in proto.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    entries = [entry for t in external for entry in t.external_data if entry.key == "location"]
    places = sorted({entry.value for entry in entries})
    if len(places) > 1:
        raise CheckpointError(
            f"{original}: its weights lie in {len(places)} files: one at most "
            "(onnx.save has all_tensors_to_one_file)"
        )
    for place in places:
        if Path(place).name != place:
            raise CheckpointError(
                f"{original}: its weights must be in its directory, not at {place}"
            )
        shutil.copyfile(original.parent / place, path.parent / WEIGHTS)
    for entry in entries:
        entry.value = WEIGHTS
    path.write_bytes(proto.SerializeToString(deterministic=True))
    return bool(places)
