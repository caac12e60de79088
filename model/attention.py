"""Attention: one function with one contract, and the only place that has several lowerings.

    attention(qkv, num_heads, layout, dropout, bias, scale) -> context        qkv [T, 3H] -> [T, H]

Every other part of the model works on packed tokens `[T, H]` and never sees padding. Here the tokens are gathered
into `[B, S]` slots and back, in the way that the device or the exported graph does best:

    PackedLayout, PyTorch      gather, `scaled_dot_product_attention` with a key mask, gather back
    PackedLayout, CPU half     the same written out, where gradients are wanted: its backward pass is the faster one
    PackedLayout, CUDA half    `varlen_attn` on `cu_seqlens`: no padding at all
    PackedLayout, ONNX         gather, `com.microsoft.MultiHeadAttention` with key lengths, gather back
                               (`export.passes.mask_free_attention` then hides padding in another way, where it can)
    PackedLayout, ONNX CUDA    `com.microsoft.PackedMultiHeadAttention` on `token_offset` and `cu_seqlens`: no padding
    PaddedLayout               the trivial layout: `[B, S]` slots with an additive mask (the portable graph)

T tokens, B sequences, S longest, N heads, D head size, H hidden
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from service.core import packing

HALF = (torch.float16, torch.bfloat16)

# `training.capture` appends a list for each capture of attention weights [B, N, S, S].
weight_captures: list[list[Tensor]] = []


@dataclass(frozen=True)
class PackedLayout:
    """`service.core.packing.Layout` as tensors on the model's device."""

    lengths: Tensor  # [B]
    unpack: Tensor  # [B, S]
    pack: Tensor  # [T]
    cu_seqlens: Tensor | None = None  # [B + 1] int32
    token_offset: Tensor | None = None  # [B, S] int32; given, a graph for CUDA is traced
    full: bool = (
        False  # all sequences are S long, so that slots are tokens and nothing need be gathered
    )

    @classmethod
    def of(cls, layout: packing.Layout, device: torch.device | str = "cpu") -> "PackedLayout":
        return cls(
            torch.as_tensor(layout.lengths, device=device),
            torch.as_tensor(layout.unpack, device=device),
            torch.as_tensor(layout.pack, device=device),
            torch.as_tensor(layout.cu_seqlens, device=device),
            full=layout.unpack.size == layout.pack.size,
        )

    @property
    def firsts(self) -> Tensor:
        """`[B]` packed index of each sequence's first token."""
        return self.unpack[:, 0]


@dataclass(frozen=True)
class PaddedLayout:
    """The trivial layout: T = B * S, every slot a token, and a mask that says which are real."""

    attention_mask: Tensor  # [B, S] 1 = real token


AnyLayout = PackedLayout | PaddedLayout


