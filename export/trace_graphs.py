"""Trace a model to packed ONNX graphs for ONNX Runtime's attention kernels on a CPU or CUDA.

`docs/reference/bundle.md` specifies the names.

T tokens, B sequences, S longest, M mask tokens, C outputs of a head
"""

import hashlib
import logging
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import torch
from onnx.external_data_helper import set_external_data
from torch import Tensor, nn
from torch.export import Dim

from export.passes import mask_free_attention
from export.passes.fold import fold
from export.passes.graph_utils import check_model, read_tensor
from export.passes.joint_gather import join_gathers
from export.passes.sliding_window import MARK, lower_windows
from model.attention import PackedLayout
from model.heads import EncoderWithHeads, WordLabels
from service.core import packing
from service.core.manifest import INPUTS, Head

OPSET = 20
ALIGNMENT = 4096  # page size: the runtime may then map the file instead of reading it
LARGE = 2**16  # bytes; larger weights of a traced graph are not in the graph
SMALL = 1024  # bytes; smaller tensors stay in the graph, where shape inference can see them

PACKED_INPUTS = ["input_ids", "token_type_ids", "position_ids", "lengths", "unpack", "pack"]
CUDA_INPUTS = [*PACKED_INPUTS[:4], "token_offset", "cu_seqlens"]
ATTENTION_BIAS = 6  # place among the inputs of PackedMultiHeadAttention
MASKS = "positions"  # a further input, where a head has a row for each mask token
WORD_LABELS = [
    *WordLabels._fields
]  # further inputs, where a head has a row for each word and label


class PackedGraph(nn.Module):
    """`[T]` tokens with their layout -> every head's output."""

    def __init__(self, model: EncoderWithHeads) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        lengths: Tensor,
        unpack: Tensor,
        pack: Tensor,
        positions: Tensor | None = None,
        words: Tensor | None = None,
        labels: Tensor | None = None,
        pairs: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        layout = PackedLayout(lengths, unpack, pack)
        inputs = (input_ids, token_type_ids, position_ids, layout)
        of = None
        if words is not None and labels is not None and pairs is not None:
            of = WordLabels(words, labels, pairs)
        return tuple(self.model(*inputs, positions=positions, of=of).values())


class PackedCuda(nn.Module):
    """`[T]` tokens with the layout of CUDA's packed attention -> every head's output. It derives the heads' layout."""

    def __init__(self, model: EncoderWithHeads) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        lengths: Tensor,
        token_offset: Tensor,
        cu_seqlens: Tensor,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        columns = torch.arange(token_offset.shape[1])  # [S]
        firsts = cu_seqlens[:-1, None].to(torch.int64)  # [B, 1]
        unpack = firsts + torch.where(columns < lengths[:, None], columns, 0)  # [B, S]
        pack = token_offset.reshape(-1)[: input_ids.shape[0]].to(torch.int64)  # [T]
        layout = PackedLayout(lengths, unpack, pack, cu_seqlens, token_offset)
        inputs = (input_ids, token_type_ids, position_ids, layout)
        return tuple(self.model(*inputs, positions=positions).values())


def export_packed(model: EncoderWithHeads) -> onnx.ModelProto:
    """Trace the packed graph, and remove the mask of attention where possible.

    Raises ValueError for a head with the name of an input.
    """
    proto = trace_packed(model)
    lower_windows(proto)
    mask_free_attention.drop_masks(proto)
    return proto


def trace_packed(model: EncoderWithHeads, weights: Path | None = None) -> onnx.ModelProto:
    """Trace the packed graph: `com.microsoft.MultiHeadAttention` with key lengths, between two gathers.

    weights: a file for the large weights, so that copies of the graph are small; None keeps them in the graph
    Raises ValueError for a head with the name of an input.
    """
    layout, token, batch, slot = _sample()
    arrays = [*_tokens(layout), layout.unpack, layout.pack]
    dims = [{0: token}] * 3 + [{0: batch}, {0: batch, 1: slot}, {0: token}]
    return _trace(PackedGraph(model), arrays, dims, PACKED_INPUTS, model.described, weights)


def export_cuda(model: EncoderWithHeads) -> onnx.ModelProto:
    """Trace the packed graph for CUDA: `com.microsoft.PackedMultiHeadAttention`, without padding in the encoder.

    Raises ValueError for a head with the name of an input.
    """
    layout, token, batch, slot = _sample()
    arrays = [*_tokens(layout), layout.token_offset(), layout.cu_seqlens]
    dims = [{0: token}] * 3 + [{0: batch}, {0: batch, 1: slot}, {0: batch + 1}]
    return _trace(PackedCuda(model), arrays, dims, CUDA_INPUTS, model.described)


def _sample() -> tuple[packing.Layout, Dim, Dim, Dim]:
    """Return a layout to trace with, and the dynamic dimensions T, B and S."""
    return packing.make_layout([5, 3, 2]), Dim("T"), Dim("B"), Dim("S")


