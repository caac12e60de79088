"""Capture what an encoder of any family computes on its way to the last hidden state."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from model.attention import ScaledDotProductAttention
from model.data import examples
from model.heads import encoder_layers
from service.core.encode import Window


@dataclass
class Captured:
    """Tensors of one forward pass or several, in the order in which the encoder computes them.

    hidden_states: [T, H] the embeddings' output, then each layer's; the last is the encoder's own output
    projections: [T, ND], [T, KD] and [T, KD] queries, keys and values of each layer, before any rotation by position
    attention_weights: [B, N, S, S] of each layer; each row (a query's weights) sums to one

    A layer that is applied several times (ALBERT) has an item for each time. Shapes as in `model/bert.py`.
    """

    hidden_states: list[Tensor] = field(default_factory=list)
    projections: list[tuple[Tensor, ...]] = field(default_factory=list)
    attention_weights: list[Tensor] = field(default_factory=list)


@contextmanager
def capture(
    encoder: nn.Module, *, projections: bool = False, attention_weights: bool = False
) -> Iterator[Captured]:
    """Capture hidden states and, where requested, more of an encoder's forward passes in the block, by forward hooks.

    Attention weights are computed for the capture only, which costs time and memory.
    """
    captured = Captured()

    def keep_hidden(module: nn.Module, inputs: object, output: Tensor) -> None:
        captured.hidden_states.append(output)

    def replace_last(module: nn.Module, inputs: object, output: Tensor) -> None:
        captured.hidden_states[-1] = output  # a last norm follows the layers in some families

    def keep_projection(module: nn.Module, inputs: object, output: Tensor) -> None:
        captured.projections.append(output.split(encoder.config.attention_widths, dim=-1))

    def keep_weights(
        module: ScaledDotProductAttention, inputs: tuple[Any, ...], output: Tensor
    ) -> None:
        captured.attention_weights.append(module.weights(*inputs))

    hooks = [
        module.register_forward_hook(keep_hidden)
        for module in (encoder.embeddings, *encoder_layers(encoder))
    ]
    hooks.append(encoder.register_forward_hook(replace_last))
    if projections:
        hooks += [
            module.register_forward_hook(keep_projection)
            for name, module in encoder.named_modules()
            if name.endswith(".attention.qkv")
        ]
    if attention_weights:
        hooks += [
            module.register_forward_hook(keep_weights)
            for module in encoder.modules()
            if isinstance(module, ScaledDotProductAttention)
        ]
    try:
        yield captured
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def attention_maps(encoder: nn.Module, window: Window) -> Tensor:
    """Return the attention weights of an encoder of any family, `[L, N, S, S]`: rows (queries) sum to one."""
    with capture(encoder, attention_weights=True) as captured:
        encoder(*examples.pack([window]))
    return torch.cat(captured.attention_weights)  # L times [1, N, S, S] -> [L, N, S, S]
