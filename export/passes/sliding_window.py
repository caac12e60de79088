"""Sliding window: compute the attention of a layer with a window in blocks, so that it costs by the window.

A bias hides the keys outside the window, but their scores are computed: S for each query. This pass gathers queries in
blocks of BLOCK slots, and for each block the keys that its queries may reach (Beltagy et al. 2020). A batch whose
longest sequence is short is one block with all keys, which costs what it did.

B sequences, S longest, T tokens, N heads, D head size, n blocks of a sequence, L queries and K keys of a block
"""

from collections.abc import Iterator
from typing import Any

import onnx
from onnx import NodeProto, helper, inliner, parser

from export.passes.fold import fold
from export.passes.graph_utils import attribute, producers, replace_nodes, with_inputs

BLOCK = 128  # L of long sequences
SHORT = 512  # slots of a sequence that is one block
MARK = "reach "  # begins the doc_string of a node whose attention has a window, before the tokens on a side
# queries [B * n, L] and keys [B * n, K]: indices of tokens; mask [B * n, K]: 1 where a key has a token
# bias [1 or B * n, 1, L, K]; back [T]: the place of each token in the blocks
# A key's place in its block decides how a kernel rounds. It depends on the sequence alone, so that results do not
# depend on the batch: keys of a sequence of at most `short` tokens begin with its first token in any batch.
# The Identity ends first-token pruning: the scalars that it depends on have no rows of tokens.
BLOCKS = """
    <domain: "window", opset_import: ["": 20]>
    Blocks <reach: int, ahead: int, block: int, short: int> (unpack, lengths, pack) => (queries, keys, mask, bias, back)
    {
        zero = Constant <value = int64 {0}> ()
        one = Constant <value = int64 {1}> ()
        last = Constant <value_ints = [-1]> ()
        second = Constant <value_ints = [1]> ()
        third = Constant <value_ints = [2]> ()
        inner = Constant <value_ints = [1, 2]> ()
        zero_row = Constant <value_ints = [0]> ()
        hidden = Constant <value_float = -32752.0> ()
        most = Constant <value_int: int = @short> ()
        part = Constant <value_int: int = @block> ()
        before = Constant <value_int: int = @reach> ()
        after = Constant <value_int: int = @ahead> ()
        row = Shape <start = 1> (unpack)
        slots = Squeeze (row)
        is_long = Greater (slots, most)
        size = Where (is_long, part, slots)
        halo = Where (is_long, before, zero)
        rest = Where (is_long, after, zero)
        enough = Add (slots, size)
        filled = Sub (enough, one)
        count = Div (filled, size)
        columns = Range (zero, size, one)
        numbers = Range (zero, count, one)
        firsts = Mul (numbers, size)
        starts = Unsqueeze (firsts, second)
        final = Sub (slots, one)
        query_slots = Add (starts, columns)
        real_query_slots = Min (query_slots, final)
        query_tokens = Gather <axis = 1> (unpack, real_query_slots)
        size_row = Unsqueeze (size, zero_row)
        query_shape = Concat <axis = 0> (last, size_row)
        queries = Reshape (query_tokens, query_shape)
        column = Unsqueeze (lengths, second)
        is_short = LessOrEqual (column, most)
        short_lengths = Where (is_short, column, zero)
        longest_short = ReduceMax <keepdims = 0> (short_lengths)
        halos = Add (halo, rest)
        reached = Add (size, halos)
        width = Max (reached, longest_short)
        places = Range (zero, width, one)
        reached_firsts = Sub (firsts, halo)
        key_firsts = Where (is_short, zero, reached_firsts)
        key_starts = Unsqueeze (key_firsts, third)
        key_slots = Add (key_starts, places)
        low_key_slots = Min (key_slots, final)
        real_key_slots = Max (low_key_slots, zero)
        key_rows = Flatten (real_key_slots)
        key_tokens = GatherElements <axis = 1> (unpack, key_rows)
        width_row = Unsqueeze (width, zero_row)
        key_shape = Concat <axis = 0> (last, width_row)
        keys = Reshape (key_tokens, key_shape)
        ends = Unsqueeze (lengths, inner)
        is_after = GreaterOrEqual (key_slots, zero)
        is_before = Less (key_slots, ends)
        is_key = And (is_after, is_before)
        keys_of_block = Reshape (is_key, key_shape)
        mask = Cast <to = 6> (keys_of_block)
        shifts = Sub (key_firsts, firsts)
        shift_row = Reshape (shifts, last)
        blocks = Size (shift_row)
        has_short = Greater (longest_short, zero)
        is_mixed = And (is_long, has_short)
        biases = Where (is_mixed, blocks, one)
        biases_row = Unsqueeze (biases, zero_row)
        own_shifts = Slice (shift_row, zero_row, biases_row)
        block_shifts = Unsqueeze (own_shifts, inner)
        offsets = Add (block_shifts, places)
        rows = Unsqueeze (columns, second)
        distances = Sub (offsets, rows)
        low = Neg (before)
        is_far_before = Less (distances, low)
        is_far_after = Greater (distances, after)
        is_far = Or (is_far_before, is_far_after)
        far = Cast <to = 1> (is_far)
        scores = Mul (far, hidden)
        bias = Unsqueeze (scores, second)
        slots_of_blocks = Mul (count, size)
        more = Sub (slots_of_blocks, slots)
        sequence = Div (pack, slots)
        added = Mul (sequence, more)
        places_in_blocks = Add (pack, added)
        back = Identity (places_in_blocks)
    }
"""


