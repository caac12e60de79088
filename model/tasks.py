"""The four tasks as training sees them: rows to examples, examples to batches, outputs to losses.

Text is cut by the service's own Encoder. What the model should say of it is laid on the tokens
through their offsets, in the places where the service will read it.

T tokens, B sequences, S longest, C labels, D vector
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from model.attention import Layout
from model.heads import IGNORE_INDEX
from model.rows import DataError, Question, Sentence, Text
from service import bundle, packing
from service.encode import Encoded, Encoder, Encoding

Ints = NDArray[np.int64]
Bools = NDArray[np.bool]
SCALE = 20.0  # what cosines are multiplied by before a softmax


@dataclass
class HeadSettings:
    """What a run is told of one head: a `[heads.<name>]` table of its TOML file."""

    task: bundle.Task
    train: list[str]
    dev: str = ""
    batch_size: int = 32  # rows of a micro-batch; for embeddings, pairs of texts that say the same
    scored_batch_size: int = 32  # embeddings: pairs with a score, a micro-batch of their own
    weight: float = 1.0  # of this head's loss among the others
    max_length: int = 0  # 0: the run's
    stride: int = 64  # ner and qa: tokens that neighbouring windows share
    loss: str = "cosent"  # embeddings: how scored pairs are learnt, "cosent" or "cosine"
    # What the manifest will say of the head.
    labels: list[str] = field(default_factory=list)  # empty: those that occur in the data
    problem_type: bundle.ProblemType = "single_label_classification"
    pooling: str = "mean"
    normalize: bool = True
    max_answer_tokens: int = 30
    max_query_tokens: int = 64
    demo: bool = False

    def __post_init__(self) -> None:
        known = get_args(bundle.Task)
        if self.task not in known:
            raise ValueError(f"task: {self.task!r} is none of {', '.join(known)}")


def describe(settings: HeadSettings, rows: Sequence[Any], hidden_size: int) -> bundle.Head:
    """The manifest's description of a head; labels that are not given are those of the rows."""
    keep = {name: getattr(settings, name) for name in ("max_answer_tokens", "max_query_tokens")}
    described: dict[str, Any] = {"task": settings.task, "demo": settings.demo}
    match settings.task:
        case "classification" if settings.problem_type == "regression":
            described |= {"labels": settings.labels or ["score"]}
        case "classification":
            found = sorted({label for row in rows for label in row.labels})
            described |= {"labels": settings.labels or found}
        case "ner":
            types = sorted({tag[2:] for row in rows for tag in row.tags if tag != "O"})
            found = ["O", *(f"{begin}-{name}" for name in types for begin in "BI")]
            described |= {"labels": settings.labels or found}
        case "qa":
            described |= keep
        case "embedding":
            described |= {"pooling": settings.pooling, "dimensions": hidden_size}
            described |= {"normalize": settings.normalize}
    if settings.task == "classification":
        described["problem_type"] = settings.problem_type
    return bundle.Head(**described)


