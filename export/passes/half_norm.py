"""The arithmetic of ONNX Runtime's CUDA kernel for a layer norm of a sum in fp16, with PyTorch on a CPU.

T tokens, H hidden
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def skip_norm(x: Tensor, scale: Tensor, shift: Tensor, epsilon: float) -> Tensor:
    """Normalize sums [T, H] in fp16 as ONNX Runtime's CUDA kernel does, each step rounded.

    The kernel divides each number by H before it squares and sums. A mean square beyond 65,504 is infinite, so that the
    row is divided by infinity and becomes the shift.
    """
    width = x.shape[1]
    share = x * torch.tensor(1 / width, dtype=x.dtype)  # [T, H]
    mean, square = _pairwise_sum(share), _pairwise_sum(share * x)  # [T, 1]
    variance = square - mean * mean + torch.tensor(epsilon, dtype=x.dtype)
    # PyTorch's vectorized half root rounds otherwise than its scalar one, so that it depends on the number of rows.
    factor = variance.double().rsqrt().to(x.dtype)
    return scale * (x - mean) * factor + shift


def _pairwise_sum(x: Tensor) -> Tensor:
    """Sum rows as the threads of a block do, in pairs and rounded each time: [T, H] -> [T, 1]."""
    while (width := x.shape[1]) > 1:
        x = F.pad(x, (0, width % 2))
        x = x[:, 0::2] + x[:, 1::2]
    return x
