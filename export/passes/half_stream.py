"""fp16 residual stream: in a graph for CUDA, a sum and its norm are one kernel that reads and writes fp16.

`fp16` leaves sums and norms in fp32. A post-norm layer then writes each sum, each norm and their casts to memory as
separate kernels. This pass replaces

    Cast(product) + x -> LayerNormalization -> Cast      by      SkipLayerNormalization(product, x)

with all of its numbers in fp16. On one H200, the prototype of this pass reached 1.30 times the throughput of BERT-base
and 1.20 times that of MiniLM's shape at 64 x 128 tokens (research/2026-11-26-gpu-first-measurements.md).

ONNX Runtime's kernel computes such a norm in fp16: a row whose mean square passes 65,504 becomes the norm's shift,
which is wrong but finite. Its strict mode sums in fp32. The service sets it, but it is an option of the session, which
a graph cannot contain. So `fitting_norms` selects the norms that fp16 sums compute well, with a margin; others stay
in fp32.

T tokens, H hidden
"""

from collections.abc import Collection, Iterator
from functools import partial

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import NodeProto, TensorProto, helper
from torch import Tensor, nn

from export.passes.graph_utils import (
    Weights,
    attribute,
    count_readers,
    producers,
    replace_nodes,
    with_inputs,
)
from export.passes.half_norm import skip_norm
from model.attention import PackedLayout
from model.heads import EncoderWithHeads
from service.core.packing import Packed

ROW_ERROR = 0.01  # of a norm's output, as a share of its length; fp16's own step is a thousandth
# Other texts may have smaller or larger sums: a norm has to fit with these factors.
MARGINS = (0.5, 1.0, 4.0)


def fitting_norms(model: EncoderWithHeads, packed: Packed) -> set[str]:
    """Return the names of the layer norms whose inputs, for these tokens, neither overflow nor lose digits in fp16."""
    norms = {
        name: module
        for name, module in model.encoder.named_modules(prefix="encoder")
        if isinstance(module, nn.LayerNorm)
    }
    worst = dict.fromkeys(norms, 0.0)

    def measure(name: str, norm: nn.LayerNorm, inputs: tuple[Tensor, ...]) -> None:
        errors = [_row_error(norm, factor * inputs[0]) for factor in MARGINS]
        worst[name] = float(np.max([worst[name], *errors]))  # unlike Python's, it keeps a NaN

    hooks = [
        module.register_forward_pre_hook(partial(measure, name)) for name, module in norms.items()
    ]
    arrays = (packed.input_ids, packed.token_type_ids, packed.position_ids)
    try:
        with torch.no_grad():
            model.eval()(*map(torch.from_numpy, arrays), PackedLayout.of(packed.layout), heads=[])
    finally:
        for hook in hooks:
            hook.remove()
    return {name for name, error in worst.items() if error <= ROW_ERROR}