# -- rows to examples -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """What is drawn for a batch: encodings, and what the model should say of them.

    labels: classification, an index, or a float for each label `[C]`; ner, the index of each token's
    label `[n]`; qa, the first and last token of the answer `[2]`; embedding, a score (float), or the
    number of the row (int) that the texts come from.
    """

    encodings: tuple[Encoding, ...]
    labels: NDArray[Any]


def encode(
    rows: Sequence[Any], head: bundle.Head, encoder: Encoder, stride: int
) -> Iterator[tuple[Encoded, ...]]:
    """Each row as the service would encode it: one Encoded; for an embedding, one of each text."""
    for start in range(0, len(rows), 1000):  # the tokenizer's own encodings are large
        chunk = rows[start : start + 1000]
        match head.task:
            case "classification":
                yield from ((encoded,) for encoded in _encode_texts(chunk, encoder))
            case "ner":
                shared = min(stride, encoder.longest_stride)
                texts = [row.text for row in chunk]
                yield from zip(encoder.texts(texts, truncate="window", stride=shared), strict=True)
            case "qa":
                asked = [row.question for row in chunk], [row.context for row in chunk]
                most = head.max_query_tokens
                windows = encoder.questions(*asked, stride=stride, max_query_tokens=most)
                yield from zip(windows, strict=True)
            case "embedding":
                every = iter(encoder.texts([text for row in chunk for text in row.texts]))
                yield from (tuple(next(every) for _ in row.texts) for row in chunk)


def _encode_texts(rows: Sequence[Text], encoder: Encoder) -> Iterator[Encoded]:
    texts = [row.text for row in rows if row.pair is None]
    pairs = [(row.text, row.pair) for row in rows if row.pair is not None]
    alone = iter(encoder.texts(texts))
    paired = iter(encoder.pairs([a for a, _ in pairs], [b for _, b in pairs]))
    return (next(alone if row.pair is None else paired) for row in rows)


def examples(
    rows: Sequence[Any], head: bundle.Head, encoder: Encoder, stride: int
) -> Iterator[Example]:
    """What rows train. A row that is longer than a window becomes an example for each of them.

    Raises DataError for a label that the head does not have, and for an answer that does not stand
    where the data says.
    """
    encodings = encode(rows, head, encoder, stride)
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
            case "embedding" if row.score is None:
                yield Example(windows, np.asarray(number))
            case "embedding":
                yield Example(windows, np.asarray(row.score, dtype=np.float32))


def check(rows: Sequence[Any], head: bundle.Head) -> None:
    """Raises DataError for rows on which the head cannot be judged: labels it does not have, pairs without a score."""
    for row in rows:
        match head.task:
            case "classification":
                text_labels(row, head)
            case "ner":
                _indices(row.where, row.tags, head.labels)
            case "embedding" if row.score is None:
                raise DataError(f"{row.where}: embeddings are evaluated on pairs with a score")


def text_labels(row: Text, head: bundle.Head) -> NDArray[Any]:
    if head.problem_type == "regression":
        return np.asarray([row.score], dtype=np.float32)
    found = _indices(row.where, row.labels, head.labels)
    if head.problem_type == "multi_label_classification":
        return np.isin(np.arange(len(head.labels)), found).astype(np.float32)
    return np.asarray(found[0])


def _indices(where: str, names: Sequence[str], labels: Sequence[str]) -> Ints:
    unknown = [name for name in names if name not in labels]
    if unknown:
        raise DataError(f"{where}: {unknown[0]!r} is none of the labels {', '.join(labels)}")
    return np.asarray([labels.index(name) for name in names], dtype=np.int64)


class Placed(NamedTuple):
    """The tokens of a window that are text: their rows, the data's word at each, and whether that
    word begins with it. A word that a window begins within has no beginning there."""

    rows: Ints
    words: Ints
    begins: Bools


def place_words(sentence: Sentence, windows: Sequence[Encoding]) -> list[Placed]:
    """Where the data's words are among the tokens of each window, through the tokens' offsets."""
    starts = sentence.starts
    rows = [np.flatnonzero((window.sequence == 0) & _wide(window)) for window in windows]
    spans = [window.offsets[row] for window, row in zip(windows, rows, strict=True)]
    # By a token's last character: its first may be the blank before the word.
    words = [np.searchsorted(starts, span[:, 1] - 1, side="right") - 1 for span in spans]
    first = np.full(len(starts), np.iinfo(np.int64).max)
    for word, span in zip(words, spans, strict=True):
        np.minimum.at(first, word, span[:, 0])
    return [
        Placed(row, word, span[:, 0] == first[word])
        for row, word, span in zip(rows, words, spans, strict=True)
    ]


def token_labels(
    sentence: Sentence, windows: Sequence[Encoding], labels: Sequence[str]
) -> list[Ints]:
    """`[n]` for each window: the index of every token's label, IGNORE_INDEX at special tokens.

    Every token of a word has a label, for the service's words are not the data's ("U.S." is four):
    where the first one begins an entity, the others are inside it.
    """
    tags = _indices(sentence.where, sentence.tags, labels)
    inside = [tag.replace("B-", "I-", 1) for tag in sentence.tags]
    others = _indices(sentence.where, inside, labels)
    found = []
    for window, (rows, words, begins) in zip(windows, place_words(sentence, windows), strict=True):
        ids = np.full(len(window), IGNORE_INDEX)
        ids[rows] = np.where(begins, tags[words], others[words])
        found.append(ids)
    return found


def _wide(window: Encoding) -> Bools:
    return window.offsets[:, 0] < window.offsets[:, 1]


def candidates(window: Encoding) -> Bools:
    """`[n]` the tokens that may start or end an answer: [CLS], for none, and the context's."""
    may = (window.sequence == 1) & _wide(window)
    may[0] = True
    return may


