"""Rounded weights against an emulation of AVX2, and the error of both kinds of rounding."""

import numpy as np
import pytest
from numpy.typing import NDArray

from export.passes import rounding

Floats = NDArray[np.float32]
Rounded = NDArray[np.int8]


def add_products(x: NDArray[np.uint8], weight: Rounded) -> NDArray[np.int64]:
    """Emulate vpmaddubsw, which adds two products in 16 bits and saturates, and then vpmaddwd, which is exact.

    x: [K], unsigned; weight: [N, K]
    """
    products = x.astype(np.int64) * weight
    pairs = products[:, 0::2] + products[:, 1::2]
    return np.clip(pairs, -(2**15), 2**15 - 1).sum(axis=1)


def worst_inputs(row: Rounded) -> list[NDArray[np.uint8]]:
    """Return the inputs with the largest and the smallest sum of every pair of a row."""
    return [np.where(row > 0, 255, 0).astype(np.uint8), np.where(row < 0, 255, 0).astype(np.uint8)]


def saturates(weight: Rounded) -> bool:
    return any(
        add_products(x, row[None])[0] != x.astype(np.int64) @ row
        for row in weight
        for x in worst_inputs(row)
    )


def largest_pair(weight: Rounded) -> int:
    """Return the largest sum of two neighbors of one sign in a rounded weight [N, K]."""
    even, odd = weight[:, 0::2].astype(int), weight[:, 1::2].astype(int)
    return int(np.where(even * odd > 0, np.abs(even + odd), 0).max())


def draw(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_t(3, size=shape).astype(np.float32)


def correlated(tokens: int, width: int, seed: int = 5) -> Floats:
    hidden, mix = draw(tokens, width // 4, seed=seed), draw(width // 4, width, seed=6)
    return hidden @ mix + np.float32(0.1) * draw(tokens, width, seed=seed + 2)


class TestSaturation:
    weight = draw(60, 64)

    def test_nearest(self):
        """On AVX2, the largest and smallest sums of rounded weights are exact."""
        rounded = rounding.nearest(self.weight, rounding.pairwise(self.weight))
        assert not saturates(rounded)
        assert np.abs(rounded).max() > 64  # more than the 7 bits that never saturate

    def test_compensated(self):
        """Compensation moves weights, but not beyond the limit of a pair."""
        scales = rounding.pairwise(self.weight)
        rounded = rounding.compensated(self.weight, scales, correlated(2000, 64))
        assert not saturates(rounded)
        assert (rounded != rounding.nearest(self.weight, scales)).any()

    def test_eight_full_bits_saturate(self):
        """The emulation detects weights with 127 levels whatever their neighbors are."""
        assert saturates(rounding.nearest(self.weight, rounding.largest(self.weight, 127)))

    @pytest.mark.parametrize("sign", [1, -1])
    def test_two_weights_that_are_both_rounded_away_from_zero(self, sign):
        """Two halves, each rounded up, add up to 128."""
        weight = np.array([[63.5, 63.5, 127, 0]], np.float32) * np.float32(sign)
        rounded = rounding.nearest(weight, rounding.pairwise(weight))
        assert 128 == largest_pair(rounded)
        assert not saturates(rounded)

    def test_weights_of_different_signs_have_eight_bits(self):
        """Neighbors of different signs limit each other nowhere."""
        weight = np.tile(np.array([[1, -1]], np.float32), (3, 8))
        assert 127 == rounding.nearest(weight, rounding.pairwise(weight)).max()


class TestCompensation:
    def test_smaller_errors_on_other_inputs(self):
        """With correlated inputs, errors on inputs that were not measured are less than half of those of rounding."""
        weight = draw(40, 96, seed=3)
        scales = rounding.pairwise(weight)
        other = correlated(500, 96, seed=9)
        errors = [
            np.mean((other @ (weight - rounded * scales[:, None]).T) ** 2)
            for rounded in (
                rounding.compensated(weight, scales, correlated(3000, 96)),
                rounding.nearest(weight, scales),
            )
        ]
        assert errors[0] < 0.5 * errors[1]

    def test_inputs_of_zeros(self):
        """Inputs that are always zero are no reason to fail: the weights are rounded by themselves."""
        weight = draw(8, 6)
        scales = rounding.pairwise(weight)
        found = rounding.compensated(weight, scales, np.zeros((50, 6), np.float32))
        np.testing.assert_array_equal(rounding.nearest(weight, scales), found)

    def test_an_odd_number_of_inputs(self):
        """The last input has no neighbor."""
        weight = draw(8, 7)
        scales = rounding.pairwise(weight)
        assert (8, 7) == rounding.compensated(weight, scales, draw(50, 7, seed=1)).shape


def test_scales_of_zeros_are_positive():
    """A row of zeros has a scale to divide by."""
    zeros = np.zeros((1, 4), np.float32)
    assert [rounding.TINY] * 2 == pytest.approx(
        [rounding.largest(zeros, 127)[0], rounding.pairwise(zeros)[0]]
    )
