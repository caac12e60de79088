"""First-token pruning: compute the last layer for first tokens only, where no head reads other tokens.

A classifier, or an embedding with `cls` pooling, reads one row of the last hidden states for each sequence. The
operators after the last attention compute each row from the same row of their input. So this pass selects those rows
there instead of at the end, and shortens that attention's queries to the first ones. The results are the same,
and the layer computes a quarter of the products. The pass does not change a graph with a head that reads every token.

B sequences, S longest, T tokens, H hidden
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from export.passes.graph_utils import attribute, producers, replace_nodes, with_inputs

# Operators that compute each row of their output from the same row of their inputs, weights excepted.
ROWWISE = frozenset(
    {
        "Add",
        "Cast",
        "Div",
        "Gelu",
        "Gemm",
        "LayerNormalization",
        "MatMulIntegerToFloat",
        "Max",
        "Mul",
        "Neg",
        "QuantizeLinear",
        "ReduceMax",
        "ReduceMin",
        "Relu",
        "Sigmoid",
        "Split",
        "Squeeze",
        "Sub",
        "Tanh",
    }
)
FIRSTS = "firsts.index"  # [B]: where each sequence's first token is among all T
NUMBER, ZERO, ONE = "firsts.number", "firsts.zero", "firsts.one"
CONSTANTS = {NUMBER: np.array(0), ZERO: np.array([0]), ONE: np.array([1])}


def narrow(model: onnx.ModelProto) -> None:
    """Rewrite a packed graph, fp32 or int8, in place, unless a head reads more than first tokens."""
    graph = model.graph
    pruning = _Pruning(graph)
    if not pruning.narrow:
        return
    nodes = [new for node in graph.node for new in pruning.rewrite(node)]
    first = helper.make_node("Gather", ["unpack", NUMBER], [FIRSTS], axis=1)
    graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in CONSTANTS.items())
    replace_nodes(graph, [first, *nodes])


class _Pruning:
    """Analysis of a graph. narrow: the values of which only the rows of first tokens are read, and hence computed"""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.weights = {tensor.name: tensor for tensor in graph.initializer}
        self.made = producers(graph)
        self.readers = Counter(name for node in graph.node for name in node.input)
        self.narrow = self._find(graph)
        # Attentions of which only first queries are needed, by output: the value that selects from it.
        self.shortened = {
            attention.output[0]: node.output[0]
            for node in graph.node
            if node.output[0] in self.narrow and (attention := self._attention(node)) is not None
        }
        self.taken: set[str] = set()

    def rewrite(self, node: NodeProto) -> Iterator[NodeProto]:
        """Yield the nodes that replace a node."""
        output = node.output[0]
        if self._takes_firsts(node):
            yield from self._take(node.input[:1])
            yield helper.make_node("Identity", [self._taken(node.input[0])], [output])
        elif output in self.shortened:
            query = f"{node.input[0]}.first"
            yield helper.make_node("Slice", [node.input[0], ZERO, ONE, ONE], [query])
            yield with_inputs(node, [query, *node.input[1:]])
            yield helper.make_node("Squeeze", [output, ONE], [self.shortened[output]])
        elif output in self.narrow and output not in self.shortened.values():
            rows = self._rows(node)
            yield from self._take(rows)
            names = [self._taken(name) if name in rows else name for name in node.input]
            yield with_inputs(node, names)
        elif output not in self.narrow:
            yield node

    def _find(self, graph: onnx.GraphProto) -> set[str]:
        """Return `narrow`, from the last node to the first, so that all readers of a value precede it."""
        whole = {value.name for value in graph.output}
        some: set[str] = set()
        narrow: set[str] = set()
        for node in reversed(graph.node):
            rows: list[str] = []
            if self._takes_firsts(node):
                rows = [node.input[0]]
            elif some.intersection(node.output) and not whole.intersection(node.output):
                rows = self._rows(node)
                narrow.update(node.output if rows else ())
            some.update(rows)
            whole.update(name for name in node.input if name not in rows)
        return narrow

    def _rows(self, node: NodeProto) -> list[str]:
        """Return the inputs of which each output row needs only the same row; empty for other operators."""
        if node.op_type == "Gather" and attribute(node, "axis") == 0:
            return [name for name in node.input[1:] if name not in self.weights]
        if node.op_type in ROWWISE:
            return [name for name in node.input if name and name not in self.weights]
        return []

    def _takes_firsts(self, node: NodeProto) -> bool:
        """Return whether a node selects the rows of each sequence's first token."""
        if node.op_type != "Gather" or attribute(node, "axis") != 0:
            return False
        column = self._reshaped(node.input[1])
        if column is None or column not in self.made:
            return False
        select = self.made[column]
        if (
            select.op_type != "Gather"
            or select.input[0] != "unpack"
            or attribute(select, "axis") != 1
        ):
            return False
        number = self.weights.get(select.input[1])
        return number is not None and not numpy_helper.to_array(number).any()

    def _attention(self, node: NodeProto) -> NodeProto | None:
        """Return the attention whose outputs a node gathers from slots, if it can compute a part of the queries."""
        slots = self._reshaped(node.input[0])
        if node.op_type != "Gather" or slots is None or self._reshaped(node.input[1]) != "pack":
            return None
        sole_reader = self.readers[slots] == self.readers[node.input[0]] == 1
        attention = self.made.get(slots)
        if attention is None or attention.op_type != "MultiHeadAttention" or not sole_reader:
            return None
        # A sixth input has a row for each query, and a causal mask depends on their number.
        whole = len(attention.input) > 5 or attribute(attention, "unidirectional")
        return None if whole else attention

    def _reshaped(self, name: str) -> str | None:
        """Return the input of the Reshape that computes a value; None for another operator."""
        node = self.made.get(name)
        return node.input[0] if node is not None and node.op_type == "Reshape" else None

    def _take(self, names: list[str]) -> Iterator[NodeProto]:
        """Yield the nodes that gather the rows of first tokens from values that have all rows."""
        for name in names:
            if name not in self.narrow and name not in self.taken:
                self.taken.add(name)
                yield helper.make_node("Gather", [name, FIRSTS], [self._taken(name)])

    def _taken(self, name: str) -> str:
        return name if name in self.narrow else f"{name}.firsts"
