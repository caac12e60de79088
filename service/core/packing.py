"""Packed batches: one flat axis of real tokens, and a layout from which attention reads where sequences begin.

A batch of B sequences with T tokens in all is never a padded rectangle. All layers except attention compute
`[T, ...]`. Attention gathers to `[B, S]` slots (S: the longest sequence) and back, by index arrays that depend only
on the lengths.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.core.encode import Window
from service.core.goldens import Golden
from service.core.manifest import Head, find_mask_token_id

# Rows of a head over the vocabulary for each sequence. The limit bounds the memory of a batch.
MOST_MASKS = 32
# S of a packed graph is a multiple of it. Kernels compute 8 or 16 numbers of a row at a time, and sum a remainder in
# another order. Without a remainder, a text's attention does not depend on the longest text of its batch. CUDA's
# memory-efficient attention requires a multiple of 8 for a bias.
SLOT_MULTIPLE = 16

# The token types of a window for a head with a `label_prompt`, in place of the tokenizer's: the first token of each
# word of the text, and the token whose vector is a label's. A window of a zero-shot-classification head has one word,
# the separator, and TEXT after it.
WORD, LABEL, TEXT = 1, 2, 3

MOST_KEPT, LONGEST_KEPT = 1024, 512  # layouts of one sequence, and tokens of each: at most 9 MB

Ints = NDArray[np.int64]
Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Layout:
    """The slots of the tokens of B packed sequences in a padded `[B, S]` rectangle.

    lengths       [B]     tokens of each sequence
    attended      [B]     the first tokens of each sequence to which its tokens attend; all, unless a query is expanded
    unpack        [B, S]  packed index of each padded slot; a padding slot has the index of its own sequence's first
                          token, so that a row never contains a token of another sequence
    pack          [T]     flat padded slot (row * S + column) of each packed token
    cu_seqlens    [B + 1] where each sequence starts; the last entry is T
    """

    lengths: Ints
    attended: Ints
    unpack: Ints
    pack: Ints
    cu_seqlens: Int32s

    @property
    def longest(self) -> int:
        """S, the slots of a row: the length of the longest sequence, unless the layout was widened."""
        return int(self.unpack.shape[1])

    def widen(self, multiple: int) -> "Layout":
        """Return the layout with padding slots up to the next multiple of `multiple` slots in each row."""
        if len(self.lengths) == 1:
            return lone_layout(self.lengths.item(), self.attended.item(), multiple)
        longest = self.longest
        added = -longest % multiple
        if not added:
            return self
        padding = np.repeat(self.unpack[:, :1], added, axis=1)
        unpack = np.concatenate([self.unpack, padding], axis=1)
        pack = self.pack + self.pack // longest * added
        return Layout(self.lengths, self.attended, unpack, pack, self.cu_seqlens)

    def token_offset(self) -> Int32s:
        """Return `[B, S]` flat slots for CUDA's packed attention: the real tokens' slots, then the padding slots."""
        padding = np.ones(self.unpack.size, dtype=bool)
        padding[self.pack] = False
        offsets = np.concatenate([self.pack, np.flatnonzero(padding)])
        return offsets.astype(np.int32).reshape(self.unpack.shape)


@dataclass(slots=True)
class Packed:
    """One batch: `input_ids`, `token_type_ids`, `position_ids` are `[T]` int64."""

    input_ids: Ints
    token_type_ids: Ints
    position_ids: Ints
    layout: Layout

    @property
    def lengths(self) -> Ints:
        return self.layout.lengths


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def make_layout(lengths: Iterable[int], hidden: Iterable[int] | None = None) -> Layout:
    """Return the layout of sequences of these lengths. Raises ValueError for no sequence, or an empty one.

    hidden: the tokens at the end of each sequence that no token attends to; None for none
    """
    sizes = np.asarray(list(lengths), dtype=np.int64)
    attended = sizes if hidden is None else sizes - np.asarray(list(hidden), dtype=np.int64)
    if sizes.size == 0 or sizes.min() < 1:
        raise ValueError(
            f"a batch needs sequences of at least one token, got lengths {sizes.tolist()}"
        )
    cu_seqlens = np.concatenate([[0], np.cumsum(sizes)])
    columns = np.arange(sizes.max())
    real = columns < sizes[:, None]  # [B, S]
    unpack = np.where(real, cu_seqlens[:-1, None] + columns, cu_seqlens[:-1, None])
    return Layout(sizes, attended, unpack, np.flatnonzero(real), cu_seqlens.astype(np.int32))


def lone_layout(length: int, attended: int, multiple: int = 1) -> Layout:
    """Return the layout of one sequence in a row of a multiple of `multiple` slots. Its arrays must not be changed.

    Layouts of up to 512 tokens are kept, because numpy's code is slow after a run of a model has filled the caches.
    """
    make = _kept_layout if length <= LONGEST_KEPT else _make_lone_layout
    return make(length, attended, multiple)


def _make_lone_layout(length: int, attended: int, multiple: int) -> Layout:
    pack = np.arange(length)
    unpack = np.zeros((1, round_up(length, multiple)), np.int64)
    unpack[0, :length] = pack
    sizes, ends = np.array([length]), np.array([0, length], np.int32)
    return Layout(sizes, np.array([attended]), unpack, pack, ends)


_kept_layout = lru_cache(MOST_KEPT)(_make_lone_layout)


def positions(layout: Layout) -> Ints:
    """Return the position of each token in its own sequence, from 0, `[T]`."""
    return layout.pack % layout.longest


def mask_positions(packed: Packed, mask_token_id: int) -> Ints:
    """Return the packed indices of the mask tokens, `[M]`: of each sequence at most the first `MOST_MASKS`."""
    found = np.flatnonzero(packed.input_ids == mask_token_id)
    firsts = np.searchsorted(found, packed.layout.cu_seqlens[:-1])  # [B]
    sequence = np.searchsorted(packed.layout.cu_seqlens, found, side="right") - 1  # [M]
    return found[np.arange(len(found)) - firsts[sequence] < MOST_MASKS]


def count_masks(window: Window, heads: Collection[Head]) -> int:
    """Return how many mask tokens, or pairs of words and labels, of a window these heads compute a row for."""
    ids = {head.mask_token_id for head in heads if head.mask_token_id is not None}
    masks = sum(min(int(np.count_nonzero(window.input_ids == mask)), MOST_MASKS) for mask in ids)
    if not any(head.per_pair for head in heads):
        return masks
    words, labels = (int(np.count_nonzero(window.token_type_ids == mark)) for mark in (WORD, LABEL))
    return masks + words * labels


class Pairs(NamedTuple):
    """The pairs of a batch's words and labels, for heads with a `label_prompt`.

    words   [B, W]  packed index of each word's first token; after a sequence's last word that of its first token
    labels  [B, C]  packed index of each label's token, padded in the same way
    pairs   [P]     flat place in `[B, W, C]` of each word with each label of its own sequence, words first
    starts  [B + 1] where each sequence's pairs start; the last entry is P
    """

    words: Ints
    labels: Ints
    pairs: Ints
    starts: Ints


def word_label_pairs(packed: Packed) -> Pairs:
    """Return the pairs of the words and labels that a batch's token types mark."""
    firsts = packed.layout.cu_seqlens[:-1]
    slots, real = [], []
    for mark in (WORD, LABEL):
        found = np.flatnonzero(packed.token_type_ids == mark)
        starts = np.searchsorted(found, packed.layout.cu_seqlens)
        counts = np.diff(starts)
        is_real = np.arange(max(counts.max(), 1)) < counts[:, None]
        places = np.repeat(firsts[:, None].astype(np.int64), is_real.shape[1], axis=1)
        places[is_real] = found
        slots.append(places)
        real.append(is_real)
    pairs = np.flatnonzero(real[0][:, :, None] & real[1][:, None, :])
    counts = real[0].sum(axis=1) * real[1].sum(axis=1)
    return Pairs(slots[0], slots[1], pairs, np.append(0, np.cumsum(counts)))


