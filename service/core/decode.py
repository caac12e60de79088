"""Logits to results: labels, entities, answer spans and vectors.

The functions use only numpy and plain arguments, so that serving, evaluation and export verification
decode logits in the same way. A call decodes one input, given as its windows in text order (one or
more), so a result cannot depend on the other inputs of the batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from service.core import tags
from service.core.encode import Cut, Encoded, Encoding
from service.core.manifest import OutputDtype, Ranges
from service.core.packing import Ints

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Vector = NDArray[Any]  # [D] float32, int8 or uint8; or [ceil(D / 8)] of packed bits
OffsetUnit = Literal["code_point", "utf16"]
Span = tuple[float, int, int]  # the sum of two logits, start, end


class LabelScore(NamedTuple):
    label: str
    score: float


class EntitySpan(NamedTuple):
    """An entity; `word` is `text[start:end]`, and `entity` a type ("PER") or a token's own label ("B-PER")."""

    entity: str
    score: float
    word: str
    start: int
    end: int


class AnswerSpan(NamedTuple):
    """An answer; `answer` is `context[start:end]`. The null answer is "", 0, 0."""

    answer: str
    score: float
    start: int
    end: int


class TokenScore(NamedTuple):
    """A token for a mask token; `sequence` is the text with `token_str` in its place."""

    token: int
    token_str: str
    score: float
    sequence: str


@dataclass(slots=True)
class MaskedText(Cut):
    """One input with its mask tokens; `windows` are only those that a mask token is read from."""

    ids: list[int]  # of all tokens of the text, special tokens included
    places: list[int]  # the indices of the mask tokens in `ids`, `[m]`
    rows: Ints  # the row of each mask token in the outputs of all `windows` together, `[m]`


S = TypeVar("S", EntitySpan, AnswerSpan)


def to_utf16(spans: Sequence[S], text: str) -> list[S]:
    """Return spans of `text` with offsets in UTF-16 code units, as JavaScript and Java index strings."""
    if text.isascii():
        return list(spans)
    units = utf16_positions(text)
    return [span._replace(start=units[span.start], end=units[span.end]) for span in spans]


def utf16_positions(text: str) -> list[int]:
    """Return the UTF-16 code units before each code point, and the number of all."""
    code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    return [0, *np.cumsum(1 + (code_points > 0xFFFF)).tolist()]


def softmax(logits: Floats) -> Floats:
    """Return the softmax over the last axis; large logits do not overflow."""
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities: Floats = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return probabilities


def sigmoid(logits: Floats) -> Floats:
    """Return the logistic function; large logits do not overflow."""
    probabilities: Floats = np.exp(-np.logaddexp(0, -logits))
    return probabilities


def activate(
    logits: Floats, problem_type: str | None, function_to_apply: str | None = None
) -> Floats:
    """Turn logits into scores, both `[..., C]`.

    function_to_apply: "softmax", "sigmoid" or "none", as transformers' text-classification pipeline has it; None
    follows the problem type. A regression keeps its logits; labels that may hold together, and a single label, get a
    sigmoid; labels that exclude each other (also the meaning of None) get a softmax.
    """
    if function_to_apply is None:
        if problem_type == "regression":
            function_to_apply = "none"
        elif problem_type == "multi_label_classification" or logits.shape[-1] == 1:
            function_to_apply = "sigmoid"
        else:
            function_to_apply = "softmax"
    return FUNCTIONS[function_to_apply](logits)


FUNCTIONS: dict[str, Callable[[Floats], Floats]] = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "none": lambda logits: logits,
}


