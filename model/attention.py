"""Attention: one function with one contract, and the only place that has several lowerings.

    attention(q, k, v, layout, num_heads, ...) -> context        q [T, ND], k and v [T, KD] -> [T, ND]

Every other part of the model works on packed tokens `[T, H]` and has no padding. Here the tokens are gathered into
`[B, S]` slots and back, in the fastest way of the device or the exported graph. `_lowering` selects it.

Shapes as in `model/bert.py`: T tokens, B sequences, S longest, N heads, D head size, H hidden, and K heads of keys and
values, each of which N / K consecutive heads of queries share (Ainslie et al. 2023, grouped-query attention)
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import BertConfig
from service.core import packing

HALF = (torch.float16, torch.bfloat16)
HIDDEN = torch.finfo(torch.float16).min / 2  # its sum with a score is finite in any precision


@dataclass(frozen=True)
class PackedLayout:
    """`service.core.packing.Layout` as tensors. A slot is a place in the `[B, S]` rectangle."""

    lengths: Tensor  # [B] tokens of each sequence, without the last ones that no token attends to
    unpack: Tensor  # [B, S] the token in each slot
    pack: Tensor  # [T] the slot of each token
    cu_seqlens: Tensor | None = None  # [B + 1] int32, where each sequence begins and the last ends
    token_offset: Tensor | None = None  # [B, S] int32
    full: bool = False  # all sequences are S long: slots are tokens, and nothing is gathered
    biases: dict["tuple[Mask, torch.dtype]", Tensor] = field(default_factory=dict)  # of masks

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


@dataclass(frozen=True)
class Mask:
    """The keys of its own sequence that a query attends to: all by default."""

    causal: bool = False  # no keys after the query
    reach: int | None = None  # only keys at most this many tokens away

    @property
    def window(self) -> tuple[int, int]:
        """The tokens before and after a query that it attends to; -1 for all."""
        reach = -1 if self.reach is None else self.reach
        return reach, 0 if self.causal else reach

    def bias(self, layout: PackedLayout, like: Tensor) -> Tensor | None:
        """Return the bias that hides the other keys, `[1, 1, S, S]`, of the type of `like`; None if there are none."""
        if self == FULL:
            return None
        if (self, like.dtype) not in layout.biases:
            places = torch.arange(count_slots(layout), device=like.device)  # [S]
            distance = places[None, :] - places[:, None]  # [S, S]
            is_hidden = distance > 0 if self.reach is None else distance.abs() > self.reach
            if self.causal:
                is_hidden = is_hidden | (distance > 0)
            layout.biases[self, like.dtype] = (is_hidden * HIDDEN).to(like.dtype)[None, None]
        return layout.biases[self, like.dtype]  # [1, 1, S, S]


FULL = Mask()


class Inputs(NamedTuple):
    """The inputs of an attention. A lowering is a function from them to `[T, ND]`."""

    q: Tensor  # [T, ND]
    k: Tensor  # [T, KD]
    v: Tensor  # [T, KD]
    layout: PackedLayout
    num_heads: int
    num_key_heads: int
    mask: Mask
    bias: Tensor | None
    scale: float | None
    dropout: float


Lowering = Callable[[Inputs], Tensor]


def _lowering(x: Inputs) -> Lowering:
    """Return the first lowering of the table whose condition holds."""
    is_exporting, is_half = torch.onnx.is_in_onnx_export(), x.q.dtype in HALF
    table: list[tuple[bool, Lowering]] = [
        (is_exporting and x.layout.token_offset is not None, _onnx_cuda),
        (is_exporting, _onnx),
        (is_half and x.q.is_cuda and not x.dropout and x.bias is None, _varlen),
        (is_half and not x.q.is_cuda and torch.is_grad_enabled(), _written_out),
        (True, _fused),
    ]
    return next(lowering for condition, lowering in table if condition)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackedLayout,
    num_heads: int,
    num_key_heads: int | None = None,
    mask: Mask = FULL,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Scaled dot-product self-attention within each sequence (Vaswani et al. 2017).

    `[T, ND]`, `[T, KD]` and `[T, KD]` -> `[T, ND]`

    num_key_heads: K, a divisor of N; N by default
    bias: added to the scaled scores, `[1 or B, 1 or N, S, S]`
    scale: of the scores, 1 / sqrt(D) by default
    """
    if bias is not None:
        bias = bias.to(q.dtype)
    num_key_heads = num_key_heads or num_heads
    if num_heads % num_key_heads:
        raise ValueError(f"{num_heads} heads are not a multiple of {num_key_heads} heads of keys")
    x = Inputs(q, k, v, layout, num_heads, num_key_heads, mask, bias, scale, dropout)
    return _lowering(x)(x)


