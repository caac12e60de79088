"""The cost of a batch on this machine: a linear model, fitted to measured batches.

    seconds = per_run + per_token * T + per_slot * B * S * S + per_mask * M

for B sequences of T real tokens together, the longest of S tokens, with M mask tokens. `per_token` covers every
layer that computes packed tokens. `per_slot` covers attention, which on a CPU also computes padding. `per_mask` covers
the logits of the whole vocabulary that a fill-mask head computes for each mask token. A graph with padded batches
computes padding in every layer: its T is B * S. The scheduler uses this model to plan batches, to predict how fast the
queue drains, and to fill `Retry-After`.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

T = TypeVar("T")
Matrix = NDArray[np.float64]

SHAPES = ((1, 16), (1, 128), (8, 32), (1, 512), (6, 128))  # size, length; by number of tokens
MEMORY = 0.98  # factor on the weight of a batch for each later batch: about the last fifty count
WARM_UP = 0.1  # weight of a warm-up sample relative to a new batch
REFIT_EVERY = 8  # batches
SURPRISE = 1.25  # ratio of measured and expected time, or its inverse, above which a batch refits the cost at once
SHORT_S = 0.001  # of a batch that causes no fit by itself, because a fit takes 0.1 ms
RIDGE = 1e-8
DRAIN_S = 2.0  # seconds of work after which the weight of older work falls to 1 / e
TERMS = 4
# All choices of the terms, as masks.
CHOICES = np.array([*itertools.product((0, 1), repeat=TERMS)][1:], np.float64)


class Sample(NamedTuple):
    """One measured batch. masks: mask tokens whose logits were computed"""

    tokens: int
    size: int
    longest: int
    seconds: float
    masks: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds per run, per computed token, per attention slot (B * S * S of them in a batch) and per mask token."""

    per_run: float
    per_token: float
    per_slot: float
    per_mask: float = 0.0
    padded: bool = False  # whether the graph computes padding like tokens

    def seconds(self, tokens: int, size: int, longest: int, masks: int = 0) -> float:
        """Predict the time of a batch of `size` sequences, `tokens` and `masks` in all, none over `longest`."""
        slots = size * longest * longest
        computed = self.computed(tokens, size, longest)
        layers = self.per_token * computed + self.per_slot * slots
        return self.per_run + layers + self.per_mask * masks

    def computed(self, tokens: int, size: int, longest: int) -> int:
        """Return the tokens that such a batch computes, padding included if `padded`."""
        return size * longest if self.padded else tokens

    def tokens_per_second(self, lengths: Sequence[int], masks: int = 0) -> float:
        """Predict the speed of one replica that runs batches of these lengths and mask tokens, back to back."""
        tokens = sum(lengths)
        return tokens / max(self.seconds(tokens, len(lengths), max(lengths), masks), 1e-9)


GUESS = Cost(per_run=1e-3, per_token=2e-5, per_slot=0.0)  # before anything was measured


def fit(samples: Iterable[Sample]) -> Cost:
    """Fit the cost by non-negative least squares on relative errors, without samples `GUESS`.

    Terms that the samples do not determine get equal shares of the time.
    """
    return _solve(_evidence(samples))


class Estimator:
    """The cost of one bundle: first fitted to the warm-up, then refined by the batches of requests.

    The weight of older batches decays. The warm-up keeps a small weight, so that the cost stays known
    for shapes that do not occur in the traffic. The state is two 4 x 5 matrices of constant size.
    """

    def __init__(self, samples: Iterable[Sample] = (), *, padded: bool = False) -> None:
        self._padded = padded
        self._warm = _evidence(samples)
        self._recent = np.zeros_like(self._warm)
        self._new: list[Sample] = []  # since the last fit
        self.cost = self._fit(self._warm)

    def refine(self, sample: Sample) -> None:
        """Refine the cost by a batch that ran; one on a stalled machine, or far too fast, has little weight."""
        if sample.seconds <= 0:
            return
        computed = self.cost.computed(sample.tokens, sample.size, sample.longest)
        self._new.append(sample._replace(tokens=computed))
        if len(self._new) == REFIT_EVERY or self._surprises(sample):
            self._fold()
            self.cost = self._fit(WARM_UP * self._warm + self._recent)

    def _surprises(self, sample: Sample) -> bool:
        """Return whether a batch's time differs so much that the cost must be corrected at once."""
        expected = self._expected_s(sample)
        if max(expected, sample.seconds) < SHORT_S:
            return False
        return not expected < SURPRISE * sample.seconds < SURPRISE**2 * expected

    def _expected_s(self, sample: Sample) -> float:
        return self.cost.seconds(sample.tokens, sample.size, sample.longest, sample.masks)

    def _fit(self, evidence: Matrix) -> Cost:
        return replace(_solve(evidence), padded=self._padded)

    def _fold(self) -> None:
        """Add the new samples to the recent evidence, with smaller weights for older ones."""
        expected = [self._expected_s(sample) for sample in self._new]
        ages = np.arange(len(self._new))[::-1]
        fresh = _evidence(self._new, expected, MEMORY**ages)
        self._recent = MEMORY ** len(self._new) * self._recent + fresh
        self._new.clear()