def classify(
    windows: Sequence[Floats],
    lengths: Sequence[int],
    *,
    labels: Sequence[str],
    problem_type: str | None,
    top_k: int | None,
    threshold: float | None = None,
    function_to_apply: str | None = None,
    temperature: float | None = None,
) -> list[LabelScore]:
    """Return the `top_k` labels (None: all) by falling score, equal scores in label order.

    windows: logits `[C]` of each window; their mean, weighted by `lengths` in tokens, is activated.
    threshold: the smallest score of a label that is returned; function_to_apply: see `activate`
    temperature: what logits are divided by, to calibrate the scores; None for scores as they are
    """
    logits = mean_logits(windows, lengths)
    if temperature is not None:
        logits = logits / np.float32(temperature)
    scores = activate(logits, problem_type, function_to_apply)
    order = np.argsort(-scores, kind="stable")[:top_k]
    found = [LabelScore(labels[index], float(scores[index])) for index in order]
    return found if threshold is None else [one for one in found if one.score >= threshold]


def mean_logits(windows: Sequence[Floats], lengths: Sequence[int]) -> Floats:
    """Return the mean logits `[C]` of a text's windows, weighted by `lengths` in tokens."""
    return _weighted_mean(windows, lengths).astype(np.float32)


def embed(
    windows: Sequence[Floats], lengths: Sequence[int], *, normalize: bool, dimensions: int | None
) -> Floats:
    """Return one vector: the first `dimensions` (None: all) of D, scaled to length 1 if `normalize`.

    windows: pooled vectors `[D]`, not normalized; their mean is weighted by `lengths` in tokens.
    A zero vector stays zero. Raises ValueError unless 1 <= dimensions <= D.
    """
    vector = _weighted_mean(windows, lengths)
    if dimensions is not None and not 1 <= dimensions <= len(vector):
        raise ValueError(f"dimensions must be from 1 to {len(vector)}, not {dimensions}")
    vector = vector[:dimensions]
    norm = math.sqrt(vector @ vector) if normalize else 0
    return (vector / norm if norm > 0 else vector).astype(np.float32)


def embed_rows(vectors: Floats, *, normalize: bool, dimensions: int | None) -> Floats:
    """Return the vectors of texts of one window each, `[k, D]`, bit for bit as `embed` does one by one."""
    rows = vectors[:, :dimensions].astype(np.float64)
    if normalize:
        norms = np.sqrt(np.vecdot(rows, rows))
        rows /= np.where(norms > 0, norms, 1)[:, None]
    return rows.astype(np.float32)


def quantize(vector: Floats, dtype: OutputDtype, ranges: Ranges | None = None) -> Vector:
    """Return a vector in a smaller type, as sentence-transformers' `quantize_embeddings` does.

    dtype: "float" changes nothing. "int8" and "uint8" give 256 steps between the smallest and the largest number of
    each dimension, `[D]`. "binary" and "ubinary" give a bit for each dimension, 1 above zero, the first one highest:
    `[ceil(D / 8)]` int8 (less 128) or uint8.
    ranges: `[2, D]`. Raises ValueError where "int8" or "uint8" lack them, and for other sizes.
    """
    match dtype:
        case "float":
            return vector
        case "ubinary":
            return np.packbits(vector > 0)
        case "binary":
            return (np.packbits(vector > 0).astype(np.int16) - 128).astype(np.int8)
    if ranges is None or len(ranges[0]) != len(vector):
        raise ValueError(f"{dtype} needs the ranges of {len(vector)} dimensions")
    low, high = np.asarray(ranges, np.float32)
    steps = (high - low) / 255
    levels: Floats = np.clip(np.floor((vector - low) / np.where(steps == 0, 1, steps)), 0, 255)
    return levels.astype(np.uint8) if dtype == "uint8" else (levels - 128).astype(np.int8)


def _weighted_mean(windows: Sequence[Floats], lengths: Sequence[int]) -> Doubles:
    """Return the weighted mean in double precision; the mean of one window is that window exactly."""
    if len(windows) == 1:
        return windows[0].astype(np.float64)
    mean: Doubles = np.average(np.stack(windows), axis=0, weights=np.asarray(lengths, np.float64))
    return mean