class ScaledDotProductAttention(nn.Module):
    """`attention` as a module without parameters, whose inputs `training.capture` can hook."""

    def __init__(self, config: BertConfig, mask: Mask = FULL, scale: float | None = None):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_key_heads = config.num_key_heads
        self.dropout = config.attention_probs_dropout_prob
        self.mask = mask
        self.scale = scale

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, bias: Tensor | None = None
    ) -> Tensor:
        """`[T, ND]`, `[T, KD]` and `[T, KD]` -> `[T, ND]`."""
        dropout = self.dropout if self.training else 0.0
        heads = (self.num_heads, self.num_key_heads)
        return attention(q, k, v, layout, *heads, self.mask, bias, self.scale, dropout)

    def weights(
        self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, bias: Tensor | None = None
    ) -> Tensor:
        """The attention weights, `[B, N, S, S]`, of the same inputs: each row (a query's weights) sums to one."""
        heads = (self.num_heads, self.num_key_heads)
        x = Inputs(q, k, v, layout, *heads, self.mask, bias, self.scale, 0.0)
        query, key, _ = _heads(x)  # [B, N, S, D]
        return _softmax(query, key, _key_mask(x), self.scale)  # [B, N, S, S]


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


def split_heads(slots: Tensor, num_heads: int) -> Tensor:
    """`[B, S, ND]` -> `[B, N, S, D]`"""
    return slots.view(*slots.shape[:2], num_heads, -1).transpose(1, 2)


# -- what several lowerings share --------------------------------------------------------------------------------------


def _slots(x: Inputs) -> list[Tensor]:
    """Return queries, keys and values in slots, `[B, S, ND]` each: heads of keys and values are repeated."""
    parts = (x.q, _repeat_heads(x.k, x), _repeat_heads(x.v, x))  # [T, ND] each
    return [to_slots(part, x.layout) for part in parts]


def _repeat_heads(part: Tensor, x: Inputs) -> Tensor:
    """`[T, KD]` -> `[T, ND]`"""
    if x.num_key_heads == x.num_heads:
        return part
    heads = part.unflatten(-1, (x.num_key_heads, 1, -1))  # [T, K, 1, D]
    times = x.num_heads // x.num_key_heads
    return heads.expand(-1, -1, times, -1).flatten(1)  # [T, ND]


def _heads(x: Inputs) -> list[Tensor]:
    """Return queries, keys and values by head, `[B, N, S, D]` each."""
    return [split_heads(slots, x.num_heads) for slots in _slots(x)]


def _from_heads(context: Tensor, layout: PackedLayout) -> Tensor:
    """`[B, N, S, D]` -> `[T, ND]`"""
    return from_slots(context.transpose(1, 2).flatten(2), layout)


def _bias(x: Inputs, mask: Mask) -> Tensor | None:
    """Return the sum of the bias and a mask's, `[1 or B, 1 or N, S, S]`; None for neither."""
    of_mask = mask.bias(x.layout, x.q)
    if of_mask is None or x.bias is None:
        return x.bias if of_mask is None else of_mask
    return x.bias + of_mask


def _key_mask(x: Inputs) -> Tensor | None:
    """Return the bias with -inf for keys without a token; without a bias True for keys with one, or None if all are."""
    bias = _bias(x, x.mask)
    if x.layout.full:
        return bias
    real = real_slots(x.layout)[:, None, None, :]  # [B, 1, 1, S]
    return real if bias is None else bias.masked_fill(~real, -torch.inf)


# -- PyTorch -----------------------------------------------------------------------------------------------------------


