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

from export.external.onnx_source import Recipe
from export.passes.graph_utils import WEIGHTS
from model.checkpoints.errors import CheckpointError
from service.core import bundle

POOLING = "pooling."  # of all names of a pooling
CONSTANTS = {
    "axis": np.array([1]),
    "column": np.array([0, 0, 1]),
    "zero": np.array(0),
    "second": np.array(1),
    "one": np.array(1, np.float32),
    "least": np.array(np.finfo(np.float32).max),
}
AXES_AS_INPUT = 18  # the opset from which on ReduceMax has them so
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
    if recipe.pooling and opset_of(proto) < POOLING_OPSET:
        proto.CopyFrom(version_converter.convert_version(proto, POOLING_OPSET))
        proto.ir_version = max(proto.ir_version, POOLING_IR)
    add_prefix(proto, PREFIX, rename_inputs=False, rename_functions=False, inplace=True)
    graph, task = proto.graph, recipe.head.task
    outputs = [f"{task}.{name}" for name in recipe.outputs]
    graph.node.extend(
        helper.make_node("Cast", [f"{PREFIX}{name}"], [output], to=TensorProto.FLOAT)
        for name, output in zip(recipe.outputs, outputs, strict=True)
    )
    if recipe.pooling:
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
    """Append poolings of states with the dense layers after them, `[B, S, H]` -> `[B, D]`."""
    graph = proto.graph
    if "attention_mask" not in {value.name for value in graph.input}:
        graph.input.append(_like(graph.input, "attention_mask"))
    graph.node.append(helper.make_node("Identity", [states], [f"{POOLING}states"]))
    graph.node.append(helper.make_node("Identity", ["attention_mask"], [f"{POOLING}mask"]))
    constants: dict[str, Any] = dict(CONSTANTS)
    by_attribute = opset_of(proto) < AXES_AS_INPUT
    graph.node.extend(_modes(recipe.pooling, by_attribute=by_attribute))
    graph.node.append(_node("dense0", "Concat", *recipe.pooling, axis=1))
    for number, layer in enumerate(recipe.dense):
        own = {f"weight{number}": layer.weight, f"bias{number}": layer.bias}
        own = {name: value for name, value in own.items() if value is not None}
        constants |= own
        graph.node.append(_node(f"linear{number}", "Gemm", f"dense{number}", *own, transB=1))
        activation = "Tanh" if layer.tanh else "Identity"
        graph.node.append(_node(f"dense{number + 1}", activation, f"linear{number}"))
    vector = f"{POOLING}dense{len(recipe.dense)}"
    graph.node.append(helper.make_node("Identity", [vector], [recipe.head.task]))
    graph.initializer.extend(
        numpy_helper.from_array(value, f"{POOLING}{name}") for name, value in constants.items()
    )


def _modes(modes: Sequence[str], *, by_attribute: bool) -> Iterator[NodeProto]:
    """Yield the nodes of poolings, `[B, S, H]` -> `[B, H]` named by the mode. by_attribute: the axes of ReduceMax"""
    yield _node("slots", "Reshape", "mask", "column")
    yield _node("real", "Cast", "slots", to=TensorProto.FLOAT)  # [B, S, 1]
    if "cls" in modes:
        yield _node("cls", "Gather", "states", "zero", axis=1)
    if "lasttoken" in modes:
        yield _node("lengths", "ReduceSum", "mask", "axis")
        yield _node("last", "Sub", "lengths", "axis")  # [B, 1]
        yield _node("lasttoken", "GatherND", "states", "last", batch_dims=1)
    if "max" in modes:
        yield _node("absent", "Sub", "real", "one")
        yield _node("lowering", "Mul", "absent", "least")
        yield _node("lowered", "Add", "states", "lowering")
        axes = {"axes": [1]} if by_attribute else {}
        inputs = ["lowered"] if by_attribute else ["lowered", "axis"]
        yield _node("max", "ReduceMax", *inputs, keepdims=0, **axes)
    if {"mean", "mean_sqrt_len_tokens"} & {*modes}:
        yield _node("masked", "Mul", "states", "real")
        yield _node("sum", "ReduceSum", "masked", "axis", keepdims=0)
        yield _node("count", "ReduceSum", "real", "axis", keepdims=0)  # [B, 1]
        yield _node("mean", "Div", "sum", "count")
        yield _node("root", "Sqrt", "count")
        yield _node("mean_sqrt_len_tokens", "Div", "sum", "root")
    if "weightedmean" in modes:
        yield _node("places", "CumSum", "real", "second")
        yield _node("weights", "Mul", "places", "real")
        yield _node("weighted", "Mul", "states", "weights")
        yield _node("total", "ReduceSum", "weighted", "axis", keepdims=0)
        yield _node("weight", "ReduceSum", "weights", "axis", keepdims=0)
        yield _node("weightedmean", "Div", "total", "weight")


def _node(output: str, operator: str, *inputs: str, **attributes: Any) -> NodeProto:
    """Return a node of a pooling, whose values are named without their prefix."""
    names = [f"{POOLING}{name}" for name in inputs]
    return helper.make_node(operator, names, [f"{POOLING}{output}"], **attributes)


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
