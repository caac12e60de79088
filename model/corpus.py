"""Pretraining text: read, split into sentences, tokenised once, and drawn from at random but repeatably.

A file holds one paragraph per line and an empty line between documents. What a step trains on follows from the seed,
the step and the index of the sample alone, so that a resumed run goes on exactly as an uninterrupted one would.
"""

import bisect
import gzip
import hashlib
import itertools
import lzma
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import tokenizers
from numpy.typing import NDArray

from service import packing

SENTENCES = 1  # the version of the rules by which sentences are split: another makes another cache

OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".txt": open}

# A sentence ends at . ! or ? (and closing quotes) before a blank and what may begin one. Not after these.
BOUNDARY = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+(?=[\"'“‘(\[]*[A-Z0-9])")
ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|Lt|Col|Gen|Capt|Sgt|Rev|Hon|Gov|Sen|Rep|No|Vol|Fig|vs|etc|approx|ca|cf|al|Inc|Ltd|Co|Corp"
    r"|Jan|Feb|Mar|Apr|Aug|Sept?|Oct|Nov|Dec)|\b[A-Z]|\b(?:e\.g|i\.e|U\.S|U\.K))\.$"
)


def sentences(paragraph: str) -> list[str]:
    """Cut a paragraph into sentences by rule: good enough for neighbouring text, not a grammar."""
    found, start = [], 0
    for boundary in BOUNDARY.finditer(paragraph):
        if ABBREVIATION.search(paragraph, start, boundary.start()):
            continue
        found.append(paragraph[start : boundary.end()].strip())
        start = boundary.end()
    return [sentence for sentence in [*found, paragraph[start:].strip()] if sentence]


def open_text(path: Path) -> IO[str]:
    """Open a `.txt`, `.gz` or `.xz` file as UTF-8 text."""
    if path.suffix not in OPENERS:
        raise ValueError(f"{path}: the corpus is read from {', '.join(OPENERS)} files")
    return OPENERS[path.suffix](path, "rt", encoding="utf-8")  # type: ignore[operator, no-any-return]


def documents(files: Iterable[Path]) -> Iterator[list[str]]:
    """The paragraphs of each document, in order."""
    for path in files:
        with open_text(path) as file:
            for blank, lines in itertools.groupby(map(str.strip, file), key=lambda line: not line):
                if not blank:
                    yield list(lines)


@dataclass(frozen=True)
class Corpus:
    """Token ids `[N]`, where each sentence starts `[M + 1]`, and each document's first sentence `[D + 1]`."""

    ids: NDArray[np.uint16]
    sentence_starts: NDArray[np.int64]
    document_starts: NDArray[np.int64]

    @property
    def num_documents(self) -> int:
        return len(self.document_starts) - 1

    def tokens(self, first: int, last: int) -> NDArray[np.int64]:
        """The tokens of sentences first (inclusive) to last (exclusive)."""
        return self.ids[self.sentence_starts[first] : self.sentence_starts[last]].astype(np.int64)

    def document_of(self, sentence: int) -> tuple[int, int]:
        """The sentences [first, last) of the document that a sentence stands in."""
        document = bisect.bisect_right(self.document_starts, sentence) - 1
        return int(self.document_starts[document]), int(self.document_starts[document + 1])


def build(files: list[Path], tokenizer: tokenizers.Tokenizer) -> Corpus:
    """Tokenise files. Token ids must fit 16 bits."""
    if tokenizer.get_vocab_size() > 2**16:
        raise ValueError(f"a vocabulary of {tokenizer.get_vocab_size()} does not fit 16-bit ids")
    ids: list[NDArray[np.uint16]] = []
    lengths: list[int] = []
    counts: list[int] = []
    for chunk in _chunks(documents(files), 512):
        texts = [
            [text for paragraph in document for text in sentences(paragraph)] for document in chunk
        ]
        encoded = tokenizer.encode_batch_fast(
            list(itertools.chain(*texts)), add_special_tokens=False
        )
        ids += [np.asarray(encoding.ids, dtype=np.uint16) for encoding in encoded]
        lengths += [len(encoding.ids) for encoding in encoded]
        counts += [len(document) for document in texts]
    if not ids:
        raise ValueError(f"no text in {', '.join(map(str, files))}")
    return Corpus(np.concatenate(ids), _starts(lengths), _starts(counts))


def _chunks(items: Iterator[list[str]], size: int) -> Iterator[list[list[str]]]:
    while chunk := list(itertools.islice(items, size)):
        yield chunk


