"""The steps (scales) with which rows of activations fit in 8 bits, and the channels that make them large.

T tokens, K channels
"""

import numpy as np
from numpy.typing import NDArray

from export.passes.rounding import TINY

MOST = 255  # activations are unsigned, because x86 multiplies u8 x s8 fastest
ZERO_POINTS = (128, 64, 32, 16, 8)  # the first one where no inputs were measured
OUTLIERS = 4  # channels of an input
ROWS = 2048  # of the inputs, at least, by which outliers are chosen
# Part of the mean square of the steps. With outliers that leave more, an input stays as it is.
WORTH = 0.85

Floats = NDArray[np.float32]
Channels = NDArray[np.intp]


def row_scales(x: Floats, zero_point: int, most: int = MOST) -> Floats:
    """Return the scale of each row of x, [T, 1], with which the row fits in numbers from 0 to `most`."""
    return _scales(x.max(axis=1, keepdims=True), x.min(axis=1, keepdims=True), zero_point, most)


def best_zero_point(x: Floats) -> int:
    """Return the zero point with which the scales of the rows of x, [T, K], have the smallest mean square."""
    ends = x.max(axis=1), x.min(axis=1)
    return min(ZERO_POINTS, key=lambda point: float(np.mean(_scales(*ends, point) ** 2)))


def choose_outliers(x: Floats) -> Channels:
    """Return the sorted channels without which the row scales of x, [T, K], are smallest; none if they gain little."""
    x = x[:: max(len(x) // ROWS, 1)]
    zero_point = best_zero_point(x)
    steps = np.maximum(x / np.float32(MOST - zero_point), x / np.float32(-zero_point))
    rows = np.arange(len(x))
    chosen: set[int] = set()
    for _ in range(OUTLIERS):
        largest = steps.argmax(axis=1)
        first = steps[rows, largest]
        steps[rows, largest] = 0
        gains = np.bincount(largest, first**2 - steps.max(axis=1) ** 2, minlength=x.shape[1])
        steps[rows, largest] = first
        chosen.add(int(gains.argmax()))
        steps[:, [*chosen]] = 0
    channels = np.asarray(sorted(chosen), dtype=np.intp)
    left = _mean_square(without(x, channels), zero_point)
    return channels if left <= WORTH * _mean_square(x, zero_point) else channels[:0]


def without(x: Floats, channels: Channels) -> Floats:
    """Return a copy of x, [T, K], with zeros in some channels."""
    left = x.copy()
    left[:, channels] = 0
    return left


def _scales(above: Floats, below: Floats, zero_point: int, most: int = MOST) -> Floats:
    """Return the scales of rows with these largest and smallest numbers."""
    steps = np.maximum(above / np.float32(most - zero_point), below / np.float32(-zero_point))
    return np.asarray(np.maximum(steps, TINY), dtype=np.float32)


def _mean_square(x: Floats, zero_point: int) -> float:
    return float(np.mean(row_scales(x, zero_point) ** 2))