def _fused(x: Inputs) -> Tensor:
    """PyTorch, any device: the fused kernel, between two gathers."""
    q, k, v = _heads(x)  # [B, N, S, D]
    mask = _key_mask(x)
    context = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=x.dropout, scale=x.scale
    )  # [B, N, S, D]
    return _from_heads(context, x.layout)  # [T, ND]


def _written_out(x: Inputs) -> Tensor:
    """PyTorch, training on a CPU in half precision: separate operations, whose backward pass is faster."""
    q, k, v = _heads(x)  # [B, N, S, D]
    weights = F.dropout(_softmax(q, k, _key_mask(x), x.scale), x.dropout)  # [B, N, S, S]
    return _from_heads(weights @ v, x.layout)  # [T, ND]


def _softmax(query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return the weights `[B, N, S, S]` of q, k `[B, N, S, D]`; mask: True for visible keys, or added to the scores."""
    scores = (query * (scale or query.shape[-1] ** -0.5)) @ key.transpose(-1, -2)  # [B, N, S, S]
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -torch.inf)
        scores = scores + mask  # [B, N, S, S]; its backward pass is faster than masked_fill's
    return scores.softmax(dim=-1)  # [B, N, S, S]


def _varlen(x: Inputs) -> Tensor:
    """PyTorch, CUDA in half precision without dropout or bias: no padding at all."""
    from torch.nn.attention.varlen import varlen_attn

    heads = (x.num_heads, x.num_key_heads, x.num_key_heads)
    q, k, v = (
        part.view(len(part), count, -1) for part, count in zip((x.q, x.k, x.v), heads, strict=True)
    )  # [T, N, D], [T, K, D]
    ends, longest = x.layout.cu_seqlens, count_slots(x.layout)
    context = varlen_attn(
        q,
        k,
        v,
        ends,
        ends,
        longest,
        longest,
        scale=x.scale,
        window_size=x.mask.window,
        enable_gqa=x.num_key_heads != x.num_heads,
    )  # [T, N, D]
    return context.flatten(1)  # [T, ND]


# -- ONNX --------------------------------------------------------------------------------------------------------------


def _onnx(x: Inputs) -> Tensor:
    """A graph for a CPU: one node between two gathers.

    inputs: queries, keys and values [B, S, ND], nothing, key lengths [B] int32, and the bias, unless there is none
    attributes: num_heads, scale, unidirectional = 1 if the mask is causal, and its reach if the bias is of it alone
    `export.passes.mask_free_attention` replaces the key lengths where it can, `export.passes.sliding_window` the bias,
    `export.passes.portable` the node.
    """
    q, k, v = _slots(x)  # [B, S, ND]
    bias = _bias(x, replace(x.mask, causal=False))
    scale = x.scale or (q.shape[-1] // x.num_heads) ** -0.5
    attributes = {"unidirectional": 1} if x.mask.causal else {}
    if x.mask.reach is not None and x.bias is None:
        attributes["reach"] = x.mask.reach
    context = torch.onnx.ops.symbolic(
        "com.microsoft::MultiHeadAttention",
        [q, k, v, None, x.layout.lengths.to(torch.int32), *_optional(bias)],
        {"num_heads": x.num_heads, "scale": scale, **attributes},
        dtype=q.dtype,
        shape=q.shape,
        version=1,
    )  # [B, S, ND]
    return from_slots(context, x.layout)  # [T, ND]


def _optional(bias: Tensor | None) -> list[Tensor]:
    """Return an operator's optional last input."""
    return [] if bias is None else [bias]


def _onnx_cuda(x: Inputs) -> Tensor:
    """A graph for CUDA: one node on packed tokens. Any mask is in the bias."""
    k, v = (_repeat_heads(part, x) for part in (x.k, x.v))  # [T, ND]
    return torch.onnx.ops.symbolic(
        "com.microsoft::PackedMultiHeadAttention",
        [x.q, k, v, None, x.layout.token_offset, x.layout.cu_seqlens, *_optional(_bias(x, x.mask))],
        {"num_heads": x.num_heads} | ({} if x.scale is None else {"scale": x.scale}),
        dtype=x.q.dtype,
        shape=x.q.shape,
        version=1,
    )  # [T, ND]
