"""Text to tokens: the only module that cuts texts.

Training, calibration, parity checks and serving all encode with it. The encoder never uses the tokenizer's own
truncation and padding, and never changes its state. It tokenizes without special tokens, cuts the tokens into windows,
and frames each window with the special tokens of the tokenizer's template.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray

from service.core.ascii_tokenizer import AsciiTokenizer, AsciiTokens
from service.core.words import Places

Truncate = bool | Literal["window"]


@dataclass(slots=True)
class Window:
    """One sequence of a batch: n tokens, special tokens included; or several sequences, one after the other.

    input_ids       [n]     int64
    token_type_ids  [n]     int64
    hidden                  number of tokens, the last ones, that no token attends to; 0 for several sequences
    lengths                 tokens of each of several sequences; empty for one
    """

    input_ids: NDArray[np.int64]
    token_type_ids: NDArray[np.int64]
    hidden: int = field(default=0, kw_only=True)
    lengths: Sequence[int] = field(default=(), kw_only=True)

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(slots=True)
class Encoding(Window):
    """A window of one input, with the positions of its tokens in the text.

    offsets         [n, 2]  half-open range of the token's code points in its text, from the first character that is no
                            space to the last; of width 0 if there is none; (0, 0) at special tokens
    words           [n]     index of the token's word in its text (see `service.core.words`); -1 at special tokens
    sequence        [n]     0 for the first text, 1 for the second of a pair, -1 at special tokens
    """

    offsets: NDArray[np.int32]
    words: NDArray[np.int32]
    sequence: NDArray[np.int8]


@dataclass(slots=True)
class Cut:
    """One input: its windows in text order (one, unless it was too long), and whether it was truncated."""

    windows: tuple[Window, ...]
    truncated: bool

    @property
    def lengths(self) -> list[int]:
        """The tokens of each window."""
        return [len(window) for window in self.windows]

    @property
    def tokens(self) -> int:
        if len(self.windows) == 1:
            return len(self.windows[0].input_ids)
        return sum(map(len, self.windows))


@dataclass(slots=True)
class Encoded(Cut):
    """One input whose windows contain the positions of their tokens in the text."""

    windows: tuple[Encoding, ...]


class TextIds(NamedTuple):
    """The token ids of one text, without special tokens.

    ids: the first of them, as many as its windows need
    length: the number of all
    """

    ids: list[int]
    length: int


class TextError(ValueError):
    """Inputs that cannot be encoded; `indices` contains the index of each of them."""

    def __init__(self, indices: list[int], reason: str) -> None:
        super().__init__(f"inputs {indices}: {reason}")
        self.indices = indices
        self.reason = reason


def load_tokenizer(path: Path | str) -> tokenizers.Tokenizer:
    """Read a `tokenizer.json`, without its truncation and padding. Raises ValueError naming the file."""
    with tokenizer_errors(f"{path} cannot be read"):
        return _plain(tokenizers.Tokenizer.from_file(str(path)))


def parse_tokenizer(data: bytes) -> tokenizers.Tokenizer:
    """Parse the bytes of a `tokenizer.json`, without its truncation and padding. Raises ValueError."""
    with tokenizer_errors("the tokenizer cannot be read"):
        return _plain(tokenizers.Tokenizer.from_buffer(data))


@contextmanager
def tokenizer_errors(message: str) -> Iterator[None]:
    """Raise ValueError with a message for each error of the library, which has no error class of its own."""
    try:
        yield
    except BaseException as error:  # tokenizers raises Exception itself
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ValueError(f"{message}: {error}") from None


def is_panic(error: BaseException) -> bool:
    """Return whether an error is of the library's Rust code, a class that cannot be imported and is no Exception."""
    return type(error).__name__ == "PanicException"


