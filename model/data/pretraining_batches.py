"""Batches of pretraining: samples of a corpus, with some of their tokens masked.

The samples of a step are a function of seed and step, so that a resumed run equals an uninterrupted one, and parallel
processes need no messages. Blocks of text are built and masked on the model's device.

Shapes as in `model/bert.py`: B samples of a step, L tokens of the longest one, T tokens, M masked tokens
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from tokenizers import models
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from model.attention import PackedLayout
from model.data.corpus import Corpus
from model.families.spec import Family, Pairs
from service.core import packing
from service.core.packing import Ints


@dataclass(frozen=True)
class Specials:
    """The special tokens of a family in a tokenizer.

    ids: by the token's text
    frame: templates for a text and for a pair, see `Family`
    mask: the separator for a family without a masked language model
    """

    ids: Mapping[str, int]
    frame: tuple[str, str]
    sep: int
    mask: int
    vocab_size: int

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer, family: Family) -> "Specials":
        """Find a family's special tokens in a tokenizer. Raises ValueError for missing ones."""
        named = {"mask": family.special_tokens["sep"], **family.special_tokens}
        wanted = {named["sep"], named["mask"], *_framing(family.frame)}
        ids = {token: tokenizer.token_to_id(token) for token in sorted(wanted)}
        if missing := [token for token, i in ids.items() if i is None]:
            raise ValueError(f"the tokenizer lacks {family.model_type}'s special tokens: {missing}")
        sep, mask = ids[named["sep"]], ids[named["mask"]]
        return cls(ids, family.frame, sep, mask, tokenizer.get_vocab_size())

    def room(self, length: int, texts: int = 1) -> int:
        """Return the number of text tokens in a sample of `length` tokens, for one text or two."""
        return length - len(_framing(self.frame[texts - 1 : texts]))

    def around(self, *texts: Ints) -> tuple[Ints, Ints]:
        """Return one text or two with their special tokens, and each token's segment."""
        by_name = dict(zip(TEXTS, texts, strict=False))
        parts, segments = [], []
        for place in self.frame[len(texts) - 1].split():
            name, _, segment = place.partition(":")
            parts.append(by_name.get(name, [self.ids.get(name)]))
            segments.append(int(segment or 0))
        ids = np.concatenate(parts).astype(np.int64)
        return ids, np.repeat(segments, [len(part) for part in parts])


TEXTS = ("$A", "$B")
TEXT = -1  # a placeholder for any token of a text


def _framing(frames: Iterable[str]) -> list[str]:
    """Return the special tokens of frames, in order."""
    names = (place.partition(":")[0] for frame in frames for place in frame.split())
    return [name for name in names if name not in TEXTS]


class Pair(NamedTuple):
    """Two texts, ids and segments. is_next: 0 where the second text follows the first, else 1"""

    input_ids: Ints
    token_type_ids: Ints
    is_next: int


# -- pairs ------------------------------------------------------------------------------------------------------------


def draw_pair(
    corpus: Corpus, specials: Specials, length: int, pairs: Pairs, rng: np.random.Generator
) -> Pair:
    """Sample a pair of at most `length` tokens, from a sentence that is sampled by its share of the corpus' tokens.

    pairs: the objective, which decides the second text
    """
    draw = _next_sentence if pairs == "nsp" else _sentence_order
    return draw(corpus, specials, length, rng)


def _next_sentence(
    corpus: Corpus, specials: Specials, length: int, rng: np.random.Generator
) -> Pair:
    """Sample a pair for next sentence prediction; half of the second texts are random (Devlin et al. 2019)."""
    sentence, end = _start(corpus, rng)
    room = specials.room(length, 2)
    split = _split(corpus, sentence, end, room, rng)
    first = corpus.tokens(sentence, split)[: room - 1]
    is_next = int(rng.random() < 0.5)
    second = _elsewhere(corpus, sentence, rng) if is_next else corpus.tokens(split, end)
    return Pair(*specials.around(first, second[: room - len(first)]), is_next)