def ner(
    windows: Sequence[Encoding],
    logits: Sequence[Floats],
    text: str,
    *,
    labels: Sequence[str],
    aggregation_strategy: str,
) -> list[EntitySpan]:
    """Return the entities of `text`, in text order; tokens or words with the label "O" are outside of entities.

    logits: `[n, C]` of each window. aggregation_strategy:
      "none"     every token is an entity of its own, with its own label
      "simple"   neighboring tokens of one type are joined by the labels' scheme (see `service.core.tags`)
      "first", "average", "max"    whole words are joined by the scheme; a word has the scores of its
                 first token, the mean of its tokens, or the token with the highest score
    The score of an entity is the mean of the joined parts. Raises ValueError for any other strategy.
    """
    if aggregation_strategy not in AGGREGATION_STRATEGIES:
        raise ValueError(f"aggregation_strategy must be one of {', '.join(AGGREGATION_STRATEGIES)}")
    offsets, words, merged = _merge_windows(windows, logits)
    if not len(words):
        return []
    scores = softmax(merged)
    if aggregation_strategy in _WORD_SCORES:
        runs = _Runs.of(words[1:] != words[:-1])
        offsets, scores = runs.span(offsets), _WORD_SCORES[aggregation_strategy](scores, runs)
    best, peaks = scores.argmax(axis=1), scores.max(axis=1)
    if aggregation_strategy == "none":
        return _entities(text, [labels[label] for label in best], peaks, offsets)
    joined = tags.scheme(labels)
    runs = _Runs.of(joined.breaks(best))
    types = [joined.types[label] for label in best[runs.firsts].tolist()]
    return _entities(text, types, runs.mean(peaks), runs.span(offsets))


def _entities(text: str, names: list[str], scores: Floats, offsets: Ints) -> list[EntitySpan]:
    found = zip(names, scores.tolist(), offsets.tolist(), strict=True)
    return [
        EntitySpan(name, score, text[start:end], start, end)
        for name, score, (start, end) in found
        if name != tags.OUTSIDE
    ]


class _Runs(NamedTuple):
    """Runs of neighboring rows: the first row of each run, and the row after its last."""

    firsts: Ints
    ends: Ints

    @classmethod
    def of(cls, breaks: NDArray[np.bool]) -> "_Runs":
        """Return the runs of n rows; `breaks` `[n - 1]` is true where a run ends between two rows."""
        inner = np.flatnonzero(breaks) + 1
        return cls(np.append(0, inner), np.append(inner, len(breaks) + 1))

    def span(self, offsets: Ints) -> Ints:
        return np.column_stack([offsets[self.firsts, 0], offsets[self.ends - 1, 1]])

    def mean(self, rows: Floats) -> Floats:
        sizes = (self.ends - self.firsts).astype(np.float32)
        return np.asarray((np.add.reduceat(rows, self.firsts).T / sizes).T, np.float32)

    def highest(self, rows: Floats) -> Floats:
        """Return the row with the highest value of each run, the first among equals."""
        peaks = rows.max(axis=1)
        run = np.repeat(np.arange(len(self.firsts)), self.ends - self.firsts)
        return rows[np.lexsort((-peaks, run))[self.firsts]]


_WORD_SCORES: dict[str, Callable[[Floats, _Runs], Floats]] = {
    "first": lambda scores, words: scores[words.firsts],
    "average": lambda scores, words: words.mean(scores),
    "max": lambda scores, words: words.highest(scores),
}
AGGREGATION_STRATEGIES = ("none", "simple", *_WORD_SCORES)


def _merge_windows(
    windows: Sequence[Encoding], logits: Sequence[Floats]
) -> tuple[Ints, Ints, Floats]:
    """Return offsets `[t, 2]`, words `[t]` and logits `[t, C]` of the first text's tokens of a width, each once.

    A token in several windows is read where its distance to the nearest edge is largest, and from the first of them.
    """
    tokens, picked = _merge_tokens(windows)
    merged = tokens[picked]
    wide = merged[:, 0] < merged[:, 1]
    rows = [window.sequence == 0 for window in windows]
    return merged[wide, :2], merged[wide, 2], _gather(logits, rows)[picked[wide]]


