"""Outlier channels of feed-forward layers, which stay in fp32 next to the int8 products.

After the activation, a few channels are much larger than the others and decide the scale of most rows (tokens).
Without them the other channels have smaller steps, as in LLM.int8() (Dettmers et al. 2022). The first product no longer
computes them: their rows of its weight are zero. A small product in fp32, with the same activation, computes them as a
value of their own, which the plan of the second product reads.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import onnx
from onnx import NodeProto

from export.passes.graph_utils import (
    TRUNK,
    Weights,
    attribute,
    count_readers,
    is_trunk_product,
    producers,
    with_inputs,
)
from export.passes.row_steps import Channels, Floats, choose_outliers

ACTIVATIONS = ("Gelu", "Relu")  # they map zero to zero


class FeedForward(NamedTuple):
    """The nodes of one layer: down(activation(up(x)))."""

    up: NodeProto
    activation: NodeProto
    down: NodeProto


def outlier_name(x: str) -> str:
    """Return the name of the outlier channels of a value x."""
    return f"{x}.outliers"


def find_layers(graph: onnx.GraphProto, trunk: str = TRUNK) -> Iterator[FeedForward]:
    """Yield the feed-forward layers whose values and weights no other node reads."""
    made, readers = producers(graph), count_readers(graph)
    for down in graph.node:
        activation = made.get(down.input[0]) if is_trunk_product(down, trunk) else None
        if activation is None or activation.op_type not in ACTIVATIONS:
            continue
        up = made.get(activation.input[0])
        if up is None or not is_trunk_product(up, trunk):
            continue
        own = [up.output[0], activation.output[0], *up.input[1:], down.input[1]]
        if all(readers[name] == 1 for name in own):
            yield FeedForward(up, activation, down)


def split_outliers(
    graph: onnx.GraphProto, inputs: Mapping[str, Floats], trunk: str = TRUNK
) -> dict[str, Channels]:
    """Compute the outlier channels of an fp32 graph's feed-forward layers apart from the others.

    inputs: of the encoder's products, [T, K] by name, for some text
    Return the channels by the input's name. The input is zero there, and `outlier_name` names their values.
    """
    weights = Weights(graph)
    nodes = list(graph.node)
    split: dict[str, Channels] = {}
    for layer in find_layers(graph, trunk):
        x = layer.down.input[0]
        if x in inputs and len(channels := choose_outliers(inputs[x])):
            place = nodes.index(layer.up)
            nodes[place : place + 1] = _split(layer, channels, weights)
            split[x] = channels
    del graph.node[:]
    graph.node.extend(nodes)
    return split


def _split(layer: FeedForward, channels: Channels, weights: Weights) -> list[NodeProto]:
    """Return the nodes that replace the first product: itself without the outliers, and the outliers' own nodes."""
    up, activation, _ = layer
    assert attribute(up, "transB") == 1, f"{up.name}: expected a transposed weight"
    outliers = outlier_name(activation.output[0])
    own, rest = [], []
    for place, name in enumerate(up.input[1:]):
        value = weights[name].copy()
        own.append(weights.add(f"{outliers}.{place}", value[channels]))
        value[channels] = 0
        rest.append(weights.add(f"{name}.rest", value))
    first = with_inputs(up, [up.input[0], *own])
    first.name, first.output[:] = f"{up.name}.outliers", [f"{outliers}.linear"]
    active = with_inputs(activation, first.output)
    active.name, active.output[:] = f"{activation.name}.outliers", [outliers]
    return [with_inputs(up, [up.input[0], *rest]), first, active]
