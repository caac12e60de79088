"""Calibration of a classification head: a temperature makes its scores predict accuracy (Guo et al. 2017).

n texts, C labels
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from service.core import decode
from service.core.decode import Doubles

FEWEST_ROWS = 20  # a temperature is not fitted to fewer
RANGE = (0.05, 20.0)  # of temperatures
BINS = 15  # of confidences, of equal width
FOLDS = 5

Logits = NDArray[np.float32]
Gold = NDArray[np.generic]


class Bin(NamedTuple):
    """Answers of similar confidence: their mean confidence, the share of them that is right, and their number."""

    confidence: float
    accuracy: float
    count: int


@dataclass(frozen=True)
class Calibration:
    """A fitted temperature, and the calibration errors without and with it."""

    temperature: float
    rows: int  # texts that it was fitted to
    # error_before, error_after: expected calibration error; `error_after` is measured on texts outside the fit
    error_before: float
    error_after: float
    # bins_before, bins_after: for a reliability curve
    bins_before: list[Bin]
    bins_after: list[Bin]


def calibrate(logits: Logits, gold: Gold, problem_type: str | None) -> Calibration | None:
    """Fit a temperature to logits [n, C] and labels, [n], or [n, C] from 0 to 1; None for fewer than FEWEST_ROWS.

    The error with the temperature is cross-fitted: each fifth of the texts gets the temperature of the others.
    """
    if len(logits) < FEWEST_ROWS:
        return None
    temperature = fit_temperature(logits, gold, problem_type)
    fold = np.random.default_rng(0).permutation(len(logits)) % FOLDS
    crossed = np.empty_like(logits)
    for number in range(FOLDS):
        others = fold != number
        fitted = fit_temperature(logits[others], gold[others], problem_type)
        crossed[~others] = logits[~others] / np.float32(fitted)
    before = reliability(*confidences(logits, gold, problem_type))
    after = reliability(*confidences(crossed, gold, problem_type))
    errors = expected_error(before), expected_error(after)
    return Calibration(temperature, len(logits), *errors, before, after)


def fit_temperature(logits: Logits, gold: Gold, problem_type: str | None) -> float:
    """Return the temperature of logits [n, C] with the smallest cross-entropy, rounded to 4 digits.

    Targets are smoothed by 1 / (n + 2), as Platt (1999) does, so that right answers alone do not fit 0.
    """
    smoothing = 1 / (len(logits) + 2)
    if gold.ndim == 1:
        targets = np.full(logits.shape, smoothing / logits.shape[1])
        targets[np.arange(len(gold)), gold.astype(np.int64)] += 1 - smoothing
    else:
        targets = gold * (1 - smoothing) + smoothing / 2

    def cross_entropy(log_temperature: float) -> float:
        scaled = logits.astype(np.float64) / np.exp(log_temperature)
        if gold.ndim == 1:
            peak = scaled.max(axis=1, keepdims=True)
            normalizer = peak + np.log(np.exp(scaled - peak).sum(axis=1, keepdims=True))
            return float((targets * (normalizer - scaled)).sum(axis=1).mean())
        return float((np.logaddexp(0, scaled) - targets * scaled).mean())

    best = minimize_scalar(cross_entropy, bounds=tuple(np.log(RANGE)), method="bounded")
    return round(float(np.exp(best.x)), 4)


def confidences(logits: Logits, gold: Gold, problem_type: str | None) -> tuple[Doubles, Doubles]:
    """Return the confidence of each answer, and whether it is right, as a share where labels are shares.

    An answer is the best label of a text; where labels may hold together, each label of each text.
    """
    scores = decode.activate(logits, problem_type).astype(np.float64)
    if gold.ndim == 1:
        return scores.max(axis=1), (scores.argmax(axis=1) == gold).astype(np.float64)
    return scores.ravel(), gold.astype(np.float64).ravel()


def reliability(confidence: Doubles, is_right: Doubles) -> list[Bin]:
    """Return the bins that have answers, by rising confidence."""
    place = np.minimum((confidence * BINS).astype(int), BINS - 1)
    return [
        Bin(float(confidence[inside].mean()), float(is_right[inside].mean()), int(inside.sum()))
        for number in range(BINS)
        if (inside := place == number).any()
    ]


def expected_error(bins: list[Bin]) -> float:
    """Return the expected calibration error: the mean difference of confidence and accuracy over all answers."""
    total = sum(each.count for each in bins)
    return sum(abs(each.confidence - each.accuracy) * each.count for each in bins) / total
