"""Make a portable graph from a packed one: padded `[B, S]` inputs, and operators of the ONNX standard only.

Every slot of the rectangle is a token, padding included. So nothing is gathered into slots or back, and all operators
except two compute the same. Attention and the maximum over a sequence get a mask, which is added to their input.

B sequences, S longest, T = B * S tokens, N heads, D head size, H hidden, C outputs of a head
"""

from collections.abc import Iterator, Mapping, Sequence

import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, inliner, parser

from export.passes.fold import fold
from export.passes.graph_utils import attribute, producers, replace_nodes, with_inputs
from service.core.manifest import ATTENTION

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
OPSETS = [helper.make_opsetid("", 20)]
IDS = {name: f"padded.{name}" for name in ("input_ids", "token_type_ids")}  # [T] each
ROWS = "padded.rows"  # [3]: B, S, -1
# 0 at tokens, and the lowest number elsewhere
KEYS, SLOTS = "padded.keys", "padded.slots"  # [B, 1, 1, S], [B, S, 1]
WEIGHTS = ".attention_weights"  # the end of the names of the weights of a layer, [B, N, S, S]
LATER = "padded.later"  # [S, S]: the lowest number at keys after a query
# The outputs of the function `Inputs`: the inputs of a packed graph and the values above.
COMPUTED = (*IDS.values(), "position_ids", "lengths", "unpack", "pack", ROWS, KEYS, SLOTS, LATER)
FUNCTIONS = (
    """
    <domain: "padded", opset_import: ["": 20]>
    Inputs (ids, mask, types)
        => (input_ids, token_type_ids, position_ids, lengths, unpack, pack, rows, keys, slots, later)
    {
        zero = Constant <value = int64 {0}> ()
        one = Constant <value = int64 {1}> ()
        last = Constant <value_ints = [-1]> ()
        second = Constant <value_ints = [1]> ()
        inner = Constant <value_ints = [1, 2]> ()
        lowest = Constant <value_float = -3.4028234663852886e38> ()
        shape = Shape (ids)
        rows = Concat <axis = 0> (shape, last)
        input_ids = Reshape (ids, last)
        token_type_ids = Reshape (types, last)
        count = Size (ids)
        pack = Range (zero, count, one)
        unpack = Reshape (pack, shape)
        row = Shape <start = 1> (ids)
        position_ids = Mod (pack, row)
        lengths = ReduceSum <keepdims = 0> (mask, second)
        is_empty = Equal (mask, zero)
        empty = Cast <to = 1> (is_empty)
        padding = Mul (empty, lowest)
        keys = Unsqueeze (padding, inner)
        slots = Unsqueeze (padding, last)
        longest = Squeeze (row)
        columns = Range (zero, longest, one)
        queries = Unsqueeze (columns, second)
        is_later = Greater (columns, queries)
        after = Cast <to = 1> (is_later)
        later = Mul (after, lowest)
    }
    """,
    """
    <domain: "padded", opset_import: ["": 20]>
    Attention <heads: ints, scale: float> (query, key, value, mask) => (context, weights)
    {
        split = Constant <value_ints: ints = @heads> ()
        factor = Constant <value_float: float = @scale> ()
        merged = Constant <value_ints = [0, 0, -1]> ()
        queries = Reshape (query, split)
        keys = Reshape (key, split)
        values = Reshape (value, split)
        queries_by_head = Transpose <perm = [0, 2, 1, 3]> (queries)
        keys_by_head = Transpose <perm = [0, 2, 3, 1]> (keys)
        values_by_head = Transpose <perm = [0, 2, 1, 3]> (values)
        scaled = Mul (queries_by_head, factor)
        products = MatMul (scaled, keys_by_head)
        scores = Add (products, mask)
        weights = Softmax <axis = -1> (scores)
        contexts_by_head = MatMul (weights, values_by_head)
        contexts = Transpose <perm = [0, 2, 1, 3]> (contexts_by_head)
        context = Reshape (contexts, merged)
    }
    """,
)


def make_portable(packed: onnx.ModelProto) -> onnx.ModelProto:
    """Return a portable copy of a packed graph, in which attention has key lengths."""
    model = onnx.ModelProto()
    model.CopyFrom(packed)
    graph = model.graph
    per_token = [value for value in graph.output if _dimensions(value)[0] == "T"]
    calls = [*_call_functions(graph, [value.name for value in per_token])]
    added = [value for value in graph.input if value.name not in {*IDS, *COMPUTED}]
    del graph.input[:], model.opset_import[:]
    graph.input.extend(
        helper.make_tensor_value_info(name, TensorProto.INT64, ["B", "S"]) for name in INPUTS
    )
    graph.input.extend(added)
    for value in per_token:
        shape = ["B", "S", *_dimensions(value)[1:]]
        value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, shape))
    model.opset_import.extend(OPSETS)
    replace_nodes(graph, _inline(calls).node)
    fold(model)
    return model


