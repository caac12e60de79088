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
SIGNS = 16  # sums of an outline
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
            return [_without_score(one) for one in answer]


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


def outline(results: Sequence[Any]) -> tuple[list[Any], NDArray[np.float32]]:
    """Return what results decide, for a hash, and 16 sums of all their numbers, each with another sign for each number.

    Decisions are labels, tokens or spans; of vectors their shapes; None for an error. The signs are the same in all
    calls. The difference of two sums, divided by 4, is about as long as that of the numbers (Johnson and
    Lindenstrauss). The sign of a number is that of its place times that of its vector, so that all vectors share a
    table. The signs of the first vector are 1.
    """
    decisions: list[Any] = []
    sums: list[NDArray[np.float32]] = []
    for one in results:
        decided, own = _outline(one)
        decisions.append(decided)
        sums += own
    if len(sums) == 1:
        return decisions, sums[0]
    rows = np.array(sums, np.float32).reshape(-1, SIGNS)
    total: NDArray[np.float32] = (rows * _first_signs(1, len(rows))).sum(axis=0)
    return decisions, total


def _outline(result: Any) -> tuple[Any, list[NDArray[np.float32]]]:
    """Return what a result decides, and the sums of each of its vectors."""
    if isinstance(result, np.ndarray):
        return result.shape, [_sums(result.ravel())]
    if isinstance(result, list):
        named = result if result and isinstance(result[0], LabelScore) else _named_scores(result)
        # In an order of their own, because equal results may have another.
        scores = [score for _, score in sorted(named)]
        return essence(result), [_sums(np.array(scores, np.float32))]
    if isinstance(result, dict):
        parts = {str(key): _outline(value) for key, value in result.items()}
        sums = [one for _, own in parts.values() for one in own]
        return {key: decided for key, (decided, _) in parts.items()}, sums
    if isinstance(result, SparseVector):
        return len(result.indices), [result.values.dot(_signs(0, result.indices))]
    if isinstance(result, AttentionMap):
        return essence(result), [_sums(result.weights.ravel())]
    return None, [] if result is None else [_sums(np.array([result], np.float32))]


def _sums(values: NDArray[Any]) -> NDArray[np.float32]:
    sums: NDArray[np.float32] = values.dot(_first_signs(0, len(values)))
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


def _named_scores(result: Sequence[Any]) -> Iterator[tuple[str, float]]:
    """Yield the scores of spans or tokens with what they are of."""
    for one in result:
        if isinstance(one, list):
            yield from _named_scores(one)
        else:
            yield repr(_without_score(one)), one.score


def _without_score(one: Any) -> tuple[Any, ...]:
    """Return a span or a token with the score 0. `_replace` takes 2.7 times as long."""
    place = one._fields.index("score")
    return *one[:place], 0.0, *one[place + 1 :]


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
