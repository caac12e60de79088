"""Rounding of a weight to 8-bit numbers whose products do not saturate on AVX2.

AVX2 multiplies unsigned activations, at most 255, by signed weights, and adds the products of two neighboring inputs,
2i and 2i + 1, in 16 bits. The sum stays below 2^15 where two weights of one sign add up to at most 128 (255 x 128 <
32,768). Two weights of different signs cannot exceed 255 x 127.

N outputs, K inputs, T tokens
"""

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack

LEVELS = 127  # the largest rounded weight
PAIR = 128  # the largest sum of two neighboring weights of one sign
TINY = 1e-20  # keeps the scale of a row of zeros above zero
# Part of the mean square of an input, which limits how much one weight compensates for others.
DAMPING = 0.01
BLOCK = 64  # columns that are rounded before later columns are updated

Floats = NDArray[np.float32]


def largest(weight: Floats, levels: int) -> Floats:
    """Return a scale per row, [N], of a weight [N, K], so that the row's largest magnitude is `levels`."""
    scales = np.abs(weight).max(axis=1) / levels
    return np.asarray(np.maximum(scales, TINY), dtype=np.float32)


def pairwise(weight: Floats) -> Floats:
    """Return a scale per row, [N], with which neighbors of one sign add up to at most 127, or 128 when rounded."""
    even, odd = weight[:, 0::2], weight[:, 1::2]
    even = even[:, : odd.shape[1]]  # the last of an odd number of inputs has no neighbor
    sums = np.where(even * odd > 0, np.abs(even + odd), 0).max(axis=1, initial=0)
    scales = np.maximum(np.abs(weight).max(axis=1), sums) / LEVELS
    return np.asarray(np.maximum(scales, TINY), dtype=np.float32)


def nearest(weight: Floats, scales: Floats) -> NDArray[np.int8]:
    """Return the weight [N, K] over the scales of its rows, each number rounded by itself."""
    return np.asarray(np.rint(weight / scales[:, None]), dtype=np.int8)


def compensated(weight: Floats, scales: Floats, inputs: Floats) -> NDArray[np.int8]:
    """Return the weight [N, K] over the scales of its rows, so that products with the inputs [T, K] change little.

    The columns are rounded in order. The error of each is compensated by later columns, as far as their inputs are
    correlated (Frantar et al. 2022, GPTQ). Two weights of a pair keep to their largest sum.
    """
    factor = _inverse_factor(inputs)
    # [K, N], so that a column of the weight is contiguous
    exact = np.ascontiguousarray((weight / scales[:, None]).T, dtype=np.float32)
    rounded = np.zeros_like(exact)
    for start in range(0, len(exact), BLOCK):
        block = slice(start, min(start + BLOCK, len(exact)))
        errors = np.zeros((block.stop - start, exact.shape[1]), np.float32)
        for column in range(start, block.stop):
            least, most = np.float32(-LEVELS), np.float32(LEVELS)
            if column % 2:
                before = rounded[column - 1]
                most = np.minimum(most, PAIR - np.maximum(before, 0))
                least = np.maximum(least, -PAIR - np.minimum(before, 0))
            rounded[column] = np.clip(np.rint(exact[column]), least, most)
            error = (exact[column] - rounded[column]) / factor[column, column]
            errors[column - start] = error
            exact[column : block.stop] -= np.outer(factor[column, column : block.stop], error)
        exact[block.stop :] -= factor[block, block.stop :].T @ errors
    return np.ascontiguousarray(rounded.T, dtype=np.int8)


def _inverse_factor(inputs: Floats) -> Floats:
    """Return the upper Cholesky factor U, [K, K], of the inverse of the inputs' mean squares: U.T @ U = inverse."""
    squares = inputs.T @ inputs
    squares /= np.float32(len(inputs))
    damping = DAMPING * max(float(np.mean(np.diag(squares))), TINY)
    squares[np.diag_indices_from(squares)] += np.float32(damping)
    # The reversed matrix is upper.T @ upper; the inverse of its lower factor, reversed again, is upper.
    upper, _ = lapack.spotrf(np.asfortranarray(squares[::-1, ::-1]), overwrite_a=1)
    inverse, _ = lapack.strtri(upper, overwrite_c=1)
    return np.asarray(inverse.T[::-1, ::-1])