def _dimensions(value: ValueInfoProto) -> list[str | int]:
    return [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]


def _call_functions(graph: onnx.GraphProto, per_token: Sequence[str]) -> Iterator[NodeProto]:
    """Yield the nodes of a packed graph with calls of the functions above. per_token: outputs with a row per token"""
    made = producers(graph)
    renamed = IDS | {name: f"padded.{name}" for name in per_token}
    yield helper.make_node("Inputs", INPUTS, COMPUTED, domain="padded")
    for node in graph.node:
        for new in _lower(node, made):
            new.input[:] = [renamed.get(name, name) for name in new.input]
            new.output[:] = [renamed.get(name, name) for name in new.output]
            yield new
    for name in per_token:
        yield helper.make_node("Reshape", [renamed[name], ROWS], [name])


def _lower(node: NodeProto, made: Mapping[str, NodeProto]) -> Iterator[NodeProto]:
    """Yield the nodes that replace a node of a packed graph. made: the graph's nodes by output"""
    if node.op_type == "MultiHeadAttention":
        yield from _attend(node)
    elif node.op_type == "ReduceMax":
        slots = f"{node.output[0]}.slots"
        yield helper.make_node("Add", [node.input[0], SLOTS], [slots])
        yield with_inputs(node, [slots, *node.input[1:]])
    elif _is_gather(node, made):
        yield helper.make_node("Identity", node.input[:1], node.output)
    else:
        yield with_inputs(node, node.input)


def _is_gather(node: NodeProto, made: Mapping[str, NodeProto]) -> bool:
    """Return whether a node gathers tokens into slots, or slots into tokens."""
    if node.op_type != "Gather" or node.input[1] not in made:
        return False
    index = made[node.input[1]]
    return index.op_type == "Reshape" and index.input[0] in ("unpack", "pack")


def _attend(node: NodeProto) -> Iterator[NodeProto]:
    """Yield an attention with one mask: the sum of the mask of keys, a causal mask, and a bias."""
    vectors, bias = node.input[:3], node.input[5:]
    masks = [KEYS, *([LATER] if attribute(node, "unidirectional") else []), *bias]
    mask = masks[0]
    for other in masks[1:]:
        yield helper.make_node("Add", [mask, other], [f"{node.output[0]}.{other}"])
        mask = f"{node.output[0]}.{other}"
    heads = [0, 0, attribute(node, "num_heads"), -1]
    (scale,) = (found.f for found in node.attribute if found.name == "scale")
    yield helper.make_node(
        "Attention",
        [*vectors, mask],
        [node.output[0], f"{node.output[0]}{WEIGHTS}"],
        domain="padded",
        heads=heads,
        scale=scale,
    )


def attention_graph(portable: onnx.ModelProto) -> onnx.ModelProto:
    """Return a graph of the attention weights of all L layers, `[B, L, N, S, S]`, from a portable graph."""
    model = onnx.ModelProto()
    model.CopyFrom(portable)
    graph = model.graph
    layers = [n.output[0] for n in graph.node if n.output[0].endswith(WEIGHTS)]
    needed = {*layers}
    nodes: list[NodeProto] = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            nodes.insert(0, node)
    axis = helper.make_tensor(f"{ATTENTION}.axis", TensorProto.INT64, [1], [1])
    rows = [f"{name}.layer" for name in layers]
    for name, row in zip(layers, rows, strict=True):
        nodes.append(helper.make_node("Unsqueeze", [name, axis.name], [row]))
    nodes.append(helper.make_node("Concat", rows, [ATTENTION], axis=1))
    weights = [axis, *(tensor for tensor in graph.initializer if tensor.name in needed)]
    inputs = [value for value in graph.input if value.name in needed]
    shape: list[str | int | None] = ["B", len(layers), "N", "S", "S"]
    output = helper.make_tensor_value_info(ATTENTION, TensorProto.FLOAT, shape)
    model.graph.CopyFrom(helper.make_graph(nodes, ATTENTION, inputs, [output], weights))
    return model


def _inline(calls: Sequence[NodeProto]) -> onnx.GraphProto:
    """Return a graph with the bodies of the functions that nodes call."""
    model = helper.make_model(
        helper.make_graph(calls, "calls", [], []),
        functions=map(parser.parse_function, FUNCTIONS),
        opset_imports=[*OPSETS, helper.make_opsetid("padded", 1)],
    )
    return inliner.inline_local_functions(model).graph
