"""What an encoder computes on its way, for those who look on: nothing of the encoder is written for them."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def projections(encoder: nn.Module) -> Iterator[list[Tensor]]:
    """Collects queries, keys and values `[T, 3H]` as projected, of each layer as it is passed through.

    Layers that are passed through again (ALBERT) are there again; those that are turned by position (ModernBERT,
    NomicBERT) are not turned yet.
    """
    seen: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, inputs, qkv: seen.append(qkv))
        for name, module in encoder.named_modules()
        if name.endswith(".attention.qkv")
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
