"""Mixed precision: matrix products in fp16; the residual stream, layer norms and heads in fp32.

The largest fp16 number is 65,504 and its step is a thousandth of the number. So:

    fp16    embedding tables; in each layer the projections, attention, and both products of the feed-forward
    fp32    the residual stream, layer norms, pooling, heads

Heads are small, and their outputs are float32 by contract. `half_stream` then moves sums and norms whose numbers fit to
fp16. All other norms stay in fp32, and ONNX Runtime's kernel for a norm without a sum computes in fp32.
"""

import copy
from typing import Any

from torch import Tensor, nn

from model.heads import EncoderWithHeads

PRODUCTS = ("attention", "feed_forward")  # their names in the layers of every family


def halved(model: EncoderWithHeads) -> EncoderWithHeads:
    """Return a copy of the model in mixed precision, which can be traced and run by PyTorch."""
    copied = copy.deepcopy(model).eval()
    for name, module in copied.encoder.named_modules():
        if isinstance(module, nn.Embedding):
            module.half().register_forward_hook(_widen)
        elif name.rpartition(".")[2] in PRODUCTS:
            module.half().register_forward_hook(_widen)
            module.register_forward_pre_hook(_narrow)
    return copied


def _narrow(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *rest = inputs
    return x.half(), *rest


def _widen(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.float()