def answer_tokens(question: Question, windows: Sequence[Encoding]) -> list[Ints]:
    """First and last token of the first answer in each window; (0, 0) where it is not whole."""
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
    # The characters that each window has of it; [CLS] has none.
    edges = [(w.offsets[a, 0], w.offsets[b, 1]) for w, (a, b) in zip(windows, spans, strict=True)]
    held = [edge for edge in edges if edge[1]]
    whole = min((a for a, _ in held), default=0), max((b for _, b in held), default=0)
    return [span if edge == whole else null for span, edge in zip(spans, edges, strict=True)]


# -- examples to batches --------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Encodings and their examples' labels. Of pairs, all first texts come before all second."""

    encodings: list[Encoding]
    labels: list[NDArray[Any]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.encodings))


class Loss(NamedTuple):
    """The mean over a batch; and what guessing evenly would cost, the unit in which heads add up."""

    value: Tensor
    chance: float


@dataclass(frozen=True)
class Stream:
    """An endless, shuffled, repeatable row of batches for one head, and how they are judged."""

    name: str
    head: str
    examples: list[Example]
    batch_size: int
    weight: float
    loss: Callable[[Tensor, Batch], Loss]

    def batch(self, seed: tuple[int, ...], step: int) -> Batch:
        """The batch of a step: a pure function of seed and step.

        Of several texts that say the same, sample i takes two, by the stream (seed, step, i).
        """
        drawn = [self.examples[i] for i in draw(len(self.examples), self.batch_size, seed, step)]
        labels = [example.labels for example in drawn]
        if len(drawn[0].encodings) == 1:
            return Batch([example.encodings[0] for example in drawn], labels)
        pairs = [_two(example, [*seed, step, index]) for index, example in enumerate(drawn)]
        return Batch([first for first, _ in pairs] + [second for _, second in pairs], labels)


def _two(example: Example, seed: list[int]) -> list[Encoding]:
    if len(example.encodings) == 2:
        return list(example.encodings)
    chosen = np.random.default_rng(seed).choice(len(example.encodings), size=2, replace=False)
    return [example.encodings[i] for i in chosen]


