"""Attention: one function with one contract, and the only place that has several lowerings.

    attention(qkv, num_heads, layout, dropout, bias, scale) -> context        qkv [T, 3H] -> [T, H]

Every other part of the model works on packed tokens `[T, H]` and has no padding. Here the tokens are gathered into
`[B, S]` slots and back, in the fastest way of the device or the exported graph:

    PyTorch      gather, `scaled_dot_product_attention` with a key mask, gather back
    CPU half     the formula in separate operations if gradients are needed: a faster backward pass
    CUDA half    `varlen_attn` on `cu_seqlens`: no padding at all
    ONNX         gather, `com.microsoft.MultiHeadAttention` with key lengths, gather back
                 (`export.passes.mask_free_attention` replaces the lengths where it can,
                 and `export.passes.portable` the operator)
    ONNX CUDA    `com.microsoft.PackedMultiHeadAttention` on `token_offset` and `cu_seqlens`: no padding

Shapes as in `model/bert.py`: T tokens, B sequences, S longest, N heads, D head size, H hidden
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from service.core import packing

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PackedLayout:
    """`service.core.packing.Layout` as tensors on the model's device.

    A slot is a place in the `[B, S]` rectangle. token_offset is set only to trace a graph for CUDA.
    """

    lengths: Tensor  # [B] tokens of each sequence, without the last ones that no token attends to
    unpack: Tensor  # [B, S] the token in each slot
    pack: Tensor  # [T] the slot of each token
    cu_seqlens: Tensor | None = None  # [B + 1] int32, where each sequence begins and the last ends
    token_offset: Tensor | None = None  # [B, S] int32
    full: bool = False  # all sequences are S long: slots are tokens, and nothing is gathered

    @classmethod
    def of(cls, layout: packing.Layout, device: torch.device | str = "cpu") -> "PackedLayout":
        return cls(
            torch.as_tensor(layout.attended, device=device),
            torch.as_tensor(layout.unpack, device=device),
            torch.as_tensor(layout.pack, device=device),
            torch.as_tensor(layout.cu_seqlens, device=device),
            full=layout.unpack.size == layout.pack.size == layout.attended.sum(),
        )

    @property
    def first_indices(self) -> Tensor:
        """The packed index of each sequence's first token, `[B]`."""
        return self.unpack[:, 0]  # [B]


class ScaledDotProductAttention(nn.Module):
    """`attention` as a module without parameters, so that `training.capture` can hook its inputs.

    scale: of the scores, 1 / sqrt(D) by default
    """

    def __init__(self, num_heads: int, dropout: float, scale: float | None = None):
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.scale = scale

    def forward(self, qkv: Tensor, layout: PackedLayout, bias: Tensor | None = None) -> Tensor:
        """`[T, 3H]` -> `[T, H]`."""
        dropout = self.dropout if self.training else 0.0
        return attention(qkv, self.num_heads, layout, dropout, bias, self.scale)

    def weights(self, qkv: Tensor, layout: PackedLayout, bias: Tensor | None = None) -> Tensor:
        """The attention weights, `[T, 3H]` -> `[B, N, S, S]`: each row (a query's weights) sums to one."""
        query, key, _ = by_head(qkv, self.num_heads, layout)  # [B, N, S, D]
        bias = None if bias is None else bias.to(qkv.dtype)
        return _softmax(query, key, _key_mask(layout, bias), self.scale)  # [B, N, S, S]


