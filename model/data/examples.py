"""The tasks in training: rows to examples, and examples to batches.

The service's own Encoder tokenizes text. Labels are mapped to tokens through the tokens' offsets, at the
places where the service reads outputs.

Shapes as in `model/bert.py`, and n tokens of a window, W words.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model.attention import PackedLayout
from model.data.head_rows import PAIRED, HeadSettings, is_graded
from model.data.labelled_rows import DataError, QuestionRow, Sentence, Text
from model.data.losses import (
    CONTRASTS,
    SCORED,
    Batch,
    FlopsRegularizer,
    Loss,
    candidates,
    span_loss,
    sparse_loss,
    text_loss,
    token_loss,
)
from model.heads import IGNORE_INDEX, Inputs
from service.core import packing, tags
from service.core.encode import Encoded, Encoder, Encoding, Window
from service.core.manifest import Head, Sparse
from service.core.packing import Ints

Bools = NDArray[np.bool]


def describe(
    settings: HeadSettings, rows: Sequence[Any], hidden_size: int, vocab_size: int | None = None
) -> Head:
    """Return a head's description for the manifest; without labels in the settings it has the rows' labels.

    vocab_size: the encoder's, for a sparse embedding
    """
    lengths = {name: getattr(settings, name) for name in ("max_answer_tokens", "max_query_tokens")}
    described: dict[str, Any] = {"task": settings.task, "demo": settings.demo}
    match settings.task:
        case "classification" if settings.problem_type == "regression":
            described |= {"labels": settings.labels or ["score"]}
        case "classification":
            labels = sorted({label for row in rows for label in row.labels})
            if not settings.labels and len(labels) == 1:
                raise DataError(f"{rows[0].where}: all rows have the label {labels[0]!r}")
            described |= {"labels": settings.labels or labels}
        case "ner":
            types = sorted({tag[2:] for row in rows for tag in row.tags if tag != "O"})
            labels = ["O", *(f"{begin}-{name}" for name in types for begin in "BI")]
            described |= {"labels": settings.labels or labels}
        case "qa":
            described |= lengths
        case "embedding":
            described |= {"pooling": settings.pooling, "dimensions": hidden_size}
            described |= {"normalize": settings.normalize}
        case "sparse-embedding":
            described |= {"sparse": Sparse(activation="relu"), "vocabulary_size": vocab_size}
    if settings.task == "classification":
        described["problem_type"] = settings.problem_type
    return Head(**described)


# -- rows to examples -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """The unit of a batch: encodings and their labels.

    labels: classification, an index, or a float for each label `[C]`; ner, the index of each token's
    label `[n]`; qa, the first and last token of the answer `[2]`; embedding, a score (float), or the
    ids (int) of the row and of each of its texts `[1 + texts]`, where equal texts have equal ids.
    negatives: the number of encodings, at the end, that are negatives.
    """

    encodings: tuple[Encoding, ...]
    labels: NDArray[Any]
    negatives: int = 0


def encode(
    rows: Sequence[Any], head: Head, encoder: Encoder, stride: int
) -> Iterator[tuple[Encoded, ...]]:
    """Encode rows as the service does: one Encoded per row; for an embedding, one per text."""
    for start in range(0, len(rows), 1000):  # the tokenizer's own encodings are large
        chunk = rows[start : start + 1000]
        match head.task:
            case "classification":
                yield from ((encoded,) for encoded in _encode_texts(chunk, head, encoder))
            case "ner":
                shared = min(stride, encoder.longest_stride)
                texts = [row.text for row in chunk]
                yield from zip(encoder.texts(texts, truncate="window", stride=shared), strict=True)
            case "qa":
                pairs = [row.question for row in chunk], [row.context for row in chunk]
                windows = encoder.questions(
                    *pairs, stride=stride, max_query_tokens=head.max_query_tokens
                )
                yield from zip(windows, strict=True)
            case "embedding" | "sparse-embedding":
                prompt = head.default_prompt_text
                every = iter(encoder.texts([prompt + text for row in chunk for text in row.every]))
                yield from (tuple(next(every) for _ in row.every) for row in chunk)


def _encode_texts(rows: Sequence[Text], head: Head, encoder: Encoder) -> Iterator[Encoded]:
    if head.pair_prompt:
        joined = (row.text if row.pair is None else head.join(row.text, row.pair) for row in rows)
        return iter(encoder.texts([*joined]))
    texts = [row.text for row in rows if row.pair is None]
    pairs = [(row.text, row.pair) for row in rows if row.pair is not None]
    single = iter(encoder.texts(texts))
    paired = iter(encoder.pairs([a for a, _ in pairs], [b for _, b in pairs]))
    return (next(single if row.pair is None else paired) for row in rows)


def examples(rows: Sequence[Any], head: Head, encoder: Encoder, stride: int) -> Iterator[Example]:
    """Yield the examples of rows: one, or for a row that is longer than a window, one per window.

    Raises DataError for a label that the head does not have, and for an answer that is not at its
    start in the context.
    """
    encodings = encode(rows, head, encoder, stride)
    texts: dict[str, int] = {}
    for number, (row, encoded) in enumerate(zip(rows, encodings, strict=True)):
        windows = tuple(window for part in encoded for window in part.windows)
        match head.task:
            case "classification":
                yield Example(windows, text_labels(row, head))
            case "ner":
                each = token_labels(row, windows, head.labels)
                yield from (Example((w,), labels) for w, labels in zip(windows, each, strict=True))
            case "qa":
                each = answer_tokens(row, windows)
                yield from (Example((w,), labels) for w, labels in zip(windows, each, strict=True))
            case "embedding" | "sparse-embedding" if row.score is None:
                numbers = [number, *(texts.setdefault(text, len(texts)) for text in row.every)]
                yield Example(windows, np.asarray(numbers), len(row.negatives))
            case "embedding" | "sparse-embedding":
                yield Example(windows, np.asarray(row.score, dtype=np.float32))


def check(rows: Sequence[Any], head: Head) -> None:
    """Raise DataError for rows that the head cannot be evaluated on: unknown labels, scores for some pairs only."""
    for row in rows:
        match head.task:
            case "classification":
                text_labels(row, head)
            case "ner":
                tag_indices(row, head.labels)
            case "embedding" | "sparse-embedding" if (row.score is None) != (rows[0].score is None):
                raise DataError(f"{row.where}: a file has scores for all of its rows or for none")


def check_contrast(rows: Sequence[Any], settings: HeadSettings) -> None:
    """Raise DataError for a row without a negative, where the triplet loss needs one."""
    for row in rows if settings.contrast == "triplet" else ():
        if row.score is None and not row.negatives:
            raise DataError(f"{row.where}: no negative, which the triplet loss needs")


def text_labels(row: Text, head: Head) -> NDArray[Any]:
    """Return a text's label index, or a float for each label, `[C]`. Raises DataError for an unknown label."""
    if is_graded(head):
        if head.problem_type != "regression" and not 0 <= row.score <= 1:
            raise DataError(f"{row.where}: a single label holds from 0 to 1, not {row.score}")
        return np.asarray([row.score], dtype=np.float32)
    indices = _indices(row.where, row.labels, head.labels)
    if head.problem_type == "multi_label_classification":
        return np.isin(np.arange(len(head.labels)), indices).astype(np.float32)
    return np.asarray(indices[0])


