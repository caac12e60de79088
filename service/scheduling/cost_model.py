"""What a batch costs on this machine: a straight line through measured batches.

    seconds = per_run + per_token * T + per_slot * B * S * S

for B sequences of T real tokens together, the longest of S tokens. The middle term is every layer
that works on packed tokens; the last one is attention, which on a CPU also works on padding. A graph
that takes padded batches works on padding everywhere: its T is B * S. This one line plans batches,
predicts how fast the queue drains, and fills `Retry-After`.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

T = TypeVar("T")
Matrix = NDArray[np.float64]

SHAPES = ((1, 16), (1, 128), (8, 32), (1, 512), (8, 128))  # size, length; by number of tokens
MEMORY = 0.98  # what a batch weighs when the next one has come: the last fifty count
WARM_UP = 0.1  # what a warm-up sample weighs beside a new batch
REFIT_EVERY = 8  # batches
SURPRISE = 1.25  # a batch of so many times the time expected, or of it, is learnt from at once
RIDGE = 1e-8
DRAIN_S = 2.0  # of work, after which it weighs a third
# Of the three terms, as masks.
CHOICES = np.array([[a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)][1:], np.float64)


class Sample(NamedTuple):
    """One measured batch."""

    tokens: int
    size: int
    longest: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds per run, per computed token and per attention slot (B * S * S of them in a batch).

    padded: whether padding is computed as tokens are
    """

    per_run: float
    per_token: float
    per_slot: float
    padded: bool = False

    def seconds(self, tokens: int, size: int, longest: int) -> float:
        """Predict the time of a batch of `size` sequences, `tokens` in all, none over `longest`."""
        slots = size * longest * longest
        computed = self.computed(tokens, size, longest)
        return self.per_run + self.per_token * computed + self.per_slot * slots

    def computed(self, tokens: int, size: int, longest: int) -> int:
        """The tokens that such a batch computes, padding included where it is padded."""
        return size * longest if self.padded else tokens

    def tokens_per_second(self, lengths: Sequence[int]) -> float:
        """Predict the speed of one replica that runs batches of these lengths, back to back."""
        tokens = sum(lengths)
        return tokens / max(self.seconds(tokens, len(lengths), max(lengths)), 1e-9)


GUESS = Cost(per_run=1e-3, per_token=2e-5, per_slot=0.0)  # before anything was measured


def fit(samples: Iterable[Sample]) -> Cost:
    """Fit by non-negative least squares on relative errors: short batches count like long ones.

    What the samples leave open is split evenly: one sample alone gives a third of its time to each
    term, and none gives `GUESS`.
    """
    return _solve(_evidence(samples))


class Estimator:
    """The cost of one bundle: known from warm-up, refined by the batches that really ran.

    Older batches fade; the warm-up never quite does, so that shapes which traffic does not show
    stay known. The state is two 3 x 4 matrices, however long it learns.
    """

    def __init__(
        self,
        samples: Iterable[Sample] = (),
        *,
        padded: bool = False,
    ) -> None:
        self._padded = padded
        self._warm = _evidence(samples)
        self._recent = np.zeros_like(self._warm)
        self._new: list[Sample] = []  # since the last fit
        self.cost = self._fit(self._warm)

    def refine(self, sample: Sample) -> None:
        """Learn from a real batch; one from a machine that stalled, or far too fast, counts little.

        That is because an error is relative to the longer of the measured and the expected time.
        """
        if sample.seconds <= 0:
            return
        computed = self.cost.computed(sample.tokens, sample.size, sample.longest)
        self._new.append(sample._replace(tokens=computed))
        if len(self._new) == REFIT_EVERY or self._surprises(sample):
            self._fold()
            self.cost = self._fit(WARM_UP * self._warm + self._recent)

    def _surprises(self, sample: Sample) -> bool:
        """Whether it took much longer or shorter than expected: a wrong cost of batches that are rare is soon right."""
        expected = self.cost.seconds(sample.tokens, sample.size, sample.longest)
        return not expected < SURPRISE * sample.seconds < SURPRISE**2 * expected

    def _fit(self, evidence: Matrix) -> Cost:
        return replace(_solve(evidence), padded=self._padded)

    def _fold(self) -> None:
        """Add the new samples to what is known, the older the less."""
        expected = [self.cost.seconds(s.tokens, s.size, s.longest) for s in self._new]
        ages = np.arange(len(self._new))[::-1]
        fresh = _evidence(self._new, expected, MEMORY**ages)
        self._recent = MEMORY ** len(self._new) * self._recent + fresh
        self._new.clear()

    def tokens_per_second(self, lengths: Sequence[int]) -> float:
        """Predict the speed of one replica that runs batches of these lengths, back to back."""
        return self.cost.tokens_per_second(lengths)