def attention(
    qkv: Tensor,
    num_heads: int,
    layout: PackedLayout,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Scaled dot-product self-attention within each sequence (Vaswani et al. 2017): `[T, 3H]` -> `[T, H]`.

    bias: added to the scaled scores, `[1 or B, 1 or N, S, S]`
    scale: of the scores, 1 / sqrt(D) by default
    """
    if bias is not None:
        bias = bias.to(qkv.dtype)
    if torch.onnx.is_in_onnx_export():
        lowering = _onnx if layout.token_offset is None else _onnx_cuda
        return lowering(qkv, num_heads, layout, bias, scale)
    if qkv.is_cuda and qkv.dtype in HALF and not dropout and bias is None:
        return _varlen(qkv, num_heads, layout, scale)
    return _gathered(qkv, num_heads, layout, dropout, bias, scale)


# -- between tokens and slots ------------------------------------------------------------------------------------------


def count_slots(layout: PackedLayout) -> int:
    """S, the length of a batch's longest sequence."""
    return layout.unpack.shape[1]


def to_slots(x: Tensor, layout: PackedLayout) -> Tensor:
    """`[T, W]` -> `[B, S, W]`; the content of slots after a sequence's end is undefined."""
    if not layout.full:
        x = x.index_select(0, layout.unpack.reshape(-1))  # [B * S, W]
    return x.view(*layout.unpack.shape, -1)  # [B, S, W]


def from_slots(x: Tensor, layout: PackedLayout) -> Tensor:
    """`[B, S, W]` -> `[T, W]`"""
    x = x.reshape(-1, x.shape[-1])  # [B * S, W]
    return x if layout.full else x.index_select(0, layout.pack)  # [T, W]


def real_slots(layout: PackedLayout) -> Tensor:
    """`[B, S]`, True where a slot has a token."""
    columns = torch.arange(layout.unpack.shape[1], device=layout.lengths.device)  # [S]
    return columns < layout.lengths[:, None]  # [B, S]


def by_head(qkv: Tensor, num_heads: int, layout: PackedLayout) -> tuple[Tensor, Tensor, Tensor]:
    """`[T, 3H]` -> query, key, value in slots, each `[B, N, S, D]`."""
    slots = to_slots(qkv, layout)  # [B, S, 3H]
    slots = slots.view(*slots.shape[:2], 3, num_heads, -1)  # [B, S, 3, N, D]
    query, key, value = slots.permute(2, 0, 3, 1, 4)  # [B, N, S, D] each
    return query, key, value


def _key_mask(layout: PackedLayout, bias: Tensor | None) -> Tensor:
    """The mask of keys: True where a slot has a token, `[B, 1, 1, S]`, or the bias with -inf elsewhere."""
    real = real_slots(layout)[:, None, None, :]  # [B, 1, 1, S]
    return real if bias is None else bias.masked_fill(~real, -torch.inf)  # [B, N, S, S]


# -- PyTorch -----------------------------------------------------------------------------------------------------------


def _gathered(
    qkv: Tensor,
    num_heads: int,
    layout: PackedLayout,
    dropout: float,
    bias: Tensor | None,
    scale: float | None,
) -> Tensor:
    query, key, value = by_head(qkv, num_heads, layout)  # [B, N, S, D]
    # None, [B, 1, 1, S], or with a bias [B, N, S, S]
    mask = bias if layout.full else _key_mask(layout, bias)
    if qkv.dtype in HALF and not qkv.is_cuda and torch.is_grad_enabled():
        context = _written_out(query, key, value, mask, dropout, scale)  # [B, N, S, D]
    else:
        context = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale
        )  # [B, N, S, D]
    context = context.transpose(1, 2).flatten(2)  # [B, N, S, D] -> [B, S, H]
    return from_slots(context, layout)  # [T, H]


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """`[B, N, S, D]` each -> `[B, N, S, D]`, with all attention weights in memory."""
    weights = _softmax(query, key, mask, scale)  # [B, N, S, S]
    return (F.dropout(weights, dropout) if dropout else weights) @ value  # [B, N, S, D]


def _softmax(query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attention weights: `[B, N, S, D]` each -> `[B, N, S, S]`, of which rows (queries) sum to one.

    mask: bool, True where a key is visible, or a float that is added to the scores
    """
    scores = (query * (scale or query.shape[-1] ** -0.5)) @ key.transpose(-1, -2)  # [B, N, S, S]
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -torch.inf)
        scores = scores + mask  # [B, N, S, S]; its backward pass is faster than masked_fill's
    return scores.softmax(dim=-1)  # [B, N, S, S]


def _varlen(qkv: Tensor, num_heads: int, layout: PackedLayout, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = qkv.view(len(qkv), 3, num_heads, -1).unbind(1)  # [T, N, D]
    longest = layout.unpack.shape[1]
    context = varlen_attn(
        query,
        key,
        value,
        layout.cu_seqlens,
        layout.cu_seqlens,
        longest,
        longest,
        scale=scale,
    )  # [T, N, D]
    return context.reshape(len(qkv), -1)  # [T, H]


# -- ONNX --------------------------------------------------------------------------------------------------------------


def _onnx(
    qkv: Tensor, num_heads: int, layout: PackedLayout, bias: Tensor | None, scale: float | None
) -> Tensor:
    query, key, value = to_slots(qkv, layout).chunk(3, dim=-1)  # [B, S, H]
    context = torch.onnx.ops.symbolic(
        "com.microsoft::MultiHeadAttention",
        [query, key, value, None, layout.lengths.to(torch.int32), *_optional(bias)],
        {"num_heads": num_heads, "scale": scale or (query.shape[-1] // num_heads) ** -0.5},
        dtype=qkv.dtype,
        shape=query.shape,
        version=1,
    )  # [B, S, H]
    return from_slots(context, layout)  # [T, H]


def _optional(bias: Tensor | None) -> list[Tensor]:
    """An operator's optional last input."""
    return [] if bias is None else [bias]


def _onnx_cuda(
    qkv: Tensor, num_heads: int, layout: PackedLayout, bias: Tensor | None, scale: float
) -> Tensor:
    query, key, value = qkv.chunk(3, dim=-1)  # [T, H]
    return torch.onnx.ops.symbolic(
        "com.microsoft::PackedMultiHeadAttention",
        [query, key, value, None, layout.token_offset, layout.cu_seqlens, *_optional(bias)],
        {"num_heads": num_heads} if scale is None else {"num_heads": num_heads, "scale": scale},
        dtype=qkv.dtype,
        shape=query.shape,
        version=1,
    )  # [T, H]