def draw(count: int, size: int, seed: tuple[int, ...], step: int) -> list[int]:
    """Which of `count` rows a step takes: the next `size` of one shuffled epoch after another."""
    places = range(step * size, (step + 1) * size)
    return [int(_shuffled(count, seed, place // count)[place % count]) for place in places]


@functools.lru_cache(maxsize=64)
def _shuffled(count: int, seed: tuple[int, ...], epoch: int) -> Ints:
    return np.random.default_rng([*seed, epoch]).permutation(count)


def streams(
    name: str, settings: HeadSettings, head: bundle.Head, found: Sequence[Example]
) -> list[Stream]:
    """What trains a head: one stream; or for embeddings, one of equal texts and one of scores."""
    if head.task != "embedding":
        loss = {
            "classification": functools.partial(text_loss, problem_type=head.problem_type),
            "ner": token_loss,
            "qa": span_loss,
        }[head.task]
        return [Stream(name, name, list(found), settings.batch_size, settings.weight, loss)]
    if settings.loss not in SCORED:
        raise ValueError(f"loss {settings.loss!r} is none of {', '.join(SCORED)}")
    equal = [example for example in found if example.labels.dtype != np.float32]
    scored = [example for example in found if example.labels.dtype == np.float32]
    kinds = [
        ("contrastive", equal, settings.batch_size, contrastive_loss),
        (settings.loss, scored, settings.scored_batch_size, SCORED[settings.loss]),
    ]
    return [
        Stream(f"{name}/{kind}", name, some, size, settings.weight, loss)
        for kind, some, size, loss in kinds
        if some
    ]


def forward(model: nn.Module, encodings: Sequence[Encoding], heads: list[str]) -> dict[str, Tensor]:
    """The named heads' outputs for a packed batch, in full precision: `[B, ...]` or `[T, ...]`."""
    device = next(model.parameters()).device
    packed = packing.pack(encodings)
    arrays = (packed.input_ids, packed.token_type_ids, packed.position_ids)
    inputs = (torch.as_tensor(array, device=device) for array in arrays)
    outputs = model(*inputs, Layout.of(packed.layout, device), heads=heads)
    return {name: output.float() for name, output in outputs.items()}


# -- outputs to losses ----------------------------------------------------------------------------


def _chance(choices: float) -> float:
    return math.log(max(choices, 2))


def _joined(batch: Batch, logits: Tensor, join: Callable[..., NDArray[Any]] = np.stack) -> Tensor:
    return torch.as_tensor(join(batch.labels), device=logits.device)


def text_loss(logits: Tensor, batch: Batch, problem_type: str | None) -> Loss:
    """logits [B, C]: cross-entropy, of each label by itself if several may hold; squared error."""
    labels = _joined(batch, logits)
    if problem_type == "regression":
        return Loss(F.mse_loss(logits, labels), 1.0)
    if problem_type == "multi_label_classification":
        return Loss(F.binary_cross_entropy_with_logits(logits, labels), _chance(2))
    return Loss(F.cross_entropy(logits, labels), _chance(logits.shape[1]))


def token_loss(logits: Tensor, batch: Batch) -> Loss:
    """logits [T, C]: cross-entropy at every token of the text."""
    labels = _joined(batch, logits, np.concatenate)
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)
    return Loss(loss, _chance(logits.shape[1]))


def span_loss(logits: Tensor, batch: Batch) -> Loss:
    """logits [T, 2]: cross-entropy of start and of end, among the tokens that may be either."""
    may = torch.as_tensor(np.concatenate([candidates(window) for window in batch.encodings]))
    logits = logits.masked_fill(~may.to(logits.device)[:, None], -math.inf)
    sequences = logits.split([len(window) for window in batch.encodings])
    slots = pad_sequence(sequences, batch_first=True, padding_value=-math.inf)  # [B, S, 2]
    choices = int(may.sum()) / len(sequences)
    return Loss(F.cross_entropy(slots, _joined(batch, logits)), _chance(choices))


def contrastive_loss(vectors: Tensor, batch: Batch) -> Loss:
    """vectors [2B, D]: each text must find its partner among those of all pairs, both ways.

    Multiple negatives ranking (Henderson et al. 2017). Texts of the same row are no negatives.
    """
    first, second = F.normalize(vectors, dim=1).chunk(2)
    scores = SCALE * first @ second.T  # [B, B]
    rows = _joined(batch, vectors)
    own = torch.arange(len(rows), device=vectors.device)
    same = (rows[:, None] == rows) & (own[:, None] != own)
    scores = scores.masked_fill(same, -math.inf)
    loss = (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
    return Loss(loss, _chance(len(rows)))


def cosent_loss(vectors: Tensor, batch: Batch) -> Loss:
    """vectors [2B, D]: of any two pairs, the one with the higher score has the higher cosine.

    CoSENT (Su 2022): log(1 + sum of exp(20 * (the lower one's cosine - the higher one's))).
    """
    cosines = F.cosine_similarity(*vectors.chunk(2))
    scores = _joined(batch, vectors)
    excess = SCALE * (cosines[:, None] - cosines)  # [B, B] of the row's over the column's
    wrong = excess[scores[:, None] < scores]
    terms = torch.cat([wrong.new_zeros(1), wrong])
    return Loss(torch.logsumexp(terms, dim=0), _chance(len(terms)))


def cosine_loss(vectors: Tensor, batch: Batch) -> Loss:
    """vectors [2B, D]: squared error of the cosine against the score."""
    cosines = F.cosine_similarity(*vectors.chunk(2))
    return Loss(F.mse_loss(cosines, _joined(batch, vectors)), 1.0)


SCORED = {"cosent": cosent_loss, "cosine": cosine_loss}