def _sentence_order(
    corpus: Corpus, specials: Specials, length: int, rng: np.random.Generator
) -> Pair:
    """Sample a pair for sentence order prediction; half of the pairs are swapped (Lan et al. 2019).

    Only their content distinguishes the two texts: both are whole sentences, and neither is longer on average. If two
    sentences do not fit, they are truncated at their outer ends.
    """
    room = specials.room(length, 2)
    begin, end = _span(corpus, room, rng)
    split = int(rng.integers(begin + 1, end))
    first, second = corpus.tokens(begin, split), corpus.tokens(split, end)
    if len(first) + len(second) > room:
        first = first[-max(room // 2, room - len(second)) :]
        second = second[: room - len(first)]
    is_next = int(rng.random() < 0.5)
    texts = (second, first) if is_next else (first, second)
    return Pair(*specials.around(*texts), is_next)


def _span(corpus: Corpus, room: int, rng: np.random.Generator) -> tuple[int, int]:
    """Return the longest range of sentences that fits, but at least two, that begins or ends at a random sentence."""
    starts = corpus.sentence_starts
    if rng.random() < 0.5:
        begin, end = _start(corpus, rng)
        fitting = int(np.searchsorted(starts, starts[begin] + room, side="right")) - 1
        return begin, min(max(fitting, begin + 2), end)
    begin, last = _start(corpus, rng, backwards=True)
    fitting = int(np.searchsorted(starts, starts[last + 1] - room, side="left"))
    return max(min(fitting, last - 1), begin), last + 1


def _start(corpus: Corpus, rng: np.random.Generator, backwards: bool = False) -> tuple[int, int]:
    """Return a random sentence that has a successor in its document, and the document's end.

    backwards: the document's beginning, and a random sentence that has a predecessor
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
    """Return the end of the first text: at least one sentence, not the last, on average half the room."""
    target = rng.integers(1, max(room, 2))
    starts = corpus.sentence_starts
    split = int(np.searchsorted(starts, starts[sentence] + target, side="left"))
    return min(max(split, sentence + 1), end - 1)


def _elsewhere(corpus: Corpus, sentence: int, rng: np.random.Generator) -> Ints:
    """Sample text from another document (or, in a corpus of one, from any place)."""
    here = corpus.document_of(sentence)
    for _ in range(10):
        other = _random_sentence(corpus, rng)
        there = corpus.document_of(other)
        if there != here:
            break
    return corpus.tokens(other, there[1])


# -- batches ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PretrainingBatch:
    """Packed samples, the arguments of a model's `losses`.

    inputs: ids, segments and positions [T], and the layout
    masked: packed indices of the masked tokens [M], in order
    labels: their original ids [M]
    is_next: class of each pair [B]
    """

    inputs: tuple[Tensor, Tensor, Tensor, PackedLayout]
    masked: Tensor
    labels: Tensor
    is_next: Tensor


@dataclass(frozen=True)
class Samples:
    """The samples of a step, one per row, before they are packed.

    input_ids, original_ids: [B, L] after and before masking
    token_type_ids: [B, L]
    hidden: [B, L], True where a token is masked
    is_next: [B]
    lengths, predictions: tokens and masked tokens of each row, on the CPU
    """

    input_ids: Tensor
    original_ids: Tensor
    token_type_ids: Tensor
    hidden: Tensor
    is_next: Tensor
    lengths: tuple[int, ...]
    predictions: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def counts(self) -> dict[str, int]:
        """The number of items that each loss is the mean of, by loss."""
        pairs = len(self)
        return {"mlm": sum(self.predictions), "nsp": pairs, "sop": pairs, "rtd": self.tokens}

    def part(self, number: int, parts: int) -> Self:
        """Return one of `parts` parts, whose sizes differ by at most one sample."""
        rows = slice(number * len(self) // parts, (number + 1) * len(self) // parts)
        return type(self)(*(value[rows] for value in vars(self).values()))

    def pack(self) -> PretrainingBatch:
        device = self.input_ids.device
        layout, positions, real = _frame_of(self.lengths, self.input_ids.shape[1], device)
        grids = (self.input_ids, self.token_type_ids, self.original_ids, self.hidden)
        ids, types, original, hidden = (grid.flatten()[real] for grid in grids)
        masked = torch.nonzero_static(hidden, size=sum(self.predictions)).squeeze(1)
        return PretrainingBatch(
            (ids, types, positions, layout), masked, original[masked], self.is_next
        )


@functools.lru_cache(maxsize=8)  # blocks have the same lengths in every step
def _frame_of(
    lengths: tuple[int, ...], width: int, device: torch.device
) -> tuple[PackedLayout, Tensor, Tensor | slice]:
    """Return the layout of rows with these lengths, the tokens' positions, and their places in a `[B, width]` grid."""
    layout = packing.make_layout(lengths)
    positions = torch.as_tensor(packing.positions(layout), device=device)
    if min(lengths) == width:
        return PackedLayout.of(layout, device), positions, slice(None)
    slots = np.flatnonzero(np.arange(width) < np.asarray(lengths)[:, None])
    return PackedLayout.of(layout, device), positions, torch.as_tensor(slots, device=device)


class Sampler:
    """Sampler of a run's steps, with masking.

    pairs: the objective on pairs of texts; None for blocks: running text of the full length, which continues in the
        next document after a separator (RoBERTa's full sentences, Liu et al. 2019)
    continues: whether each token of the vocabulary continues a word. If given, all pieces of a word are masked or none,
        except in the last masked word of a sample, where the number of masked tokens decides.
    """

    def __init__(
        self,
        corpus: Corpus,
        specials: Specials,
        pairs: Pairs | None,
        device: torch.device | str = "cpu",
        continues: Sequence[bool] | None = None,
    ):
        self.corpus = corpus
        self.specials = specials
        self.pairs = pairs
        self.device = torch.device(device)
        special = torch.zeros(specials.vocab_size, dtype=torch.bool)
        special[[*specials.ids.values()]] = True
        self.special = special.to(self.device)
        self.continues = None if continues is None else torch.tensor(continues, device=self.device)
        if not pairs:
            stream, starts = _separated(corpus, specials.sep)
            self.stream = torch.as_tensor(stream, device=self.device)
            self.starts = torch.as_tensor(starts, device=self.device)

    def samples(self, *, seed: int, step: int, size: int, length: int, rate: float) -> Samples:
        """Return `size` samples of at most `length` tokens each, with a share `rate` of their text masked.

        Each row has the rounded number of masked tokens, at least one. A separator between the documents of a block
        counts as text; it is masked only if there is too little other text.
        """
        origin = np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0]
        generator = torch.Generator(self.device).manual_seed(int(origin))
        if self.pairs:
            ids, types, is_next, lengths = self._pairs(seed, step, size, length, self.pairs)
        else:
            ids, types = self._blocks(size, length, generator)
            is_next = torch.zeros(size, dtype=torch.long, device=self.device)
            lengths = (length,) * size
        texts = (self.specials.room(tokens, 2 if self.pairs else 1) for tokens in lengths)
        predictions = tuple(max(1, round(rate * tokens)) for tokens in texts)
        changed, hidden = self._hide(ids, predictions, generator)
        return Samples(changed, ids, types, hidden, is_next, lengths, predictions)

    def _pairs(
        self, seed: int, step: int, size: int, length: int, pairs: Pairs
    ) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
        """Return ids and segments [B, L], the class of each pair [B], and its length."""
        rngs = (np.random.default_rng([seed, step, index]) for index in range(size))
        sampled = [draw_pair(self.corpus, self.specials, length, pairs, rng) for rng in rngs]
        ids = self._grid([pair.input_ids for pair in sampled], self.specials.sep)
        types = self._grid([pair.token_type_ids for pair in sampled], 0)
        is_next = torch.tensor([pair.is_next for pair in sampled], device=self.device)
        return ids, types, is_next, tuple(len(pair.input_ids) for pair in sampled)

    def _grid(self, rows: Sequence[Ints], filling: int) -> Tensor:
        """Return rows as `[B, L]`. filling: a token that is never masked and never packed"""
        tensors = [torch.as_tensor(row) for row in rows]
        grid = pad_sequence(tensors, batch_first=True, padding_value=filling)
        return grid.to(self.device)

    def _blocks(self, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return ids and segments [B, L] of text from a sentence on, which is sampled by its share of the tokens."""
        at = torch.randint(len(self.stream), (size,), generator=generator, device=self.device)
        begin = self.starts[torch.searchsorted(self.starts, at, right=True) - 1]
        room = torch.arange(self.specials.room(length), device=self.device)
        text = self.stream[(begin[:, None] + room) % len(self.stream)].long()
        framed, types = self.specials.around(np.full(len(room), TEXT))
        ids = torch.as_tensor(framed, device=self.device).repeat(size, 1)
        first = int(framed.argmin())
        ids[:, first : first + len(room)] = text
        return ids, torch.as_tensor(types, device=self.device).expand_as(ids)

    def _hide(
        self, ids: Tensor, predictions: tuple[int, ...], generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return masked ids [B, L], and which are masked: BERT's masking (Devlin et al. 2019).

        80 % of the chosen tokens become the mask token, 10 % a random token, and 10 % are kept.
        """

        def uniform() -> Tensor:
            return torch.rand(ids.shape, generator=generator, device=self.device)

        order = uniform()
        if self.continues is not None:
            words = (~self.continues[ids]).cumsum(dim=1)  # [B, L] the word of each token
            order = order.gather(1, words.clamp_max(ids.shape[1] - 1))
        order = order.masked_fill(self.special[ids], 2.0)  # after all others
        columns = torch.arange(ids.shape[1], device=self.device)
        places = torch.empty_like(ids).scatter_(
            1, order.argsort(dim=1, stable=True), columns.expand_as(ids)
        )
        hidden = places < torch.tensor(predictions, device=self.device)[:, None]
        kind = uniform()
        noise = torch.randint(
            self.specials.vocab_size, ids.shape, generator=generator, device=self.device
        )
        changed = torch.where(hidden & (kind < 0.8), self.specials.mask, ids)
        return torch.where(hidden & (kind >= 0.9), noise, changed), hidden


def _separated(corpus: Corpus, sep: int) -> tuple[NDArray[np.int32], Ints]:
    """Return the corpus as one text, with a separator after each document, and the starts of its sentences."""
    ends = corpus.sentence_starts[corpus.document_starts[1:]]
    stream = np.insert(corpus.ids, ends, sep).astype(np.int32)
    before = np.repeat(np.arange(corpus.num_documents), np.diff(corpus.document_starts))
    return stream, corpus.sentence_starts[:-1] + before


def continues(tokenizer: tokenizers.Tokenizer) -> list[bool]:
    """Return whether each token of a vocabulary continues a word."""
    tokens = map(tokenizer.id_to_token, range(tokenizer.get_vocab_size()))
    model = tokenizer.model
    if isinstance(model, models.WordPiece):
        return [token.startswith(model.continuing_subword_prefix) for token in tokens]
    begins = (
        "Ġ" if isinstance(model, models.BPE) else "▁"
    )  # the character for the space before a word
    return [not token.startswith(begins) for token in tokens]
