"""Pretraining text: read, split into sentences, and tokenized once.

A file holds one paragraph per line and an empty line between documents.
"""

import bisect
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from model.data import checksums
from service.core.data_files.text_files import COMPRESSED, read_lines
from service.core.encode import load_tokenizer
from service.core.packing import Ints

SUFFIXES = (*COMPRESSED, ".txt")
VERSION = 3  # of the rules for splitting and tokenizing text, part of the cache's name

FEWEST_DOCUMENTS = 20  # of fewer documents none are held out

# A sentence ends at . ! or ? (and closing quotes) before a space and a possible first character. Not after these.
BOUNDARY = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+(?=[\"'“‘(\[]*[A-Z0-9])")
ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|Lt|Col|Gen|Capt|Sgt|Rev|Hon|Gov|Sen|Rep|No|Vol|Fig|vs|etc|approx|ca|cf|al|Inc|Ltd|Co|Corp"
    r"|Jan|Feb|Mar|Apr|Aug|Sept?|Oct|Nov|Dec)|\b[A-Z]|\b(?:e\.g|i\.e|U\.S|U\.K))\.$"
)


def sentences(paragraph: str) -> list[str]:
    """Split a paragraph into sentences by simple rules."""
    found, start = [], 0
    for boundary in BOUNDARY.finditer(paragraph):
        if ABBREVIATION.search(paragraph, start, boundary.start()):
            continue
        found.append(paragraph[start : boundary.end()].strip())
        start = boundary.end()
    return [sentence for sentence in [*found, paragraph[start:].strip()] if sentence]


def corpus_files(paths: list[str]) -> list[Path]:
    """Return the named files, and of folders the readable files that are no lists of titles."""
    files = []
    for path in map(Path, paths):
        if not path.is_dir():
            files.append(path)
            continue
        texts = [file for file in sorted(path.iterdir()) if file.suffix in SUFFIXES]
        files += [file for file in texts if ".titles." not in file.name]
    return files


def documents(files: Iterable[Path]) -> Iterator[list[str]]:
    """Yield the paragraphs of each document in `.txt`, `.gz` and `.xz` files. Raises DataError as `read_lines` does."""
    for path in files:
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{path}: the corpus is read from {', '.join(SUFFIXES)} files")
        stripped = (line.strip() for _, line in read_lines(path))
        for blank, lines in itertools.groupby(stripped, key=lambda line: not line):
            if not blank:
                yield list(lines)


@dataclass(frozen=True)
class Corpus:
    """Tokenized text.

    ids: [tokens]
    sentence_starts: [sentences + 1] index of each sentence's first token
    document_starts: [documents + 1] index of each document's first sentence
    """

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
        """Return the tokens of sentences first (inclusive) to last (exclusive)."""
        return self.ids[self.sentence_starts[first] : self.sentence_starts[last]].astype(np.int64)

    def document_of(self, sentence: int) -> tuple[int, int]:
        """Return the sentences [first, last) of a sentence's document."""
        document = bisect.bisect_right(self.document_starts, sentence) - 1
        return int(self.document_starts[document]), int(self.document_starts[document + 1])

    def split(self, share: float, seed: int) -> tuple["Corpus", "Corpus | None"]:
        """Return the documents without a share of them, and these, which the seed chooses.

        The second is None for fewer than FEWEST_DOCUMENTS documents and for a share of 0.
        """
        if not share or self.num_documents < FEWEST_DOCUMENTS:
            return self, None
        held = np.zeros(self.num_documents, dtype=bool)
        count = max(2, round(share * self.num_documents))  # a pair may need a second document
        chosen = np.random.default_rng(seed).choice(self.num_documents, count, replace=False)
        held[chosen] = True
        return self._select(~held), self._select(held)

    def _select(self, is_kept: NDArray[np.bool]) -> "Corpus":
        """Return some of the documents. is_kept: [documents]"""
        edges = np.flatnonzero(
            np.diff(is_kept, prepend=False, append=False)
        )  # of runs of kept ones
        token_starts = self.sentence_starts[self.document_starts]
        runs = [self.ids[a:b] for a, b in token_starts[edges].reshape(-1, 2)]
        counts = np.diff(self.document_starts)
        lengths = np.diff(self.sentence_starts)[np.repeat(is_kept, counts)]
        return Corpus(np.concatenate(runs), _starts(lengths), _starts(counts[is_kept]))


def build(files: list[Path], tokenizer: tokenizers.Tokenizer) -> Corpus:
    """Tokenize files. Raises ValueError for a vocabulary that does not fit 16 bits, and for no text."""
    if tokenizer.get_vocab_size() > 2**16:
        raise ValueError(f"a vocabulary of {tokenizer.get_vocab_size()} does not fit 16-bit ids")
    ids: list[NDArray[np.uint16]] = []
    lengths: list[int] = []
    counts: list[int] = []
    for chunk in _chunks(documents(files), 512):
        texts = [
            [text for paragraph in document for text in sentences(paragraph)] for document in chunk
        ]
        # A sentence includes the space before it, because some tokenizers have tokens for it.
        spaced = [
            " " * (number > 0) + text for document in texts for number, text in enumerate(document)
        ]
        encoded = tokenizer.encode_batch_fast(spaced, add_special_tokens=False)
        ids += [np.asarray(encoding.ids, dtype=np.uint16) for encoding in encoded]
        lengths += [len(encoding.ids) for encoding in encoded]
        counts += [len(document) for document in texts]
    if not ids:
        raise ValueError(f"no text in {', '.join(map(str, files))}")
    return Corpus(np.concatenate(ids), _starts(lengths), _starts(counts))


def _chunks(items: Iterator[list[str]], size: int) -> Iterator[list[list[str]]]:
    while chunk := list(itertools.islice(items, size)):
        yield chunk


def _starts(lengths: Sequence[int] | Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def load(files: list[Path], tokenizer_file: Path, cache: Path) -> Corpus:
    """Return the corpus of files, tokenized on first use and then read from `cache`.

    The cache's name is a hash of the files, the tokenizer and VERSION.
    Raises DataError for a file that differs from its lock.
    """
    key = hashlib.sha256(tokenizer_file.read_bytes())
    key.update(f"sentences {VERSION}".encode())
    for file in files:
        checksums.check(file)
        key.update(bytes.fromhex(checksums.hash_file(file)))
    path = cache / f"corpus-{key.hexdigest()[:16]}.npz"
    if not path.is_file():
        corpus = build(files, load_tokenizer(tokenizer_file))
        cache.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, **vars(corpus))
        partial.rename(path)
    with np.load(path, allow_pickle=False) as arrays:
        return Corpus(arrays["ids"], arrays["sentence_starts"], arrays["document_starts"])