def lower_windows(model: onnx.ModelProto) -> None:
    """Rewrite, in place, each attention of a packed graph that is marked and whose inputs are gathered tokens."""
    graph = model.graph
    made = producers(graph)
    windows = {node.output[0]: window for node in graph.node if (window := _find(node, made))}
    names = {around: f"window.{around[0]}.{around[1]}" for around, _ in windows.values()}
    if not names:
        return
    readers = {node.input[0]: node for node in graph.node if node.op_type in ("Reshape", "Gather")}
    # The index of tokens among the slots of blocks, by the output of the Gather.
    back: dict[str, str] = {}
    for output, (around, _) in windows.items():
        gather = readers[readers[output].output[0]]
        back[gather.output[0]] = f"{names[around]}.back"
    nodes = [node for around, name in names.items() for node in _blocks(*around, name)]
    for node in graph.node:
        if node.output[0] in windows:
            around, tokens = windows[node.output[0]]
            nodes += _attend(node, names[around], tokens)
        elif node.output[0] in back:
            nodes.append(with_inputs(node, [node.input[0], back[node.output[0]]]))
        else:
            nodes.append(with_inputs(node, node.input))
    replace_nodes(graph, nodes)
    fold(model)


def _find(
    node: NodeProto, made: dict[str, NodeProto]
) -> tuple[tuple[int, int], list[tuple[str, NodeProto | None]]] | None:
    """Return the tokens before and after a query that a marked attention reaches, and its inputs; None for others.

    An input (queries, keys or values) is a value, or an output of a Split of it.
    """
    if node.op_type != "MultiHeadAttention" or not node.doc_string.startswith(MARK):
        return None
    tokens = [_tokens(name, made) for name in node.input[:3]]
    found = [one for one in tokens if one is not None]
    if len(found) < len(tokens):
        return None
    reach = int(node.doc_string.removeprefix(MARK))
    return (reach, 0 if attribute(node, "unidirectional") else reach), found


def _tokens(name: str, made: dict[str, NodeProto]) -> tuple[str, NodeProto | None] | None:
    node, split = made[name], None
    if node.op_type == "Split" and attribute(node, "axis") == -1:
        node, split = made[node.input[0]], node
    if node.op_type != "Reshape" or (gather := made[node.input[0]]).op_type != "Gather":
        return None
    index = made.get(gather.input[1])
    if index is None or index.op_type != "Reshape" or index.input[0] != "unpack":
        return None
    return gather.input[0], split


def _attend(
    node: NodeProto, name: str, tokens: list[tuple[str, NodeProto | None]]
) -> Iterator[NodeProto]:
    """Yield an attention within blocks, after the gathers of its inputs."""
    inputs: list[str] = []
    parts: dict[str, str] = {}
    for place, (value, split) in zip(node.input, tokens, strict=False):
        if split is not None and split.output[0] not in parts:
            own = [f"{output}.tokens" for output in split.output]
            parts |= dict(zip(split.output, own, strict=True))
            yield helper.make_node("Split", [value, split.input[1]], own, axis=-1)
        index = f"{name}.{'keys' if inputs else 'queries'}"
        inputs.append(f"{place}.blocks")
        yield helper.make_node("Gather", [parts.get(place, value), index], inputs[-1:])
    attention = with_inputs(node, [*inputs, "", f"{name}.mask", f"{name}.bias"])
    # The bias has the causal mask.
    for found in [one for one in attention.attribute if one.name == "unidirectional"]:
        attention.attribute.remove(found)
    yield attention


def _blocks(reach: int, ahead: int, name: str) -> Iterator[NodeProto]:
    """Yield the nodes that compute the indices, the mask and the bias of a window."""
    outputs = [f"{name}.{part}" for part in ("queries", "keys", "mask", "bias", "back")]
    short = max(SHORT, 2 * (BLOCK + reach + ahead))
    inputs = ["unpack", "lengths", "pack"]
    sizes: dict[str, Any] = {"reach": reach, "ahead": ahead, "block": BLOCK, "short": short}
    call = helper.make_node("Blocks", inputs, outputs, domain="window", **sizes)
    function = parser.parse_function(BLOCKS)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("window", 1)]
    graph = helper.make_graph([call], name, [], [])
    whole = helper.make_model(graph, functions=[function], opset_imports=opsets)
    for node in inliner.inline_local_functions(whole).graph.node:
        kept = {*inputs, *outputs}
        for names in (node.input, node.output):
            names[:] = [one if one in kept or not one else f"{name}.{one}" for one in names]
        yield node