def _merge_tokens(windows: Sequence[Encoding]) -> tuple[Ints, Ints]:
    """Return the rows of `_tokens` of the first text in all windows, `[n, 4]`, and which to read per token `[t]`."""
    rows = [np.flatnonzero(window.sequence == 0) for window in windows]
    tokens = _tokens(windows, rows)
    return np.concatenate(tokens), most_context([len(row) for row in rows], _shifts(tokens))


def _tokens(windows: Sequence[Encoding], rows: Sequence[Ints]) -> list[Ints]:
    """Return the offsets, word and id that distinguish a token from its neighbors, `[n, 4]` for each window."""
    return [
        np.column_stack([window.offsets, window.words, window.input_ids])[row]
        for window, row in zip(windows, rows, strict=True)
    ]


def _shifts(windows: Sequence[Ints]) -> list[int]:
    """Return the row of its predecessor at which each window begins: the row of the same token, or else its end."""
    shifts = []
    for previous, current in pairwise(windows):
        same = np.flatnonzero((previous == current[0]).all(axis=1))
        shifts.append(int(same[0]) if len(same) else len(previous))
    return shifts


def most_context(sizes: Sequence[int], shifts: Sequence[int]) -> Ints:
    """Return, for each token of the text, the row of the concatenated windows from which to read it.

    The ends of the text need no exception. In the first window, a token is farther from the window's
    start than in any later window. In the last window, a token is farther from its end than in any
    earlier one.
    """
    begins = np.cumsum([0, *shifts])
    best = np.zeros(begins[-1] + sizes[-1], np.int64)
    picked = np.zeros(len(best), np.int64)
    row = 0
    for begin, size in zip(begins, sizes, strict=True):
        here = slice(begin, begin + size)
        context = np.minimum(np.arange(1, size + 1), np.arange(size, 0, -1))
        picked[here] = np.where(context > best[here], np.arange(row, row + size), picked[here])
        best[here] = np.maximum(context, best[here])
        row += size
    return picked


def find_masks(item: Encoded, mask_token_id: int) -> MaskedText:
    """Return an input with its mask tokens, each read from the window that `ner` reads a token from."""
    first, last = item.windows[0], item.windows[-1]
    if not any((window.input_ids == mask_token_id).any() for window in item.windows):
        return MaskedText((first,), item.truncated, first.input_ids.tolist(), [], np.zeros(0, int))
    tokens, picked = _merge_tokens(item.windows)
    sizes = [np.count_nonzero(window.sequence == 0) for window in item.windows]
    window_of = np.repeat(np.arange(len(sizes)), sizes)
    is_mask = tokens[:, 3] == mask_token_id
    masks = picked[is_mask[picked]]
    needed = np.unique(window_of[masks])
    rows = np.cumsum(is_mask & np.isin(window_of, needed)) - 1
    begin = int(np.flatnonzero(first.sequence == 0)[0])
    end = int(np.flatnonzero(last.sequence == 0)[-1]) + 1
    ids = np.concatenate([first.input_ids[:begin], tokens[picked, 3], last.input_ids[end:]])
    return MaskedText(
        tuple(item.windows[index] for index in needed.tolist()),
        item.truncated,
        ids.tolist(),
        (np.flatnonzero(is_mask[picked]) + begin).tolist(),
        rows[masks],
    )


def fill_mask(
    text: MaskedText, logits: Sequence[Floats], *, top_k: int, targets: Sequence[int] | None = None
) -> list[list[tuple[int, float]]]:
    """Return the `top_k` tokens, of `targets` if given, for each mask token, with probabilities; equal ones by id.

    logits: `[m, V]` for the mask tokens of each window, of which a softmax over the vocabulary gives probabilities
    """
    scores = softmax(np.concatenate(logits)[text.rows])  # [m, V]
    ids = np.arange(scores.shape[1]) if targets is None else np.array(targets)
    return [_highest(ids, row[ids], top_k) for row in scores]


def _highest(ids: Ints, scores: Floats, count: int) -> list[tuple[int, float]]:
    """Return the `count` ids with the highest scores, and these."""
    if count < len(scores):
        best = np.argpartition(-scores, count - 1)[:count]
        ids, scores = ids[best], scores[best]
    order = np.lexsort((ids, -scores))
    return list(zip(ids[order].tolist(), scores[order].tolist(), strict=True))


