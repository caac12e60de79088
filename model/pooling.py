"""Pooling: from the hidden states of a sequence's tokens to one vector. Shapes as in `model/bert.py`."""

from torch import Tensor

from model.attention import AnyLayout, PaddedLayout, real_slots, to_slots


def first_tokens(hidden_states: Tensor, layout: AnyLayout) -> Tensor:
    """The hidden state of each sequence's first token: `[T, H]` -> `[B, H]`."""
    if isinstance(layout, PaddedLayout):
        return to_slots(hidden_states, layout)[:, 0]  # [B, S, H] -> [B, H]
    return hidden_states.index_select(0, layout.first_indices)  # [B, H]


def mean_tokens(hidden_states: Tensor, layout: AnyLayout) -> Tensor:
    """The mean over each sequence's tokens: `[T, H]` -> `[B, H]`."""
    real = real_slots(layout)[:, :, None].to(hidden_states.dtype)  # [B, S, 1]
    total = (to_slots(hidden_states, layout) * real).sum(dim=1)  # [B, S, H] -> [B, H]
    return total / real.sum(dim=1)  # [B, H]
