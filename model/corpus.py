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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import tokenizers
from numpy.typing import NDArray

from model.family import Family, Pairs
from service import packing

Ints = NDArray[np.int64]

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
    sentence_starts: Ints
    document_starts: Ints

    @property
    def num_documents(self) -> int:
        return len(self.document_starts) - 1

    @property
    def num_sentences(self) -> int:
        return len(self.sentence_starts) - 1

    def tokens(self, first: int, last: int) -> Ints:
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


def _starts(lengths: list[int]) -> Ints:
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
    """The special tokens of a family in a tokenizer.

    ids: by how the family spells them
    frame: how they stand around a text, and around a pair: see `Family`
    """

    ids: Mapping[str, int]
    frame: tuple[str, str]
    sep: int
    mask: int
    vocab_size: int

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer, family: Family) -> "Specials":
        """Raises ValueError for those that the tokenizer does not have."""
        named = family.special_tokens
        wanted = {named["sep"], named["mask"], *_framing(family.frame)}
        ids = {token: tokenizer.token_to_id(token) for token in sorted(wanted)}
        if missing := [token for token, i in ids.items() if i is None]:
            raise ValueError(f"the tokenizer lacks {family.model_type}'s special tokens: {missing}")
        sep, mask = ids[named["sep"]], ids[named["mask"]]
        return cls(ids, family.frame, sep, mask, tokenizer.get_vocab_size())

    def room(self, length: int, texts: int = 1) -> int:
        """How many tokens of text there is room for in a sample of `length`, of one text or of two."""
        return length - len(_framing(self.frame[texts - 1 : texts]))

    def around(self, *texts: Ints) -> tuple[Ints, Ints]:
        """One text or two with the tokens around them; and each token's segment."""
        standing = dict(zip(TEXTS, texts, strict=False))
        parts, segments = [], []
        for place in self.frame[len(texts) - 1].split():
            name, _, segment = place.partition(":")
            parts.append(standing.get(name, [self.ids.get(name)]))
            segments.append(int(segment or 0))
        ids = np.concatenate(parts).astype(np.int64)
        return ids, np.repeat(segments, [len(part) for part in parts])


TEXTS = ("$A", "$B")


def _framing(frames: Iterable[str]) -> list[str]:
    """The special tokens of frames, in order."""
    names = (place.partition(":")[0] for frame in frames for place in frame.split())
    return [name for name in names if name not in TEXTS]


@dataclass(frozen=True)
class Sample:
    """One text, or two with `is_next` 0 where the second really follows the first and 1 where it does not."""

    input_ids: Ints
    token_type_ids: Ints
    is_next: int = 0

    @classmethod
    def of(cls, specials: Specials, texts: tuple[Ints, ...], is_next: int = 0) -> "Sample":
        return cls(*specials.around(*texts), is_next)


def draw(
    corpus: Corpus, specials: Specials, length: int, pairs: Pairs | None, rng: np.random.Generator
) -> Sample:
    """One sample of at most `length` tokens, starting at a sentence drawn by its share of the corpus' tokens.

    pairs: how the second text comes about; without one, the only text is as long as there is room
    """
    match pairs:
        case None:
            return Sample.of(specials, (_block(corpus, specials, specials.room(length), rng),))
        case "nsp":
            return _next_sentence(corpus, specials, length, rng)
        case "sop":
            return _sentence_order(corpus, specials, length, rng)


def _block(corpus: Corpus, specials: Specials, room: int, rng: np.random.Generator) -> Ints:
    """Running text that goes on in the next document after a separator: RoBERTa's full sentences (Liu et al. 2019).

    After the last document comes the first.
    """
    sentence = _random_sentence(corpus, rng)
    parts: list[Ints] = []
    while room > 0:
        _, end = corpus.document_of(sentence)
        text = corpus.tokens(sentence, end)[:room]
        parts += [text, np.asarray([specials.sep])] if len(text) < room else [text]
        room -= len(text) + 1
        sentence = end % corpus.num_sentences
    return np.concatenate(parts)