def attention(
    qkv: Tensor,
    num_heads: int,
    layout: AnyLayout,
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
    for weights in weight_captures:
        query, key, _ = by_head(qkv, num_heads, layout)
        weights.append(_weights(query, key, _seen(layout, bias), scale))
    if isinstance(layout, PaddedLayout):
        return _padded(qkv, num_heads, layout, bias, scale)
    if torch.onnx.is_in_onnx_export():
        lowering = _onnx if layout.token_offset is None else _onnx_cuda
        return lowering(qkv, num_heads, layout, bias, scale)
    if qkv.is_cuda and qkv.dtype in HALF and not dropout and bias is None:
        return _varlen(qkv, num_heads, layout, scale)
    return _gathered(qkv, num_heads, layout, dropout, bias, scale)


def count_slots(layout: AnyLayout) -> int:
    """S, the longest sequence of a batch."""
    return (layout.attention_mask if isinstance(layout, PaddedLayout) else layout.unpack).shape[1]


def to_slots(x: Tensor, layout: AnyLayout) -> Tensor:
    """`[T, W]` -> `[B, S, W]`; what stands in the slots after a sequence's end is of no meaning."""
    if isinstance(layout, PaddedLayout):
        return x.view(*layout.attention_mask.shape, -1)
    if not layout.full:
        x = x.index_select(0, layout.unpack.reshape(-1))
    return x.view(*layout.unpack.shape, -1)


def from_slots(x: Tensor, layout: AnyLayout) -> Tensor:
    """`[B, S, W]` -> `[T, W]`"""
    x = x.reshape(-1, x.shape[-1])
    return x if isinstance(layout, PaddedLayout) or layout.full else x.index_select(0, layout.pack)


def real_slots(layout: AnyLayout) -> Tensor:
    """`[B, S]`, True where a slot holds a token."""
    if isinstance(layout, PaddedLayout):
        return layout.attention_mask.bool()
    columns = torch.arange(layout.unpack.shape[1], device=layout.lengths.device)
    return columns < layout.lengths[:, None]


def by_head(qkv: Tensor, num_heads: int, layout: AnyLayout) -> tuple[Tensor, Tensor, Tensor]:
    """`[T, 3H]` -> query, key, value in slots, each `[B, N, S, D]`."""
    slots = to_slots(qkv, layout)
    query, key, value = slots.view(*slots.shape[:2], 3, num_heads, -1).permute(2, 0, 3, 1, 4)
    return query, key, value


def _seen(layout: AnyLayout, bias: Tensor | None) -> Tensor:
    """The mask of slots without a token: True where a key may be seen, or what is added to the scores."""
    real = real_slots(layout)[:, None, None, :]
    return real if bias is None else bias.masked_fill(~real, -torch.inf)


def _gathered(
    qkv: Tensor,
    num_heads: int,
    layout: PackedLayout,
    dropout: float,
    bias: Tensor | None,
    scale: float | None,
) -> Tensor:
    query, key, value = by_head(qkv, num_heads, layout)
    mask = bias if layout.full else _seen(layout, bias)
    if qkv.dtype in HALF and not qkv.is_cuda and torch.is_grad_enabled():
        context = _written_out(query, key, value, mask, dropout, scale)
    else:
        context = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale
        )
    return from_slots(context.transpose(1, 2).flatten(2), layout)


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """`[B, N, S, D]` each -> `[B, N, S, D]`, with all weights in memory."""
    weights = _weights(query, key, mask, scale)
    return (F.dropout(weights, dropout) if dropout else weights) @ value


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Who attends to whom: `[B, N, S, D]` each -> `[B, N, S, S]`, of which rows (queries) sum to one.

    mask: True where a key may be seen, or what is added to the scores
    """
    scores = (query * (scale or query.shape[-1] ** -0.5)) @ key.transpose(-1, -2)
    if mask is not None:
        hidden = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if hidden else scores + mask
    return scores.softmax(dim=-1)


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
    )
    return context.reshape(len(qkv), -1)


def _onnx(
    qkv: Tensor, num_heads: int, layout: PackedLayout, bias: Tensor | None, scale: float
) -> Tensor:
    query, key, value = to_slots(qkv, layout).chunk(3, dim=-1)  # [B, S, H]
    context = torch.onnx.ops.symbolic(
        "com.microsoft::MultiHeadAttention",
        [query, key, value, None, layout.lengths.to(torch.int32), *_given(bias)],
        _settings(num_heads, scale),
        dtype=qkv.dtype,
        shape=query.shape,
        version=1,
    )
    return from_slots(context, layout)


def _given(bias: Tensor | None) -> list[Tensor]:
    """An operator's last input, which may be left out."""
    return [] if bias is None else [bias]


def _settings(num_heads: int, scale: float | None) -> dict[str, int | float]:
    """An operator's attributes."""
    return {"num_heads": num_heads} if scale is None else {"num_heads": num_heads, "scale": scale}


def _onnx_cuda(
    qkv: Tensor, num_heads: int, layout: PackedLayout, bias: Tensor | None, scale: float
) -> Tensor:
    query, key, value = qkv.chunk(3, dim=-1)  # [T, H]
    return torch.onnx.ops.symbolic(
        "com.microsoft::PackedMultiHeadAttention",
        [query, key, value, None, layout.token_offset, layout.cu_seqlens, *_given(bias)],
        _settings(num_heads, scale),
        dtype=qkv.dtype,
        shape=query.shape,
        version=1,
    )


def _padded(
    qkv: Tensor, num_heads: int, layout: PaddedLayout, bias: Tensor | None, scale: float
) -> Tensor:
    # Written out, so that the graph holds standard operators only.
    query, key, value = by_head(qkv, num_heads, layout)
    mask = (1.0 - layout.attention_mask.to(qkv.dtype)) * torch.finfo(qkv.dtype).min
    mask = mask[:, None, None, :]
    mask = mask if bias is None else bias + mask
    context = _written_out(query, key, value, mask, 0.0, scale)
    return from_slots(context.transpose(1, 2).flatten(2), layout)