def _indices(where: str, names: Sequence[str], labels: Sequence[str]) -> Ints:
    unknown = [name for name in names if name not in labels]
    if unknown:
        raise _unknown(where, unknown[0], labels)
    return np.asarray([labels.index(name) for name in names], dtype=np.int64)


def _unknown(where: str, name: str, labels: Sequence[str]) -> DataError:
    return DataError(f"{where}: {name!r} is none of the labels {', '.join(labels)}")


class WordTokens(NamedTuple):
    """The text tokens of a window.

    rows: their indices in the window
    words: the data's word that each is part of
    begins: whether each is the first token of its word; False where the word begins in another window
    """

    rows: Ints
    words: Ints
    begins: Bools


def place_words(sentence: Sentence, windows: Sequence[Encoding]) -> list[WordTokens]:
    """Find the data's words among the tokens of each window, through the tokens' offsets."""
    starts = sentence.starts
    rows = [np.flatnonzero((window.sequence == 0) & _wide(window)) for window in windows]
    spans = [window.offsets[row] for window, row in zip(windows, rows, strict=True)]
    # Use a token's last character: its first may be the space before the word.
    words = [np.searchsorted(starts, span[:, 1] - 1, side="right") - 1 for span in spans]
    first = np.full(len(starts), np.iinfo(np.int64).max)
    for word, span in zip(words, spans, strict=True):
        np.minimum.at(first, word, span[:, 0])
    # A character may be several tokens with equal offsets; a window may begin with any of them.
    begins = [
        (np.diff(word, prepend=-1) > 0) & (span[:, 0] == first[word])
        for word, span in zip(words, spans, strict=True)
    ]
    opening = np.zeros(len(starts), np.int64)  # the id of each word's first token
    parts = list(zip(windows, rows, words, begins, strict=True))
    for window, row, word, is_first in reversed(parts):
        opening[word[is_first]] = window.input_ids[row[is_first]]
    return [
        WordTokens(row, word, is_first & (window.input_ids[row] == opening[word]))
        for window, row, word, is_first in parts
    ]