def _next_sentence(
    corpus: Corpus, specials: Specials, length: int, rng: np.random.Generator
) -> Sample:
    """Half of the second texts are from elsewhere (Devlin et al. 2019)."""
    sentence, end = _start(corpus, rng)
    room = specials.room(length, 2)
    split = _split(corpus, sentence, end, room, rng)
    first = corpus.tokens(sentence, split)[: room - 1]
    is_next = int(rng.random() < 0.5)
    second = _elsewhere(corpus, sentence, rng) if is_next else corpus.tokens(split, end)
    return Sample.of(specials, (first, second[: room - len(first)]), is_next)


def _sentence_order(
    corpus: Corpus, specials: Specials, length: int, rng: np.random.Generator
) -> Sample:
    """Half of the pairs are swapped (Lan et al. 2019).

    Nothing but what they say tells the two texts apart: both are whole sentences, and neither is the longer one more
    often. Only where no two sentences have room are they cut, where they do not meet.
    """
    room = specials.room(length, 2)
    begin, end = _span(corpus, room, rng)
    split = int(rng.integers(begin + 1, end))
    first, second = corpus.tokens(begin, split), corpus.tokens(split, end)
    if len(first) + len(second) > room:
        first = first[-max(room // 2, room - len(second)) :]
        second = second[: room - len(first)]
    is_next = int(rng.random() < 0.5)
    return Sample.of(specials, (second, first) if is_next else (first, second), is_next)


def _span(corpus: Corpus, room: int, rng: np.random.Generator) -> tuple[int, int]:
    """The most sentences that there is room for, but two at least, from a random one on or back from one."""
    starts = corpus.sentence_starts
    if rng.random() < 0.5:
        begin, end = _start(corpus, rng)
        fitting = int(np.searchsorted(starts, starts[begin] + room, side="right")) - 1
        return begin, min(max(fitting, begin + 2), end)
    begin, last = _start(corpus, rng, backwards=True)
    fitting = int(np.searchsorted(starts, starts[last + 1] - room, side="left"))
    return max(min(fitting, last - 1), begin), last + 1


def _start(corpus: Corpus, rng: np.random.Generator, backwards: bool = False) -> tuple[int, int]:
    """A random sentence with one after it in its document, and that document's end.

    Or its document's beginning, and a random sentence with one before it there.
    """
    for _ in range(1000):
        sentence = _random_sentence(corpus, rng)
        begin, end = corpus.document_of(sentence)
        if backwards and begin < sentence:
            return begin, sentence
        if not backwards and sentence + 1 < end:
            return sentence, end
    raise ValueError("pairs of texts need documents of at least two sentences")


def _random_sentence(corpus: Corpus, rng: np.random.Generator) -> int:
    token = rng.integers(len(corpus.ids))
    return int(np.searchsorted(corpus.sentence_starts, token, side="right")) - 1


def _split(corpus: Corpus, sentence: int, end: int, room: int, rng: np.random.Generator) -> int:
    """Where the first text ends: after at least one sentence and before the last, at about half the room on average."""
    wanted = rng.integers(1, max(room, 2))
    starts = corpus.sentence_starts
    split = int(np.searchsorted(starts, starts[sentence] + wanted, side="left"))
    return min(max(split, sentence + 1), end - 1)


def _elsewhere(corpus: Corpus, sentence: int, rng: np.random.Generator) -> Ints:
    """Text from another document (or, in a corpus of one, from anywhere)."""
    here = corpus.document_of(sentence)
    for _ in range(10):
        other = _random_sentence(corpus, rng)
        there = corpus.document_of(other)
        if there != here:
            break
    return corpus.tokens(other, there[1])


def mask_tokens(
    input_ids: Ints, specials: Specials, rate: float, rng: np.random.Generator
) -> tuple[Ints, Ints]:
    """BERT's masking (Devlin et al. 2019): a share `rate` of the tokens that are not special ones is chosen; of
    these 80 % become the mask token, 10 % a random token, 10 % stay.

    Gives the changed ids [n] and the chosen positions [m], in order; the labels are the ids at these positions.
    """
    maskable = np.flatnonzero(~np.isin(input_ids, [*specials.ids.values()]))
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

    input_ids: Ints
    token_type_ids: Ints
    layout: packing.Layout
    masked: Ints
    labels: Ints
    is_next: Ints


def make_batch(
    corpus: Corpus,
    specials: Specials,
    *,
    seed: int,
    step: int,
    size: int,
    length: int,
    rate: float,
    pairs: Pairs | None,
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
