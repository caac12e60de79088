"""Pooling: from the hidden states of a sequence's tokens to one vector. Shapes as in `model/bert.py`.

POOLINGS has the modes of sentence-transformers by name. Each is batch-invariant: padding slots add zeros, or nothing.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from model.attention import PackedLayout, real_slots, to_slots


def first_tokens(hidden_states: Tensor, layout: PackedLayout) -> Tensor:
    """The hidden state of each sequence's first token: `[T, H]` -> `[B, H]`."""
    return hidden_states.index_select(0, layout.first_indices)  # [B, H]


def last_tokens(hidden_states: Tensor, layout: PackedLayout) -> Tensor:
    """The hidden state of each sequence's last token: `[T, H]` -> `[B, H]`."""
    last = layout.unpack.gather(1, layout.lengths[:, None] - 1)  # [B, 1]
    return hidden_states.index_select(0, last[:, 0])  # [B, H]


def mean_tokens(hidden_states: Tensor, layout: PackedLayout) -> Tensor:
    """The mean over each sequence's tokens: `[T, H]` -> `[B, H]`."""
    real = _real(hidden_states, layout)  # [B, S, 1]
    return _sum(hidden_states, layout, real) / real.sum(dim=1)  # [B, H]


def mean_sqrt_tokens(hidden_states: Tensor, layout: PackedLayout) -> Tensor:
    """The sum over each sequence's tokens, divided by the root of their number: `[T, H]` -> `[B, H]`."""
    real = _real(hidden_states, layout)  # [B, S, 1]
    return _sum(hidden_states, layout, real) / real.sum(dim=1).sqrt()  # [B, H]


def weighted_mean_tokens(hidden_states: Tensor, layout: PackedLayout) -> Tensor:
    """The mean weighted by positions from 1 (Muennighoff 2022): `[T, H]` -> `[B, H]`."""
    real = _real(hidden_states, layout)  # [B, S, 1]
    positions = torch.arange(1, real.shape[1] + 1, device=real.device, dtype=real.dtype)  # [S]
    weights = real * positions[:, None]  # [B, S, 1]
    return _sum(hidden_states, layout, weights) / weights.sum(dim=1)  # [B, H]


def max_tokens(hidden_states: Tensor, layout: PackedLayout) -> Tensor:
    """The largest number of each dimension over each sequence's tokens: `[T, H]` -> `[B, H]`."""
    # Padding slots contain the sequence's own first token, which does not change the maximum.
    return to_slots(hidden_states, layout).amax(dim=1)  # [B, S, H] -> [B, H]


def _real(hidden_states: Tensor, layout: PackedLayout) -> Tensor:
    """`[B, S, 1]`, 1 where a slot has a token, else 0."""
    return real_slots(layout)[:, :, None].to(hidden_states.dtype)  # [B, S] -> [B, S, 1]


def _sum(hidden_states: Tensor, layout: PackedLayout, weights: Tensor) -> Tensor:
    """The weighted sum over each sequence's slots: `[T, H]` and `[B, S, 1]` -> `[B, H]`."""
    return (to_slots(hidden_states, layout) * weights).sum(dim=1)  # [B, S, H] -> [B, H]


POOLINGS: Mapping[str, Callable[[Tensor, PackedLayout], Tensor]] = {
    "mean": mean_tokens,
    "cls": first_tokens,
    "max": max_tokens,
    "lasttoken": last_tokens,
    "weightedmean": weighted_mean_tokens,
    "mean_sqrt_len_tokens": mean_sqrt_tokens,
}
