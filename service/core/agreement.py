"""How alike two answers are: for mirrored traffic, receipts and `quartet compare`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.core.decode import (
    AnswerSpan,
    AttentionMap,
    LabelScore,
    SparseVector,
    TokenScore,
    sparse_products,
)
from service.core.goldens import cosine

CLOSE = 0.99  # two vectors with at least this cosine count as the same result
NEAR = 0.05  # two scores that differ by at most this count as the same result
SIGNS = 16  # numbers of a sketch
MOST_KNOWN = 4096  # places whose signs are kept
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
        case AttentionMap(tokens, _):
            return tokens
        case [LabelScore() as best, *_]:
            return best.label
        case [AnswerSpan(text, _, start, end), *_]:
            return text, start, end
        case [[TokenScore(), *_], *_]:
            return [tokens[0].token for tokens in answer]  # of each mask token
        case _:
            return [tuple(one._replace(score=0.0)) for one in answer]


def distance(one: Any, other: Any) -> float:
    """Return how far a result is from another: 0 for equal ones, 1 and more for unrelated ones.

    Vectors have the length of their difference divided by the length of the first; labels the largest difference of
    a score; spans that too, and the share of spans that only one has. Scores above 1 are divided by the largest one.
    """
    if isinstance(one, AttentionMap):
        one, other = one.weights, other.weights
    if isinstance(one, SparseVector):
        ids = np.union1d(one.indices, other.indices)
        one, other = (dense(sparse, ids) for sparse in (one, other))
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


def decisions(result: Any) -> Any:
    """Return what a result decides, for a hash: labels, tokens or spans; of vectors their shapes; None for an error."""
    if isinstance(result, dict):
        return {str(key): decisions(value) for key, value in result.items()}
    if result is None or isinstance(result, float):
        return None
    if isinstance(result, SparseVector):
        return len(result.indices)
    return result.shape if isinstance(result, np.ndarray) else essence(result)


def sketch(results: Sequence[Any]) -> NDArray[np.float32]:
    """Return sums of all numbers of results, `[16]`, each with another sign for each number, the same in all calls.

    The difference of two sketches, divided by 4, is about as long as that of the numbers (Johnson and Lindenstrauss).
    The sign of a number is that of its place times that of its vector, so that all vectors share a table. The signs of
    the first vector are 1: a single vector needs one call of numpy.
    """
    if len(results) == 1 and isinstance(results[0], np.ndarray):
        return _sums(None, results[0].ravel())
    parts = [_sums(*part) for one in results for part in _numbers(one)]
    if len(parts) == 1:
        return parts[0]
    rows = np.array(parts, np.float32).reshape(-1, SIGNS)
    sums: NDArray[np.float32] = (rows * _first_signs(1, len(parts))).sum(axis=0)
    return sums


def _sums(places: NDArray[Any] | None, values: NDArray[Any]) -> NDArray[np.float32]:
    signs = _first_signs(0, len(values)) if places is None else _signs(0, places)
    sums: NDArray[np.float32] = values.dot(signs)
    return sums


def _first_signs(salt: int, count: int) -> NDArray[np.float32]:
    """Return the signs of the first numbers, `[count, 16]`."""
    return _known_signs(salt)[:count] if count <= MOST_KNOWN else _signs(salt, np.arange(count))


@cache
def _known_signs(salt: int) -> NDArray[np.float32]:
    return _signs(salt, np.arange(MOST_KNOWN))


def _signs(salt: int, places: NDArray[Any]) -> NDArray[np.float32]:
    """Return 1 or -1 for numbers (salt 0) or vectors (salt 1) at these places, `[n, 16]`."""
    # The last row is the first vector. Multiplying all rows by it makes its own signs 1.
    mixed = np.append(places.astype(np.uint64) + np.uint64(salt << 32), np.uint64(1 << 32))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)  # as splitmix64
    bits = (mixed[:, None] >> np.arange(SIGNS, dtype=np.uint64)) & np.uint64(1)
    signs = np.asarray(2.0 * bits - 1.0, np.float32)
    return np.asarray(signs[:-1] * signs[-1])


def _numbers(result: Any) -> Iterator[tuple[NDArray[Any] | None, NDArray[Any]]]:
    """Yield the values of a result's numbers with their places; None for the first places."""
    if isinstance(result, dict):
        for value in result.values():
            yield from _numbers(value)
    elif result is None:  # of an input that failed
        return
    elif isinstance(result, SparseVector):
        yield result.indices, result.values
    elif isinstance(result, AttentionMap):
        yield None, result.weights.ravel()
    elif isinstance(result, np.ndarray):
        yield None, result.ravel()
    elif isinstance(result, float):
        yield None, np.array([result], np.float32)
    else:
        yield None, np.array([score for _, score in sorted(_scores(result))], np.float32)


def _scores(result: Sequence[Any]) -> Iterator[tuple[str, float]]:
    """Yield the scores of labels, spans or tokens with what they are of, so that equal ones have the same order."""
    for one in result:
        if isinstance(one, list):
            yield from _scores(one)
        elif isinstance(one, LabelScore):
            yield one
        else:
            yield str(one._replace(score=0.0)), one.score


def dense(vector: SparseVector, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the weights of a vector's tokens and 0 for other tokens, `[n]`. ids: of `n` tokens, sorted"""
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
