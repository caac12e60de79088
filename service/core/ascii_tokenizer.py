"""A shortcut for ASCII text: the tokens of a BERT tokenizer by a table of words, in half of the time.

BERT's tokenizer normalizes a text, divides it into words, and each word into pieces of its vocabulary. For printable
ASCII text, `str.lower` and a regular expression take the first two steps. The table contains the pieces of the words
that were seen; the tokenizer's own model divides a new word.
"""

import re
from itertools import chain
from typing import NamedTuple

import tokenizers
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

WORD = re.compile(r"[^\W_]+|[^\w\s]|_", re.ASCII)
BETWEEN = re.compile(r"[\W_]", re.ASCII)
WORDS = 16_384  # of a table: 3 MB with news, 5 MB at most
LONGEST_WORD, MOST_PIECES = 16, 3  # characters and pieces of a word in the table
PART = 4_096  # characters that are divided at once: other threads wait meanwhile


class _Pieces(dict[str, tuple[int, ...]]):
    """The ids of the pieces of each word that was seen, until the table is full and starts anew."""

    def __init__(self, model: WordPiece) -> None:
        super().__init__()
        self._model = model

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = tuple([piece.id for piece in self._model.tokenize(word)])
        if len(word) <= LONGEST_WORD and len(ids) <= MOST_PIECES:
            if len(self) >= WORDS:
                self.clear()
            self[word] = ids
        return ids


class AsciiTokens(NamedTuple):
    """The tokens of one text, as `tokenizers.Encoding` has them; the last two are empty where they were not asked for.

    offsets: half-open ranges of characters
    word_ids: index of each token's word
    """

    ids: list[int]
    offsets: list[tuple[int, int]]
    word_ids: list[int]


class AsciiTokenizer:
    """The tokens of ASCII texts, without special tokens."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Raises ValueError for a tokenizer that is not of BERT's kind."""
        normalizer, model = tokenizer.normalizer, tokenizer.model
        if not (
            isinstance(normalizer, BertNormalizer)
            and isinstance(tokenizer.pre_tokenizer, BertPreTokenizer)
            and isinstance(model, WordPiece)
        ):
            raise ValueError("only BERT's normalizer, pre-tokenizer and model are known here")
        self._model = model
        self._lowercase = normalizer.lowercase
        self._pieces = _Pieces(model)
        begins = set[str]()
        for token in tokenizer.get_added_tokens_decoder().values():
            for content in (token.content, normalizer.normalize_str(token.content).strip()):
                begins |= {content[:1].lower(), content[:1].upper()}
        known = {*map(chr, (9, 10, 13, *range(32, 127)))} - begins
        self._unknown = re.compile(f"[^{re.escape(''.join(sorted(known)))}]")

    def encode(self, text: str, needed: int | None, *, with_offsets: bool) -> AsciiTokens | None:
        """Return the tokens of a text; None for a text that needs all steps, as if it may contain [MASK].

        needed: number of tokens after which the rest of a long text may be left out; None for all
        """
        if self._unknown.search(text):
            return None
        found = AsciiTokens([], [], [])
        add = self._add_with_offsets if with_offsets else self._add
        if self._lowercase:
            text = text.lower()
        start = 0
        while start < len(text) and (needed is None or len(found.ids) < needed):
            between = BETWEEN.search(text, start + PART)
            end = between.start() if between else len(text)
            add(found, text, start, end)
            start = end
        return found

    def _add(self, found: AsciiTokens, text: str, start: int, end: int) -> None:
        words = WORD.findall(text, start, end)
        found.ids.extend(chain.from_iterable(map(self._pieces.__getitem__, words)))

    def _add_with_offsets(self, found: AsciiTokens, text: str, start: int, end: int) -> None:
        word = found.word_ids[-1] + 1 if found.word_ids else 0
        for number, match in enumerate(WORD.finditer(text, start, end), word):
            ids = self._pieces[match[0]]
            if len(ids) == 1:
                found.offsets.append(match.span())
            else:
                first = match.start()
                spans = [piece.offsets for piece in self._model.tokenize(match[0])]
                found.offsets.extend((first + begin, first + end) for begin, end in spans)
            found.ids.extend(ids)
            found.word_ids.extend([number] * len(ids))
