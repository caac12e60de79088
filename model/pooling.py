"""From the hidden states of a sequence's tokens to one vector.

T tokens, B sequences, S longest, H hidden
"""

import torch
from torch import Tensor

from model.attention import Layout, Padded


def first_tokens(hidden_states: Tensor, layout: Layout | Padded) -> Tensor:
    """The hidden state of each sequence's first token: `[T, H]` -> `[B, H]`."""
    if isinstance(layout, Padded):
        batch, longest = layout.attention_mask.shape
        return hidden_states.view(batch, longest, -1)[:, 0]
    return hidden_states.index_select(0, layout.firsts)


def mean_tokens(hidden_states: Tensor, layout: Layout | Padded) -> Tensor:
    """The mean over each sequence's tokens: `[T, H]` -> `[B, H]`."""
    if isinstance(layout, Padded):
        mask = layout.attention_mask.to(hidden_states.dtype)[:, :, None]
        slots = hidden_states.view(*layout.attention_mask.shape, -1)
        lengths = mask.sum(dim=1)
    else:
        batch, longest = layout.unpack.shape
        columns = torch.arange(longest, device=layout.lengths.device)
        mask = (columns < layout.lengths[:, None]).to(hidden_states.dtype)[:, :, None]
        slots = hidden_states.index_select(0, layout.unpack.reshape(-1)).view(batch, longest, -1)
        lengths = layout.lengths.to(hidden_states.dtype)[:, None]
    return (slots * mask).sum(dim=1) / lengths
