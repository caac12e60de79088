"""A packed batch holds every token once, and its layout says where each stands in a rectangle."""

from collections.abc import Sequence
from dataclasses import asdict, fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.encode import Encoding, Window
from service.core.manifest import Head
from service.core.packing import (
    MOST_MASKS,
    divide,
    each,
    join,
    lone_layout,
    make_layout,
    mask_positions,
    pack,
    positions,
    row_starts,
    split,
)

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=9)


def encoding(ids: Sequence[int]) -> Encoding:
    """An encoding with these ids, whose segments are 1 from the third token on."""
    size = len(ids)
    return Encoding(
        input_ids=np.array(ids),
        token_type_ids=(np.arange(size) >= 2).astype(np.int64),
        offsets=np.zeros((size, 2), np.int32),
        words=np.full(size, -1, np.int32),
        sequence=np.full(size, -1, np.int8),
    )


class TestLayout:
    @given(LENGTHS)
    def test_by_counting(self, lengths):
        """The arrays are what counting tokens and slots one by one gives."""
        longest, token = max(lengths), 0
        unpack, slots, starts = [], [], [0]
        for row, length in enumerate(lengths):
            first = token
            unpack.append([first + (column if column < length else 0) for column in range(longest)])
            slots += [row * longest + column for column in range(length)]
            token += length
            starts.append(token)

        layout = make_layout(lengths)

        assert layout.lengths.tolist() == lengths
        assert layout.unpack.tolist() == unpack
        assert layout.pack.tolist() == slots
        assert layout.cu_seqlens.tolist() == starts
        assert layout.longest == longest

    @given(LENGTHS)
    def test_round_trip(self, lengths):
        """Tokens unpacked into slots and packed again are the tokens."""
        layout = make_layout(lengths)
        tokens = np.arange(sum(lengths)) + 100

        np.testing.assert_array_equal(tokens[layout.unpack].reshape(-1)[layout.pack], tokens)

    @given(LENGTHS)
    def test_padding_stays_at_home(self, lengths):
        """A padding slot holds its own sequence's first token."""
        layout = make_layout(lengths)

        for row, length in enumerate(lengths):
            assert set(layout.unpack[row, length:].tolist()) <= {layout.cu_seqlens[row]}

    @given(LENGTHS, st.sampled_from([1, 3, 8]))
    def test_wider_rows(self, lengths, multiple):
        """A widened layout has the next multiple of slots in a row: the tokens' own, and padding."""
        layout = make_layout(lengths)

        wide = layout.widen(multiple)

        assert 0 == wide.longest % multiple <= wide.longest - max(lengths) < multiple
        rows, columns = np.divmod(layout.pack, layout.longest)
        np.testing.assert_array_equal(rows * wide.longest + columns, wide.pack)
        np.testing.assert_array_equal(layout.unpack, wide.unpack[:, : layout.longest])
        assert (wide.unpack[:, layout.longest :] == wide.unpack[:, :1]).all()

    @given(LENGTHS)
    def test_token_offset(self, lengths):
        """`token_offset` lists the slots of all real tokens in order, then the padding slots."""
        columns = max(lengths)

        found = make_layout(lengths).token_offset()

        assert (len(lengths), columns) == found.shape
        real = [
            columns * row + place for row, length in enumerate(lengths) for place in range(length)
        ]
        padding = sorted(set(range(found.size)) - set(real))
        assert real + padding == found.reshape(-1).tolist()

    def test_types(self):
        """Indices are int64, but for the two that the GPU's kernels take."""
        layout = make_layout([2, 3])

        for array in (layout.lengths, layout.unpack, layout.pack, positions(layout)):
            assert array.dtype == np.int64
        assert layout.cu_seqlens.dtype == layout.token_offset().dtype == np.int32

    def test_any_iterable(self):
        """Lengths may come from anything that gives integers."""
        assert make_layout(iter(np.array([2, 1]))).pack.tolist() == [0, 1, 2]

    @given(LENGTHS)
    def test_positions(self, lengths):
        """Each sequence's positions count from 0."""
        expected = [position for length in lengths for position in range(length)]

        assert positions(make_layout(lengths)).tolist() == expected

    @pytest.mark.parametrize("lengths", [[], [0], [3, 0, 2], [2, -1]])
    def test_nothing_to_pack(self, lengths):
        """A batch without sequences, or with an empty one, is refused with its lengths."""
        with pytest.raises(ValueError, match="at least one token") as refused:
            make_layout(lengths)

        assert str(lengths) in str(refused.value)


def test_lone_layout():
    """The kept layout of one sequence is the one that is made for several."""
    made, lone = make_layout([5], [2]), lone_layout(5, 3)

    for field in fields(made):
        np.testing.assert_array_equal(
            getattr(made, field.name), getattr(lone, field.name), strict=True
        )


