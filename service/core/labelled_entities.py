"""Entities with labels that a request names (GLiNER): from texts to windows, and from a head's scores to entities.

A window has the tokens of all labels, then a part of the text. Its token types mark words and labels.

n tokens, W words of a window, C labels, K scores of a word and a label
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.core.decode import EntitySpan, Floats, most_context, sigmoid
from service.core.encode import Encoded, Encoder, Encoding, TextError, Truncate, cut
from service.core.label_prompts import prompt_tokens
from service.core.manifest import LabelPrompt
from service.core.packing import WORD, Ints

WORDS = re.compile(r"\w+(?:[-_]\w+)*|\S")  # the words of GLiNER's texts


def word_ids(encoder: Encoder, words: Sequence[str]) -> list[list[int]]:
    """Return the token ids of words, or labels that are read as words, each without its neighbors."""
    encode = encoder.tokenizer.encode_batch_fast
    found = encode([[word] for word in words], is_pretokenized=True, add_special_tokens=False)
    return [encoding.ids for encoding in found]


def label_windows(
    encoder: Encoder,
    texts: Sequence[str],
    labels: Sequence[list[int]],
    prompt: LabelPrompt,
    *,
    truncate: Truncate = "window",
    stride: int = 0,
) -> list[Encoded]:
    """Encode texts, each with all labels. A token has the offsets of its word, and the word's index.

    labels: the ids of each label, see `word_ids`
    truncate, stride: as in `Encoder.texts`. Raises TextError.
    Raises LabelsError where the labels fill more than half a window.
    """
    first, last = encoder.single_frame
    ids, types = prompt_tokens(encoder, labels, prompt)
    before, types = np.append(first, ids), np.append(np.zeros_like(first), types)
    capacity = encoder.max_length - len(before) - len(last)

    def build(text: _Words) -> Encoding:
        around = (len(before), len(last))
        return Encoding(
            np.concatenate([before, text.ids, last]),
            np.concatenate([types, WORD * text.is_first, np.zeros(len(last), np.int64)]),
            np.pad(text.offsets, (around, (0, 0))),
            np.pad(text.words, around, constant_values=-1),
            np.pad(np.zeros(len(text.ids), np.int8), around, constant_values=-1),
        )

    found, too_long = [], []
    for index, text in enumerate(_read_words(encoder, texts)):
        is_long = len(text.ids) > capacity
        if is_long and truncate is False:
            too_long.append(index)
        cuts = cut(len(text.ids), capacity, min(stride, capacity // 2), truncate)
        windows = tuple(build(text.part(one)) for one in cuts)
        found.append(Encoded(windows, truncate is True and is_long))
    if too_long:
        reason = f"longer than {encoder.max_length} tokens with its labels, and truncate is false"
        raise TextError(too_long, reason)
    return found


class _Words(NamedTuple):
    """The tokens of a text whose words were tokenized one by one."""

    ids: Ints  # [n]
    offsets: NDArray[np.int32]  # [n, 2], of the token's word
    words: NDArray[np.int32]  # [n]
    is_first: NDArray[np.bool]  # [n], whether it is the word's first token

    def part(self, cut: slice) -> "_Words":
        return _Words(self.ids[cut], self.offsets[cut], self.words[cut], self.is_first[cut])


def _read_words(encoder: Encoder, texts: Sequence[str]) -> Iterator[_Words]:
    matches = [[*WORDS.finditer(text)] for text in texts]
    words = [[match.group() for match in own] for own in matches]
    encode = encoder.tokenizer.encode_batch
    encodings = encode(words, is_pretokenized=True, add_special_tokens=False)
    for own, encoding in zip(matches, encodings, strict=True):
        offsets = np.array([match.span() for match in own], np.int32).reshape(-1, 2)
        numbers = np.array(encoding.word_ids, np.int32)
        is_first = np.diff(numbers, prepend=-1) > 0
        yield _Words(np.array(encoding.ids, np.int64), offsets[numbers], numbers, is_first)


class _WordSpan(NamedTuple):
    """A span of words with its best label: the positions of its words, and of its characters."""

    score: float
    first: int
    last: int
    label: int
    start: int
    end: int


def labelled_entities(
    windows: Sequence[Encoding],
    logits: Sequence[Floats],
    text: str,
    *,
    labels: Sequence[str],
    max_width: int | None,
    threshold: float,
    nested: bool,
) -> list[EntitySpan]:
    """Return the entities of `text` with labels of the request, in text order, as GLiNER decodes them.

    logits: `[W * C, K]` of each window, for each word with each label: the logits of `max_width` spans that begin at
    the word, or, where that is None, 3 logits of the word as first, last and any word of an entity, of which the
    smallest is a span's score.
    A span has its best label, and is an entity if its score exceeds `threshold` and no span with a higher score
    overlaps it. With `nested`, one span may contain another. A span is read from the window in which its first word is
    farthest from the nearest edge.
    """
    parts = []
    for window, own in zip(windows, logits, strict=True):
        rows = np.flatnonzero(window.token_type_ids == WORD)
        if len(rows):
            scores = sigmoid(own).reshape(len(rows), len(labels), -1)
            parts.append((window.words[rows], window.offsets[rows], scores))
    if not parts:
        return []
    starts = [int(words[0]) for words, _, _ in parts]
    picked = most_context([len(words) for words, _, _ in parts], np.diff(starts).tolist())
    is_read = np.zeros(sum(len(words) for words, _, _ in parts), bool)
    is_read[picked] = True
    found: list[_WordSpan] = []
    for words, offsets, scores in parts:
        own_read, is_read = is_read[: len(words)], is_read[len(words) :]
        for more, of_width in enumerate(_scores_by_width(scores, max_width, threshold)):
            best = of_width.max(axis=1)
            at = np.flatnonzero((best > threshold) & own_read[: len(best)])
            columns = (
                *(best[at], words[at], words[at + more], of_width[at].argmax(axis=1)),
                *(offsets[at, 0], offsets[at + more, 1]),
            )
            found += map(_WordSpan, *(column.tolist() for column in columns))
    kept = sorted(_without_overlaps(found, nested), key=lambda span: span.first)
    return [
        EntitySpan(labels[one.label], one.score, text[one.start : one.end], one.start, one.end)
        for one in kept
    ]


def _scores_by_width(scores: Floats, max_width: int | None, threshold: float) -> Iterator[Floats]:
    """Yield the scores `[W - k, C]` of the spans of k + 1 words, from k = 0 on, from `[W, C, K]`."""
    size = len(scores)
    if max_width is not None:
        yield from (scores[: size - more, :, more] for more in range(min(max_width, size)))
        return
    first, last, inside = np.moveaxis(scores, -1, 0)
    least = inside
    for more in range(size):
        least = np.minimum(least[: size - more], inside[more:])
        if not (least > threshold).any():
            return
        yield np.minimum(least, np.minimum(first[: size - more], last[more:]))


def _without_overlaps(spans: Sequence[_WordSpan], nested: bool) -> list[_WordSpan]:
    """Return the spans that overlap none with a higher score; with `nested`, spans may contain others."""
    kept: list[_WordSpan] = []
    over: defaultdict[int, list[_WordSpan]] = defaultdict(list)  # the kept spans over a word
    for span in sorted(spans, key=lambda one: (-one.score, one.first, one.last)):
        if nested:
            before = any(
                one.first < span.first and one.last < span.last for one in over[span.first]
            )
            after = any(one.first > span.first and one.last > span.last for one in over[span.last])
            overlaps = before or after
        else:
            overlaps = any(over[word] for word in range(span.first, span.last + 1))
        if not overlaps:
            kept.append(span)
            for word in range(span.first, span.last + 1):
                over[word].append(span)
    return kept