def fill_rows(window: Window, heads: Mapping[str, Head]) -> Window:
    """Return a window with about as many mask tokens, or pairs of words and labels, as the heads compute.

    Labels of two tokens each take half of it.
    """
    ids, types = window.input_ids.copy(), window.token_type_ids.copy()
    mask = find_mask_token_id(heads)
    if mask is not None:
        ids[:] = mask
    if any(head.per_pair for head in heads.values()):
        half = len(types) // 2
        types[:half:2] = LABEL
        types[half:] = WORD
    return Window(ids, types)


def row_starts(packed: Packed, heads: Mapping[str, Head]) -> dict[str, Ints | Int32s]:
    """Return where each sequence's rows start, `[B + 1]`, in outputs of heads with any number of rows."""
    ends = packed.layout.cu_seqlens
    starts: dict[str, Ints | Int32s] = {}
    for name, head in heads.items():
        if head.per_token:
            starts[name] = ends
        elif head.mask_token_id is not None:
            starts[name] = np.searchsorted(mask_positions(packed, head.mask_token_id), ends)
        elif head.per_pair:
            starts[name] = word_label_pairs(packed).starts
    return starts


def pack(windows: Sequence[Window]) -> Packed:
    """Concatenate windows, in order, into one packed batch."""
    if len(windows) == 1 and len(only := windows[0]) and not only.lengths:
        layout = lone_layout(len(only), len(only) - only.hidden)
        return Packed(only.input_ids, only.token_type_ids, layout.pack, layout)
    hidden = None
    if any(window.hidden for window in windows):
        hidden = [window.hidden for window in windows for _ in window.lengths or (0,)]
    layout = make_layout(sequence_lengths(windows), hidden)
    several = join(windows)
    return Packed(several.input_ids, several.token_type_ids, positions(layout), layout)