def _plain(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@dataclass(frozen=True)
class _Frame:
    """The special tokens around one text or a pair: a slice of the template before, between and after the texts."""

    ids: tuple[NDArray[np.int64], ...]
    types: tuple[NDArray[np.int64], ...]
    text_types: tuple[int, ...]

    @cached_property
    def size(self) -> int:
        return sum(len(part) for part in self.ids)

    @cached_property
    def parts(self) -> tuple[list[int], ...]:
        """The special tokens as lists, which are faster to join with a text's tokens than arrays."""
        return tuple(part.tolist() for part in self.ids)

    @cached_property
    def has_types(self) -> bool:
        """Whether a token of a text or a special token has another type than 0."""
        return any(self.text_types) or any(part.any() for part in self.types)


def _frame(tokenizer: tokenizers.Tokenizer, text: str, pair: str | None = None) -> _Frame:
    """Read the template from the tokenizer's encoding of a known text."""
    encoding = tokenizer.encode(text, pair, add_special_tokens=True)
    special = np.asarray(encoding.special_tokens_mask, dtype=bool)
    sequence = np.asarray([-1 if index is None else index for index in encoding.sequence_ids])
    sequence[special] = -1
    ids = np.asarray(encoding.ids, dtype=np.int64)
    types = np.asarray(encoding.type_ids, dtype=np.int64)
    edges, text_types = [0], []
    for index in range(1 if pair is None else 2):
        where = np.flatnonzero(sequence == index)
        edges += [int(where[0]), int(where[-1]) + 1]
        text_types.append(int(types[where[0]]))
    edges.append(len(ids))
    gaps = list(zip(edges[::2], edges[1::2], strict=True))
    return _Frame(
        tuple(ids[start:end] for start, end in gaps),
        tuple(types[start:end] for start, end in gaps),
        tuple(text_types),
    )


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of one text, without special tokens."""

    ids: NDArray[np.int64]
    offsets: NDArray[np.int32]
    words: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, cut: slice) -> "_Tokens":
        return _Tokens(self.ids[cut], self.offsets[cut], self.words[cut])


def _tokens(encoding: tokenizers.Encoding | AsciiTokens) -> _Tokens:
    words = [-1 if word is None else word for word in encoding.word_ids]
    return _Tokens(
        np.asarray(encoding.ids, dtype=np.int64),
        np.asarray(encoding.offsets, dtype=np.int32).reshape(-1, 2),
        np.asarray(words, dtype=np.int32),
    )


class Encoder:
    """The encoder of one model's texts. max_length: tokens of the longest window, special tokens included"""

    def __init__(self, tokenizer: tokenizers.Tokenizer, max_length: int) -> None:
        if tokenizer.truncation is not None or tokenizer.padding is not None:
            raise ValueError("the tokenizer must carry neither truncation nor padding")
        self.tokenizer = tokenizer
        self.max_length = max_length
        self._ascii = _ascii_tokenizer(tokenizer)
        self._places = Places(tokenizer)
        self._single = _frame(tokenizer, "a")
        self._pair = _frame(tokenizer, "a", "b")

    @classmethod
    def from_file(cls, path: Path | str, max_length: int) -> "Encoder":
        return cls(load_tokenizer(path), max_length)

    @property
    def longest_stride(self) -> int:
        """The largest stride (tokens that neighboring windows share) of a single text's windows."""
        return self._capacity // 2

    def texts(
        self, texts: Sequence[str], *, truncate: Truncate = True, stride: int = 0
    ) -> list[Encoded]:
        """Encode single texts.

        truncate: True cuts a text at the longest window. "window" makes as many windows as needed, of which neighbors
        share `stride` tokens. False raises TextError that names every text that is too long.
        """
        tokens = self._tokenize(texts, _needed(self._capacity, truncate))
        plans = self._plan([*map(len, tokens)], truncate, stride)
        return [
            Encoded(tuple(_build(self._single, (own[cut],)) for cut in cuts), truncated)
            for own, (cuts, truncated) in zip(tokens, plans, strict=True)
        ]

    def windows(
        self, texts: Sequence[str], *, truncate: Truncate = True, stride: int = 0, prompt: str = ""
    ) -> list[Cut]:
        """Encode single texts as `texts` does, without the positions of their tokens, in two thirds of the time.

        prompt: stands before each text. It is a part of the text that `truncate` cuts. Later windows of a long text
        begin with the prompt's tokens, too. Raises ValueError for a prompt of more than half a window with "window".
        """
        together = [prompt + text for text in texts]
        tokens = self._ids(together, _needed(self._capacity, truncate))
        if prompt and truncate == "window":
            return [Cut(self._prompted(ids, prompt, stride), False) for ids in tokens]
        if max(map(len, tokens), default=0) <= self._capacity:
            return [Cut((_frame_ids(self._single, ids),), False) for ids in tokens]
        plans = self._plan([*map(len, tokens)], truncate, stride)
        return [
            Cut(tuple(_frame_ids(self._single, own[cut]) for cut in cuts), truncated)
            for own, (cuts, truncated) in zip(tokens, plans, strict=True)
        ]

    def _prompted(self, ids: list[int], prompt: str, stride: int) -> tuple[Window, ...]:
        """Return the windows of a prompt and its text, which are tokenized together.

        A text that fits in a window is one window, as without a prompt. Otherwise each window begins with the tokens
        that the prompt has when it is alone, as far as they are the same: a tokenizer may join its last characters with
        the text.
        """
        if len(ids) <= self._capacity:
            return (_frame_ids(self._single, ids),)
        both = zip(self._prompt_ids(prompt), ids, strict=False)
        size = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))
        first, rest = ids[:size], ids[size:]
        capacity = self._capacity - size
        cuts = cut(len(rest), capacity, min(stride, capacity // 2), "window")
        return tuple(_frame_ids(self._single, [*first, *rest[cut]]) for cut in cuts)

    def _prompt_ids(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt. Raises ValueError where they fill more than half a window."""
        (ids,) = self._ids([prompt])
        if len(ids) > self.longest_prompt:
            raise ValueError(
                f"a prompt of {len(ids)} tokens does not fit: at most {self.longest_prompt}"
            )
        return ids

    def count_tokens(self, text: str) -> int:
        """Return the tokens of a text, without special tokens."""
        return len(self._ids([text])[0])

    @property
    def longest_prompt(self) -> int:
        """The largest number of tokens of a prompt that each window of a long text begins with."""
        return self._capacity // 2

    @property
    def single_frame(self) -> tuple[NDArray[np.int64], ...]:
        """The special tokens before and after a single text."""
        return self._single.ids

    @property
    def _capacity(self) -> int:
        """The tokens of a single text that fit in a window, without special tokens."""
        return self.max_length - self._single.size

    def _plan(
        self, lengths: Sequence[int], truncate: Truncate, stride: int
    ) -> list[tuple[list[slice], bool]]:
        """Return the cuts of each text, and whether they truncate it. Raises TextError."""
        capacity = self._capacity
        if truncate is False:
            self._refuse([index for index, length in enumerate(lengths) if length > capacity])
        return [
            (cut(length, capacity, stride, truncate), truncate is True and length > capacity)
            for length in lengths
        ]

    def pairs(
        self, texts: Sequence[str], pairs: Sequence[str], *, truncate: bool = True
    ) -> list[Encoded]:
        """Encode pairs as one sequence each; with `truncate`, the longer text loses tokens first. Raises TextError."""
        capacity = self.max_length - self._pair.size
        encoded = []
        too_long = []
        both = zip(self._tokenize(texts), self._tokenize(pairs), strict=True)
        for index, (first, second) in enumerate(both):
            if len(first) + len(second) > capacity and not truncate:
                too_long.append(index)
            sizes = _longest_first(len(first), len(second), capacity)
            window = _build(self._pair, (first[: sizes[0]], second[: sizes[1]]))
            encoded.append(Encoded((window,), len(first) + len(second) > capacity))
        self._refuse(too_long)
        return encoded

    def questions(
        self,
        questions: Sequence[str],
        contexts: Sequence[str],
        *,
        truncate: Truncate = "window",
        stride: int = 0,
        max_query_tokens: int = 64,
    ) -> list[Encoded]:
        """Encode questions with their contexts; every window contains the whole question and a part of the context.

        A question longer than `max_query_tokens` is cut to it, and the input counts as truncated. If `truncate` is
        False, such a question, or a context that is too long, raises TextError.
        """
        encoded = []
        too_long = []
        needed = _needed(self.max_length, truncate)
        both = zip(self._tokenize(questions), self._tokenize(contexts, needed), strict=True)
        for index, (question, context) in enumerate(both):
            capacity = self.max_length - self._pair.size
            # One token is left for the context.
            asked = question[: min(max_query_tokens, capacity - 1)]
            capacity -= len(asked)
            cut_off = len(question) > len(asked) or (truncate is True and len(context) > capacity)
            if truncate is False and (cut_off or len(context) > capacity):
                too_long.append(index)
            cuts = cut(len(context), capacity, min(stride, capacity // 2), truncate)
            windows = tuple(_build(self._pair, (asked, context[cut])) for cut in cuts)
            encoded.append(Encoded(windows, cut_off))
        self._refuse(too_long, f", or a question than {max_query_tokens}")
        return encoded

    def text_ids(self, texts: Sequence[str], truncate: Truncate = True) -> list[TextIds]:
        """Tokenize texts for `one_with_each`. truncate: as there, for these texts"""
        needed = _needed(self.max_length - self._pair.size, truncate)
        return [TextIds(ids[:needed], len(ids)) for ids in self._ids(texts)]

    def one_with_each(
        self,
        first: TextIds,
        seconds: Sequence[TextIds],
        *,
        truncate: Truncate = True,
        stride: int = 0,
    ) -> list[Cut]:
        """Encode one text paired with each of several, without the positions of tokens.

        truncate: True makes one window of each pair, of which the longer text loses tokens first. "window" makes as
        many windows of the second text as needed, of which neighbors share `stride` tokens; each begins with the first
        text, which is cut at half a window. False raises TextError that names every pair that is too long.
        """
        capacity = self.max_length - self._pair.size
        one, length = first
        if truncate is False:
            long = [i for i, other in enumerate(seconds) if length + other.length > capacity]
            self._refuse(long)
        found = []
        for ids, other in seconds:
            is_long = length + other > capacity
            if truncate == "window" and is_long:
                kept = one[: capacity // 2]
                room = capacity - len(kept)
                cuts = cut(len(ids), room, min(stride, room // 2), truncate)
                pairs = [(kept, ids[cut]) for cut in cuts]
                found.append(self._cut(pairs, len(kept) < length))
            else:
                sizes = _longest_first(length, other, capacity)
                found.append(self._cut([(one[: sizes[0]], ids[: sizes[1]])], is_long))
        return found

    def _cut(self, pairs: Iterable[tuple[list[int], list[int]]], truncated: bool) -> Cut:
        return Cut(tuple(_frame_ids(self._pair, *pair) for pair in pairs), truncated)

    def prefixed(
        self,
        texts: Sequence[str],
        *,
        prefix: str = "",
        length: int | None = None,
        truncate: Truncate = True,
        stride: int = 0,
    ) -> list[Cut]:
        """Encode single texts, each with a prefix, in windows of at most `length` tokens (None: the longest).

        The prefix is tokenized with the text. If `truncate` is "window", each window of a long text begins with the
        tokens of the prefix, cut at half a window; neighbors share `stride` tokens of the text, at most half of the
        window's. Otherwise as `texts`.
        """
        longest = min(length or self.max_length, self.max_length)
        capacity = longest - self._single.size
        whole = [prefix + text for text in texts]
        tokens = self._ids(whole, _needed(capacity, truncate))
        too_long = [index for index, ids in enumerate(tokens) if len(ids) > capacity]
        if truncate is False and too_long:
            raise TextError(too_long, f"longer than {longest} tokens, and truncate is false")
        found = []
        for text, ids in zip(whole, tokens, strict=True):
            if truncate == "window" and len(ids) > capacity:
                ends = self._tokenize([text])[0].offsets[:, 1] if prefix else np.empty(0)
                before = min(int(np.sum(ends <= len(prefix))), capacity // 2)
                room = capacity - before
                cuts = cut(len(ids) - before, room, min(stride, room // 2), truncate)
                parts = [ids[:before] + ids[before:][cut] for cut in cuts]
            else:
                parts = [ids[:capacity]]
            windows = tuple(_frame_ids(self._single, part) for part in parts)
            found.append(Cut(windows, truncate is True and len(ids) > capacity))
        return found

    def whole(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[Encoded]:
        """Encode texts, or pairs, as one window each; one longer than `max_length` counts as truncated."""
        if pairs is None:
            windows = [_build(self._single, (own,)) for own in self._tokenize(texts)]
        else:
            both = zip(self._tokenize(texts), self._tokenize(pairs), strict=True)
            windows = [_build(self._pair, pair) for pair in both]
        return [Encoded((window,), len(window) > self.max_length) for window in windows]

    def _tokenize(self, texts: Sequence[str], needed: int | None = None) -> list[_Tokens]:
        """Return the tokens of texts, without special tokens: the first `needed`, None for all."""
        tokens = []
        encodings = self._encode(texts, needed, with_offsets=True)
        for text, encoding in zip(texts, encodings, strict=True):
            own = _tokens(encoding)[:needed]
            if not self._places.are_known(text):
                placed = self._places.find(text, own.ids, own.offsets, own.words)
                own = _Tokens(own.ids, *placed)
            tokens.append(own)
        return tokens

    def _ids(self, texts: Sequence[str], needed: int | None = None) -> list[list[int]]:
        """Return the token ids of texts, without special tokens: the first `needed`, None for all."""
        encodings = self._encode(texts, needed, with_offsets=False)
        return [encoding.ids[:needed] for encoding in encodings]

    def _encode(
        self, texts: Sequence[str], needed: int | None, *, with_offsets: bool
    ) -> list[tokenizers.Encoding | AsciiTokens]:
        """Return at least the first `needed` tokens of texts; ASCII texts take the shortcut if there is one."""
        short = self._ascii
        found = [
            short.encode(text, needed, with_offsets=with_offsets) if short else None
            for text in texts
        ]
        others = [text for text, own in zip(texts, found, strict=True) if own is None]
        encode = self.tokenizer.encode_batch if with_offsets else self.tokenizer.encode_batch_fast
        encodings = encode(others, add_special_tokens=False) if others else []
        if needed is not None:  # before the slow conversion to Python objects
            for encoding in encodings:
                encoding.truncate(needed)
        rest = iter(encodings)
        return [next(rest) if own is None else own for own in found]

    def _refuse(self, too_long: list[int], limits: str = "") -> None:
        if too_long:
            said = f"longer than {self.max_length} tokens{limits}, and truncate is false"
            raise TextError(too_long, said)


def _ascii_tokenizer(tokenizer: tokenizers.Tokenizer) -> AsciiTokenizer | None:
    try:
        return AsciiTokenizer(tokenizer)
    except ValueError:
        return None


def expand(window: Window, length: int, token_id: int, *, attended: bool) -> Window:
    """Return a window filled up to `length` tokens. attended: whether other tokens attend to the added ones"""
    missing = length - len(window)
    if missing <= 0:
        return window
    return Window(
        np.append(window.input_ids, np.full(missing, token_id, np.int64)),
        np.append(window.token_type_ids, np.zeros(missing, np.int64)),
        hidden=0 if attended else missing,
    )


def _needed(capacity: int, truncate: Truncate) -> int | None:
    """Return how many tokens of a text are needed: one more than fit, to detect a longer text; None for all."""
    return None if truncate == "window" else capacity + 1


def cut(size: int, capacity: int, stride: int, truncate: Truncate) -> list[slice]:
    """Return the cuts of `size` tokens into windows of `capacity` tokens that share `stride`; at least one cut."""
    if truncate != "window" or size <= capacity:
        return [slice(0, capacity)]
    if not 0 <= stride < capacity:
        raise ValueError(f"a stride of {stride} does not fit windows of {capacity} tokens")
    step = capacity - stride
    return [slice(start, start + capacity) for start in range(0, size - stride, step)]


def _longest_first(first: int, second: int, capacity: int) -> tuple[int, int]:
    """Return how many tokens of each text stay when the longer text loses tokens first (HF's `longest_first`)."""
    if first + second <= capacity:
        return first, second
    shorter = min(first, second, capacity // 2)
    return (shorter, capacity - shorter) if first <= second else (capacity - shorter, shorter)


def _frame_ids(frame: _Frame, *texts: list[int]) -> Window:
    """Frame the token ids of one text or a pair with the template's special tokens."""
    together = [*frame.parts[0]]
    for ids, special in zip(texts, frame.parts[1:], strict=True):
        together += ids
        together += special
    framed = np.array(together, np.int64)
    if not frame.has_types:
        return Window(framed, np.zeros(len(framed), np.int64))
    types = [frame.types[0]]
    for ids, text_type, after in zip(texts, frame.text_types, frame.types[1:], strict=True):
        types += [np.full(len(ids), text_type, np.int64), after]
    return Window(framed, np.concatenate(types))


def _build(frame: _Frame, texts: tuple[_Tokens, ...]) -> Encoding:
    """Frame the tokens of one text or a pair with the template's special tokens."""
    empty = (0, 0)
    ids, types = [frame.ids[0]], [frame.types[0]]
    offsets = [np.full((len(frame.ids[0]), 2), empty, dtype=np.int32)]
    words = [np.full(len(frame.ids[0]), -1, dtype=np.int32)]
    sequence = [np.full(len(frame.ids[0]), -1, dtype=np.int8)]
    for index, tokens in enumerate(texts):
        after = len(frame.ids[index + 1])
        ids += [tokens.ids, frame.ids[index + 1]]
        types += [
            np.full(len(tokens), frame.text_types[index], dtype=np.int64),
            frame.types[index + 1],
        ]
        offsets += [tokens.offsets, np.zeros((after, 2), dtype=np.int32)]
        words += [tokens.words, np.full(after, -1, dtype=np.int32)]
        sequence += [np.full(len(tokens), index, dtype=np.int8), np.full(after, -1, dtype=np.int8)]
    return Encoding(
        np.concatenate(ids),
        np.concatenate(types),
        np.concatenate(offsets),
        np.concatenate(words),
        np.concatenate(sequence),
    )