class Drain:
    """How fast work gets done, by what was expected: less than 1 where others use the cores, or batches are small.

    Older evidence fades with the seconds that it is of.
    """

    def __init__(self) -> None:
        self.speed = 1.0
        self._expected = self._took = DRAIN_S

    def observe(self, expected_s: float, took_s: float) -> None:
        """Work that was expected to take so long has taken so long, while there was always more of it."""
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
    budget_s: float = 0.3,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Sample]:
    """Time a model on at most five shapes, small ones first, and stop before `budget_s` is over.

    `build` makes an input of so many tokens, `run` takes a batch of them, `max_size` at most. A shape
    counts with the faster of two runs, because the first one allocates; the smallest runs once
    whatever it takes.
    """
    samples: list[Sample] = []
    end = clock() + budget_s
    shapes = dict.fromkeys((min(n, max_size), min(length, max_length)) for n, length in SHAPES)
    for size, length in shapes:
        tokens = size * length
        if samples and clock() + samples[-1].seconds * tokens / samples[-1].tokens > end:
            break
        batch = [build(length) for _ in range(size)]
        seconds = _time(run, batch, clock)
        if clock() + seconds <= end:
            seconds = min(seconds, _time(run, batch, clock))
        samples.append(Sample(tokens, size, length, seconds))
    return samples


def _time(
    run: Callable[[Sequence[T]], object], batch: Sequence[T], clock: Callable[[], float]
) -> float:
    began = clock()
    run(batch)
    return clock() - began


def _evidence(
    samples: Iterable[Sample], at_least: ArrayLike = 0.0, weights: ArrayLike = 1.0
) -> Matrix:
    """The normal equations of the relative errors, [3, 4]; the last column is the right side.

    An error is relative to the measured seconds, or to `at_least`, if that is more.
    """
    rows = [(1, s.tokens, s.size * s.longest**2, s.seconds) for s in samples if s.seconds > 0]
    table = np.array(rows, dtype=np.float64).reshape(-1, 4)
    table /= np.maximum(table[:, 3], at_least)[:, None]
    evidence: Matrix = (table[:, :3] * np.broadcast_to(weights, len(table))[:, None]).T @ table
    return evidence


def _solve(evidence: Matrix) -> Cost:
    """The best line without a negative term: of every choice of terms, the one with least error."""
    if not evidence.any():
        return GUESS
    scale = 1 / np.sqrt(np.diagonal(evidence))  # the terms' units are ten powers of ten apart
    matrix = evidence[:, :3] * np.outer(scale, scale) + RIDGE * np.eye(3)
    target = evidence[:, 3] * scale
    chosen = CHOICES[:, :, None] * CHOICES[:, None, :]
    # Terms that are not chosen have an equation of their own, which says 0.
    equations = chosen * matrix + (1 - chosen) * np.eye(3)
    lines = np.linalg.solve(equations, (CHOICES * target)[:, :, None])[:, :, 0]  # [7, 3]
    errors = ((lines @ matrix) * lines).sum(axis=1) - 2 * lines @ target
    errors[lines.min(axis=1) < 0] = np.inf
    return Cost(*(lines[errors.argmin()] * scale).tolist())
