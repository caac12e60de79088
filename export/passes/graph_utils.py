"""Helpers of the passes over a graph: attributes, producers and readers, copies, and other nodes."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

WEIGHTS = "weights.bin"  # the file of the large weights of a bundle's graphs
WORDS = "embeddings.word.weight"  # the end of the name of the word embeddings
TRUNK = "encoder.layers"  # a part of the names of the layers' weights


def attribute(node: NodeProto, name: str, default: int = 0) -> int:
    """Return an integer attribute of a node, or the operator's default."""
    return next((found.i for found in node.attribute if found.name == name), default)


def producers(graph: onnx.GraphProto) -> dict[str, NodeProto]:
    """Return the node that computes each value, by the value's name."""
    return {output: node for node in graph.node for output in node.output}


def count_readers(graph: onnx.GraphProto) -> Counter[str]:
    """Return the number of times that nodes, or the graph's outputs, read each value."""
    read = [name for node in graph.node for name in node.input]
    return Counter([*read, *(value.name for value in graph.output)])


def is_trunk_product(node: NodeProto, trunk: str = TRUNK) -> bool:
    """Return whether a node multiplies by a weight of the encoder's layers."""
    return node.op_type == "Gemm" and trunk in node.input[1]


def takes_words(node: NodeProto) -> bool:
    """Return whether a node takes some of the word embeddings, for a product with a part of the vocabulary."""
    return node.op_type == "Slice" and node.input[0].endswith(WORDS)


def read_tensor(tensor: TensorProto) -> NDArray[Any]:
    """Return a tensor's numbers: its own, or those at its place in the file of `trace_graphs.move_weights`."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return numpy_helper.to_array(tensor)
    place = {entry.key: entry.value for entry in tensor.external_data}
    kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    count, offset = int(np.prod(tensor.dims)), int(place["offset"])
    return np.fromfile(place["location"], kind, count, offset=offset).reshape(tensor.dims)


def embed_weights(model: onnx.ModelProto) -> None:
    """Move the weights of a file into the graph."""
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor.CopyFrom(numpy_helper.from_array(read_tensor(tensor), tensor.name))


def check_model(model: onnx.ModelProto) -> None:
    """Check a graph with ONNX's checker, which cannot read weights outside the graph: they are empty."""
    checked = onnx.ModelProto()
    checked.CopyFrom(model)
    for tensor in checked.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            empty = np.zeros(0, helper.tensor_dtype_to_np_dtype(tensor.data_type))
            tensor.CopyFrom(numpy_helper.from_array(empty, tensor.name))
    onnx.checker.check_model(checked)


class Weights:
    """The weights of a graph, by name. Equal names are equal weights: a name that exists is not added again.

    names: of the weights, and of values that a pass has nodes for
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}
        self.names = {*self._tensors}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> NDArray[Any]:
        return read_tensor(self._tensors[name])

    def floats(self, name: str) -> NDArray[np.float32]:
        return self[name].astype(np.float32, copy=False)

    def add(self, name: str, value: NDArray[Any] | np.generic) -> str:
        """Add a weight, and return its name."""
        if name not in self.names:
            self.names.add(name)
            self._tensors[name] = numpy_helper.from_array(np.asarray(value, order="C"), name)
            self._graph.initializer.append(self._tensors[name])
        return name


def with_inputs(node: NodeProto, names: Iterable[str]) -> NodeProto:
    """Return a copy of a node with other inputs."""
    new = NodeProto()
    new.CopyFrom(node)
    new.input[:] = names
    return new


def replace_nodes(graph: onnx.GraphProto, nodes: Sequence[NodeProto]) -> None:
    """Replace a graph's nodes by the given ones that an output depends on, and remove weights that no node reads."""
    wanted = {value.name for value in graph.output}
    kept: list[NodeProto] = []
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted.update(node.input)
    del graph.node[:]
    graph.node.extend(reversed(kept))
    read = [tensor for tensor in graph.initializer if tensor.name in wanted]
    del graph.initializer[:]
    graph.initializer.extend(read)
