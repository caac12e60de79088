"""Figures of how equal the answers of two sides are."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.comparison.sides import Task
from service.core.agreement import dense, distance, same_answer, scores, vector_cosine
from service.core.decode import SparseVector

Z95 = 1.96  # of a 95 % interval
NEIGHBORS = 10
EQUAL = 1e-4  # a distance that only the order of sums explains
# The largest usual distance by rounding, by precision; half of the answers have at most half of it.
ROUNDING = {"fp16": 5e-3, "bf16": 4e-2, "int8": 0.35}
EVEN = (
    0.3  # the deviation of the distances of vectors by rounding, at most, as a share of their mean
)


def compare(task: Task, pairs: Sequence[tuple[Any, Any]]) -> dict[str, float]:
    """Return the figures of pairs of answers, by name. Shares are from 0 to 1."""
    same = sum(same_answer(one, other) for one, other in pairs)
    apart = [distance(one, other) for one, other in pairs]
    low, high = interval(same, len(pairs))
    figures = {
        "texts": len(pairs),
        "same": same / len(pairs),
        "same_low": low,
        "same_high": high,
        "distance_p50": float(np.median(apart)),
        "distance_max": max(apart),
    }
    if task in ("embeddings", "sparse"):
        cosines = [vector_cosine(one, other) for one, other in pairs]
        for name, share in (("min", 0.0), ("p1", 0.01), ("p5", 0.05), ("p50", 0.5)):
            figures[f"cosine_{name}"] = float(np.quantile(cosines, share))
        if len(pairs) > 2:
            figures["top10"] = overlap(*map(list, zip(*pairs, strict=True)))
        return figures
    shared = [
        abs(mine[key] - theirs[key])
        for mine, theirs in ((scores(one), scores(other)) for one, other in pairs)
        for key in mine.keys() & theirs.keys()
    ]
    figures["score_difference_mean"] = float(np.mean(shared)) if shared else 0.0
    figures["score_difference_max"] = max(shared, default=0.0)
    if task == "reranking":
        orders = [
            ([own.label for own in one], [own.label for own in other]) for one, other in pairs
        ]
        figures["order_same"] = float(np.mean([one == other for one, other in orders]))
        figures["pairs_swapped"] = float(np.mean([swapped(*own) for own in orders]))
    return figures


def interval(count: int, of: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share."""
    share, extra = count / of, Z95**2 / of
    middle = (share + extra / 2) / (1 + extra)
    half = Z95 * math.sqrt(share * (1 - share) / of + extra / (4 * of)) / (1 + extra)
    return max(0.0, middle - half), min(1.0, middle + half)


def overlap(ones: Sequence[Any], others: Sequence[Any]) -> float:
    """Return the mean share of each text's nearest texts, up to ten, that two sides have in common."""
    nearest = []
    for vectors in (ones, others):
        rows = stack(vectors)
        rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        products = rows @ rows.T
        np.fill_diagonal(products, -np.inf)
        count = min(NEIGHBORS, len(vectors) - 1)
        nearest.append(np.argsort(-products, kind="stable")[:, :count])
    both = zip(*nearest, strict=True)
    return float(np.mean([len({*mine} & {*theirs}) / len(mine) for mine, theirs in both]))


def stack(vectors: Sequence[Any]) -> NDArray[np.float64]:
    """Return vectors as rows; of sparse ones, a column for each token that any of them has."""
    if isinstance(vectors[0], np.ndarray):
        return np.array(vectors, np.float64)
    ids = np.unique(np.concatenate([own.indices for own in vectors]))
    return np.array([dense(own, ids) for own in vectors])


def swapped(one: Sequence[str], other: Sequence[str]) -> float:
    """Return the share of pairs of documents whose order differs between two rankings."""
    place = {label: index for index, label in enumerate(other)}
    ranks = np.array([place[label] for label in one if label in place])
    count = len(ranks) * (len(ranks) - 1) / 2
    return float(np.triu(ranks[:, None] > ranks[None, :]).sum() / count) if count else 0.0


def rounding(pairs: Sequence[tuple[Any, Any]]) -> str:
    """Return the precision whose rounding explains the differences: fp32 for equal answers, "" for none.

    Rounding changes all answers: vectors by nearly the same length (by a fifth of it more or less, measured for fp16,
    bf16 and int8; another prompt or type of tokens by a third and more), and the scores of at least half of the texts.
    """
    apart = np.array([distance(one, other) for one, other in pairs])
    if apart.max() <= EQUAL:
        return "fp32"
    is_vector = isinstance(pairs[0][0], np.ndarray | SparseVector)
    is_even = apart.std() <= EVEN * apart.mean()
    if not (is_even if is_vector else (apart > EQUAL / 10).mean() >= 0.5):
        return ""
    fits = (name for name, most in ROUNDING.items() if np.median(apart) <= most / 2)
    precision = next(fits, "")
    return precision if precision and apart.max() <= ROUNDING[precision] else ""