def join(windows: Sequence[Window]) -> Window:
    """Return the sequences of windows, one after the other, without their `hidden`."""
    return Window(
        np.concatenate([window.input_ids for window in windows]),
        np.concatenate([window.token_type_ids for window in windows]),
        lengths=sequence_lengths(windows),
    )


def sequence_lengths(windows: Sequence[Window]) -> list[int]:
    """Return the tokens of each sequence."""
    return [length for own in windows for length in own.lengths or (len(own),)]


def divide(window: Window) -> list[Window]:
    """Return a window for each of several sequences."""
    ends = np.cumsum(window.lengths)[:-1]
    parts = (np.split(array, ends) for array in (window.input_ids, window.token_type_ids))
    return [Window(*own) for own in zip(*parts, strict=True)]


def golden_windows(golden: Golden) -> list[Window]:
    """Return the input of each golden."""
    lengths = golden.lengths.tolist()
    return divide(Window(golden.input_ids, golden.token_type_ids, lengths=lengths))


def each(packed: Packed) -> Iterator[Packed]:
    """Yield each sequence as a batch of its own."""
    hidden = packed.layout.lengths - packed.layout.attended
    for row, (start, end) in enumerate(pairwise(packed.layout.cu_seqlens.tolist())):
        own = slice(start, end)
        yield Packed(
            packed.input_ids[own],
            packed.token_type_ids[own],
            packed.position_ids[own],
            lone_layout(end - start, end - start - hidden[row].item()),
        )


def split(
    outputs: Mapping[str, NDArray[np.float32]],
    windows: Sequence[Window],
    starts: Mapping[str, NDArray[Any]],
) -> list[dict[str, NDArray[np.float32]]]:
    """Return the outputs of each window of a batch, by output name.

    outputs: `[R, ...]` for the names in `starts`, `[B, ...]` for all others
    starts: see `row_starts`
    A window of k sequences has `[k, ...]` of the others.
    """
    found, row = [], 0
    for window in windows:
        end = row + (len(window.lengths) or 1)
        own = {}
        for name, value in outputs.items():
            if name in starts:
                own[name] = value[starts[name][row] : starts[name][end]]
            else:
                own[name] = value[row:end] if window.lengths else value[row]
        found.append(own)
        row = end
    return found
