"""Run a graph for CUDA without a GPU: the same file, node by node, each result exact and rounded once to its own type.

ONNX Runtime has no CPU kernel for `PackedMultiHeadAttention`, and computes most other nodes of an fp16 graph in fp32 on
a CPU, which would hide the rounding and the overflows of fp16. Here a product is summed in float64 and rounded to its
output's type. A GPU sums in fp32 and in another order, so its outputs differ from these by rounding. The one exception
is `SkipLayerNormalization`, whose kernel computes in fp16 throughout.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch import Tensor

from export.passes.half_norm import skip_norm
from service.core.packing import Packed, mask_positions
from service.core.session import BatchOutputs, packed_feeds

Array = NDArray[Any]


def emulated(path: Path, mask_token_id: int | None = None) -> Callable[[Packed], BatchOutputs]:
    """Return a function that runs a file's graph on packed batches, as `Session.run` does on the device.

    mask_token_id: of a graph with a fill-mask head
    """
    graph = evaluator(path)

    def run(packed: Packed) -> BatchOutputs:
        feeds = packed_feeds(packed, graph.input_names)
        if mask_token_id is not None:
            feeds["positions"] = mask_positions(packed, mask_token_id)
        with np.errstate(over="ignore", invalid="ignore"):  # the checks find infinities
            outputs = graph.run(None, feeds)
        return dict(zip(graph.output_names, outputs, strict=True))

    return run


def evaluator(path: Path) -> ReferenceEvaluator:
    return ReferenceEvaluator(
        onnx.load(path), new_ops=[Gemm, Gelu, PackedMultiHeadAttention, SkipLayerNormalization]
    )


def _wide(array: Array) -> Tensor:
    return torch.from_numpy(array.astype(np.float64))


def _rounded(exact: Tensor, like: Array) -> tuple[Array]:
    return (exact.numpy().astype(like.dtype),)


class Gemm(OpRun):
    """x @ W.T + b: the only form in our graphs."""

    alpha: float
    beta: float
    transA: int
    transB: int

    def _run(self, x: Array, weight: Array, bias: Array | None = None, **_: Any) -> tuple[Array]:
        assert (self.alpha, self.beta, self.transA, self.transB) == (1, 1, 0, 1)
        wide = None if bias is None else _wide(bias)
        return _rounded(F.linear(_wide(x), _wide(weight), wide), x)


class Gelu(OpRun):
    approximate: str

    def _run(self, x: Array, **_: Any) -> tuple[Array]:
        return _rounded(F.gelu(_wide(x), approximate=self.approximate), x)


class SkipLayerNormalization(OpRun):
    """The norm of a sum of two values and a bias. The kernel rounds the sum after each term."""

    op_domain = "com.microsoft"
    epsilon: float

    def _run(
        self,
        x: Array,  # [T, H]
        skip: Array,
        scale: Array,  # [H]
        shift: Array,
        bias: Array | None = None,
        **_: Any,
    ) -> tuple[Array]:
        added = torch.from_numpy(x + skip if bias is None else (x + bias) + skip)
        gain, offset = torch.tensor(scale), torch.tensor(shift)
        return (skip_norm(added, gain, offset, self.epsilon).numpy(),)


class PackedMultiHeadAttention(OpRun):
    """The operator as documented: tokens go to the slots in `token_offset`, and their outputs return to `[T, H]`."""

    op_domain = "com.microsoft"
    num_heads: int
    scale: float | None = None  # 1 / sqrt(D)

    def _run(
        self,
        query: Array,  # [T, H]
        key: Array,
        value: Array,
        bias: None,
        token_offset: Array,  # [B, S]
        cumulative_sequence_length: Array,  # [B + 1]
        attention_bias: Array | None = None,  # [1 or B, 1 or N, S, S]
        **_: Any,
    ) -> tuple[Array]:
        batch, longest = token_offset.shape
        slots = token_offset.reshape(-1)[: len(query)]
        real = np.arange(longest) < np.diff(cumulative_sequence_length)[:, None]

        def spread(rows: Array) -> Tensor:
            padded = np.zeros((batch * longest, rows.shape[1]), rows.dtype)
            padded[slots] = rows
            return _wide(padded).view(batch, longest, self.num_heads, -1).transpose(1, 2)

        mask = torch.from_numpy(real)[:, None, None]
        if attention_bias is not None:
            mask = _wide(attention_bias).masked_fill(~mask, -np.inf)
        context = F.scaled_dot_product_attention(
            spread(query), spread(key), spread(value), attn_mask=mask, scale=self.scale
        )
        return _rounded(context.transpose(1, 2).reshape(batch * longest, -1)[slots], query)