class Drain:
    """The measured speed of the device relative to the expected one, below 1 for busy cores or small batches.

    The weight of older observations decays with the seconds of the newer ones.
    """

    def __init__(self) -> None:
        self.speed = 1.0
        self._expected = self._took = DRAIN_S

    def observe(self, expected_s: float, took_s: float) -> None:
        """Add an observation: work with `expected_s` expected seconds took `took_s`, while more work always waited."""
        fade = math.exp(-took_s / DRAIN_S)
        self._expected = fade * self._expected + expected_s
        self._took = fade * self._took + took_s
        self.speed = self._expected / self._took


def measure(
    run: Callable[[Sequence[T]], object],
    build: Callable[[int], T],
    *,
    max_length: int,
    max_size: int = 8,
    max_tokens: float = math.inf,
    budget_s: float = 0.3,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Sample]:
    """Time a model on at most five shapes, small ones first, and stop before `budget_s` is over.

    build: makes an input of this many tokens
    run: computes a batch of at most `max_size` inputs and, unless it has one input, `max_tokens` tokens

    The time of a shape is that of the faster of two runs, because the first one allocates memory. The
    smallest shape runs once even if it exceeds the budget.
    """
    samples: list[Sample] = []
    end = clock() + budget_s
    shapes = dict.fromkeys((min(n, max_size), min(length, max_length)) for n, length in SHAPES)
    for size, length in shapes:
        tokens = size * length
        if size > 1 and tokens > max_tokens:
            continue
        if samples and clock() + samples[-1].seconds * tokens / samples[-1].tokens > end:
            break
        batch = [build(length) for _ in range(size)]
        seconds = time_run(run, batch, clock)
        if clock() + seconds <= end:
            seconds = min(seconds, time_run(run, batch, clock))
        samples.append(Sample(tokens, size, length, seconds))
    return samples


def time_run(
    run: Callable[[Sequence[T]], object],
    batch: Sequence[T],
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    began = clock()
    run(batch)
    return clock() - began


def _evidence(
    samples: Iterable[Sample], at_least: ArrayLike = 0.0, weights: ArrayLike = 1.0
) -> Matrix:
    """Return the normal equations, [4, 5], of errors relative to the measured seconds or, if larger, `at_least`."""
    rows = [
        (1, s.tokens, s.size * s.longest**2, s.masks, s.seconds) for s in samples if s.seconds > 0
    ]
    table = np.array(rows, dtype=np.float64).reshape(-1, TERMS + 1)
    table /= np.maximum(table[:, TERMS], at_least)[:, None]
    evidence: Matrix = (table[:, :TERMS] * np.broadcast_to(weights, len(table))[:, None]).T @ table
    return evidence


def _solve(evidence: Matrix) -> Cost:
    """Return the cost with the least error among all choices of terms without a negative one."""
    if not evidence.any():
        return GUESS
    squares = np.diagonal(evidence)
    known = squares > 0  # without mask tokens, nothing is known of their term, which is then 0
    # The terms' units are ten powers of ten apart.
    scale = np.where(known, 1 / np.sqrt(np.where(known, squares, 1.0)), 0.0)
    matrix = evidence[:, :TERMS] * np.outer(scale, scale) + RIDGE * np.eye(TERMS)
    target = evidence[:, TERMS] * scale
    chosen = CHOICES[:, :, None] * CHOICES[:, None, :]
    # A term that is not chosen has an equation of its own, whose solution is 0.
    equations = chosen * matrix + (1 - chosen) * np.eye(TERMS)
    lines = np.linalg.solve(equations, (CHOICES * target)[:, :, None])[:, :, 0]  # [15, 4]
    errors = ((lines @ matrix) * lines).sum(axis=1) - 2 * lines @ target
    errors[lines.min(axis=1) < 0] = np.inf
    return Cost(*(lines[errors.argmin()] * scale).tolist())