def _tokens(layout: packing.Layout) -> list[np.ndarray]:
    count = len(layout.pack)
    ids, types = np.ones(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    return [ids, types, packing.positions(layout), layout.lengths]


def has_attention_bias(proto: onnx.ModelProto) -> bool:
    """Return whether any attention of a graph for CUDA adds a bias to its scores."""
    packed = (node for node in proto.graph.node if node.op_type == "PackedMultiHeadAttention")
    return any(len(node.input) > ATTENTION_BIAS and node.input[ATTENTION_BIAS] for node in packed)


def _trace(
    module: nn.Module,
    arrays: Iterable[np.ndarray],
    dims: list[dict[int, Dim]],
    inputs: list[str],
    heads: Mapping[str, Head],
    weights: Path | None = None,
) -> onnx.ModelProto:
    outputs = [*heads]
    _check_names(outputs)
    if any(head.per_mask for head in heads.values()):
        arrays, inputs = [*arrays, np.array([1, 2, 4])], [*inputs, MASKS]
        dims = [*dims, {0: Dim("M")}]
    if any(head.per_pair for head in heads.values()):
        words, labels = (
            np.array([[1, 2, 3], [6, 7, 5], [9, 8, 8]]),
            np.array([[4, 3], [5, 6], [8, 9]]),
        )
        arrays, inputs = [*arrays, words, labels, np.arange(7)], [*inputs, *WORD_LABELS]
        batch = dims[inputs.index("lengths")][0]
        dims = [*dims, {0: batch, 1: Dim("W")}, {0: batch, 1: Dim("C")}, {0: Dim("P")}]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for name in ("torch.onnx", "onnxscript"):
            logging.getLogger(name).setLevel(logging.ERROR)
        program = torch.onnx.export(
            module.eval(),
            kwargs=dict(zip(inputs, map(torch.from_numpy, arrays), strict=True)),
            dynamic_shapes=dict(zip(inputs, dims, strict=True)),
            input_names=inputs,
            output_names=[f"output.{name}" for name in outputs],
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    if weights is not None:
        move_weights(program.model, weights)
    return _tidy(program.model_proto, outputs)


def move_weights(model: onnx_ir.Model, file: Path) -> None:
    """Write the large weights of a traced graph to a file, whose place and path the graph then has."""
    with file.open("wb") as opened:
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor is None or tensor.nbytes < LARGE:
                continue
            offset = opened.tell()
            tensor.numpy().tofile(opened)
            place = (file, offset, tensor.nbytes, tensor.dtype)
            shape = onnx_ir.Shape(tensor.shape.numpy())
            value.const_value = onnx_ir.ExternalTensor(*place, shape=shape, name=str(value.name))


def _check_names(heads: Iterable[str]) -> None:
    for name in heads:
        if name in INPUTS:
            raise ValueError(f"a head cannot be named {name}: that is a graph's input")


def _tidy(proto: onnx.ModelProto, outputs: list[str]) -> onnx.ModelProto:
    """Name the outputs after the heads, and drop debug texts. A traced value with a head's name gets another."""
    renamed = {name: f"{name}.value" for name in outputs}
    renamed |= {value.name: name for value, name in zip(proto.graph.output, outputs, strict=True)}
    for node in proto.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
        del node.metadata_props[:]
        node.doc_string = ""
        for found in [one for one in node.attribute if one.name == "reach"]:  # not of the operator
            node.doc_string = f"{MARK}{found.i}"
            node.attribute.remove(found)
    for value in proto.graph.output:
        value.name = renamed[value.name]
    del proto.graph.value_info[:]
    del proto.metadata_props[:]
    del proto.graph.metadata_props[:]
    fold(proto)
    join_gathers(proto)
    check_model(proto)
    return proto


def save_sharing_weights(graphs: dict[Path, onnx.ModelProto], weights: Path) -> None:
    """Write graphs whose large tensors are in one external file, each tensor once for all graphs.

    The file contains the model's weights only, because `embedding_space` is a hash of it.
    """
    offsets: dict[bytes, int] = {}
    with weights.open("wb") as file:
        for proto in graphs.values():
            for tensor in proto.graph.initializer:
                raw = read_tensor(tensor).tobytes()
                if len(raw) >= SMALL and not tensor.name.startswith(mask_free_attention.PREFIX):
                    key = hashlib.sha256(raw).digest()
                    if key not in offsets:
                        file.write(b"\0" * (-file.tell() % ALIGNMENT))
                        offsets[key] = file.tell()
                        file.write(raw)
                    tensor.raw_data = b""  # without the field, the next function refuses
                    set_external_data(tensor, weights.name, offsets[key], len(raw))
                    tensor.ClearField("raw_data")
    for path, proto in graphs.items():
        path.write_bytes(proto.SerializeToString(deterministic=True))