class TestPack:
    def test_concatenates(self):
        """Encodings stand one after the other, in order, each with positions of its own."""
        packed = pack([encoding([5, 6, 7]), encoding([8]), encoding([9, 10])])

        assert packed.input_ids.tolist() == [5, 6, 7, 8, 9, 10]
        assert packed.token_type_ids.tolist() == [0, 0, 1, 0, 0, 0]
        assert packed.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
        assert packed.lengths.tolist() == [3, 1, 2]

    def test_hidden_tokens(self):
        """Tokens that no token attends to have slots, and are not counted as attended."""
        ids = np.array([5, 6, 7])
        window = Window(ids, 0 * ids, hidden=2)

        packed = pack([encoding([8, 9]), window])

        assert packed.input_ids.tolist() == [8, 9, 5, 6, 7]
        assert packed.lengths.tolist() == [2, 3]
        assert packed.layout.attended.tolist() == [2, 1]
        assert packed.layout.pack.tolist() == [0, 1, 3, 4, 5]
        assert [own.layout.attended.tolist() for own in each(packed)] == [[2], [1]]

    @pytest.mark.parametrize("encodings", [[], [encoding([])], [encoding([1]), encoding([])]])
    def test_nothing_to_pack(self, encodings):
        """No encodings, or one without tokens, are refused."""
        with pytest.raises(ValueError, match="at least one token"):
            pack(encodings)

    def test_several_sequences_of_a_window(self):
        """Windows of several sequences are packed as windows of one each, and get the rows of all of theirs."""
        windows = [encoding([1, 2]), encoding([3]), encoding([4, 5, 6])]
        together = [windows[0], join(windows[1:])]

        packed = pack(together)

        np.testing.assert_equal(asdict(pack(windows)), asdict(packed))
        for one, other in zip(windows[1:], divide(together[1]), strict=True):
            np.testing.assert_array_equal(one.input_ids, other.input_ids)
        outputs = {"mood": np.arange(3.0, dtype=np.float32)[:, None]}
        assert [[0], [[1], [2]]] == [own["mood"].tolist() for own in split(outputs, together, {})]


class TestEach:
    def test_one_after_the_other(self):
        """Each sequence becomes the batch that packing it alone would give."""
        encodings = [encoding([5, 6, 7]), encoding([8]), encoding([9, 10])]

        for own, alone in zip(each(pack(encodings)), encodings, strict=True):
            expected = pack([alone])
            assert own.input_ids.tolist() == expected.input_ids.tolist()
            assert own.token_type_ids.tolist() == expected.token_type_ids.tolist()
            assert own.position_ids.tolist() == expected.position_ids.tolist()
            assert own.layout.unpack.tolist() == expected.layout.unpack.tolist()


class TestSplit:
    @given(LENGTHS)
    def test_everyone_gets_their_own(self, lengths):
        """Each sequence gets the rows of its own tokens, and its own row where there is one each."""
        layout = make_layout(lengths)
        owners = np.repeat(np.arange(len(lengths)), lengths).astype(np.float32)
        outputs = {
            "entities": np.stack([owners, positions(layout).astype(np.float32)], axis=1),
            "mood": np.arange(len(lengths), dtype=np.float32)[:, None],
        }

        windows = [encoding([0] * length) for length in lengths]
        rows = split(outputs, windows, {"entities": layout.cu_seqlens})

        assert len(rows) == len(lengths)
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            assert row["entities"].tolist() == [[index, position] for position in range(length)]
            assert row["mood"].tolist() == [index]

    def test_as_many_tokens_as_sequences(self):
        """The name of an array decides whether it has a row per token, not its number of rows."""
        layout = make_layout([1, 1])
        rows = np.array([[1.0], [2.0]], np.float32)

        outputs = {"tokens": rows, "texts": rows}
        first, second = split(outputs, [encoding([1])] * 2, {"tokens": layout.cu_seqlens})

        assert first["tokens"].shape == (1, 1)
        assert first["texts"].shape == (1,)
        assert second["tokens"].tolist() == [[2.0]]
        assert second["texts"].tolist() == [2.0]


MASK = 4
HEADS = {
    "tags": Head(task="ner", labels=("O",)),
    "mood": Head(task="classification", labels=("good", "bad")),
    "masks": Head(task="fill-mask", mask_token_id=MASK, vocabulary_size=9),
}


class TestMaskPositions:
    def test_of_all_sequences(self):
        """Mask tokens are found in the whole batch, in order; sequences may have none or several."""
        packed = pack([encoding([MASK, 6, MASK]), encoding([8]), encoding([9, MASK])])

        assert [0, 2, 5] == mask_positions(packed, MASK).tolist()

    def test_at_most(self):
        """Only the first tokens of each sequence count."""
        many = encoding([MASK] * (MOST_MASKS + 3))
        packed = pack([many, encoding([1, MASK]), many])

        found = mask_positions(packed, MASK).tolist()

        second = MOST_MASKS + 4
        third = range(second + 1, second + 1 + MOST_MASKS)
        assert [*range(MOST_MASKS), second, *third] == found

    def test_rows_of_each_sequence(self):
        """Outputs per mask token are split by the mask tokens of each sequence, and others as before."""
        windows = [encoding([MASK, 6, MASK]), encoding([8]), encoding([9, MASK])]
        packed = pack(windows)
        rows = np.arange(3, dtype=np.float32)[:, None] * np.ones(9, np.float32)
        outputs = {"masks": rows, "mood": np.eye(3, 2, dtype=np.float32)}

        parts = split(outputs, windows, row_starts(packed, HEADS))

        assert [[0, 1], [], [2]] == [part["masks"][:, 0].tolist() for part in parts]
        assert [(2,), (2,), (2,)] == [part["mood"].shape for part in parts]
        assert ["tags", "masks"] == [*row_starts(packed, HEADS)]
