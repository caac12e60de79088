"""Attach a head to an external ONNX graph, so that its outputs have our names and shapes.

The operators are standard ones, unchanged in every opset from 7 on.

B sequences, S longest, H hidden
"""

import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper
from onnx.compose import add_prefix
from torch import nn

from export.external.onnx_source import Recipe
from export.trace_graphs import WEIGHTS
from model.checkpoints.hub_names import CheckpointError
from service.core import bundle
from service.core.bundle import PoolingMode

PREFIX = "given."  # of all original names, so that appended values cannot collide with them
LARGE = 256  # numbers; a smaller tensor is no weight, but a scale, a bias or a shape
EXACT = {TensorProto.DOUBLE, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL}
PRECISIONS = {
    TensorProto.INT8: "int8",
    TensorProto.UINT8: "int8",
    TensorProto.FLOAT16: "fp16",
    TensorProto.FLOAT: "fp32",
}  # by the type of a weight; the first type present decides
POOLING_INPUTS: dict[PoolingMode, tuple[str, ...]] = {
    "cls": (),
    "max": ("attention_mask",),
    "mean": ("attention_mask",),
    "mean_sqrt_len_tokens": ("attention_mask",),
    "lasttoken": ("attention_mask", "position_ids"),
    "weightedmean": ("attention_mask", "position_ids"),
}


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
    """Make the recipe's head the graph's only output. Besides the appended nodes only names change."""
    add_prefix(proto, PREFIX, rename_inputs=False, rename_functions=False, inplace=True)
    graph, task = proto.graph, recipe.head.task
    tail = Tail(task)
    values = [tail.add("Cast", f"{PREFIX}{name}", to=TensorProto.FLOAT) for name in recipe.outputs]
    value = values[0] if len(values) == 1 else tail.stack(values)
    for name in sorted({name for mode in recipe.pooling for name in POOLING_INPUTS[mode]}):
        if name not in {value.name for value in graph.input}:
            graph.input.append(_like(graph.input, name))
    pooled = [tail.pool(value, mode) for mode in recipe.pooling]
    if pooled:
        value = pooled[0] if len(pooled) == 1 else tail.add("Concat", *pooled, axis=1)
    for layer in recipe.dense:
        value = tail.dense(value, layer)
    tail.nodes.append(helper.make_node("Identity", [value], [task]))
    rows = (None, None) if recipe.head.per_token else (None,)
    del graph.output[:]
    graph.output.append(
        helper.make_tensor_value_info(task, TensorProto.FLOAT, [*rows, recipe.head.width])
    )
    graph.node.extend(tail.nodes)
    graph.initializer.extend(tail.constants)


def _like(inputs: Sequence[ValueInfoProto], name: str) -> ValueInfoProto:
    """Return another input with the shape of `input_ids`."""
    made = ValueInfoProto()
    made.CopyFrom(next(value for value in inputs if value.name == "input_ids"))
    made.name = name
    return made


class Tail:
    """Builder of the appended nodes and constants; their names begin with the head's."""

    def __init__(self, head: str) -> None:
        self.head = head
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Append a node, and return the name of its output."""
        output = f"{self.head}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [output], **attributes))
        return output

    def constant(self, value: np.ndarray) -> str:
        name = f"{self.head}.constant.{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(value, name))
        return name

    def reshape(self, value: str, *shape: int) -> str:
        """Append a Reshape. shape: 0 keeps an axis, -1 is inferred"""
        return self.add("Reshape", value, self.constant(np.array(shape)))

    def stack(self, values: Sequence[str]) -> str:
        """`[B, S]` each -> `[B, S, 2]`."""
        return self.add("Concat", *(self.reshape(value, 0, 0, 1) for value in values), axis=2)

    def pool(self, states: str, mode: PoolingMode) -> str:
        """Append a pooling: `[B, S, H]` -> `[B, H]`."""
        match mode:
            case "cls":
                return self.add("Gather", states, self.constant(np.array(0)), axis=1)
            case "max":
                return self.max(states)
            case "mean":
                return self.weighted(states, self.real, self.count)
            case "mean_sqrt_len_tokens":
                return self.weighted(states, self.real, self.add("Sqrt", self.count))
            case "lasttoken":
                return self.weighted(states, self.last)
            case "weightedmean":
                one = self.constant(np.array(1, np.float32))
                weights = self.add("Mul", self.real, self.add("Add", self.positions, one))
                return self.weighted(states, weights, self.total(weights))

    @cached_property
    def real(self) -> str:
        """The mask as numbers, `[B, S]`."""
        return self.add("Cast", "attention_mask", to=TensorProto.FLOAT)

    @cached_property
    def positions(self) -> str:
        """The columns as numbers, `[B, S]`."""
        return self.add("Cast", "position_ids", to=TensorProto.FLOAT)

    @cached_property
    def count(self) -> str:
        """The number of tokens, `[B, 1, 1]`."""
        return self.total(self.real)

    @cached_property
    def last(self) -> str:
        """1 at the last token, else 0: `[B, S]`."""
        one = self.constant(np.array(1, np.float32))
        end = self.reshape(self.add("Sub", self.count, one), 0, 1)  # [B, 1]
        distance = self.add("Abs", self.add("Sub", self.positions, end))
        return self.add("Relu", self.add("Sub", one, distance))

    def total(self, weights: str) -> str:
        """Append the sum of the weights at tokens: `[B, S]` -> `[B, 1, 1]`."""
        row, column = self.reshape(weights, 0, 1, -1), self.reshape(self.real, 0, -1, 1)
        return self.add("MatMul", row, column)

    def weighted(self, states: str, weights: str, divisor: str | None = None) -> str:
        """Append a weighted sum over tokens: `[B, S, H]` and `[B, S]` -> `[B, H]`. divisor: `[B, 1, 1]`"""
        value = self.add("MatMul", self.reshape(weights, 0, 1, -1), states)  # [B, 1, H]
        if divisor is not None:
            value = self.add("Div", value, divisor)
        return self.reshape(value, 0, -1)

    def max(self, states: str) -> str:
        """Append the largest numbers over tokens: `[B, S, H]` -> `[B, H]`. Padding is the lowest number."""
        one = self.constant(np.array(1, np.float32))
        lowest = self.constant(np.array(np.finfo(np.float32).max))
        padding = self.add("Mul", self.add("Sub", self.real, one), lowest)  # 0 or the lowest
        slots = self.add("Add", states, self.reshape(padding, 0, -1, 1))
        columns = self.add("Transpose", slots, perm=[0, 2, 1])  # [B, H, S]
        return self.reshape(self.add("GlobalMaxPool", columns), 0, -1)

    def dense(self, value: str, layer: nn.Module) -> str:
        """Append a linear layer or an activation of a sentence-transformers Dense module."""
        if isinstance(layer, nn.Linear):
            weight = layer.weight.detach().numpy().T.copy()
            value = self.add("MatMul", value, self.constant(weight))
            if layer.bias is None:
                return value
            return self.add("Add", value, self.constant(layer.bias.detach().numpy()))
        return self.add("Tanh", value) if isinstance(layer, nn.Tanh) else value


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