def _row_error(norm: nn.LayerNorm, x: Tensor) -> float:
    """Return the largest relative error that the kernel makes in a row of `x` [T, H]."""
    if norm.bias is None:
        return float("nan")
    exact = F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    half = skip_norm(x.half(), norm.weight.half(), norm.bias.half(), norm.eps).float()
    return float(((half - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


def fuse_norms(model: onnx.ModelProto, norms: Collection[str]) -> None:
    """Rewrite, in place, each of these norms whose input is a sum that nothing else reads, of values that are in fp16.

    A value counts as fp16 if a product has computed it so, or if the graph rounds it for the next product, as in
    post-norm layers. The residual stream of a pre-norm layer is neither, and stays in fp32.

    norms: their names in the model, such as `encoder.layers.0.attention_norm`
    """
    graph = model.graph
    fusion = _Fusion(graph, {f"model.{name}.weight" for name in norms})
    nodes = [new for node in graph.node for new in fusion.rewrite(node)]
    replace_nodes(graph, nodes)


class _Fusion:
    """The state of one pass over the nodes in topological order.

    half: the fp16 form of each fp32 value that has one so far
    aliases: new names of fp16 values that were casts
    """

    def __init__(self, graph: onnx.GraphProto, scales: Collection[str]) -> None:
        self.scales = scales
        self.weights = Weights(graph)
        self.made = producers(graph)
        self.readers = count_readers(graph)
        self.half: dict[str, str] = {}
        self.aliases: dict[str, str] = {}

    def rewrite(self, node: NodeProto) -> Iterator[NodeProto]:
        """Yield the nodes that replace a node. Nodes that nothing reads any more are left for removal."""
        if self._fuses(node):
            yield from self._fused(node)
            return
        if node.op_type == "Cast":
            source, to = node.input[0], attribute(node, "to")
            if to == TensorProto.FLOAT and self._computes_half(source):
                self.half[node.output[0]] = source
            elif to == TensorProto.FLOAT16 and source in self.half:
                self.aliases[node.output[0]] = self.half[source]
                return
            elif to == TensorProto.FLOAT16:
                self.half[source] = node.output[0]
        yield with_inputs(node, [self.aliases.get(name, name) for name in node.input])

    def _fuses(self, node: NodeProto) -> bool:
        """Return whether a node is one of the norms, and the terms of its sum exist in fp16."""
        if node.op_type != "LayerNormalization" or node.input[1] not in self.scales:
            return False
        added = self._sum(node.input[0])
        return added is not None and all(map(self._exists_in_half, added.input))

    def _fused(self, norm: NodeProto) -> Iterator[NodeProto]:
        """Yield a norm of two fp16 terms, and its output in fp32 for the nodes that read it so."""
        out = norm.output[0]
        terms = list(self.made[norm.input[0]].input)
        for term in terms:
            yield from self._in_half(term)
        terms.sort(key=lambda term: not self._is_product(term))  # the first takes the bias
        scale, shift = (
            self.weights.add(f"{name}.half", self.weights[name].astype(np.float16))
            for name in norm.input[1:3]
        )
        fused = f"{out}.half"
        yield helper.make_node(
            "SkipLayerNormalization",
            [*(self.half[term] for term in terms), scale, shift],
            [fused],
            norm.name,
            domain="com.microsoft",
            epsilon=next(found.f for found in norm.attribute if found.name == "epsilon"),
        )
        yield helper.make_node("Cast", [fused], [out], to=TensorProto.FLOAT)
        self.half[out] = fused

    def _sum(self, name: str) -> NodeProto | None:
        """Return the Add that computes a value with one reader; None for another value."""
        node = self.made.get(name)
        return node if node and node.op_type == "Add" and self.readers[name] == 1 else None

    def _exists_in_half(self, name: str) -> bool:
        """Return whether a value exists in fp16, or is a sum of such values, as of three embeddings."""
        if name in self.half:
            return True
        added = self._sum(name)
        return added is not None and all(map(self._exists_in_half, added.input))

    def _in_half(self, name: str) -> Iterator[NodeProto]:
        """Yield the nodes that compute such a sum in fp16."""
        if name not in self.half:
            terms = self.made[name].input
            for term in terms:
                yield from self._in_half(term)
            self.half[name] = f"{name}.half"
            yield helper.make_node("Add", [self.half[term] for term in terms], [self.half[name]])

    def _is_product(self, name: str) -> bool:
        """Return whether a product computes a value's fp16 form."""
        node = self.made.get(self.half[name])
        return node is not None and node.op_type == "Gemm"

    def _computes_half(self, name: str) -> bool:
        """Return whether a product or a lookup computes a value in fp16."""
        place = {"Gemm": 1, "Gather": 0}  # of the weight among the inputs
        node = self.made.get(name)
        if node is None or node.op_type not in place:
            return False
        weight = node.input[place[node.op_type]]
        return weight in self.weights and self.weights[weight].dtype == np.float16