def qa(
    windows: Sequence[Encoding],
    logits: Sequence[Floats],
    context: str,
    *,
    top_k: int,
    handle_impossible_answer: bool,
    null_threshold: float,
    max_answer_tokens: int,
) -> list[AnswerSpan]:
    """Return the `top_k` answers of `context` by falling score, equal scores by start and end; [] if it is empty.

    logits: `[n, 2]` of each window, for starts and for ends. Starts and ends get one softmax each,
    over the context's tokens and [CLS] of all windows. The score of a span of 1 to
    `max_answer_tokens` tokens within a window is p_start * p_end, the largest value if several
    windows contain it. The span is extended to the edges of its words. The best 2 * `top_k` + 10
    spans count. Spans whose texts differ only in case are one answer, whose score is their sum and
    whose place is that of the best of them.

    With `handle_impossible_answer`, the null answer is start and end at [CLS], in the window where
    that is least likely. It comes first if there is no answer, or if it exceeds the best answer by
    more than `null_threshold` (a difference of logarithms). Otherwise its score gives its rank, after
    the best answer.
    """
    rows = [_competing(window) for window in windows]
    scores = _gather(logits, rows).astype(np.float64)
    scores -= scores.max(axis=0)
    partition = float(np.exp(scores).sum(axis=0).prod())
    edges, words = _word_edges(
        _gather([window.words for window in windows], rows),
        _gather([window.offsets for window in windows], rows),
    )
    places = np.concatenate(_places(windows, rows))
    splits = np.cumsum([len(row) for row in rows])[:-1]
    parts = [np.split(column, splits) for column in (scores, words, places)]
    by_window = list(zip(*parts, strict=True))
    ranked = _merge_spans(_best_spans(by_window, edges, 2 * top_k + 10, max_answer_tokens), context)
    if handle_impossible_answer:
        null = min(float(part[0].sum()) for part, *_ in by_window)
        ranked.insert(_null_rank(ranked, null, null_threshold), (null, 0, 0))
    return [
        AnswerSpan(context[start:end], math.exp(score) / partition, start, end)
        for score, start, end in ranked[:top_k]
    ]


def _competing(window: Encoding) -> Ints:
    """Return the rows of a window that compete: [CLS], then the tokens of the second text that have a width."""
    wide = window.offsets[:, 0] < window.offsets[:, 1]
    return np.append(0, np.flatnonzero((window.sequence == 1) & wide))


