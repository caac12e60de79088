"""The steps (scales) with which rows of activations fit in 8 bits, and the channels that make them large.

T tokens, K channels
"""

import numpy as np
from numpy.typing import NDArray

from export.passes.rounding import TINY

MOST = 255  # activations are unsigned, because x86 multiplies u8 x s8 fastest
ZERO_POINTS = (128, 64, 32, 16, 8)  # the first one where no inputs were measured
OUTLIERS = 4  # channels of an input
# Part of the mean square of the steps. With outliers that leave more, an input stays as it is.
WORTH = 0.85

Floats = NDArray[np.float32]
Channels = NDArray[np.intp]


def row_scales(x: Floats, zero_point: int, most: int = MOST) -> Floats:
    """Return the scale of each row of x, [T, 1], with which the row fits in numbers from 0 to `most`."""
    above = x.max(axis=1, keepdims=True) / np.float32(most - zero_point)
    below = x.min(axis=1, keepdims=True) / np.float32(-zero_point)
    return np.asarray(np.maximum(np.maximum(above, below), TINY), dtype=np.float32)


def best_zero_point(x: Floats) -> int:
    """Return the zero point with which the scales of the rows of x, [T, K], have the smallest mean square."""
    return min(ZERO_POINTS, key=lambda point: _mean_square(x, point))


def choose_outliers(x: Floats) -> Channels:
    """Return the sorted channels without which the row scales of x, [T, K], are smallest; none if they gain little."""
    zero_point = best_zero_point(x)
    left = x.copy()
    chosen: set[int] = set()
    for _ in range(OUTLIERS):
        steps = np.maximum(left / np.float32(MOST - zero_point), left / np.float32(-zero_point))
        second, first = np.partition(steps, -2, axis=1)[:, -2:].T
        gains = np.bincount(steps.argmax(axis=1), first**2 - second**2, minlength=x.shape[1])
        chosen.add(int(gains.argmax()))
        left[:, [*chosen]] = 0
    if _mean_square(left, zero_point) > WORTH * _mean_square(x, zero_point):
        chosen.clear()
    return np.asarray(sorted(chosen), dtype=np.intp)


def without(x: Floats, channels: Channels) -> Floats:
    """Return a copy of x, [T, K], with zeros in some channels."""
    left = x.copy()
    left[:, channels] = 0
    return left


def _mean_square(x: Floats, zero_point: int) -> float:
    return float(np.mean(row_scales(x, zero_point) ** 2))