def word_ends(windows: Sequence[Encoding], placed: Sequence[WordTokens]) -> list[Bools]:
    """Return whether each text token is the last of its word; False where the word ends in another window."""
    ends = [window.offsets[where.rows, 1] for window, where in zip(windows, placed, strict=True)]
    last: dict[int, int] = {}
    for where, end in zip(placed, ends, strict=True):
        for word, at in zip(where.words.tolist(), end.tolist(), strict=True):
            last[word] = max(at, last.get(word, 0))
    return [
        (np.diff(where.words, append=-1) != 0)
        & (end == np.array([last[word] for word in where.words.tolist()], end.dtype))
        for where, end in zip(placed, ends, strict=True)
    ]


def token_labels(
    sentence: Sentence, windows: Sequence[Encoding], labels: Sequence[str]
) -> list[Ints]:
    """Return the index of every token's label, `[n]` for each window, IGNORE_INDEX at special tokens.

    Every token of a word has a label, because the service's words differ from the data's ("U.S." is
    four): where the first one begins an entity, the others are inside it.
    """
    named = tag_indices(sentence, labels)
    placed = place_words(sentence, windows)
    each = []
    for window, where, ends in zip(windows, placed, word_ends(windows, placed), strict=True):
        ids = np.full(len(window), IGNORE_INDEX)
        ids[where.rows] = named[where.words, where.begins.astype(int), ends.astype(int)]
        each.append(ids)
    return each


def tag_indices(sentence: Sentence, labels: Sequence[str]) -> Ints:
    """Return the label index of each word's tokens, in the scheme of `labels`: `[W, 2, 2]`.

    The second axis is 1 for the first token of the word, the third for the last one.
    Raises DataError for a tag that the labels do not have.
    """
    after = [*sentence.tags[1:], tags.OUTSIDE]
    indices = np.empty((len(sentence.tags), 2, 2), np.int64)
    for word, (tag, following) in enumerate(zip(sentence.tags, after, strict=True)):
        for begins, ends in product((0, 1), repeat=2):
            first = begins == 1 and tag.startswith("B-")
            last = ends == 1 and following != f"I-{tag[2:]}"
            index = _tag_index(tag, tuple(labels), first, last)
            if index is None:
                name = tag if tag == tags.OUTSIDE else f"{'B' if first else 'I'}-{tag[2:]}"
                raise _unknown(sentence.where, name, labels)
            indices[word, begins, ends] = index
    return indices


@functools.cache
def _tag_index(tag: str, labels: tuple[str, ...], first: bool, last: bool) -> int | None:
    if tag == tags.OUTSIDE:
        return labels.index(tag) if tag in labels else None
    return tags.place(labels, tag[2:], first=first, last=last)


def _wide(window: Encoding) -> Bools:
    return window.offsets[:, 0] < window.offsets[:, 1]


def answer_tokens(question: QuestionRow, windows: Sequence[Encoding]) -> list[Ints]:
    """Return the first and last token of the first answer in each window; (0, 0) where it is not complete."""
    null = np.zeros(2, dtype=np.int64)
    if not question.answers:
        return [null] * len(windows)
    text, start = question.answers[0]
    end = start + len(text)
    if not text or question.context[start:end] != text:
        raise DataError(f"{question.where}: the answer {text!r} does not stand at {start}")
    spans = []
    for window in windows:
        rows = np.flatnonzero(candidates(window))[1:]
        within = (window.offsets[rows, 1] > start) & (window.offsets[rows, 0] < end)
        spans.append(rows[within][[0, -1]] if within.any() else null)
    # The range of the answer's characters in each window; [CLS] has none.
    edges = [(w.offsets[a, 0], w.offsets[b, 1]) for w, (a, b) in zip(windows, spans, strict=True)]
    held = [edge for edge in edges if edge[1]]
    whole = min((a for a, _ in held), default=0), max((b for _, b in held), default=0)
    return [span if edge == whole else null for span, edge in zip(spans, edges, strict=True)]


# -- examples to batches --------------------------------------------------------------------------


@dataclass(frozen=True)
class ExampleStream:
    """An endless, shuffled, reproducible stream of batches for one head, with its loss and its regularizer."""

    name: str
    head: str
    examples: list[Example]
    batch_size: int
    weight: float
    loss: Callable[[Tensor, Batch], Loss]
    regularizer: FlopsRegularizer | None = None

    @property
    def size(self) -> int:
        """The number of examples in an epoch."""
        return len(self.examples)

    def batch(self, seed: tuple[int, ...], step: int) -> Batch:
        """Return the batch of a step: a pure function of seed and step.

        Sample i takes two of several related texts, chosen by the random stream (seed, step, i).
        """
        samples = [self.examples[i] for i in draw(len(self.examples), self.batch_size, seed, step)]
        if len(samples[0].encodings) == 1:
            return Batch([each.encodings[0] for each in samples], [e.labels for e in samples])
        samples = [_two(example, [*seed, step, index]) for index, example in enumerate(samples)]
        places = [slice(0, 1), slice(1, 2), slice(2, None)]
        encodings = [e for place in places for example in samples for e in example.encodings[place]]
        return Batch(encodings, [example.labels for example in samples])