def _gather(parts: Sequence[NDArray[Any]], rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate([part[row] for part, row in zip(parts, rows, strict=True)])


def _word_edges(words: Ints, offsets: Ints) -> tuple[Ints, Ints]:
    """Return start and end `[W, 2]` of the words in all windows, which may cut words, and each token's word."""
    names, members = np.unique(words, return_inverse=True)
    edges = np.tile([np.iinfo(np.int64).max, 0], (len(names), 1))
    np.minimum.at(edges[:, 0], members, offsets[:, 0])
    np.maximum.at(edges[:, 1], members, offsets[:, 1])
    return edges, members


def longest_answer(windows: Sequence[Encoding], max_answer_tokens: int) -> int:
    """Return the largest number of characters of an answer of `qa`: some tokens, extended to the edges of words."""
    longest = 0
    for window in windows:
        offsets, words = (c[window.sequence == 1] for c in (window.offsets, window.words))
        if len(words):
            edges, members = _word_edges(words, offsets)
            starts, ends = edges[members].T
            last = np.minimum(np.arange(len(words)) + max_answer_tokens, len(words)) - 1
            longest = max(longest, int((ends[last] - starts).max()))
    return longest


def _null_rank(ranked: Sequence[Span], null: float, null_threshold: float) -> int:
    if not ranked or null - ranked[0][0] > null_threshold:
        return 0
    return max(1, sum(score >= null for score, _, _ in ranked))


def _places(windows: Sequence[Encoding], rows: Sequence[Ints]) -> list[Ints]:
    """Return the index of each row's token in the context, which is the same in every window that contains it."""
    texts = [np.flatnonzero(window.sequence == 1) for window in windows]
    begins = np.cumsum([0, *_shifts(_tokens(windows, texts))])
    return [
        row - (text[0] if len(text) else 0) + begin
        for row, text, begin in zip(rows, texts, begins, strict=True)
    ]


def _best_spans(
    windows: Sequence[tuple[Doubles, Ints, Ints]], edges: Ints, count: int, max_answer_tokens: int
) -> list[Span]:
    """Return the best `count` spans, each once; windows: logits, words and places, [CLS] first."""
    best: dict[tuple[int, int], Span] = {}
    for logits, words, places in windows:
        for score, first, last in _top_spans(logits[1:], count, max_answer_tokens):
            tokens = int(places[1 + first]), int(places[1 + last])
            span = score, int(edges[words[1 + first], 0]), int(edges[words[1 + last], 1])
            best[tokens] = max(span, best.get(tokens, span))
    ranked = sorted(best, key=lambda tokens: (-best[tokens][0], tokens))
    return [best[tokens] for tokens in ranked[:count]]


def _merge_spans(spans: Sequence[Span], context: str) -> list[Span]:
    """Merge spans whose texts differ only in case; both lists are sorted by falling score."""
    same: dict[str, list[Span]] = {}
    for span in spans:
        same.setdefault(context[span[1] : span[2]].lower(), []).append(span)
    merged = [(_log_sum([score for score, *_ in own]), *own[0][1:]) for own in same.values()]
    return sorted(merged, key=lambda span: (-span[0], span[1:]))


def _log_sum(scores: Sequence[float]) -> float:
    """Return the logarithm of the sum of the scores' exponentials; the first score must be the largest."""
    return scores[0] + math.log(math.fsum(math.exp(score - scores[0]) for score in scores))


def _top_spans(logits: Doubles, count: int, max_answer_tokens: int) -> list[Span]:
    """Return score, first and last token of the best `count` spans of one window, equal scores in text order."""
    reach = min(max_answer_tokens, len(logits))
    if not reach:
        return []
    # [n, reach]: each start with every end that it may have; a padded end has the score -inf
    ends = np.pad(logits[:, 1], (0, reach - 1), constant_values=-np.inf)
    scores = (logits[:, :1] + sliding_window_view(ends, reach)).ravel()
    order = np.argsort(-scores, kind="stable")[:count]
    order = order[scores[order] > -np.inf]
    columns = scores[order], order // reach, order // reach + order % reach
    return list(zip(*(column.tolist() for column in columns), strict=True))


def relevance(windows: Sequence[Floats], *, problem_type: str | None, raw: bool) -> float:
    """Return the relevance of a document: the score, or if raw the logit, of its best window, `[1]` each."""
    best = max(windows, key=lambda logits: float(logits[0])).astype(np.float32)
    return float((best if raw else activate(best, problem_type))[0])


def cosines(query: Floats, vectors: Sequence[Floats]) -> list[float]:
    """Return the cosine of a vector `[D]` with each of the others; 0 with a zero vector."""
    one = query.astype(np.float64)
    found = []
    for vector in vectors:
        other = vector.astype(np.float64)
        norms = math.sqrt((one @ one) * (other @ other))
        found.append(float(one @ other / norms) if norms > 0 else 0.0)
    return found


def token_vectors(
    windows: Sequence[Floats], ids: Sequence[Ints], *, normalize: bool, skip: Sequence[int] = ()
) -> Floats:
    """Return one vector for each token, `[n, D]`, of all windows one after the other.

    windows: vectors `[n, D]` of the tokens of each window; with `normalize` they are scaled to length 1
    ids: the tokens of each window, `[n]`
    skip: ids of tokens whose vectors are left out
    A zero vector stays zero.
    """
    parts = zip(windows, ids, strict=True)
    vectors = np.concatenate([own[~np.isin(tokens, skip)] for own, tokens in parts])
    vectors = vectors.astype(np.float32)
    if normalize:
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = vectors / np.maximum(norms, np.float32(1e-12))
    return vectors


def maxsim(query: Floats, documents: Sequence[Floats], *, mean: bool) -> list[float]:
    """Return the sum or mean over query tokens `[q, D]` of the best product in each document `[n, D]`; 0 for n = 0."""
    found = []
    for document in documents:
        best = (query @ document.T).max(axis=1) if len(document) else np.zeros(len(query))
        total = float(best.sum(dtype=np.float64))
        found.append(total / len(query) if mean else total)
    return found


class AttentionMap(NamedTuple):
    """The n tokens of an input, and the weights of N heads, `[N, n, n]`. Each row (a query's weights) sums to one."""

    tokens: list[str]
    weights: Floats


class SparseVector(NamedTuple):
    """The weights above 0 of a text's tokens: `[n]` ids of the vocabulary in rising order, `[n]` weights."""

    indices: NDArray[np.int64]
    values: Floats


def spread_token_weights(
    windows: Sequence[Floats], ids: Sequence[NDArray[np.int64]], size: int
) -> list[Floats]:
    """Return each window's largest weight of the vocabulary's tokens, `[V]`, from those of its tokens, `[n, 1]`."""
    found = []
    for weights, tokens in zip(windows, ids, strict=True):
        row = np.zeros(size, np.float32)
        np.maximum.at(row, tokens, weights[:, 0])
        found.append(row)
    return found


def sparse_vector(
    windows: Sequence[Floats],
    *,
    activation: Literal["relu", "log1p_relu"] | None = None,
    skip: Sequence[int] = (),
    top_k: int | None = None,
) -> SparseVector:
    """Return the largest weight of each token over a text's windows, where it is above 0.

    windows: `[V]` weights of each window, or logits
    activation: makes weights of logits: log(1 + relu(x)), or log(1 + log(1 + relu(x))); None for weights
    skip: ids of tokens that have no weight
    top_k: keep this many of the largest weights; of equal ones those with the smallest ids
    """
    row = windows[0] if len(windows) == 1 else np.max(np.stack(windows), axis=0)
    indices = np.flatnonzero(row > 0)
    if skip:
        indices = indices[~np.isin(indices, skip)]
    if top_k is not None and len(indices) > top_k:
        order = np.argsort(-row[indices], kind="stable")[:top_k]
        indices = np.sort(indices[order])
    values = row[indices].astype(np.float64)
    for _ in range({None: 0, "relu": 1, "log1p_relu": 2}[activation]):
        values = np.log1p(values)
    return SparseVector(indices, values.astype(np.float32))


def sparse_products(query: SparseVector, documents: Sequence[SparseVector]) -> list[float]:
    """Return the dot product of a sparse vector with each of the others."""
    found = []
    for document in documents:
        _, mine, theirs = np.intersect1d(
            query.indices, document.indices, assume_unique=True, return_indices=True
        )
        products = query.values[mine].astype(np.float64) * document.values[theirs]
        found.append(float(products.sum()))
    return found


def zero_shot(
    hypotheses: Sequence[Floats],
    labels: Sequence[str],
    *,
    entailment: int,
    contradiction: int,
    multi_label: bool,
) -> list[LabelScore]:
    """Return all labels by falling score, as transformers' zero-shot-classification pipeline computes them.

    hypotheses: logits `[C]` of the text with the hypothesis of each label
    entailment, contradiction: indices of the head's labels
    multi_label: each label's score is its entailment against its contradiction. Otherwise, the scores of all labels
    are one softmax over their entailments. A single label always has its own score.
    """
    logits = np.stack(hypotheses).astype(np.float32)
    if multi_label or len(labels) == 1:
        scores = softmax(logits[:, [contradiction, entailment]])[:, 1]
    else:
        scores = softmax(logits[:, entailment])
    order = np.argsort(-scores, kind="stable")
    return [LabelScore(labels[index], float(scores[index])) for index in order]