def _starts(lengths: list[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def load(files: list[Path], tokenizer_file: Path, cache: Path) -> Corpus:
    """The corpus of these files, tokenised on first use and kept in `cache` under a name made of all it depends on."""
    key = hashlib.sha256(tokenizer_file.read_bytes())
    key.update(f"sentences {SENTENCES}".encode())
    for path in files:
        with path.open("rb") as file:
            key.update(hashlib.file_digest(file, "sha256").digest())
    kept = cache / f"corpus-{key.hexdigest()[:16]}.npz"
    if not kept.is_file():
        corpus = build(files, tokenizers.Tokenizer.from_file(str(tokenizer_file)))
        cache.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(".partial.npz")
        np.savez(partial, **vars(corpus))
        partial.rename(kept)
    with np.load(kept, allow_pickle=False) as arrays:
        return Corpus(arrays["ids"], arrays["sentence_starts"], arrays["document_starts"])


# -- samples ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Specials:
    cls: int
    sep: int
    mask: int
    vocab_size: int

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> "Specials":
        ids = {name: tokenizer.token_to_id(f"[{name}]") for name in ("CLS", "SEP", "MASK")}
        if None in ids.values():
            raise ValueError(
                f"the tokenizer lacks special tokens: {[n for n, i in ids.items() if i is None]}"
            )
        return cls(ids["CLS"], ids["SEP"], ids["MASK"], tokenizer.get_vocab_size())


@dataclass(frozen=True)
class Sample:
    """[CLS] A [SEP], or [CLS] A [SEP] B [SEP] with `is_next` 0 where B really follows A and 1 where it is random."""

    input_ids: NDArray[np.int64]
    token_type_ids: NDArray[np.int64]
    is_next: int


def draw(
    corpus: Corpus, specials: Specials, length: int, pairs: bool, rng: np.random.Generator
) -> Sample:
    """One sample of at most `length` tokens, starting at a sentence drawn by its share of the corpus' tokens."""
    sentence, end = _start(corpus, rng, sentences_after=int(pairs))
    if not pairs:
        return _sample(specials, corpus.tokens(sentence, end)[: length - 2], None, 0)
    room = length - 3
    split = _split(corpus, sentence, end, room, rng)
    first = corpus.tokens(sentence, split)[: room - 1]
    is_next = int(rng.random() < 0.5)
    second = _elsewhere(corpus, sentence, rng) if is_next else corpus.tokens(split, end)
    return _sample(specials, first, second[: room - len(first)], is_next)


def _start(corpus: Corpus, rng: np.random.Generator, sentences_after: int) -> tuple[int, int]:
    """A random sentence with as many after it in its document, and that document's end."""
    for _ in range(1000):
        sentence = _random_sentence(corpus, rng)
        _, end = corpus.document_of(sentence)
        if sentence + sentences_after < end:
            return sentence, end
    raise ValueError("next sentence prediction needs documents of at least two sentences")


def _random_sentence(corpus: Corpus, rng: np.random.Generator) -> int:
    token = rng.integers(len(corpus.ids))
    return int(np.searchsorted(corpus.sentence_starts, token, side="right")) - 1


def _split(corpus: Corpus, sentence: int, end: int, room: int, rng: np.random.Generator) -> int:
    """Where the first text ends: after at least one sentence and before the last, at about half the room on average."""
    wanted = rng.integers(1, max(room, 2))
    starts = corpus.sentence_starts
    split = int(np.searchsorted(starts, starts[sentence] + wanted, side="left"))
    return min(max(split, sentence + 1), end - 1)


def _elsewhere(corpus: Corpus, sentence: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Text from another document (or, in a corpus of one, from anywhere)."""
    here = corpus.document_of(sentence)
    for _ in range(10):
        other = _random_sentence(corpus, rng)
        there = corpus.document_of(other)
        if there != here:
            break
    return corpus.tokens(other, there[1])


def _sample(
    specials: Specials, first: NDArray[np.int64], second: NDArray[np.int64] | None, is_next: int
) -> Sample:
    parts = [[specials.cls], first, [specials.sep]]
    sizes = [len(first) + 2]
    if second is not None:
        parts += [second, [specials.sep]]
        sizes.append(len(second) + 1)
    return Sample(
        np.concatenate(parts).astype(np.int64), np.repeat(np.arange(len(sizes)), sizes), is_next
    )


def mask_tokens(
    input_ids: NDArray[np.int64], specials: Specials, rate: float, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """BERT's masking (Devlin et al. 2019): a share `rate` of the tokens that are not special ones is chosen; of
    these 80 % become [MASK], 10 % a random token, 10 % stay.

    Gives the changed ids [n] and the chosen positions [m], in order; the labels are the ids at these positions.
    """
    maskable = np.flatnonzero((input_ids != specials.cls) & (input_ids != specials.sep))
    chosen = np.sort(rng.choice(maskable, size=max(1, round(rate * len(maskable))), replace=False))
    kind = rng.random(len(chosen))
    changed = input_ids.copy()
    changed[chosen[kind < 0.8]] = specials.mask
    noise = chosen[kind >= 0.9]
    changed[noise] = rng.integers(specials.vocab_size, size=len(noise))
    return changed, chosen


@dataclass(frozen=True)
class Batch:
    """A packed batch: ids and types [T], the masked packed indices [M] with their labels, next-sentence labels [B]."""

    input_ids: NDArray[np.int64]
    token_type_ids: NDArray[np.int64]
    layout: packing.Layout
    masked: NDArray[np.int64]
    labels: NDArray[np.int64]
    is_next: NDArray[np.int64]


def make_batch(
    corpus: Corpus,
    specials: Specials,
    *,
    seed: int,
    step: int,
    size: int,
    length: int,
    rate: float,
    pairs: bool,
) -> Batch:
    """The batch of one step: a pure function of its arguments. Sample i draws from the stream (seed, step, i)."""
    samples, changed, masked, labels, offset = [], [], [], [], 0
    for index in range(size):
        rng = np.random.default_rng([seed, step, index])
        sample = draw(corpus, specials, length, pairs, rng)
        ids, chosen = mask_tokens(sample.input_ids, specials, rate, rng)
        samples.append(sample)
        changed.append(ids)
        masked.append(chosen + offset)
        labels.append(sample.input_ids[chosen])
        offset += len(ids)
    return Batch(
        np.concatenate(changed),
        np.concatenate([sample.token_type_ids for sample in samples]),
        packing.make_layout(len(sample.input_ids) for sample in samples),
        np.concatenate(masked),
        np.concatenate(labels),
        np.asarray([sample.is_next for sample in samples]),
    )