def _two(example: Example, seed: list[int]) -> Example:
    """Return the example with two of its related texts, and its negatives."""
    every = len(example.encodings)
    related = every - example.negatives
    if related == 2:
        return example
    chosen = np.random.default_rng(seed).choice(related, size=2, replace=False)
    kept = [*chosen, *range(related, every)]
    labels = example.labels[[0, *(1 + i for i in kept)]]
    return Example(tuple(example.encodings[i] for i in kept), labels, example.negatives)


def draw(count: int, size: int, seed: tuple[int, ...], step: int) -> list[int]:
    """Return the rows, below `count`, of a step: the next `size` of one shuffled epoch after another."""
    places = range(step * size, (step + 1) * size)
    return [int(_shuffled(count, seed, place // count)[place % count]) for place in places]


@functools.lru_cache(maxsize=64)
def _shuffled(count: int, seed: tuple[int, ...], epoch: int) -> Ints:
    return np.random.default_rng([*seed, epoch]).permutation(count)


def streams(
    name: str, settings: HeadSettings, head: Head, examples: Sequence[Example]
) -> list[ExampleStream]:
    """Return a head's streams: one; or for embeddings, one of related texts and one of scored pairs."""
    if head.task not in PAIRED:
        loss = {
            "classification": functools.partial(
                text_loss,
                problem_type=head.problem_type,
                weights=class_weights(settings, head, examples),
            ),
            "ner": token_loss,
            "qa": span_loss,
        }[head.task]
        return [
            ExampleStream(name, name, list(examples), settings.batch_size, settings.weight, loss)
        ]
    related = [example for example in examples if example.labels.dtype != np.float32]
    scored = [example for example in examples if example.labels.dtype == np.float32]
    kinds = [
        (settings.contrast, related, settings.batch_size, CONTRASTS[settings.contrast](settings)),
        (settings.loss, scored, settings.scored_batch_size, SCORED[settings.loss]),
    ]
    regularizer = None
    if head.task == "sparse-embedding":
        regularizer = FlopsRegularizer(settings.flops, settings.flops_ramp)
        kinds = [
            (kind, some, size, functools.partial(sparse_loss, loss=loss))
            for kind, some, size, loss in kinds
        ]
    return [
        ExampleStream(f"{name}/{kind}", name, some, size, settings.weight, loss, regularizer)
        for kind, some, size, loss in kinds
        if some
    ]


def class_weights(settings: HeadSettings, head: Head, examples: Sequence[Example]) -> Tensor | None:
    """Return the weight of each label in the loss, `[C]`; None where the settings have none.

    "balanced" gives every label the same weight in total: rows / (labels * rows of the label), as scikit-learn has it;
    where labels may hold together, rows without the label / rows with it.
    Raises ValueError for the weight of an unknown label.
    """
    stated = settings.class_weights
    if not stated:
        return None
    if isinstance(stated, dict):
        if unknown := sorted(set(stated) - set(head.labels)):
            known = ", ".join(head.labels)
            raise ValueError(f"class_weights: {unknown[0]!r} is none of the labels {known}")
        return torch.tensor([stated.get(label, 1.0) for label in head.labels])
    labels, size = np.stack([example.labels for example in examples]), len(head.labels)
    if head.problem_type == "multi_label_classification":
        counts = labels.sum(axis=0)
        balanced = (len(labels) - counts) / np.maximum(counts, 1)
    else:
        balanced = len(labels) / (size * np.maximum(np.bincount(labels, minlength=size), 1))
    return torch.as_tensor(balanced, dtype=torch.float32)


def pack(encodings: Sequence[Window], device: torch.device | str = "cpu") -> Inputs:
    """Return the inputs of a model for one batch: ids, segments and positions `[T]` each, and the layout."""
    packed = packing.pack(encodings)
    arrays = (packed.input_ids, packed.token_type_ids, packed.position_ids)
    ids, types, positions = (torch.as_tensor(array, device=device) for array in arrays)
    return ids, types, positions, PackedLayout.of(packed.layout, device)


def forward(model: nn.Module, encodings: Sequence[Encoding], heads: list[str]) -> dict[str, Tensor]:
    """Run the named heads on a packed batch, in full precision: `[B, ...]` or `[T, ...]`."""
    device = next(model.parameters()).device
    outputs = model(*pack(encodings, device), heads=heads)
    return {name: output.float() for name, output in outputs.items()}
