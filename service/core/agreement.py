"""How alike two answers are: counted by mirrored traffic, measured by `quartet compare`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.core.bundle import cosine
from service.core.decode import AnswerSpan, LabelScore, SparseVector, TokenScore, sparse_products

CLOSE = 0.99  # two vectors with at least this cosine count as the same result
NEAR = 0.05  # two scores that differ by at most this count as the same result
CLOSE_INTEGERS = 0.9  # the cosine of their packed bits that follows from it


def same_answer(one: Any, other: Any) -> bool:
    """Return whether two results have the same best label, tokens, entities or span, or near scores or vectors."""
    if isinstance(one, float):
        return bool(abs(one - other) <= NEAR)
    if isinstance(one, Mapping):
        return all(same_answer(value, other[key]) for key, value in one.items())
    if isinstance(one, np.ndarray | SparseVector):
        if isinstance(one, np.ndarray) and one.dtype.kind != "f":
            return _same_integers(one, other)
        return vector_cosine(one, other) >= CLOSE
    return essence(one) == essence(other)


def vector_cosine(one: Any, other: Any) -> float:
    """Return the cosine of two dense or two sparse vectors; 0 for different shapes."""
    if isinstance(one, SparseVector):
        product, mine, theirs = (
            sparse_products(a, [b])[0] for a, b in ((one, other), (one, one), (other, other))
        )
        return product / math.sqrt(mine * theirs) if mine * theirs else float(mine == theirs)
    return cosine(one, other) if one.shape == other.shape else 0.0


def _same_integers(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Return whether two quantized vectors have a high cosine around the middle of their type."""
    if one.shape != other.shape:
        return False
    middle = 127.5 if one.dtype == np.uint8 else -0.5
    return (
        cosine(one.astype(np.float32) - middle, other.astype(np.float32) - middle) >= CLOSE_INTEGERS
    )


def essence(answer: Sequence[Any]) -> object:
    """Return a result without its scores."""
    match answer:
        case [LabelScore(label, _), *_]:
            return label
        case [AnswerSpan(text, _, start, end), *_]:
            return text, start, end
        case [[TokenScore(), *_], *_]:
            return [tokens[0].token for tokens in answer]  # of each mask token
        case _:
            return [one._replace(score=0.0) for one in answer]


def distance(one: Any, other: Any) -> float:
    """Return how far a result is from another: 0 for equal ones, 1 and more for unrelated ones.

    Vectors have the length of their difference divided by the length of the first; labels the largest difference of
    a score; spans that too, and the share of spans that only one has. Scores above 1 are divided by the largest one.
    """
    if isinstance(one, SparseVector):
        ids = np.union1d(one.indices, other.indices)
        one, other = (_dense(sparse, ids) for sparse in (one, other))
    if isinstance(one, np.ndarray):
        if one.shape != other.shape:
            return 1.0
        first, second = one.astype(np.float64), other.astype(np.float64)
        length = float(np.linalg.norm(first)) or 1.0
        return float(np.linalg.norm(first - second)) / length
    mine, theirs = scores(one), scores(other)
    shared = mine.keys() & theirs.keys()
    if not shared:
        return float(mine.keys() != theirs.keys())
    largest = max(1.0, *(abs(mine[key]) for key in shared))
    apart = max(abs(mine[key] - theirs[key]) for key in shared) / largest
    if isinstance(one[0], LabelScore):  # a result may have only the best labels
        return apart
    return max(apart, 1 - 2 * len(shared) / (len(mine) + len(theirs)))


def _dense(vector: SparseVector, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    row = np.zeros(len(ids))
    row[np.searchsorted(ids, vector.indices)] = vector.values
    return row


def scores(answer: Sequence[Any]) -> dict[Any, float]:
    """Return the score of each label, or of each span by its entity, start and end."""
    return {
        one.label
        if isinstance(one, LabelScore)
        else (getattr(one, "entity", ""), one.start, one.end): one.score
        for one in answer
    }
